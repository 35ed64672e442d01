"""The ranks that add a gradient, and the ranks that hold identical copies: decided here and nowhere else.

The table of the numbers that ranks add in each step, and of the ranks that report them, so that each counts once.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from motet.collectives.cost.alpha_beta import RankGroups
from motet.parallel.data_parallel.data_sharding import DataParallelSharding
from motet.parallel.data_parallel.zero import is_cut_into_rows
from motet.parallel.layout import Layout
from motet.parallel.model_sharding import TENSOR_DIMENSION, ModelInventory, ModelSharding
from motet.parallel.parallel_dims import ParallelDims


@dataclass(frozen=True)
class SyncGroup:
    """Tensors that the same ranks add and shard in the same way: split ones, and whole ones that more ranks hold.

    They travel together, since ranks must start collectives over the same ranks in one order, and FSDP2 shards a module
    once. Each tensor has its own copies.
    """

    names: tuple[str, ...]
    sum_groups: RankGroups  # Ranks that hold the same shard and add its gradient; `sharding` numbers them in this order
    copy_groups: Mapping[str, RankGroups]  # By name: ranks with identical copies; the first is counted in the norm
    sharding: DataParallelSharding  # Sharding over the ranks of a sum group
    unit_kind: Literal["rows", "bucket"]
    stages: tuple[int, ...]  # Stages that hold the tensors
    frozen: tuple[str, ...] = ()  # Frozen parameters that its ranks shard too
    in_pipeline: bool = False  # Its ranks hold stages, and not the whole module

    @cached_property
    def position_of_rank(self) -> Mapping[int, int]:
        """Rank -> its number within its sum group; a rank that holds nothing of the group is missing."""
        return {rank: i for ranks in reversed(self.sum_groups) for i, rank in reversed([*enumerate(ranks)])}

    def sum_group_of(self, rank: int) -> tuple[int, ...]:
        """The sum group of a rank; empty if it holds nothing of the group."""
        return next((ranks for ranks in self.sum_groups if rank in ranks), ())

    @cached_property
    def counting_ranks(self) -> Mapping[str, frozenset[int]]:
        """Tensor -> the first rank of each group of copies."""
        distinct = {id(copies): copies for copies in self.copy_groups.values()}
        first = {key: frozenset(ranks[0] for ranks in copies) for key, copies in distinct.items()}
        return {name: first[id(copies)] for name, copies in self.copy_groups.items()}


def make_sync_groups(
    inventory: ModelInventory, model_sharding: ModelSharding, layout: Layout, *, is_compressed: bool = False
) -> tuple[SyncGroup, ...]:
    """Groups of all trained tensors, in the order in which they start collectives: by stage, rows before buckets.

    Frozen parameters have no gradient, so no group trains them; but stage 3 shards them over the ranks of a group. It
    cuts into rows the tensors that only data-parallel ranks add: FSDP2 shards all parameters of a module over the same
    ranks. A codec rounds by the tensors that it compresses together, so it gets no whole tensors together with split
    ones: copies would become different.
    """
    dims, specs = layout.dims, model_sharding.specs(inventory, layout.dims)
    module_parts, all_dims = set(module_part_groups(dims)), set(dict(dims.sizes))
    # A group, its copies by name, and its frozen parameters.
    groups: dict[object, tuple[SyncGroup, dict[str, RankGroups], list[str]]] = {}
    known: dict[object, tuple[SyncGroup, dict[str, RankGroups], list[str]]] = {}
    known_ranks: dict[object, tuple[RankGroups, RankGroups]] = {}  # Ranks that add a shard, and ranks with copies
    interned: dict[RankGroups, RankGroups] = {}  # Equal groups of ranks are one object
    keeps_copies_apart = is_compressed and any(rule.splits for rule in model_sharding.rules.values())
    for tensor in (tensor for tensor in inventory.tensors if tensor.kind in ("trained", "frozen")):
        shards, partial_over = specs[tensor.name], {*model_sharding.partial_over(tensor)}
        partial_over -= {TENSOR_DIMENSION} if tensor.kind == "frozen" else set()
        # Gradients of a row from several stages are added row by row there, before ranks add up rows.
        partial_over -= {"pp"} if layout.sharding.reproducible_batch_size else set()
        if (ranks_key := (shards.pattern, frozenset(partial_over))) not in known_ranks:
            sums, copies = (shards.ranks_of_equal_shards(same) for same in (all_dims - partial_over, partial_over))
            known_ranks[ranks_key] = interned.setdefault(sums, sums), interned.setdefault(copies, copies)
        sums, copies = known_ranks[ranks_key]
        if (key := (id(shards), frozenset(partial_over), tensor.dtype)) not in known:
            sharding, stages = layout.sharding.for_ranks(len(sums[0])), model_sharding.stages_of(tensor)
            if len(stages) > 1:  # In buckets, reduced after the backwards of all stages: once, or by row
                sharding = replace(sharding, zero=min(sharding.zero, 1 if "pp" in partial_over else 2))
            cuts_rows = is_cut_into_rows(next(iter(shards.shards.values())).local_shape, tensor.dtype, sharding)
            cuts_rows &= module_parts.issuperset(sums) and not (keeps_copies_apart and len(copies) < len(shards))
            kind: Literal["rows", "bucket"] = "rows" if cuts_rows else "bucket"
            group = SyncGroup((), sums, {}, sharding, kind, stages, in_pipeline=bool(model_sharding.stages))
            known[key] = groups.setdefault((id(sums), stages, kind), (group, {}, []))
        group, copies_by_name, frozen = known[key]
        if tensor.kind == "trained":
            copies_by_name[tensor.name] = copies
        elif group.unit_kind == "rows":
            frozen.append(tensor.name)
    made = [
        replace(group, names=tuple(copies_by_name), copy_groups=copies_by_name, frozen=tuple(frozen))
        for group, copies_by_name, frozen in groups.values()
        if copies_by_name or frozen
    ]
    return tuple(sorted(made, key=lambda group: (group.stages, group.unit_kind != "rows")))


DATA_DIMENSIONS = ("dp", "cp")  # Their ranks hold the same part of the module


def module_part_groups(dims: ParallelDims) -> RankGroups:
    """Ranks that hold the same part of the module, and so the same buffers."""
    return dims.groups(*DATA_DIMENSIONS)


def pipeline_groups(dims: ParallelDims) -> RankGroups:
    """Ranks that hold the stages of one copy of the model, in the order of the pipeline."""
    return dims.groups("pp")


def ranks_of_stages(sharding: ModelSharding, stages: tuple[int, ...], dims: ParallelDims) -> RankGroups:
    """Ranks that hold these stages of one copy of the model, in the order of the pipeline."""
    places = {sharding.rank_of_stage(stage, dims) for stage in stages}
    return tuple(tuple(ranks[place] for place in sorted(places)) for ranks in pipeline_groups(dims))


def same_rows_groups(dims: ParallelDims) -> RankGroups:
    """Ranks that work on the same rows and positions of the batch."""
    return dims.groups(*(name for name, _ in dims.sizes if name not in DATA_DIMENSIONS))


def same_loss_groups(dims: ParallelDims) -> RankGroups:
    """Ranks that compute the same loss, where they compute one."""
    return dims.groups("tp")


def same_loss_ranks(dims: ParallelDims, rank: int) -> tuple[int, ...]:
    """Ranks that compute the same loss as this one."""
    return dims.group_of(rank, "tp")


def next_data_rank(dims: ParallelDims, rank: int) -> int:
    """The rank with the same part of the model and the next rows; the first rows follow the last."""
    ranks = dims.group_of(rank, "dp")
    return ranks[(ranks.index(rank) + 1) % len(ranks)]


# Metric -> the coordinates of the ranks that report it, where -1 is the index at which the model ends. Along the other
# dimensions each rank reports its own share. The squared norm is reported by the first rank of each copy group of
# `sync_groups`.
METRIC_REPORTERS: Mapping[str, Mapping[str, int]] = {
    "loss": {"pp": -1, "tp": 0},
    "targets": {"pp": -1, "tp": 0},
    "tokens": {"pp": 0, "cp": 0, "tp": 0},
    "rows": {"pp": 0, "cp": 0, "tp": 0},
    "loads": {"tp": 0},  # The tokens of experts, on the stage that has these
    "loads of parts": {},  # Where tensor-parallel ranks have different tokens
    "stop": {},  # Any rank: more than 0 counts
}


def reports(metric: str, coordinates: Mapping[str, int], dims: ParallelDims) -> bool:
    """Whether the rank at these coordinates adds its number to the sum; other ranks add 0."""
    reporters = METRIC_REPORTERS[metric].items()
    return all(coordinates.get(name, 0) == (dims.end(name) if index < 0 else index) for name, index in reporters)
