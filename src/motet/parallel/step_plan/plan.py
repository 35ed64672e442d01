"""A step of a layout as a value: the rows that each rank reads, and the actions on each bucket or FSDP unit.

The engine executes these actions; bytes, memory, the timeline, its picture and the check before the first step read
the same list. check.py proves that it is right.

The tensors, or shards of them, that several ranks hold, and must hold with the same bits.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import prod
from typing import Literal, NamedTuple

from motet.collectives.cost.alpha_beta import RankGroups
from motet.memory.policy_choice import ALL_ON_DEVICE, Place, StatePlaces
from motet.models.spec.layer_specs import MicroBatchShape
from motet.parallel.context_parallel.context_partition import ContextSplit
from motet.parallel.data_parallel.comm_units import CommUnit, SyncGroupPlan, make_group_plan
from motet.parallel.data_parallel.communication.communication_settings import CommunicationSettings
from motet.parallel.data_parallel.communication.powersgd_matrices import Shape
from motet.parallel.data_parallel.zero import shard_rows
from motet.parallel.layout import Layout, contributing_rows_of_rank
from motet.parallel.model_sharding import CONTEXT_DIMENSION, ModelInventory, ModelSharding, TensorInfo
from motet.parallel.parallel_dims import ParallelDims
from motet.parallel.shard_spec import HeldShards, ShardSpec
from motet.parallel.sync_groups import SyncGroup, make_sync_groups
from motet.precision.recipe import PrecisionRecipe


@dataclass(frozen=True)
class StepPlan:
    """A step of a layout."""

    inventory: ModelInventory
    model_sharding: ModelSharding
    dims: ParallelDims  # Dimensions of the ranks that take a step together
    groups: tuple[SyncGroupPlan, ...]
    microbatches: int
    rows_by_rank: tuple[tuple[range, ...], ...]  # By micro-batch; for all independent replicas
    batch_sequences: int
    outer_groups: RankGroups = ()  # Ranks of independent replicas that average their masters in an outer step
    states: Place = "device"  # The place of masters and moments
    parameters: Place = "device"  # The place of parameters that are cut into rows
    delays: bool = False  # The host applies the gradients of a step while the next one computes
    window: int = 2  # Units whose rows the host reads ahead, if they lie on disk
    context: ContextSplit = field(default_factory=ContextSplit)

    @cached_property
    def specs(self) -> Mapping[str, HeldShards]:
        """The shards of each tensor, by rank; a rank that holds nothing is missing."""
        return self.model_sharding.specs(self.inventory, self.dims)

    def part_on_rank(self, shape: MicroBatchShape, rank: int) -> MicroBatchShape:
        """The part of a micro-batch of complete rows that a rank of context parallelism computes."""
        if self.context.ranks == 1:
            return shape
        length = self.context.partition(shape.length).length(self.dims.coordinates(rank)[CONTEXT_DIMENSION])
        targets = None if shape.targets is None else round(shape.targets * length / shape.length)
        return replace(shape, length=length, targets=targets)

    @property
    def comm_units(self) -> tuple[CommUnit, ...]:
        return tuple(unit for group in self.groups for unit in group.units)


def make_step_plan(
    inventory: ModelInventory,
    layout: Layout,
    recipe: PrecisionRecipe,
    *,
    settings: CommunicationSettings,
    batch_sequences: int,
    independent_replicas: bool = False,
    model_sharding: ModelSharding | None = None,
    places: StatePlaces = ALL_ON_DEVICE,
) -> StepPlan:
    """The plan of a layout; with independent replicas, that of the first replica, which all others follow."""
    model_sharding = model_sharding or ModelSharding()
    step_layout = layout.replica_layout() if independent_replicas else layout
    step_layout = replace(step_layout, sharding=replace(step_layout.sharding, parameters=places.parameters))
    dims = step_layout.dims
    specs = model_sharding.specs(inventory, dims)
    is_compressed = (settings.compress_gradients or settings.compress_parameters) is not None
    groups = make_sync_groups(inventory, model_sharding, step_layout, is_compressed=is_compressed)

    def local_tensors(group: SyncGroup) -> dict[str, tuple[TensorInfo, Shape]]:
        rank, parameters = group.sum_groups[0][0], (t for t in inventory.tensors if t.kind in ("trained", "frozen"))
        held = ((tensor, specs[tensor.name].get(rank)) for tensor in parameters)
        return {tensor.name: (tensor, spec.local_shape) for tensor, spec in held if spec}

    return StepPlan(
        inventory,
        model_sharding,
        dims,
        _name_units(
            make_group_plan(group, local_tensors(group), recipe, settings=settings, on_device=places.states == "device")
            for group in groups
        ),
        layout.sharding.microbatches,
        _rows_by_rank(layout, batch_sequences),
        batch_sequences,
        layout.sharding.replica_groups if independent_replicas else (),
        *places,
        context=layout.context,
    )


def _rows_by_rank(layout: Layout, batch_sequences: int) -> tuple[tuple[range, ...], ...]:
    """The rows of each rank, by micro-batch; ranks with the same data rank share one value."""
    rows = dict[int, tuple[range, ...]]()
    data_ranks = [layout.data_rank(rank) for rank in range(layout.dims.ranks)]
    for rank, data_rank in enumerate(data_ranks):
        if data_rank not in rows:
            rows[data_rank] = tuple(contributing_rows_of_rank(layout, rank, batch_sequences))
    return tuple(rows[data_rank] for data_rank in data_ranks)


def _name_units(groups: Iterable[SyncGroupPlan]) -> tuple[SyncGroupPlan, ...]:
    """Units of several sync groups may have one name; each of them then gets the number of its group, too."""
    groups = tuple(groups)
    counts = Counter(unit.name for group in groups for unit in group.units)
    suffixes = {name: " of sync group {}" * (count > 1) for name, count in counts.items()}
    return tuple(
        replace(group, units=tuple(replace(u, name=u.name + suffixes[u.name].format(i)) for u in group.units))
        for i, group in enumerate(groups)
    )


def updated_ranges(plan: StepPlan, rank: int) -> dict[str, tuple[int, int]]:
    """(first, stop) of the elements of its local tensors that a rank updates; tensors without any are left out."""
    ranges: dict[str, tuple[int, int]] = {}
    for group in plan.groups:
        position = group.position(rank)
        for unit in group.units:
            if position is None:
                break
            shard = unit.updated_shard(position)
            ranges |= {name: (first, stop) for name, first, stop in unit.member_ranges(shard)}
    return ranges


class HeldRun(NamedTuple):
    """Consecutive elements of a shard, in local order and with padding."""

    spec: ShardSpec
    start: int
    stop: int
    ranks: tuple[int, ...]  # All that hold the same elements, in ascending order


def held_runs(plan: StepPlan, rank: int) -> dict[str, HeldRun]:
    """The elements of each tensor's state on a rank, by all its names: of a trained one, the elements that it updates.

    Tensors of which it holds no element are left out.
    """
    updated, shards, frozen = updated_ranges(plan, rank), _updated_shards(plan), _frozen_rows(plan, rank)
    runs, holders = dict[str, HeldRun](), dict[object, tuple[int, ...]]()
    for tensor in plan.inventory.tensors:
        specs = plan.specs[tensor.name]
        if rank not in specs:
            continue
        start, stop, shard_of = 0, prod(specs[rank].local_shape), shards.get(tensor.name, {})
        if tensor.kind == "trained":
            start, stop = updated.get(tensor.name, (0, 0))
        elif tensor.name in frozen:
            start, stop, shard_of = frozen[tensor.name]
        if start == stop:
            continue
        if (key := (specs.pattern, id(shard_of) if shard_of else 0)) not in holders:  # many tensors have the same
            classes = specs.class_of_rank
            same_spec = (other for other, number in classes.items() if number == classes[rank])
            holders[key] = tuple(sorted(other for other in same_spec if shard_of.get(other) == shard_of.get(rank)))
        runs |= dict.fromkeys((tensor.name, *tensor.aliases), HeldRun(specs[rank], start, stop, holders[key]))
    return runs


ShardsByRank = Mapping[int, int | None]  # None: all shards


def _updated_shards(plan: StepPlan) -> dict[str, ShardsByRank]:
    """The shard of each trained tensor that the ranks of its sync group update."""
    shards, known = dict[str, ShardsByRank](), dict[tuple[int, int], ShardsByRank]()
    for group, unit in ((each, unit) for each in plan.groups for unit in each.units if unit.members):
        if (key := (id(group), id(unit.schedule))) not in known:
            sum_groups = group.group.sum_groups
            by_position = [unit.updated_shard(position) for position in range(len(sum_groups[0]))]
            known[key] = {rank: shard for ranks in sum_groups for rank, shard in zip(ranks, by_position, strict=True)}
        shards |= dict.fromkeys((member.name for member in unit.members), known[key])
    return shards


def _frozen_rows(plan: StepPlan, rank: int) -> dict[str, tuple[int, int, ShardsByRank]]:
    """(first, stop, shards by rank) of the frozen tensors that stage 3 cuts into rows, as this rank holds them."""
    rows = dict[str, tuple[int, int, ShardsByRank]]()
    for group in (each.group for each in plan.groups if each.position(rank) is not None):
        sharding = group.sharding
        shards = {other: sharding.shard_of_rank(i) for ranks in group.sum_groups for i, other in enumerate(ranks)}
        for name in group.frozen:
            shape = plan.specs[name][rank].local_shape
            first, stop = shard_rows(shape[0], sharding.shards, shards[rank])
            rows[name] = first * prod(shape[1:]), stop * prod(shape[1:]), shards
    return rows


# States are masters and moments; loads are those of experts after the update, and what follows from them.
CopyKind = Literal["parameters", "gradients", "states", "loads"]


class IdenticalCopies(NamedTuple):
    """Tensors of which each group of ranks holds the same shards: at a step's start, at its norm, or after it."""

    kind: CopyKind
    names: tuple[str, ...]
    rank_groups: RankGroups


def copies_in_plan(plan: StepPlan) -> Iterator[IdenticalCopies]:
    """The copies of all trained and frozen parameters. A trained parameter that is cut into rows is its master."""
    sharded = set[str]()
    for group in plan.groups:
        names, frozen = group.group.names, group.group.frozen
        sharded.update(names, frozen)
        unit = next((unit for unit in group.units if unit.members), None)
        if unit is not None:
            yield from _copies(plan, "gradients", names, shard_of=partial(unit.shard_at, "norm"))
            yield from _copies(plan, "states", names, shard_of=partial(unit.shard_at, "update"))
            if group.group.unit_kind == "bucket":
                yield from _copies(plan, "parameters", names)
        yield from _copies(plan, "parameters", frozen, shard_of=group.group.sharding.shard_of_rank)
    frozen = tuple(tensor.name for tensor in plan.inventory.tensors if tensor.kind == "frozen")
    yield from _copies(plan, "parameters", tuple(name for name in frozen if name not in sharded))


def _copies(
    plan: StepPlan, kind: CopyKind, names: tuple[str, ...], *, shard_of: Callable[[int], int | None] = lambda rank: None
) -> Iterator[IdenticalCopies]:
    """The ranks with the same part of each tensor and the same shard of it, by their positions in the sum group."""
    group = next(
        (group for group in plan.groups if {*names[:1]}.issubset((*group.group.names, *group.group.frozen))), None
    )
    split_alike, copied_alike = dict[object, list[str]](), dict[RankGroups, list[str]]()
    for name in names:
        split_alike.setdefault(plan.specs[name].pattern, []).append(name)
    for alike in split_alike.values():
        ranks: dict[object, list[int]] = {}
        for rank, number in plan.specs[alike[0]].class_of_rank.items():
            position = group.position(rank) if group else None
            ranks.setdefault((number, None if position is None else shard_of(position)), []).append(rank)
        copied_alike.setdefault(tuple(map(tuple, ranks.values())), []).extend(alike)
    for rank_groups, alike in copied_alike.items():
        yield IdenticalCopies(kind, tuple(alike), rank_groups)
