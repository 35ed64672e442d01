"""Units of communication, and how ranks shard them: buckets, and the units that stage 3 gathers by FSDP2."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from math import prod
from typing import Literal, NamedTuple

from motet.parallel.data_parallel.buckets import Bucket, BucketParameter, shard_range
from motet.parallel.data_parallel.communication.communication_settings import CommunicationSettings
from motet.parallel.data_parallel.communication.powersgd_matrices import (
    ReductionBufferSpec,
    Shape,
    bucket_reduction_spec,
    row_shard_reduction_spec,
)
from motet.parallel.data_parallel.zero import (
    FSDPUnit,
    UnitKind,
    UnitSchedule,
    make_buckets,
    make_unit_schedule,
    shard_rows,
)
from motet.parallel.model_sharding import TensorInfo
from motet.parallel.sync_groups import SyncGroup
from motet.precision.recipe import PrecisionRecipe

ShardRanges = tuple[tuple[int, int], ...]  # (first, stop) of each shard, from the start of the span


class ShardedSpan(NamedTuple):
    """Consecutive elements that are cut into shards: a bucket with its padding, or one parameter at stage 3."""

    start: int  # Offset in the flat tensor of all units of its kind
    length: int
    shard_ranges: ShardRanges


@dataclass(frozen=True)
class CommUnit:
    """A unit of communication: a bucket of stages 0 to 2, or parameters that stage 3 gathers together."""

    name: str  # Unique within a plan
    kind: UnitKind
    contents: Bucket | FSDPUnit
    spans: tuple[ShardedSpan, ...]
    schedule: UnitSchedule
    shards: int
    shapes: Mapping[str, Shape]  # Shapes of all tensors of the group

    @property
    def members(self) -> tuple[BucketParameter, ...]:
        """The trainable parameters."""
        return self.contents.members

    @property
    def owner(self) -> int | None:
        """The rank that updates all of a bucket; if None, each rank updates its shard."""
        return self.contents.owner if isinstance(self.contents, Bucket) else None

    @property
    def reshards(self) -> bool:
        """Whether stage 3 frees the gathered parameters after forward, and gathers them again."""
        return any(action.moment == "backward" for action in self.schedule)

    @property
    def gathered_numel(self) -> int:
        """Elements with padding, frozen ones included."""
        return self.contents.length if isinstance(self.contents, Bucket) else self.contents.gathered_numel(self.shards)

    def shard_slice(self, shard: int) -> slice:
        """The range of a bucket's shard in the flat tensor."""
        (span,) = self.spans
        first, stop = span.shard_ranges[shard]
        return slice(span.start + first, span.start + stop)

    def updated_shard(self, rank: int) -> int | None:
        """Index of the shard that a rank updates, or None if it has everything by then."""
        return self.shard_at("update", rank)

    def shard_at(self, kind: Literal["norm", "update"], rank: int) -> int | None:
        """Index of the shard of the sums that a rank has at an action of the step, or None if it has everything."""
        before = [action.kind for action in self.schedule].index(kind) if self.members else 0
        for action in reversed(self.schedule[:before]):
            if action.is_gather and action.moment == "step":
                return None
            if action.is_scatter:
                return action.position_of_rank[rank]
        return None

    def updated_numel(self, rank: int) -> int:
        """Elements whose masters a rank updates, with the padding of a bucket."""
        shard = self.updated_shard(rank)
        ranges = ((0, span.length) if shard is None else span.shard_ranges[shard] for span in self.spans)
        return sum(stop - first for first, stop in ranges)

    def slice_lengths(self, rank: int) -> list[int]:
        """Elements of each slice that one call of a rank's optimizer updates: of a bucket one for each group of the
        optimizer, at stage 3 each parameter."""
        shard = self.updated_shard(rank)
        if isinstance(self.contents, Bucket):
            updated = self.contents.flat_slice if shard is None else self.shard_slice(shard)
            return [each.stop - each.start for _, each in self.contents.group_slices(updated)]
        bounds = [(0, span.length) if shard is None else span.shard_ranges[shard] for span in self.spans]
        return [stop - first for first, stop in bounds]

    def member_spans(self) -> Iterator[tuple[ShardedSpan, BucketParameter]]:
        """Each member with the span that it lies in."""
        spans = self.spans * len(self.members) if self.kind == "bucket" else self.spans
        return zip(spans, self.members, strict=True)

    def member_ranges(self, shard: int | None) -> Iterator[tuple[str, int, int]]:
        """(Name, first, stop) of the elements of members that a shard has, or all shards together (None)."""
        for span, member in self.member_spans():
            first, stop = (0, span.length) if shard is None else span.shard_ranges[shard]
            start, end = max(0, span.start + first - member.start), min(member.numel, span.start + stop - member.start)
            if start < end:
                yield member.name, start, end

    def reduction_spec(self, shard: int | None) -> ReductionBufferSpec:
        """The buffer of the gradients when they are reduced: the unsharded one (None), or one shard of it."""
        if isinstance(self.contents, Bucket):
            flat_slice = self.contents.flat_slice if shard is None else self.shard_slice(shard)
            return bucket_reduction_spec(self.contents, flat_slice, self.shapes)
        spec = row_shard_reduction_spec(self.contents.trainable, self.shards)
        return ReductionBufferSpec(self.shards * spec.numel) if shard is None else spec


@dataclass(frozen=True)
class SyncGroupPlan:
    """The units of one sync group, in the order in which they are reduced. Ranks are numbered within a sum group."""

    group: SyncGroup
    shapes: Mapping[str, Shape]  # Shapes on a rank before data parallelism shards the group's tensors
    units: tuple[CommUnit, ...]

    def position(self, rank: int) -> int | None:
        """The number of a rank within its sum group, or None if it holds nothing of the group."""
        return self.group.position_of_rank.get(rank)

    def counted_names(self, rank: int) -> frozenset[str]:
        """Tensors whose sums a rank adds to the squared norm: it is the first of their copies, with a norm action."""
        position, schedule = self.position(rank), next((unit.schedule for unit in self.units if unit.members), ())
        if not any(position in a.position_of_rank for a in schedule if a.kind == "norm"):
            return frozenset()
        return frozenset(name for name, ranks in self.group.counting_ranks.items() if rank in ranks)


def make_group_plan(
    group: SyncGroup,
    tensors: Mapping[str, tuple[TensorInfo, Shape]],
    recipe: PrecisionRecipe,
    *,
    settings: CommunicationSettings,
    on_device: bool = True,
) -> SyncGroupPlan:
    """The units of a sync group, from all `tensors` of its ranks, in their local shapes. Masters lie on the device, or
    the host updates them."""
    names = set(group.names)
    members = {name: pair for name, pair in tensors.items() if name in names}
    shapes = {name: shape for name, (_, shape) in members.items()}
    if group.unit_kind == "bucket":
        sizes = {name: (tensor.optimizer_group, prod(shape)) for name, (tensor, shape) in members.items()}
        is_compressed = (settings.compress_gradients or settings.compress_parameters) is not None
        copies = group.copy_groups if is_compressed else {}
        buckets = make_buckets(sizes, group.sharding, recipe, settings=settings, copies=copies)
        schedule = make_unit_schedule(settings, group.sharding, on_device=on_device)
        units = tuple(_bucket_unit(f"bucket {i}", bucket, schedule, shapes=shapes) for i, bucket in enumerate(buckets))
    else:
        units = tuple(_row_units(tensors, group, settings, shapes=shapes, on_device=on_device))
    return SyncGroupPlan(group, shapes, units)


def _bucket_unit(name: str, bucket: Bucket, schedule: UnitSchedule, *, shapes: Mapping[str, Shape]) -> CommUnit:
    ranges = _bucket_shard_ranges(bucket.length, bucket.shards, bucket.owner)
    span = ShardedSpan(bucket.start, bucket.length, ranges)
    return CommUnit(name, "bucket", bucket, (span,), schedule, bucket.shards, shapes)


def _row_units(
    tensors: Mapping[str, tuple[TensorInfo, Shape]],
    group: SyncGroup,
    settings: CommunicationSettings,
    *,
    shapes: Mapping[str, Shape],
    on_device: bool,
) -> Iterator[CommUnit]:
    """A unit for each block, and one for the parameters outside of blocks; each parameter is cut into rows."""
    sharding, all_frozen, all_names = group.sharding, set(group.frozen), {*shapes, *group.frozen}
    by_block: dict[int | None, list[str]] = {}
    for name, (tensor, _) in tensors.items():
        by_block.setdefault(tensor.block, []).append(name)
    root = by_block.pop(None, [])
    if group.in_pipeline:  # A rank may hold blocks of other stages, too
        by_block = {block: names for block, names in by_block.items() if not all_names.isdisjoint(names)}
    schedules = {
        (kind, trained): make_unit_schedule(settings, sharding, kind, trained=trained, on_device=on_device)
        for kind in ("block", "root")
        for trained in (True, False)
    }
    start = 0
    for block, names in (*sorted(by_block.items()), (None, root)):
        trained = [name for name in names if name in shapes]
        frozen = [name for name in names if name in all_frozen]
        late = [n for n in trained if block is None and -1 in tensors[n][0].needed_with_blocks]
        members = []
        for name in trained:
            members.append(BucketParameter(name, tensors[name][0].optimizer_group, start, prod(shapes[name])))
            start = members[-1].stop
        spans = (ShardedSpan(m.start, m.numel, _row_shard_ranges(shapes[m.name], sharding.shards)) for m in members)
        trainable, frozen_shapes, late_shapes = (
            tuple(tensors[name][1] for name in each) for each in (trained, frozen, late)
        )
        kind: UnitKind = "root" if block is None else "block"
        label = "outside of blocks" if block is None else _common_module(names) or f"block {block}"
        unit = FSDPUnit(trainable, frozen_shapes, late_shapes, tuple(members))
        yield CommUnit(label, kind, unit, tuple(spans), schedules[kind, bool(trained)], sharding.shards, shapes)


def _common_module(names: Sequence[str]) -> str:
    """The innermost module that has all of these parameters."""
    paths = [name.split(".")[:-1] for name in names]
    common = takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))
    return ".".join(parts[0] for parts in common)


@cache
def _bucket_shard_ranges(length: int, shards: int, owner: int | None) -> ShardRanges:
    return tuple(shard_range(length, shards, shard, owner=owner) for shard in range(shards))


@cache
def _row_shard_ranges(shape: Shape, shards: int) -> ShardRanges:
    width, row_ranges = prod(shape[1:]), (shard_rows(shape[0], shards, shard) for shard in range(shards))
    return tuple((first * width, stop * width) for first, stop in row_ranges)
