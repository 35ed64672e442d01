"""A step of a layout as a value: which rows each rank reads, and the actions on each bucket or FSDP unit.

The engine executes these actions; bytes, memory, the timeline, its picture and the check before the first step read
the same list. check.py proves that it is right.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from motet.collectives.cost.alpha_beta import RankGroups
from motet.parallel.data_parallel.comm_units import CommUnit, SyncGroupPlan, make_group_plan
from motet.parallel.data_parallel.communication.communication_settings import CommunicationSettings
from motet.parallel.data_parallel.communication.powersgd_matrices import Shape
from motet.parallel.layout import Layout, contributing_rows_of_rank
from motet.parallel.model_inventory import ModelInventory, TensorInfo
from motet.parallel.model_sharding import ModelSharding
from motet.parallel.parallel_dims import ParallelDims
from motet.parallel.shard_spec import ShardSpec
from motet.parallel.sync_groups import DATA_DIMENSIONS, SyncGroup, make_sync_groups, same_rows_groups
from motet.precision.recipe import PrecisionRecipe


@dataclass(frozen=True)
class StepPlan:
    """A step of a layout."""

    inventory: ModelInventory
    model_sharding: ModelSharding
    dims: ParallelDims  # Of the ranks that take a step together
    groups: tuple[SyncGroupPlan, ...]
    microbatches: int
    rows_by_rank: tuple[tuple[range, ...], ...]  # By micro-batch; of all independent replicas where there are any
    batch_sequences: int
    outer_groups: RankGroups = ()  # Ranks of independent replicas that average their masters in an outer step

    @cached_property
    def specs(self) -> Mapping[str, Mapping[int, ShardSpec]]:
        """The shards of each tensor, by rank; a rank that holds nothing is missing."""
        return self.model_sharding.specs(self.inventory, self.dims)

    @property
    def comm_units(self) -> tuple[CommUnit, ...]:
        return tuple(unit for group in self.groups for unit in group.units)

    def writes(self, tensor: TensorInfo, rank: int) -> bool:
        """Whether a rank writes what it holds of a tensor to a checkpoint: it is the first with the same values.

        Ranks that differ in data parallelism alone all write what they hold; a checkpoint keeps equal parts once.
        """
        if self.dims.ranks == self.dims.size(*DATA_DIMENSIONS):
            return True
        group = next((group.group for group in self.groups if tensor.name in group.shapes), None)
        if group is not None:
            return any(ranks[0] == rank for ranks in group.copy_groups)
        ranks = next(ranks for ranks in same_rows_groups(self.dims) if rank in ranks)
        specs = self.specs[tensor.name]
        return rank in specs and next(other for other in ranks if specs.get(other) == specs[rank]) == rank


def make_step_plan(
    inventory: ModelInventory,
    layout: Layout,
    recipe: PrecisionRecipe,
    *,
    settings: CommunicationSettings,
    batch_sequences: int,
    independent_replicas: bool = False,
    model_sharding: ModelSharding | None = None,
) -> StepPlan:
    """The plan of a layout; with independent replicas, that of the first replica, which all others follow."""
    step_layout, model_sharding = (
        layout.of_replica() if independent_replicas else layout,
        model_sharding or ModelSharding(),
    )
    dims = step_layout.dims
    groups = make_sync_groups(inventory, model_sharding, step_layout)

    def local_tensors(group: SyncGroup) -> dict[str, tuple[TensorInfo, Shape]]:
        coordinates = dims.coordinates(group.sum_groups[0][0])
        parameters = (tensor for tensor in inventory.tensors if tensor.kind in ("trained", "frozen"))
        specs = {tensor: model_sharding.spec(tensor, coordinates, dims) for tensor in parameters}
        return {tensor.name: (tensor, spec.local_shape) for tensor, spec in specs.items() if spec}

    return StepPlan(
        inventory,
        model_sharding,
        dims,
        _name_units(make_group_plan(group, local_tensors(group), recipe, settings=settings) for group in groups),
        layout.sharding.microbatches,
        tuple(tuple(contributing_rows_of_rank(layout, rank, batch_sequences)) for rank in range(layout.dims.ranks)),
        batch_sequences,
        layout.sharding.replica_groups if independent_replicas else (),
    )


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
