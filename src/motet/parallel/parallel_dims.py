"""The dimensions along which ranks split the work, and the position of each rank in them."""

from collections.abc import Container
from dataclasses import dataclass
from functools import cached_property
from math import prod

from motet.collectives.cost.alpha_beta import RankGroups


@dataclass(frozen=True)
class ParallelDims:
    """Named sizes, outermost first: ranks that differ in the last dimension alone are neighbours."""

    sizes: tuple[tuple[str, int], ...]  # Such as ("pp", 2), ("dp", 2), ("tp", 2); other dimensions have size 1
    # Index where the model ends, if that is not the last: a pipeline may end on its first rank.
    ends: tuple[tuple[str, int], ...] = ()

    @cached_property
    def ranks(self) -> int:
        return prod(size for _, size in self.sizes)

    def size(self, *names: str) -> int:
        """The product of the sizes of these dimensions."""
        return prod(size for name, size in self.sizes if name in names)

    def stride(self, *names: str) -> int:
        """The distance of neighbouring ranks of a group along these dimensions, which are neighbours themselves."""
        inner = max(index for index, (name, _) in enumerate(self.sizes) if name in names)
        return prod(size for _, size in self.sizes[inner + 1 :])

    def end(self, name: str) -> int:
        """The index in a dimension where the model ends."""
        return dict(self.ends).get(name, self.size(name) - 1)

    def coordinates(self, rank: int) -> dict[str, int]:
        """The index of a rank in each dimension."""
        indices = {}
        for name, size in reversed(self.sizes):
            rank, indices[name] = divmod(rank, size)
        return indices

    def ranks_at_start_but_in(self, names: Container[str]) -> list[int]:
        """Ranks whose index is 0 in every dimension but these, in ascending order."""
        ranks, stride = [0], self.ranks
        for name, size in self.sizes:
            stride //= size
            if name in names:
                ranks = [rank + index * stride for rank in ranks for index in range(size)]
        return ranks

    def groups(self, *names: str) -> RankGroups:
        """Ranks that differ in these dimensions alone, in ascending order."""
        offsets = self.ranks_at_start_but_in(names)
        firsts = self.ranks_at_start_but_in([name for name, _ in self.sizes if name not in names])
        return tuple(tuple([first + offset for offset in offsets]) for first in firsts)

    def group_of(self, rank: int, *names: str) -> tuple[int, ...]:
        """The group of `groups` that has this rank."""
        indices = {name: index for name, index in self.coordinates(rank).items() if name in names}
        first, stride = rank, self.ranks
        for name, size in self.sizes:
            stride //= size
            first -= indices.get(name, 0) * stride
        return tuple(first + offset for offset in self.ranks_at_start_but_in(names))
