"""Over which ranks a gradient is added, and which ranks hold identical copies: decided here and nowhere else."""

from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from motet.collectives.cost.alpha_beta import RankGroups
from motet.parallel.data_parallel.data_sharding import DataParallelSharding
from motet.parallel.data_parallel.zero import is_replicated, uses_row_shards
from motet.parallel.layout import Layout
from motet.parallel.model_inventory import ModelInventory
from motet.parallel.model_sharding import ModelSharding
from motet.parallel.parallel_dims import ParallelDims
from motet.parallel.shard_spec import ShardSpec

UnitKind = Literal["rows", "bucket"]


@dataclass(frozen=True)
class SyncGroup:
    """Tensors that the same ranks hold, add and shard in the same way."""

    names: tuple[str, ...]
    sum_groups: RankGroups  # Ranks of each hold the same shard and add its gradient; the position is that in `sharding`
    copy_groups: RankGroups  # Identical copies: ranks at the same position; the first counts in the norm and writes
    sharding: DataParallelSharding  # Of the ranks of a sum group
    unit_kind: UnitKind
    stages: tuple[int, ...]  # Stages that hold the tensors


def make_sync_groups(inventory: ModelInventory, model_sharding: ModelSharding, layout: Layout) -> tuple[SyncGroup, ...]:
    """Groups of all trained tensors, in the order in which they start collectives: by stage, rows before buckets."""
    specs, names = model_sharding.specs(inventory, layout.dims), dict[SyncGroup, list[str]]()
    known: dict[object, SyncGroup] = {}
    for tensor in inventory.trained:
        shards, partial_over = specs[tensor.name], model_sharding.partial_over(tensor)
        if (key := (id(shards), partial_over)) not in known:
            sums = _ranks_of_one_shard(shards, layout.dims, set(dict(layout.dims.sizes)) - set(partial_over))
            copies = _ranks_of_one_shard(shards, layout.dims, set(partial_over))
            sharding, local_shape = (
                replace(layout.sharding, ranks=len(sums[0])),
                next(iter(shards.values())).local_shape,
            )
            cuts_rows = uses_row_shards(sharding) and not is_replicated(local_shape, sharding)
            kind: UnitKind = "rows" if cuts_rows else "bucket"
            known[key] = SyncGroup((), sums, copies, sharding, kind, model_sharding.stages_of(tensor))
        names.setdefault(known[key], []).append(tensor.name)
    groups = [replace(group, names=tuple(members)) for group, members in names.items()]
    return tuple(sorted(groups, key=lambda group: (group.stages, group.unit_kind != "rows")))


def _ranks_of_one_shard(shards: Mapping[int, ShardSpec], dims: ParallelDims, equal: Container[str]) -> RankGroups:
    """Ranks that hold the same shard and have the same index in the dimensions `equal`, in ascending order."""
    groups: dict[object, list[int]] = {}
    for rank, spec in shards.items():
        indices = tuple(index for name, index in dims.coordinates(rank).items() if name in equal)
        groups.setdefault((spec, indices), []).append(rank)
    return tuple(map(tuple, groups.values()))


def module_part_groups(dims: ParallelDims) -> RankGroups:
    """Ranks that hold the same part of the module, and so the same buffers."""
    return dims.groups("dp", "cp")


def same_rows_groups(dims: ParallelDims) -> RankGroups:
    """Ranks that work on the same rows and positions of the batch."""
    return dims.groups(*(name for name, _ in dims.sizes if name not in ("dp", "cp")))
