"""Parameters cut into buckets, in the order in which backward has their gradients.

A bucket is what one collective carries. All lie one after another in one flat tensor; each is padded so that it cuts
into equal shards, and within it the parameters of one optimizer group stand together.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import ceil

ALIGN_ELEMENTS = 32
"""Each parameter and each shard starts on a multiple of this, so that every view is aligned for vector loads."""


@dataclass(frozen=True)
class Member:
    """Where a parameter stands in the flat tensor."""

    name: str
    group: int
    """Its optimizer group."""
    start: int
    numel: int

    @property
    def stop(self) -> int:
        return self.start + self.numel


@dataclass(frozen=True)
class Bucket:
    """Some parameters, and the part of the flat tensor that they fill."""

    members: tuple[Member, ...]
    start: int
    length: int
    """With padding: a multiple of the number of shards."""
    shards: int
    owner: int | None = None
    """The one rank that updates all of it; without, each updates its shard."""

    @property
    def stop(self) -> int:
        return self.start + self.length

    def shard(self, index: int) -> slice:
        """The part of one shard, in the flat tensor."""
        first, stop = part_of_bucket(self.length, self.shards, index, self.owner)
        return slice(self.start + first, self.start + stop)

    @property
    def gaps(self) -> list[slice]:
        """What belongs to no parameter, in the flat tensor."""
        ends = [self.start, *(member.stop for member in self.members)]
        starts = [*(member.start for member in self.members), self.stop]
        return [slice(end, start) for end, start in zip(ends, starts, strict=True) if end < start]

    def runs(self, part: slice) -> list[tuple[int, slice]]:
        """(optimizer group, what of `part` belongs to it), in order; padding goes with what stands before it."""
        groups = [(group, next(members).start) for group, members in groupby(self.members, key=lambda m: m.group)]
        starts = [start for _, start in groups[1:]] + [self.stop]
        cut = [
            (group, slice(max(start, part.start), min(stop, part.stop)))
            for (group, start), stop in zip(groups, starts, strict=True)
        ]
        return [(group, piece) for group, piece in cut if piece.start < piece.stop]


def part_of_bucket(length: int, shards: int, index: int, owner: int | None = None) -> tuple[int, int]:
    """(first, stop) of one of equal parts; or all of it for its owner."""
    if owner is not None:
        return 0, length if index == owner else 0
    size = length // shards
    return index * size, (index + 1) * size


def cut_buckets(
    sizes: Mapping[str, tuple[int, int]], shards: int, most: int, most_in_first: int | None = None
) -> tuple[Bucket, ...]:
    """`sizes`: name -> (optimizer group, numel), in the order of use; `most` numbers in a bucket.

    The last used comes first. A parameter of more than `most` has a bucket to itself. The first bucket may be smaller:
    the earlier it is full, the earlier there is something to send.
    """
    found: list[Bucket] = []
    waiting: list[str] = []
    limit, held = min(most, most_in_first or most), 0
    for name in reversed(list(sizes)):
        numel = sizes[name][1]
        if waiting and held + numel > limit:
            found.append(_bucket(waiting, sizes, found[-1].stop if found else 0, shards))
            waiting, held, limit = [], 0, most
        waiting.append(name)
        held += numel
    if waiting:
        found.append(_bucket(waiting, sizes, found[-1].stop if found else 0, shards))
    return tuple(found)


def with_owners(buckets: Sequence[Bucket], owners: int) -> tuple[Bucket, ...]:
    """Each goes to the one of the first so many ranks that has least until then."""
    held = [0] * owners
    found = []
    for bucket in buckets:
        owner = min(range(owners), key=lambda rank: held[rank])
        held[owner] += bucket.length
        found.append(replace(bucket, owner=owner))
    return tuple(found)


def _bucket(names: list[str], sizes: Mapping[str, tuple[int, int]], start: int, shards: int) -> Bucket:
    members: list[Member] = []
    at = start
    for name in sorted(names, key=lambda name: sizes[name][0]):
        group, numel = sizes[name]
        members.append(Member(name, group, at, numel))
        at += _up(numel, ALIGN_ELEMENTS)
    return Bucket(tuple(members), start, _up(at - start, shards * ALIGN_ELEMENTS), shards)


def _up(count: int, unit: int) -> int:
    return ceil(count / unit) * unit
