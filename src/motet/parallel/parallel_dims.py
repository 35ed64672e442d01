"""The dimensions along which ranks split the work, and the position of each rank in them."""

from dataclasses import dataclass
from itertools import product
from math import prod

from motet.collectives.cost.alpha_beta import RankGroups


@dataclass(frozen=True)
class ParallelDims:
    """Named sizes, outermost first: ranks that differ in the last dimension alone are neighbours."""

    sizes: tuple[tuple[str, int], ...]  # Such as ("pp", 2), ("dp", 2), ("tp", 2); what is missing has size 1
    # Where a model ends that does not end on the last index: a pipeline may end on its first rank.
    ends: tuple[tuple[str, int], ...] = ()

    @property
    def ranks(self) -> int:
        return prod(size for _, size in self.sizes)

    def size(self, *names: str) -> int:
        """The product of the sizes of these dimensions."""
        return prod(size for name, size in self.sizes if name in names)

    def end(self, name: str) -> int:
        """The index in a dimension where the model ends."""
        return dict(self.ends).get(name, self.size(name) - 1)

    def coordinates(self, rank: int) -> dict[str, int]:
        """The index of a rank in each dimension."""
        indices = {}
        for name, size in reversed(self.sizes):
            rank, indices[name] = divmod(rank, size)
        return indices

    def groups(self, *names: str) -> RankGroups:
        """Ranks that differ in these dimensions alone, in ascending order."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank, indices in enumerate(product(*(range(size) for _, size in self.sizes))):
            fixed = tuple(i for (name, _), i in zip(self.sizes, indices, strict=True) if name not in names)
            groups.setdefault(fixed, []).append(rank)
        return tuple(map(tuple, groups.values()))
