"""What a layout does in a step, as a value: who reads which rows, whose sums go where, who updates and who gets what.

It is made by the functions that the engine reads too: `joined` (the ranks of each sum and gather), `buckets_of` and
`Bucket.shard` (what a shard has), `rows_of_rank`. Whether it is right is for `proof.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import Literal, NamedTuple

from motet.collectives.cost.alpha_beta import RankGroups
from motet.parallel.data_parallel.buckets import BucketParameter, shard_range
from motet.parallel.data_parallel.communication.communication_settings import (
    CommunicationGroups,
    CommunicationSettings,
    resolve_communication_groups,
    without_forward_overlap,
)
from motet.parallel.data_parallel.communication.powersgd_matrices import Shape
from motet.parallel.data_parallel.zero import ZERO_STAGES, is_replicated, make_buckets, shard_rows, uses_row_shards
from motet.parallel.layout import Layout
from motet.parallel.row_assignment import contributing_rows_of_rank
from motet.precision.recipe import PrecisionRecipe

ActionKind = Literal["scatter", "sum", "norm", "update", "gather", "keep", "levels"]


class CommUnitAction(NamedTuple):
    """What sets of ranks do at once with a portion.

    | verb | each set |
    |---|---|
    | scatter | adds up what its ranks have of all of it; a rank gets the shard that its place in the set says |
    | sum | adds up the shard that its ranks have, for each of them |
    | norm | its ranks add what they have of the sums to the square of the norm |
    | update | is one copy: its ranks update what they have of it |
    | gather | each of its ranks gets all of it, the shards in the order of the set |
    | keep | keeps a second copy of what was gathered, in parts, and gathers it once more |
    | levels | has the same part of a second copy; a sum in two levels goes over those that share one, and then these |
    """

    kind: ActionKind
    rank_groups: RankGroups


UnitSchedule = tuple[CommUnitAction, ...]
ShardRanges = tuple[tuple[int, int], ...]  # (first, stop) of each shard of a portion, from its start


@dataclass(frozen=True)
class CommUnit:
    """What is cut as one: a bucket of stages 0 to 2, or a parameter that stage 3 cuts into rows."""

    name: str
    kind: Literal["rows", "bucket"]
    members: tuple[BucketParameter, ...]
    start: int  # In the flat tensor of all of its kind
    length: int  # With padding
    shard_ranges: ShardRanges
    schedule: UnitSchedule


@dataclass(frozen=True)
class StepPlan:
    """A step of a layout."""

    shapes: Mapping[str, Shape]  # Of what is trained
    comm_units: tuple[CommUnit, ...]
    ranks: int  # That take a step together
    reduce_after: tuple[tuple[int, ...], ...]  # Each time that gradients travel: the micro-batches that they are of
    microbatches: int
    # That each rank reads, by micro-batches; where replicas train apart, of all of them.
    rows_by_rank: tuple[tuple[range, ...], ...]
    batch_sequences: int
    outer_groups: RankGroups = ()  # Ranks of replicas that train apart, whose masters meet


@dataclass(frozen=True)
class ParameterInventory:
    """What is trained, in the order of use."""

    shapes: Mapping[str, Shape]
    optimizer_groups: Mapping[str, int]  # The optimizer group of each; those that are not there are in the first


def make_step_plan(
    parameters: ParameterInventory,
    layout: Layout,
    recipe: PrecisionRecipe,
    settings: CommunicationSettings,
    batch_sequences: int,
    independent_replicas: bool = False,
) -> StepPlan:
    """Of a layout. `apart`: its replicas train apart; then each takes a step like the first, which it is of."""
    full_layout = layout
    if independent_replicas:
        layout, settings = replace(layout, dp=layout.shards), without_forward_overlap(settings)
    microbatches = range(layout.microbatches)
    reduces_once = not ZERO_STAGES[layout.zero].gradients
    return StepPlan(
        parameters.shapes,
        make_comm_units(parameters, layout, recipe, settings),
        layout.dp,
        (tuple(microbatches),) if reduces_once else tuple((number,) for number in microbatches),
        layout.microbatches,
        tuple(tuple(contributing_rows_of_rank(full_layout, rank, batch_sequences)) for rank in range(full_layout.dp)),
        batch_sequences,
        full_layout.replica_groups if independent_replicas else (),
    )


def updated_ranges(plan: StepPlan, rank: int) -> dict[str, tuple[int, int]]:
    """(first, stop) of the elements that a rank updates of each parameter; those that it has none of are left out."""

    def updated_shard(schedule: UnitSchedule) -> int | None:
        """Its number; None when it updates all of what was gathered."""
        reduce_scatter, *others = (action for action in schedule if action.kind in ("scatter", "gather", "update"))
        gathers_first = others[0].kind == "gather"
        return (
            None if gathers_first else next(ranks.index(rank) for ranks in reduce_scatter.rank_groups if rank in ranks)
        )

    schedules = {id(unit.schedule): unit.schedule for unit in plan.comm_units}
    shard_by_schedule = {key: updated_shard(course) for key, course in schedules.items()}
    ranges = {}
    for portion in plan.comm_units:
        shard = shard_by_schedule[id(portion.schedule)]
        first, stop = (0, portion.length) if shard is None else portion.shard_ranges[shard]
        for member in portion.members:
            start = max(0, portion.start + first - member.start)
            end = min(member.numel, portion.start + stop - member.start)
            if start < end:
                ranges[member.name] = start, end
    return ranges


def make_comm_units(
    parameters: ParameterInventory, layout: Layout, recipe: PrecisionRecipe, settings: CommunicationSettings
) -> tuple[CommUnit, ...]:
    """Of all parameters; rows first."""
    groups = resolve_communication_groups(settings, layout)
    schedule, shards = make_unit_schedule(groups, layout), len(groups.shard_groups[0])
    rows = {n: s for n, s in parameters.shapes.items() if uses_row_shards(layout) and not is_replicated(s, layout)}
    sizes = {n: (parameters.optimizer_groups.get(n, 0), prod(s)) for n, s in parameters.shapes.items() if n not in rows}

    @cache
    def row_shard_ranges(shape: Shape) -> ShardRanges:
        width, row_ranges = prod(shape[1:]), (shard_rows(shape[0], shards, shard) for shard in range(shards))
        return tuple((first * width, stop * width) for first, stop in row_ranges)

    @cache
    def bucket_shard_ranges(length: int, owner: int | None) -> ShardRanges:
        return tuple(shard_range(length, shards, shard, owner) for shard in range(shards))

    units, start = [], 0
    for name, shape in rows.items():
        numel = prod(shape)
        units.append(
            CommUnit(
                name, "rows", (BucketParameter(name, 0, start, numel),), start, numel, row_shard_ranges(shape), schedule
            )
        )
        start += numel
    for bucket_id, bucket in enumerate(make_buckets(sizes, layout, recipe, settings)):
        shard_ranges = bucket_shard_ranges(bucket.length, bucket.owner)
        units.append(
            CommUnit(
                f"bucket {bucket_id}", "bucket", bucket.members, bucket.start, bucket.length, shard_ranges, schedule
            )
        )
    return tuple(units)


def make_unit_schedule(groups: CommunicationGroups, layout: Layout) -> UnitSchedule:
    """Of any portion of a layout."""
    reduce_actions = (CommUnitAction("scatter", groups.shard_groups), CommUnitAction("sum", groups.replica_groups))
    norm = CommUnitAction("norm", (tuple(ranks[0] for ranks in groups.replica_groups),))
    update, gather = CommUnitAction("update", layout.shard_groups), CommUnitAction("gather", groups.shard_groups)
    if groups.gathers_gradients:
        return (*reduce_actions, norm, gather, update)
    secondary_actions = (
        (
            CommUnitAction("keep", groups.secondary_shard_groups),
            CommUnitAction("levels", groups.secondary_replica_groups),
        )
        if groups.secondary_shard_groups
        else ()
    )
    return (*reduce_actions, norm, update, gather, *secondary_actions)
