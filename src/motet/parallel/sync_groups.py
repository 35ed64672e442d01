"""Over which ranks a gradient is added, and which ranks hold identical copies: decided here and nowhere else."""

from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from motet.collectives.cost.alpha_beta import RankGroups
from motet.parallel.data_parallel.data_sharding import DataParallelSharding
from motet.parallel.data_parallel.zero import is_cut_into_rows
from motet.parallel.layout import Layout
from motet.parallel.model_inventory import ModelInventory, TensorInfo
from motet.parallel.model_sharding import ModelSharding
from motet.parallel.parallel_dims import ParallelDims
from motet.parallel.shard_spec import ShardSpec


@dataclass(frozen=True)
class SyncGroup:
    """Tensors that the same ranks hold, add and shard in the same way."""

    names: tuple[str, ...]
    sum_groups: RankGroups  # Ranks that hold the same shard and add its gradient; `sharding` numbers them in this order
    copy_groups: RankGroups  # Ranks with identical copies; the first is counted in the norm
    sharding: DataParallelSharding  # Of the ranks of a sum group
    unit_kind: Literal["rows", "bucket"]
    stages: tuple[int, ...]  # Stages that hold the tensors
    frozen: tuple[str, ...] = ()  # Frozen parameters that its ranks shard too


def make_sync_groups(inventory: ModelInventory, model_sharding: ModelSharding, layout: Layout) -> tuple[SyncGroup, ...]:
    """Groups of all trained tensors, in the order in which they start collectives: by stage, rows before buckets.

    Frozen parameters have no gradient, so no group trains them; but stage 3 shards them over the ranks of a group.
    """
    specs, members = model_sharding.specs(inventory, layout.dims), dict[SyncGroup, list[TensorInfo]]()
    known: dict[object, SyncGroup] = {}
    for tensor in (tensor for tensor in inventory.tensors if tensor.kind in ("trained", "frozen")):
        shards, partial_over = specs[tensor.name], model_sharding.partial_over(tensor)
        if (key := (id(shards), partial_over, tensor.dtype)) not in known:
            sums = _ranks_of_one_shard(shards, layout.dims, set(dict(layout.dims.sizes)) - set(partial_over))
            copies = _ranks_of_one_shard(shards, layout.dims, set(partial_over))
            sharding = replace(layout.sharding, ranks=len(sums[0]))
            cuts_rows = is_cut_into_rows(next(iter(shards.values())).local_shape, tensor.dtype, sharding)
            stages = model_sharding.stages_of(tensor)
            known[key] = SyncGroup((), sums, copies, sharding, "rows" if cuts_rows else "bucket", stages)
        if tensor.kind == "trained" or known[key].unit_kind == "rows":
            members.setdefault(known[key], []).append(tensor)

    def names(tensors: list[TensorInfo], kind: str) -> tuple[str, ...]:
        return tuple(tensor.name for tensor in tensors if tensor.kind == kind)

    groups = [
        replace(group, names=names(tensors, "trained"), frozen=names(tensors, "frozen"))
        for group, tensors in members.items()
    ]
    return tuple(sorted(groups, key=lambda group: (group.stages, group.unit_kind != "rows")))


def _ranks_of_one_shard(shards: Mapping[int, ShardSpec], dims: ParallelDims, equal: Container[str]) -> RankGroups:
    """Ranks that hold the same shard and have the same index in the dimensions `equal`, in ascending order."""
    groups: dict[object, list[int]] = {}
    for rank, spec in shards.items():
        indices = tuple(index for name, index in dims.coordinates(rank).items() if name in equal)
        groups.setdefault((spec, indices), []).append(rank)
    return tuple(map(tuple, groups.values()))


DATA_DIMENSIONS = ("dp", "cp")  # Their ranks hold the same part of the module


def module_part_groups(dims: ParallelDims) -> RankGroups:
    """Ranks that hold the same part of the module, and so the same buffers."""
    return dims.groups(*DATA_DIMENSIONS)


def same_rows_groups(dims: ParallelDims) -> RankGroups:
    """Ranks that work on the same rows and positions of the batch."""
    return dims.groups(*(name for name, _ in dims.sizes if name not in DATA_DIMENSIONS))


def same_loss_groups(dims: ParallelDims) -> RankGroups:
    """Ranks that compute the same loss, where they compute one."""
    return dims.groups("tp")


def next_data_rank(dims: ParallelDims, rank: int) -> int:
    """The rank with the same part of the model and the next rows; the first rows follow the last."""
    ranks = next(ranks for ranks in dims.groups("dp") if rank in ranks)
    return ranks[(ranks.index(rank) + 1) % len(ranks)]
