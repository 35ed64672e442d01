"""A step of a layout as a value: which rows each rank reads, over which ranks gradients are reduced, who updates what.

It is made by the functions that the engine reads too: `resolve_communication_groups` (ranks of each collective),
`make_buckets` and `shard_range` (elements of a shard), `contributing_rows_of_rank`. check.py proves that it is right.
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
from motet.parallel.data_parallel.data_sharding import DataParallelSharding
from motet.parallel.data_parallel.zero import ZERO_STAGES, is_replicated, make_buckets, shard_rows, uses_row_shards
from motet.parallel.layout import Layout, contributing_rows_of_rank
from motet.precision.recipe import PrecisionRecipe

ActionKind = Literal["reduce_scatter", "all_reduce", "norm", "update", "all_gather", "keep_secondary", "two_level"]


class CommUnitAction(NamedTuple):
    """One action on a communication unit, by all groups in parallel.

    | kind | in each group |
    |---|---|
    | reduce_scatter | ranks sum the unsharded unit; each gets the shard of its position in the group |
    | all_reduce | ranks sum the shard that they hold, and all of them get the sum |
    | norm | ranks add the sums that they hold to the squared norm |
    | update | the group is one copy of the model; its ranks update what they hold |
    | all_gather | each rank gets the unsharded unit, from shards in the order of the group |
    | keep_secondary | ranks keep secondary shards of what was gathered, and gather these for backward |
    | two_level | ranks hold the same secondary shard; a two-level sum goes over keep_secondary's groups, then these |
    """

    kind: ActionKind
    rank_groups: RankGroups


UnitSchedule = tuple[CommUnitAction, ...]
ShardRanges = tuple[tuple[int, int], ...]  # (first, stop) of each shard, from the start of the unit


@dataclass(frozen=True)
class CommUnit:
    """A unit of sharding: a bucket of stages 0 to 2, or a parameter that stage 3 cuts into rows."""

    name: str
    kind: Literal["rows", "bucket"]
    members: tuple[BucketParameter, ...]
    start: int  # In the flat tensor of all units of its kind
    length: int  # With padding
    shard_ranges: ShardRanges
    schedule: UnitSchedule


@dataclass(frozen=True)
class StepPlan:
    """A step of a layout."""

    shapes: Mapping[str, Shape]  # Of the trainable parameters
    comm_units: tuple[CommUnit, ...]
    ranks: int  # Ranks that take a step together
    reduce_after: tuple[tuple[int, ...], ...]  # For each reduction of gradients: the micro-batches that it sums
    microbatches: int
    rows_by_rank: tuple[tuple[range, ...], ...]  # By micro-batch; of all independent replicas where there are any
    batch_sequences: int
    outer_groups: RankGroups = ()  # Ranks of independent replicas that average their masters in an outer step


@dataclass(frozen=True)
class ParameterInventory:
    """The trainable parameters, in the order of use."""

    shapes: Mapping[str, Shape]
    optimizer_groups: Mapping[str, int]  # A parameter that is not here is in group 0


def make_step_plan(
    parameters: ParameterInventory,
    layout: Layout,
    recipe: PrecisionRecipe,
    *,
    settings: CommunicationSettings,
    batch_sequences: int,
    independent_replicas: bool = False,
) -> StepPlan:
    """The plan of a layout; with independent replicas, that of the first replica, which all others follow."""
    sharding, microbatches = layout.sharding, tuple(range(layout.sharding.microbatches))
    if independent_replicas:
        sharding, settings = replace(sharding, ranks=sharding.shards), without_forward_overlap(settings)
    return StepPlan(
        parameters.shapes,
        make_comm_units(parameters, sharding, recipe, settings=settings),
        sharding.ranks,
        tuple((i,) for i in microbatches) if ZERO_STAGES[sharding.zero].gradients else (microbatches,),
        sharding.microbatches,
        tuple(tuple(contributing_rows_of_rank(layout, rank, batch_sequences)) for rank in range(layout.dims.ranks)),
        batch_sequences,
        layout.sharding.replica_groups if independent_replicas else (),
    )


def updated_ranges(plan: StepPlan, rank: int) -> dict[str, tuple[int, int]]:
    """(first, stop) of the elements that a rank updates of each parameter; parameters without any are left out."""

    def updated_shard(schedule: UnitSchedule) -> int | None:
        """Index of the shard, or None if the rank gathers first and updates everything."""
        scatter, second, *_ = (each for each in schedule if each.kind in ("reduce_scatter", "all_gather", "update"))
        if second.kind == "all_gather":
            return None
        return next(ranks.index(rank) for ranks in scatter.rank_groups if rank in ranks)

    schedules = {id(unit.schedule): unit.schedule for unit in plan.comm_units}
    shard_by_schedule = {key: updated_shard(schedule) for key, schedule in schedules.items()}
    ranges = {}
    for unit in plan.comm_units:
        shard = shard_by_schedule[id(unit.schedule)]
        first, stop = (0, unit.length) if shard is None else unit.shard_ranges[shard]
        for member in unit.members:
            start = max(0, unit.start + first - member.start)
            end = min(member.numel, unit.start + stop - member.start)
            if start < end:
                ranges[member.name] = start, end
    return ranges


def make_comm_units(
    parameters: ParameterInventory,
    sharding: DataParallelSharding,
    recipe: PrecisionRecipe,
    *,
    settings: CommunicationSettings,
) -> tuple[CommUnit, ...]:
    """Units of all parameters; parameters that are cut into rows come first."""
    groups = resolve_communication_groups(settings, sharding)
    schedule, shards = make_unit_schedule(groups, sharding), range(len(groups.shard_groups[0]))
    rows = {n: s for n, s in parameters.shapes.items() if uses_row_shards(sharding) and not is_replicated(s, sharding)}
    sizes = {n: (parameters.optimizer_groups.get(n, 0), prod(s)) for n, s in parameters.shapes.items() if n not in rows}

    @cache
    def row_shard_ranges(shape: Shape) -> ShardRanges:
        width, row_ranges = prod(shape[1:]), (shard_rows(shape[0], len(shards), shard) for shard in shards)
        return tuple((first * width, stop * width) for first, stop in row_ranges)

    @cache
    def bucket_shard_ranges(length: int, owner: int | None) -> ShardRanges:
        return tuple(shard_range(length, len(shards), shard, owner=owner) for shard in shards)

    units: list[CommUnit] = []
    for name, shape in rows.items():
        start, numel = units[-1].start + units[-1].length if units else 0, prod(shape)
        members = (BucketParameter(name, 0, start, numel),)
        units.append(CommUnit(name, "rows", members, start, numel, row_shard_ranges(shape), schedule))
    for i, bucket in enumerate(make_buckets(sizes, sharding, recipe, settings=settings)):
        ranges = bucket_shard_ranges(bucket.length, bucket.owner)
        units.append(CommUnit(f"bucket {i}", "bucket", bucket.members, bucket.start, bucket.length, ranges, schedule))
    return tuple(units)


def make_unit_schedule(groups: CommunicationGroups, sharding: DataParallelSharding) -> UnitSchedule:
    """The actions of every unit of a layout."""
    update, gather = CommUnitAction("update", sharding.shard_groups), CommUnitAction("all_gather", groups.shard_groups)
    keep = CommUnitAction("keep_secondary", groups.secondary_shard_groups)
    reduce_two_levels = CommUnitAction("two_level", groups.secondary_replica_groups)
    return (
        CommUnitAction("reduce_scatter", groups.shard_groups),
        CommUnitAction("all_reduce", groups.replica_groups),
        CommUnitAction("norm", (tuple(ranks[0] for ranks in groups.replica_groups),)),
        *((gather, update) if groups.gathers_gradients else (update, gather)),
        *((keep, reduce_two_levels) if groups.secondary_shard_groups else ()),
    )
