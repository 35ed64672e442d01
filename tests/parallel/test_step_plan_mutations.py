"""Plans with a planted mistake are not proven, and it is located: the element, its parameter, and the rank."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from small_plans import plan, servers

from motet.parallel.layout import Layout
from motet.parallel.step_plan.check import InvalidStepPlanError, prove_step_plan
from motet.parallel.step_plan.plan import ActionKind, CommUnit, CommUnitAction, StepPlan

Change = Callable[[StepPlan], StepPlan]


def in_unit(name: str, change: Callable[[CommUnit], CommUnit]) -> Change:
    """Plant it into the portion that has this parameter."""

    def planted(good: StepPlan) -> StepPlan:
        return replace(
            good, comm_units=tuple(change(p) if name in {m.name for m in p.members} else p for p in good.comm_units)
        )

    return planted


def moves(change: Callable[[CommUnitAction], list[CommUnitAction]], name: str = "w") -> Change:
    return in_unit(name, lambda p: replace(p, schedule=tuple(new for move in p.schedule for new in change(move))))


def over(verb: ActionKind, sets: tuple[tuple[int, ...], ...], name: str = "w") -> Change:
    """Other ranks do it together."""
    return moves(lambda move: [CommUnitAction(verb, sets) if move.kind == verb else move], name)


def without(verb: ActionKind) -> Change:
    return moves(lambda move: [] if move.kind == verb else [move])


def twice(verb: ActionKind) -> Change:
    return moves(lambda move: [move, move] if move.kind == verb else [move])


def shard(number: int, first: int, stop: int, name: str = "w") -> Change:
    """Move the bounds of a shard."""

    def moved(portion: CommUnit) -> CommUnit:
        cut = list(portion.shard_ranges)
        cut[number] = cut[number][0] + first, cut[number][1] + stop
        return replace(portion, shard_ranges=tuple(cut))

    return in_unit(name, moved)


def placed(unit: CommUnit, **fields: int) -> CommUnit:
    return replace(unit, members=(replace(unit.members[0], **fields), *unit.members[1:]))


def read(rank: int, part: int, what: range) -> Change:
    def planted(good: StepPlan) -> StepPlan:
        rows = [list(parts) for parts in good.rows_by_rank]
        rows[rank][part] = what
        return replace(good, rows_by_rank=tuple(map(tuple, rows)))

    return planted


ROWS, COLUMNS, ALL, ALONE = ((0, 1), (2, 3)), ((0, 2), (1, 3)), ((0, 1, 2, 3),), ((0,), (1,), (2,), (3,))
HYBRID, SECOND, W = "zero=2 shard_group=2", "zero=3 secondary_group=2", "elements 0 to 39 of w"

# (layout, planted mistake, where it is located).
PLANTED: list[tuple[str, Change, str]] = [
    (HYBRID, over("reduce_scatter", ROWS[:1]), f"rank 0 adds {W} to another shard, which rank 2 holds"),
    (HYBRID, without("all_reduce"), f"the sum of {W} on rank 0 misses ranks 2, 3"),
    ("zero=0", over("all_reduce", ((0, 1, 2), (3,))), f"the sum of {W} on rank 0 misses rank 3"),
    ("zero=0", over("all_reduce", ((0, 1, 1, 2, 3),)), "w on rank 0 counts rank 1 more than once"),
    (HYBRID, twice("all_reduce"), f"the sum of {W} on rank 0 counts ranks 0 to 3 more than once"),
    (HYBRID, over("all_reduce", ROWS), f"rank 0 adds {W} to another shard, which rank 1 holds"),
    (HYBRID, over("reduce_scatter", COLUMNS), f"rank 0 adds {W} to another shard, which rank 2 holds"),
    (
        HYBRID,
        lambda good: over("all_reduce", ROWS)(over("reduce_scatter", COLUMNS)(good)),
        "rank 0 gathers shard 0 of rank 1 in the place of elements 0 to 9 of b",
    ),
    ("zero=1", twice("reduce_scatter"), "rank 0 holds only a shard where all of elements 0 to"),
    ("zero=3", shard(1, -4, 0), "two of the copy of ranks 0 to 3 update elements 8 to 11 of w: ranks 0 and 1"),
    ("zero=3", shard(1, 4, 0), "nobody of the copy of ranks 0 to 3 updates elements 12 to 15 of w"),
    ("zero=3", shard(3, 0, -4), r"nobody .* updates elements 36 to 39 of w"),
    ("zero=3", shard(2, 1, 0, "v"), r"nobody .* updates element 128 of v"),
    ("zero=3", shard(3, 0, 4), "rank 3 has 4 elements beyond the end of w"),
    ("zero=1", shard(0, 0, -1), r"nobody .* updates element 31 of w"),
    ("zero=1", over("update", ((0, 1, 2, 3), (0,))), "rank 0 updates elements 0 to 31 of w 2 times, not once"),
    (
        "zero=3",
        lambda good: over("all_gather", ALONE)(over("reduce_scatter", ((0, 1, 2), (3,)))(good)),
        "misses rank 3",
    ),
    ("zero=2", without("update"), f"nobody updates {W}"),
    ("zero=2", twice("update"), f"a step updates {W} twice"),
    ("zero=0", over("update", ROWS), f"two of the copy of ranks 0, 1 update {W}: ranks 0 and 1"),
    (servers(2), over("update", ROWS), rf"nobody of the copy of ranks [02], [13] updates {W}"),
    (HYBRID, over("norm", ALL), f"the norm counts {W} twice: ranks 0 and 2"),
    (HYBRID, over("norm", ((0,),)), "the norm leaves elements 0 to 9 of b out"),
    (
        HYBRID,
        moves(lambda m: {"all_reduce": [CommUnitAction("norm", ((0, 1),)), m], "norm": []}.get(m.kind, [m])),
        r"misses ranks 2, 3",
    ),
    (HYBRID, over("all_gather", COLUMNS), "rank 0 gathers shard 0 of rank 2 in the place of elements 0 to 9 of b"),
    ("zero=1", over("all_gather", ((0, 2, 1, 3),)), "rank 0 gathers shard 2 of rank 2 in the place of"),
    ("zero=1", without("all_gather"), "rank 0 does not get the updated elements 0 to 39 of w, but has only its shar"),
    (HYBRID, over("all_gather", ROWS[:1]), f"rank 2 gathers {W} 0 times, not once"),
    (
        "zero=1",
        moves(lambda m: {"update": [CommUnitAction("all_gather", ALL), m], "all_gather": []}.get(m.kind, [m])),
        f"two of the copy of ranks 0 to 3 update {W}: ranks 0 and 1",
    ),
    (
        "zero=3 shard_group=2",
        moves(lambda m: [m, CommUnitAction("keep_secondary", COLUMNS)] if m.kind == "all_gather" else [m]),
        f"ranks 0 and 2 share a secondary copy of {W}, but not a primary one",
    ),
    (SECOND, over("two_level", ((2, 0), (3, 1))), "rank 2 gets another shard than elements 24 to 35 of w"),
    (SECOND, over("two_level", ALONE), "w on rank 0 misses ranks 2, 3"),
    (
        "zero=1",
        in_unit("w", lambda p: placed(p, start=p.start + p.length - 8)),
        r"elements 8 to .* beyond the end of bucket",
    ),
    (
        "zero=1",
        in_unit("b", lambda p: replace(p, members=tuple(replace(m, start=p.start) for m in p.members))),
        "element 0 of b is in bucket 3 where w is",
    ),
    (
        "zero=1",
        in_unit("w", lambda p: placed(p, numel=p.members[0].numel - 3)),
        r"elements 37 to 39 of w: bucket . has 37 of 40",
    ),
    (
        "zero=1",
        lambda good: replace(good, comm_units=tuple(p for p in good.comm_units if p.members[0].name != "w")),
        f"nobody updates {W}",
    ),
    (
        "zero=1",
        lambda good: replace(good, comm_units=(*good.comm_units, replace(good.comm_units[-1], name="bucket 9"))),
        r"element 0 of w is in bucket . and again in bucket 9",
    ),
    ("", read(2, 0, range(24, 35)), "nobody reads row 35 of the global batch"),
    (
        "microbatches=2",
        read(1, 1, range(12, 18)),
        "rank 1 in micro-batch 0 and rank 1 in micro-batch 1 both read rows 12 to 17 of the global batch",
    ),
    ("", read(3, 0, range(12)), "rank 0 in micro-batch 0 and rank 3 in micro-batch 0 both read rows 0 to 11"),
    ("", read(3, 0, range(36, 46)), "nobody reads rows 46 to 47 of the global batch"),
    ("", read(3, 0, range(36, 49)), "rank 3 in micro-batch 0 reads up to row 48 of a global batc"),
    (
        "zero=2 microbatches=3",
        lambda good: replace(good, reduce_after=good.reduce_after[:-1]),
        "element 0 of w: gradients of micro-batch 2 are in no sum",
    ),
    (
        "zero=1 microbatches=3",
        lambda good: replace(good, reduce_after=((0,), (0, 1), (0, 1, 2))),
        "element 0 of w: gradients of micro-batch 0 are summed 3 times",
    ),
]


@pytest.mark.parametrize(("layout", "change", "sentence"), PLANTED)
def test_a_planted_mistake_is_located(layout: str, change: Change, sentence: str) -> None:
    good = plan(layout)
    prove_step_plan(good)
    with pytest.raises(InvalidStepPlanError, match=sentence):
        prove_step_plan(change(good))


def test_replicas_that_meet_with_unlike_shards_are_found() -> None:
    good = plan("zero=1 shard_group=2", apart=True)
    with pytest.raises(InvalidStepPlanError, match="element 0 of w: the outer step of ranks 0 and 1 mixes shards"):
        prove_step_plan(replace(good, outer_groups=(*good.outer_groups[::-1], (0, 1))))


# --- mistakes in what the engine reads -------------------------------------------------------------


def floor_rows(rows: int, shards: int, shard: int) -> tuple[int, int]:
    most = rows // shards
    return shard * most, (shard + 1) * most


def same_rows(layout: Layout, rank: int, batch_sequences: int) -> list[range]:
    """Micro-batches are forgotten."""
    return [range(rank * 12, rank * 12 + 12)] * layout.microbatches


def unpadded(length: int, shards: int, index: int, *, owner: int | None = None) -> tuple[int, int]:
    size = length // shards - 1
    return index * size, (index + 1) * size


@pytest.mark.parametrize(
    ("layout", "where", "wrong", "sentence"),
    [
        ("zero=3", "step_plan.plan.shard_rows", floor_rows, "nobody .* updates elements 32 to 39 of w"),
        (
            "microbatches=2",
            "step_plan.plan.contributing_rows_of_rank",
            same_rows,
            "both read rows 0 to 11 of the global batch",
        ),
        ("zero=1", "step_plan.plan.shard_range", unpadded, "nobody .* updates elements .* of "),
        (HYBRID, "layout.Layout.replica_groups", Layout.shard_groups, "rank 0 adds .* to another shard"),
    ],
)
def test_a_mistake_in_what_the_engine_reads_is_located(
    layout: str, where: str, wrong: object, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"motet.parallel.{where}", wrong)
    with pytest.raises(InvalidStepPlanError, match=sentence):
        prove_step_plan(plan(layout))
