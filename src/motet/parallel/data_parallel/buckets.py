"""Parameters cut into buckets, in the order in which backward has their gradients.

A bucket is what one collective carries. All lie one after another in one flat tensor; each is padded so that it cuts
into equal shards, and within it the parameters of one optimizer group stand together.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import ceil

# Each parameter and each shard starts on a multiple of this, so that every view is aligned for vector loads.
ALIGN_ELEMENTS = 32


@dataclass(frozen=True)
class BucketParameter:
    """Where a parameter stands in the flat tensor."""

    name: str
    optimizer_group: int  # Its optimizer group
    start: int
    numel: int

    @property
    def stop(self) -> int:
        return self.start + self.numel


@dataclass(frozen=True)
class Bucket:
    """Some parameters, and the part of the flat tensor that they fill."""

    members: tuple[BucketParameter, ...]
    start: int
    length: int  # With padding: a multiple of the number of shards
    shards: int
    owner: int | None = None  # The one rank that updates all of it; without, each updates its shard

    @property
    def stop(self) -> int:
        return self.start + self.length

    def shard_slice(self, index: int) -> slice:
        """The part of one shard, in the flat tensor."""
        first, stop = shard_range(self.length, self.shards, index, self.owner)
        return slice(self.start + first, self.start + stop)

    @property
    def padding(self) -> list[slice]:
        """What belongs to no parameter, in the flat tensor."""
        ends = [self.start, *(member.stop for member in self.members)]
        starts = [*(member.start for member in self.members), self.stop]
        return [slice(end, start) for end, start in zip(ends, starts, strict=True) if end < start]

    def group_slices(self, flat_slice: slice) -> list[tuple[int, slice]]:
        """(optimizer group, what of `part` belongs to it), in order; padding goes with what stands before it."""
        groups = [
            (group, next(members).start) for group, members in groupby(self.members, key=lambda m: m.optimizer_group)
        ]
        starts = [start for _, start in groups[1:]] + [self.stop]
        slices = [
            (group, slice(max(start, flat_slice.start), min(stop, flat_slice.stop)))
            for (group, start), stop in zip(groups, starts, strict=True)
        ]
        return [(group, piece) for group, piece in slices if piece.start < piece.stop]


def shard_range(length: int, shards: int, index: int, owner: int | None = None) -> tuple[int, int]:
    """(first, stop) of one of equal parts; or all of it for its owner."""
    if owner is not None:
        return 0, length if index == owner else 0
    size = length // shards
    return index * size, (index + 1) * size


def build_buckets(
    sizes: Mapping[str, tuple[int, int]], shards: int, max_numel: int, first_max_numel: int | None = None
) -> tuple[Bucket, ...]:
    """`sizes`: name -> (optimizer group, numel), in the order of use; `most` numbers in a bucket.

    The last used comes first. A parameter of more than `most` has a bucket to itself. The first bucket may be smaller:
    the earlier it is full, the earlier there is something to send.
    """
    buckets: list[Bucket] = []
    pending: list[str] = []
    limit, pending_numel = min(max_numel, first_max_numel or max_numel), 0
    for name in reversed(list(sizes)):
        numel = sizes[name][1]
        if pending and pending_numel + numel > limit:
            buckets.append(_make_bucket(pending, sizes, buckets[-1].stop if buckets else 0, shards))
            pending, pending_numel, limit = [], 0, max_numel
        pending.append(name)
        pending_numel += numel
    if pending:
        buckets.append(_make_bucket(pending, sizes, buckets[-1].stop if buckets else 0, shards))
    return tuple(buckets)


def assign_owners(buckets: Sequence[Bucket], owner_count: int) -> tuple[Bucket, ...]:
    """Each goes to the one of the first so many ranks that has least until then."""
    owned_numel = [0] * owner_count
    assigned = []
    for bucket in buckets:
        owner = min(range(owner_count), key=lambda rank: owned_numel[rank])
        owned_numel[owner] += bucket.length
        assigned.append(replace(bucket, owner=owner))
    return tuple(assigned)


def _make_bucket(names: list[str], sizes: Mapping[str, tuple[int, int]], start: int, shards: int) -> Bucket:
    members: list[BucketParameter] = []
    offset = start
    for name in sorted(names, key=lambda name: sizes[name][0]):
        group, numel = sizes[name]
        members.append(BucketParameter(name, group, offset, numel))
        offset += _round_up(numel, ALIGN_ELEMENTS)
    return Bucket(tuple(members), start, _round_up(offset - start, shards * ALIGN_ELEMENTS), shards)


def _round_up(count: int, unit: int) -> int:
    return ceil(count / unit) * unit
