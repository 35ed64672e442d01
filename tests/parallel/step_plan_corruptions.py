"""Plans of a small model with planted mistakes, and where the proof must locate each of them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from motet.parallel.data_parallel.comm_units import CommUnit, ShardedSpan
from motet.parallel.data_parallel.communication.communication_settings import CommunicationSettings
from motet.parallel.data_parallel.zero import ActionKind, CommUnitAction, Moment
from motet.parallel.layout import parse_layout, resolve_layout
from motet.parallel.step_plan.plan import StepPlan
from parallel.plans import inventory_of_shapes, plan_of

SHAPES = {"w": (10, 4), "b": (10,), "v": (3, 64), "scale": (), "none": (0, 4), "u": (7, 5)}
INVENTORY = inventory_of_shapes(SHAPES, {"b": 1, "scale": 1}, {"w": 0, "b": 0, "v": 1})
SMALL = CommunicationSettings(bucket_mib=0.0005, first_bucket_mib=0.0001)


def plan(
    text: str, ranks: int = 4, overlap: str = "backward", *, apart: bool = False, codec: str | None = None
) -> StepPlan:
    """Make a plan with buckets of a hundred elements, so that there are several."""
    how = SMALL.model_copy(update={"overlap": overlap, "compress_gradients": codec})
    sharding = resolve_layout(parse_layout(text), ranks, 48).sharding
    return plan_of(INVENTORY, sharding, settings=how, batch_sequences=48, independent_replicas=apart)


def servers(count: int) -> str:
    return f"data=parameter_server server={{count={count},transport='collectives',slice_mib=0.0005}}"


Change = Callable[[StepPlan], StepPlan]


def in_group(change: Callable[[list[CommUnit]], list[CommUnit]]) -> Change:
    """Plant it into the first sync group, which has the matrices in all layouts."""

    def planted(good: StepPlan) -> StepPlan:
        first, *others = good.groups
        return replace(good, groups=(replace(first, units=tuple(change(list(first.units)))), *others))

    return planted


def in_unit(change: Callable[[CommUnit], CommUnit], name: str = "w") -> Change:
    """Plant it into the unit that has this parameter."""
    return in_group(lambda units: [change(u) if name in {m.name for m in u.members} else u for u in units])


def actions(change: Callable[[CommUnitAction], list[CommUnitAction]], name: str = "w") -> Change:
    return in_unit(lambda u: replace(u, schedule=tuple(new for old in u.schedule for new in change(old))), name)


def where(kind: ActionKind, at: Moment | None = None, **fields: Any) -> Change:
    """Other fields of the actions of a kind, or of those at one moment."""
    return actions(lambda a: [replace(a, **fields) if a.kind == kind and at in (None, a.moment) else a])


def over(kind: ActionKind, groups: tuple[tuple[int, ...], ...]) -> Change:
    return where(kind, rank_groups=groups)


def without(kind: ActionKind, at: Moment | None = None) -> Change:
    return actions(lambda a: [] if a.kind == kind and at in (None, a.moment) else [a])


def twice(kind: ActionKind, **fields: Any) -> Change:
    return actions(lambda a: [a, replace(a, **fields)] if a.kind == kind else [a])


def swapped(first: ActionKind, second: ActionKind) -> Change:
    """Two actions of a schedule in each other's place."""

    def planted(unit: CommUnit) -> CommUnit:
        by_kind = {action.kind: action for action in unit.schedule}
        other = {first: by_kind[second], second: by_kind[first]}
        return replace(unit, schedule=tuple(other.get(action.kind, action) for action in unit.schedule))

    return in_unit(planted)


def shard(index: int, first: int, stop: int, name: str = "w") -> Change:
    def moved(span: ShardedSpan) -> ShardedSpan:
        ranges = list(span.shard_ranges)
        ranges[index] = ranges[index][0] + first, ranges[index][1] + stop
        return span._replace(shard_ranges=tuple(ranges))

    def planted(unit: CommUnit) -> CommUnit:
        spans = [moved(span) if member.name == name else span for span, member in unit.member_spans()]
        return replace(unit, spans=tuple(spans[: len(unit.spans)]))

    return in_unit(planted, name)


def put(unit: CommUnit, **fields: int) -> CommUnit:
    members = replace(unit.members[0], **fields), *unit.members[1:]
    return replace(unit, contents=replace(unit.contents, members=members))


def read(rank: int, part: int, what: range) -> Change:
    def planted(good: StepPlan) -> StepPlan:
        rows = [list(parts) for parts in good.rows_by_rank]
        rows[rank][part] = what
        return replace(good, rows_by_rank=tuple(map(tuple, rows)))

    return planted


ROWS, COLUMNS, ALL, ALONE = ((0, 1), (2, 3)), ((0, 2), (1, 3)), ((0, 1, 2, 3),), ((0,), (1,), (2,), (3,))
HYBRID, SECOND, W = "zero=2 shard_group=2", "zero=3 secondary_group=2", "elements 0 to 39 of w"
AHEAD, TWO_LEVELS, TWO = "zero=0 ahead", f"{SECOND} int8", "two_level_reduce_scatter"
VARIANTS = {AHEAD: ("zero=0", "forward", None), TWO_LEVELS: (SECOND, "backward", "int8")}
WITHOUT_OVERLAP = plan(HYBRID, overlap="none").comm_units[0].schedule

# (layout, planted mistake, where it is located).
PLANTED: list[tuple[str, Change, str]] = [
    (HYBRID, over("reduce_scatter", ROWS[:1]), f"rank 2 sums {W} 0 times, not once"),
    (HYBRID, without("all_reduce"), f"the sum of {W} on rank 0 misses ranks 2, 3"),
    ("zero=0", over("all_reduce", ((0, 1, 2), (3,))), f"the sum of {W} on rank 0 misses rank 3"),
    ("zero=0", over("all_reduce", ((0, 1, 1, 2, 3),)), f"rank 1 sums {W} 2 times, not once"),
    (HYBRID, twice("all_reduce"), f"the sum of {W} on rank 0 counts ranks 0 to 3 more than once"),
    (HYBRID, over("all_reduce", ROWS), f"rank 0 adds {W} to another shard, which rank 1 holds"),
    (HYBRID, over("reduce_scatter", COLUMNS), f"rank 0 adds {W} to another shard, which rank 2 holds"),
    (
        HYBRID,
        lambda good: over("all_reduce", ROWS)(over("reduce_scatter", COLUMNS)(good)),
        f"the norm of ranks 0, 1 has {W} 2 times, not once",
    ),
    ("zero=1", twice("reduce_scatter"), f"reduce_scatter of {W} by ranks 0 to 3 must come before every other sum"),
    ("zero=1 shard_group=2", swapped("reduce_scatter", "all_reduce"), "must come before every other sum"),
    (AHEAD, where("reduce_scatter", moment="microbatch"), "reduce_scatter of .* cannot happen in 'microbatch'"),
    (
        *(
            "zero=1",
            lambda p: over("update", ALONE)(
                where("all_gather", tensor="gradients")(swapped("update", "all_gather")(p))
            ),
        ),
        "ranks 0 to 3 gather sums of .* of which they keep shards",
    ),
    (HYBRID, without("reduce_scatter"), f"the sum of {W} on rank 0 misses ranks 1, 3"),
    ("zero=3", shard(1, -4, 0), r"of ranks 0 to 3: shard 1 of w is elements \(8, 24\), not \(12, 24\)"),
    ("zero=3", shard(1, 4, 0), r"shard 1 of w is elements \(16, 24\), not \(12, 24\)"),
    ("zero=3", shard(3, 0, -4), r"shard 3 of w is elements \(36, 36\), not \(36, 40\)"),
    ("zero=3", shard(2, 1, 0, "v"), r"shard 2 of v is elements \(129, 192\), not \(128, 192\)"),
    ("zero=3", shard(3, 0, 4), r"shard 3 of w is elements \(36, 44\), not \(36, 40\)"),
    ("zero=1", shard(0, 0, -1), r"bucket 3 \(w, b\) .* shard 0 of w is elements \(0, 31\), not \(0, 32\)"),
    ("zero=1", over("update", ((0, 1, 2, 3), (0,))), "rank 0 updates elements 0 to 31 of w 2 times, not once"),
    ("zero=3", lambda p: over("all_gather", ALONE)(over("reduce_scatter", ((0, 1, 2), (3,)))(p)), "which has 4 shards"),
    ("zero=0", without("update"), f"none of ranks 0 to 3 updates {W}"),
    ("zero=2", without("update"), f"all_gather communicates parameters of {W} where ranks 0 to 3 hold gradients"),
    ("zero=2", twice("update"), f"ranks 0 to 3 update {W} twice"),
    ("zero=0", over("update", ROWS), f"the update of ranks 0, 1 has {W} 2 times, not once"),
    (servers(2), over("update", ROWS), "the update of ranks 0, 1 has w 0 times, not once"),
    (HYBRID, over("norm", ALL), f"the norm of ranks 0 to 3 has {W} 2 times, not once"),
    (HYBRID, over("norm", ((0,),)), "the norm of rank 0 has elements 0 to 9 of b 0 times, not once"),
    (HYBRID, over("norm", ()), rf"the norm of ranks \(none\) has {W} 0 times, not once"),
    ("zero=1", without("norm"), f"ranks 0 to 3 update {W} before their norm is known"),
    ("zero=1", twice("norm"), f"ranks 0 to 3 count {W} twice in the norm"),
    ("zero=1", swapped("norm", "update"), f"ranks 0 to 3 update {W} before their norm is known"),
    (
        HYBRID,
        swapped("norm", "all_gather"),
        "all_gather communicates parameters of elements .* where ranks 0 to 3 hold grad",
    ),
    (HYBRID, over("all_gather", COLUMNS), "rank 0 gathers shard 0 of rank 2 in the place of elements 0 to 9 of b"),
    ("zero=1", over("all_gather", ((0, 2, 1, 3),)), "rank 0 gathers shard 2 of rank 2 in the place of"),
    ("zero=1", without("all_gather"), f"rank 0 does not get the updated {W} for forward, but has only its shard 0"),
    (HYBRID, over("all_gather", ROWS[:1]), f"rank 2 gathers {W} 0 times, not once"),
    ("zero=1", twice("all_gather"), "rank 0 gathers shard None of rank 0 in the place of elements 0 to 31 of w"),
    (
        "zero=1",
        swapped("update", "all_gather"),
        "all_gather communicates parameters of .* where ranks 0 to 3 hold gradients",
    ),
    (
        *("zero=1", lambda p: where("all_gather", tensor="gradients")(swapped("update", "all_gather")(p))),
        f"the update of ranks 0 to 3 has {W} 4 times, not once",
    ),
    (AHEAD, without("all_gather"), "the update of rank 0 has elements 32 to 39 of w 0 times, not once"),
    (AHEAD, swapped("update", "all_gather"), "the update of rank 0 has elements 32 to 39 of w 0 times, not once"),
    (AHEAD, swapped("norm", "all_gather"), f"the norm of ranks 0 to 3 has {W} 4 times, not once"),
    (
        AHEAD,
        where("all_gather", tensor="parameters"),
        "all_gather communicates parameters of .* ranks 0 to 3 hold gradients",
    ),
    (
        "zero=1",
        where("all_gather", tensor="gradients"),
        "communicates gradients of .* where ranks 0 to 3 hold parameters",
    ),
    (
        "zero=2",
        where("reduce_scatter", tensor="parameters"),
        f"communicates parameters of {W} where ranks .* hold gradients",
    ),
    ("zero=3", where("all_gather", "forward", tensor="gradients"), "communicates gradients of .* hold parameters"),
    (
        "zero=1",
        where("reduce_scatter", moment="step"),
        f"reduce_scatter of {W} by ranks 0 to 3 cannot happen in 'step'",
    ),
    ("zero=3", where("reduce_scatter", moment="last_microbatch"), "cannot happen in 'last_microbatch'"),
    (
        HYBRID,
        where("norm", moment="last_microbatch"),
        f"norm of {W} by ranks 0 to 3 cannot happen in 'last_microbatch'",
    ),
    ("zero=2", where("update", moment="microbatch"), f"update of {W} by ranks 0 to 3 cannot happen in 'microbatch'"),
    ("zero=1", where("all_gather", moment="forward"), f"all_gather of {W} by ranks 0 to 3 cannot happen in 'forward'"),
    ("zero=3", where("all_gather", moment="step"), f"all_gather of {W} by ranks 0 to 3 cannot happen in 'step'"),
    (
        SECOND,
        where("keep_secondary", moment="forward"),
        f"keep_secondary of {W} by ranks 0 to 3 cannot happen in 'forward'",
    ),
    (
        HYBRID,
        twice("all_reduce", moment="microbatch"),
        f"all_reduce of {W} by ranks 0 to 3 cannot happen in 'microbatch'",
    ),
    ("zero=0", where("all_reduce", moment="microbatch"), "all_reduce of .* cannot happen in 'microbatch'"),
    ("zero=1", where("reduce_scatter", moment="microbatch"), "reduce_scatter of .* cannot happen in 'microbatch'"),
    (
        "zero=3",
        without("all_gather", "forward"),
        f"rank 0 does not get the updated {W} for forward, but has only its shard 0",
    ),
    (
        SECOND,
        without("all_gather", "backward"),
        f"rank 0 does not get the updated {W} for backward, but has only its shard 0",
    ),
    (SECOND, lambda p: twice("all_gather")(without("keep_secondary")(p)), "rank 0 gathers shard None of rank 0"),
    (
        SECOND,
        over("keep_secondary", COLUMNS),
        "rank 0 gathers shard 0 of rank 1 in the place of elements 12 to 23 of w",
    ),
    (SECOND, over("keep_secondary", ROWS[:1]), "rank 2 keeps a secondary shard of .* 0 times, not once"),
    (SECOND, where("all_gather", "backward", rank_groups=COLUMNS), "rank 0 gathers shard 0 of rank 2 in the place of"),
    (
        *(
            "zero=3 shard_group=2",
            actions(
                lambda a: [replace(a, kind="keep_secondary", rank_groups=COLUMNS), a] if a.moment == "backward" else [a]
            ),
        ),
        f"ranks 0, 2 share a secondary copy of {W}, but not a primary one",
    ),
    (TWO_LEVELS, where(TWO, inter_groups=((2, 0), (3, 1))), "rank 2 gets another shard than elements 24 to 35 of w"),
    (TWO_LEVELS, where(TWO, inter_groups=ALONE), "w on rank 0 misses ranks 2, 3"),
    (TWO_LEVELS, where(TWO, inter_groups=COLUMNS[:1]), "rank 1 sums .* in two levels 0 times, not once"),
    (TWO_LEVELS, where(TWO, intra_groups=ALONE), "w on rank 0 misses ranks 1, 3"),
    (TWO_LEVELS, where(TWO, intra_groups=((0, 1), (3, 2))), "rank 2 gets another shard than elements 24 to 35 of w"),
    (
        TWO_LEVELS,
        where(TWO, intra_groups=COLUMNS, inter_groups=ROWS),
        "rank 1 gets another shard than elements 12 to 23",
    ),
    (
        *("zero=1", in_unit(lambda u: put(u, start=u.spans[0].start + u.gathered_numel - 8))),
        r"bucket 3 \(w, b\) .*name='w', .*start=632.* is in the place of .*start=512, numel=40",
    ),
    (
        "zero=1",
        in_unit(lambda u: put(u, start=u.members[1].start)),
        "name='w', .*start=576.* is in the place of .*start=512",
    ),
    ("zero=1", in_unit(lambda u: put(u, numel=37)), "name='w', .*numel=37.* is in the place of .*numel=40"),
    ("zero=1", in_group(lambda units: units[:-1]), r"w: ranks \[0, 1, 2, 3\] hold it, and it is in 0 units"),
    (
        *("zero=1", in_group(lambda units: [*units, replace(units[-1], name="bucket 9")])),
        r"w: ranks \[0, 1, 2, 3\] hold it, and it is in 2 units, not in 1",
    ),
    ("zero=3", in_group(lambda units: units[1:]), r"w: ranks \[0, 1, 2, 3\] hold it, and it is in 0 units"),
    (
        HYBRID,
        in_group(lambda units: [*units[:-1], replace(units[-1], schedule=WITHOUT_OVERLAP)]),
        r"bucket 3 \(w, b\) of ranks 0 to 3: its actions are not those on u",
    ),
    ("", read(2, 0, range(24, 35)), "row 35 of the 48 rows of the global batch is read 0 times"),
    (
        "microbatches=2",
        read(1, 1, range(12, 18)),
        r"row 12 of the 48 rows of the global batch is read 2 times, by ranks \[1, 1\]",
    ),
    ("", read(3, 0, range(12)), r"row 0 of .* is read 2 times, by ranks \[0, 3\]"),
    ("", read(3, 0, range(36, 46)), "row 46 of the 48 rows of the global batch is read 0 times"),
    ("", read(3, 0, range(36, 49)), r"row 48 of .* is read 1 times, by ranks \[3\]"),
]
