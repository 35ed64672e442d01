"""The proof covers what the engine does in every layout; a planted mistake is located: the element and the rank."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from math import prod
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.collectives import Program
from motet.collectives.algorithms import build
from motet.core.errors import InputError
from motet.parallel.data_parallel.communication.communication_settings import CommunicationSettings
from motet.parallel.data_parallel.data_sharding import DataParallelSharding
from motet.parallel.layout import Layout, parse_layout, resolve_layout
from motet.parallel.step_plan.check import (
    InvalidStepPlanError,
    check_rank_matches_plan,
    prove_collective_programs,
    prove_step_plan,
)
from motet.parallel.step_plan.plan import (
    ActionKind,
    CommUnit,
    CommUnitAction,
    ParameterInventory,
    StepPlan,
    make_step_plan,
)
from motet.precision.recipe import RECIPES

SHAPES = {"w": (10, 4), "b": (10,), "v": (3, 64), "scale": (), "none": (0, 4), "u": (7, 5)}
SMALL = CommunicationSettings(bucket_mib=0.0005, first_bucket_mib=0.0001)


def plan(text: str, ranks: int = 4, overlap: str = "backward", *, apart: bool = False) -> StepPlan:
    """Make a plan with buckets of a hundred elements, so that there are several."""
    how, layout = SMALL.model_copy(update={"overlap": overlap}), resolve_layout(parse_layout(text), ranks, 48)
    parameters, recipe = ParameterInventory(SHAPES, {"b": 1, "scale": 1}), RECIPES["fp32"]
    return make_step_plan(parameters, layout, recipe, settings=how, batch_sequences=48, independent_replicas=apart)


def servers(count: int) -> str:
    return f"data=parameter_server server={{count={count},transport='collectives',slice_mib=0.0005}}"


@pytest.mark.parametrize("ranks", range(1, 9))
def test_every_layout_is_right(ranks: int) -> None:
    tried = 0
    for zero, group, near, parts, overlap, whole in product(
        range(4), (None, 1, 2, 3, 4), (None, 1, 2, 3), (1, 2, 3), ("backward", "forward"), (0, 30)
    ):
        if 48 % (ranks * parts) or (zero == 0 and group) or (zero < 3 and (near or whole)):
            continue
        words = [f"zero={zero}", f"microbatches={parts}", f"min_shard_numel={whole}"]
        words += [f"shard_group={group}"] if group else []
        words += [f"secondary_group={near}"] if near else []
        try:
            made = plan(" ".join(words), ranks, overlap)
        except InputError:
            continue
        proof = prove_step_plan(made)
        assert proof.rows == 48 and proof.elements == sum(map(prod, SHAPES.values()))
        assert proof.copies == (ranks if zero == 0 else ranks // (group or ranks))
        tried += 1
    assert tried >= (20 if 48 % ranks == 0 else 0)


@pytest.mark.parametrize(("ranks", "count"), [(2, 1), (4, 1), (4, 3), (6, 6)])
def test_servers_among_the_ranks_are_right(ranks: int, count: int) -> None:
    made = plan(servers(count), ranks)
    assert prove_step_plan(made).copies == 1
    owned = {part for portion in made.comm_units for part in portion.shard_ranges}
    assert (0, 0) in owned  # some rank has nothing of some bucket


@pytest.mark.parametrize("layout", ["", "zero=1 shard_group=2", "zero=3 shard_group=3"])
def test_replicas_that_train_apart_are_right(layout: str) -> None:
    made = plan(layout, 6, apart=True)
    assert prove_step_plan(made).ranks == {"": 1, "zero=1 shard_group=2": 2}.get(layout, 3)
    assert len(made.rows_by_rank) == 6


@settings(deadline=None, max_examples=150)
@given(
    st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=1, max_size=8),
    st.integers(1, 8),
    st.sampled_from(["zero=0", "zero=1", "zero=2", "zero=3", "zero=3 min_shard_numel=20", servers(1)]),
    st.sampled_from(["", " shard_group=2", " shard_group=3", " shard_group=4 secondary_group=2"]),
    st.sampled_from(["forward", "backward"]),
)
def test_odd_shapes_are_right(shapes: list[tuple[int, ...]], ranks: int, stage: str, group: str, overlap: str) -> None:
    named = {f"p{number}": shape for number, shape in enumerate(shapes)}
    try:
        layout = resolve_layout(parse_layout(stage + group), ranks, ranks)
    except InputError:
        return
    how = SMALL.model_copy(update={"overlap": overlap})
    parameters = ParameterInventory(named, {"p1": 1})
    proof = prove_step_plan(make_step_plan(parameters, layout, RECIPES["bf16"], settings=how, batch_sequences=ranks))
    assert proof.parameters == len(shapes)


def test_programs_are_proven_for_the_ranks_of_their_groups() -> None:
    layout = resolve_layout(parse_layout("zero=2 shard_group=2"), 6, 6)
    named = CommunicationSettings(all_reduce="ring", reduce_scatter="ring", all_gather="ring")
    played = {(one.collective, one.ranks) for one in prove_collective_programs(layout.sharding, named)}
    assert played == {("reduce-scatter", 2), ("all-reduce", 3), ("all-gather", 2)}
    owned = resolve_layout(parse_layout(servers(2)), 3, 3).sharding
    assert {one.collective for one in prove_collective_programs(owned, SMALL)} == {"reduce", "broadcast"}


def test_a_wrong_program_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: Any, **options: Any) -> Program:
        made = build(*given, **options)
        return replace(made, steps=made.steps[:-1])

    monkeypatch.setattr("motet.parallel.step_plan.check.build", broken)
    with pytest.raises(InvalidStepPlanError, match=r"all-reduce/ring.* is wrong"):
        prove_collective_programs(DataParallelSharding(4, 1), CommunicationSettings(all_reduce="ring"))


def test_a_thousand_ranks_are_looked_at_by_their_classes() -> None:
    """Not by their number: the work of a copy is done once for all copies, and of a shape once for all parameters."""
    shapes = {f"layer{i}.{name}": (512, 64 * width) for i in range(250) for width, name in enumerate("qkvo", start=1)}
    how = CommunicationSettings()
    for words in ("zero=0", "zero=1", "zero=2 shard_group=8", "zero=3", "zero=3 shard_group=8 secondary_group=2"):
        layout = resolve_layout(parse_layout(words), 1024, 1024)
        parameters = ParameterInventory(shapes, {})
        found = make_step_plan(parameters, layout, RECIPES["bf16"], settings=how, batch_sequences=1024)
        assert prove_step_plan(found).ranks == 1024
        assert len({id(portion.shard_ranges) for portion in found.comm_units}) <= 8
        assert len({id(portion.schedule) for portion in found.comm_units}) == 1


def bounds_of_rank(made: StepPlan, layout: str, rank: int) -> dict[str, tuple[int, int]]:
    """(first, stop) of each parameter that one of four ranks updates, by the definition of the layout."""
    shards, bounds = {"": 1, "zero=2 shard_group=2": 2}.get(layout, 4), {}
    for unit in made.comm_units:
        each, index = unit.length // shards, rank % shards
        if unit.kind == "rows":
            rows, *rest = SHAPES[unit.members[0].name]
            each = -(-rows // shards) * prod(rest)
        elif layout == servers(3):  # Each of the first three ranks owns one of the three buckets
            each, index = unit.length, 0 if unit.name == f"bucket {rank}" else -1
        for member in unit.members:
            places = [member.start - unit.start + element for element in range(member.numel)]
            if updated := [element for element, place in enumerate(places) if place // each == index]:
                bounds[member.name] = updated[0], updated[-1] + 1
    return bounds


@pytest.mark.parametrize("layout", ["", "zero=1", "zero=2 shard_group=2", "zero=3", servers(3)])
@pytest.mark.parametrize("overlap", ["backward", "forward"])
def test_ranks_are_held_to_their_plan(layout: str, overlap: str) -> None:
    made = plan(layout, 4, overlap)
    sets = [ranks for move in made.comm_units[0].schedule if move.kind == "norm" for ranks in move.rank_groups]
    counting = {rank for ranks in sets for rank in ranks}
    for rank in range(4):
        ranges = bounds_of_rank(made, layout, rank)
        check_rank_matches_plan(made, rank, ranges | {"none": (0, 0)}, contributes_to_norm=rank in counting)
        with pytest.raises(InvalidStepPlanError, match=f"rank {rank} (counts|does not count) in the norm"):
            check_rank_matches_plan(made, rank, ranges, contributes_to_norm=rank not in counting)
    ranges = bounds_of_rank(made, layout, 0)
    name, (first, stop) = next(iter(ranges.items()))
    one_less = f"elements? {first}( to {stop - 2})? of {name}"
    with pytest.raises(InvalidStepPlanError, match=f"rank 0 updates {one_less}, where its plan says element"):
        check_rank_matches_plan(made, 0, ranges | {name: (first, stop - 1)}, contributes_to_norm=True)
    with pytest.raises(InvalidStepPlanError, match=f"rank 0 updates nothing of {name}, where its plan says"):
        check_rank_matches_plan(made, 0, {n: p for n, p in ranges.items() if n != name}, contributes_to_norm=True)


# --- planted mistakes in plans ---------------------------------------------------------------------
Change = Callable[[StepPlan], StepPlan]


def in_unit(change: Callable[[CommUnit], CommUnit], name: str = "w") -> Change:
    """Plant it into the portion that has this parameter."""

    def planted(good: StepPlan) -> StepPlan:
        units = (change(p) if name in {m.name for m in p.members} else p for p in good.comm_units)
        return replace(good, comm_units=tuple(units))

    return planted


def moves(change: Callable[[CommUnitAction], list[CommUnitAction]]) -> Change:
    return in_unit(lambda p: replace(p, schedule=tuple(new for move in p.schedule for new in change(move))))


def over(verb: ActionKind, sets: tuple[tuple[int, ...], ...]) -> Change:
    return moves(lambda move: [CommUnitAction(verb, sets) if move.kind == verb else move])


def without(verb: ActionKind) -> Change:
    return moves(lambda move: [] if move.kind == verb else [move])


def twice(verb: ActionKind) -> Change:
    return moves(lambda move: [move, move] if move.kind == verb else [move])


def shard(number: int, first: int, stop: int, name: str = "w") -> Change:
    def moved(portion: CommUnit) -> CommUnit:
        cut = list(portion.shard_ranges)
        cut[number] = cut[number][0] + first, cut[number][1] + stop
        return replace(portion, shard_ranges=tuple(cut))

    return in_unit(moved, name)


def put(unit: CommUnit, **fields: int) -> CommUnit:
    return replace(unit, members=(replace(unit.members[0], **fields), *unit.members[1:]))


def read(rank: int, part: int, what: range) -> Change:
    def planted(good: StepPlan) -> StepPlan:
        rows = [list(parts) for parts in good.rows_by_rank]
        rows[rank][part] = what
        return replace(good, rows_by_rank=tuple(map(tuple, rows)))

    return planted


def after(*microbatches: tuple[int, ...]) -> Change:
    return lambda good: replace(good, reduce_after=microbatches)


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
    ("zero=3", lambda p: over("all_gather", ALONE)(over("reduce_scatter", ((0, 1, 2), (3,)))(p)), "misses rank 3"),
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
    ("zero=1", in_unit(lambda p: put(p, start=p.start + p.length - 8)), "elements 8 to .* beyond the end of bucket"),
    (
        "zero=1",
        in_unit(lambda p: replace(p, members=tuple(replace(m, start=p.start) for m in p.members)), "b"),
        "element 0 of b is in bucket 3 where w is",
    ),
    ("zero=1", in_unit(lambda p: put(p, numel=37)), r"elements 37 to 39 of w: bucket . has 37 of 40"),
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
    ("zero=2 microbatches=3", after((0,), (1,)), "element 0 of w: gradients of micro-batch 2 are in no sum"),
    (
        *("zero=1 microbatches=3", after((0,), (0, 1), (0, 1, 2))),
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
PLAN = "step_plan.plan"


def floor_rows(rows: int, shards: int, shard: int) -> tuple[int, int]:
    most = rows // shards
    return shard * most, (shard + 1) * most


def same(layout: Layout, rank: int, batch_sequences: int) -> list[range]:
    return [range(rank * 12, rank * 12 + 12)] * layout.sharding.microbatches


def unpadded(length: int, shards: int, index: int, *, owner: int | None = None) -> tuple[int, int]:
    size = length // shards - 1
    return index * size, (index + 1) * size


@pytest.mark.parametrize(
    ("layout", "where", "wrong", "sentence"),
    [
        ("zero=3", f"{PLAN}.shard_rows", floor_rows, "nobody .* updates elements 32 to 39 of w"),
        ("microbatches=2", f"{PLAN}.contributing_rows_of_rank", same, "both read rows 0 to 11 of the global batch"),
        ("zero=1", f"{PLAN}.shard_range", unpadded, "nobody .* updates elements .* of "),
        (
            HYBRID,
            "data_parallel.data_sharding.DataParallelSharding.replica_groups",
            DataParallelSharding.shard_groups,
            "rank 0 adds .* to another shard",
        ),
    ],
)
def test_a_mistake_in_what_the_engine_reads_is_located(
    layout: str, where: str, wrong: object, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"motet.parallel.{where}", wrong)
    with pytest.raises(InvalidStepPlanError, match=sentence):
        prove_step_plan(plan(layout))
