"""Parameters grouped into buckets, in the order in which backward has their gradients.

A bucket is the unit of one collective. The buckets follow one another in one flat tensor. Each is padded so that it
divides into equal shards, and holds the parameters of one optimizer group side by side.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import ceil

# Each parameter and each shard starts on a multiple of this, so that every view is aligned for vector loads.
ALIGN_ELEMENTS = 32


@dataclass(frozen=True)
class BucketParameter:
    """The range of one parameter in the flat tensor."""

    name: str
    optimizer_group: int
    start: int
    numel: int

    @property
    def stop(self) -> int:
        return self.start + self.numel

    @property
    def flat_slice(self) -> slice:
        return slice(self.start, self.stop)


@dataclass(frozen=True)
class Bucket:
    """Some parameters, and the range of the flat tensor that they fill."""

    members: tuple[BucketParameter, ...]
    start: int
    length: int  # With padding: a multiple of the number of shards
    shards: int
    owner: int | None = None  # The rank that updates all of the bucket; if None, each rank updates its shard
    align: int = ALIGN_ELEMENTS  # Members and shards start on a multiple of this

    @property
    def stop(self) -> int:
        return self.start + self.length

    @property
    def flat_slice(self) -> slice:
        return slice(self.start, self.stop)

    @property
    def padding(self) -> list[slice]:
        """Ranges of the flat tensor that belong to no parameter."""
        ends = [self.start, *(member.stop for member in self.members)]
        starts = [*(member.start for member in self.members), self.stop]
        return [slice(end, start) for end, start in zip(ends, starts, strict=True) if end < start]

    def group_slices(self, flat_slice: slice) -> list[tuple[int, slice]]:
        """(optimizer group, its range within `flat_slice`), in order; padding goes with the parameter before it."""
        groups = [(group, next(members).start) for group, members in groupby(self.members, lambda m: m.optimizer_group)]
        slices = [
            (group, slice(max(start, flat_slice.start), min(stop, flat_slice.stop)))
            for (group, start), stop in zip(groups, [*(start for _, start in groups[1:]), self.stop], strict=True)
        ]
        return [(group, clipped) for group, clipped in slices if clipped.start < clipped.stop]


def shard_range(length: int, shards: int, index: int, *, owner: int | None = None) -> tuple[int, int]:
    """(first, stop) of one of equal shards; with an owner, the owner has everything."""
    if owner is not None:
        return 0, length if index == owner else 0
    return index * (length // shards), (index + 1) * (length // shards)


def build_buckets(
    sizes: Mapping[str, tuple[int, int]],
    shards: int,
    max_numel: int,
    *,
    first_max_numel: int | None = None,
    kinds: Mapping[str, object] | None = None,
    align: int = ALIGN_ELEMENTS,
) -> tuple[Bucket, ...]:
    """Buckets of at most `max_numel` elements; a larger parameter has a bucket to itself.

    `sizes` is name -> (optimizer group, elements), in the order of use. The parameter used last comes first. A smaller
    first bucket is full earlier, so that communication starts earlier. A bucket has parameters of one kind.
    """
    bucket_names: list[list[str]] = []
    filling: dict[object, tuple[list[str], int]] = {}  # The last bucket of each kind, and how many elements it can take
    limit = min(max_numel, first_max_numel or max_numel)
    for name in reversed(list(sizes)):
        (_, numel), kind = sizes[name], (kinds or {}).get(name)
        names, space = filling.get(kind, ([], -1))
        if numel > space:
            names, space, limit = [], limit, max_numel
            bucket_names.append(names)
        names.append(name)
        filling[kind] = names, space - numel
    in_backward = {name: index for index, name in enumerate(reversed(list(sizes)))}
    bucket_names.sort(key=lambda names: in_backward[names[-1]])  # The bucket that is complete first comes first
    buckets: list[Bucket] = []
    for names in bucket_names:
        start = offset = buckets[-1].stop if buckets else 0
        members = []
        for name in sorted(names, key=lambda name: sizes[name][0]):
            group, numel = sizes[name]
            members.append(BucketParameter(name, group, offset, numel))
            offset += _round_up(numel, align)
        length = _round_up(offset - start, shards * align)
        buckets.append(Bucket(tuple(members), start, length, shards, align=align))
    return tuple(buckets)


def assign_owners(buckets: Sequence[Bucket], owner_count: int) -> tuple[Bucket, ...]:
    """Give each bucket to that of the first `owner_count` ranks that has the fewest elements so far."""
    owned_numel = [0] * owner_count
    owners = []
    for bucket in buckets:
        owners.append(owned_numel.index(min(owned_numel)))
        owned_numel[owners[-1]] += bucket.length
    return tuple(replace(bucket, owner=owner) for bucket, owner in zip(buckets, owners, strict=True))


def _round_up(count: int, unit: int) -> int:
    return ceil(count / unit) * unit
