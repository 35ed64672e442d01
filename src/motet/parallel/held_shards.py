"""The shards of one tensor on all ranks, as classes: ranks with the same indices in some dimensions hold the same."""

from collections.abc import Container, Iterator, Mapping
from functools import cached_property

from motet.collectives.cost.alpha_beta import RankGroups
from motet.parallel.parallel_dims import ParallelDims
from motet.parallel.shard_spec import ShardSpec


class HeldShards(Mapping[int, ShardSpec]):
    """Rank -> its shard; a rank that holds nothing is missing.

    The shards are listed by the indices in the dimensions `over`, of which there are few. Indices in other dimensions
    make no difference, so the ranks need not be listed.
    """

    def __init__(self, dims: ParallelDims, over: tuple[str, ...], shards: Mapping[tuple[int, ...], ShardSpec]) -> None:
        self.dims, self.over, self.shards = dims, over, shards  # `over` in the order of the dimensions
        strides, stride = dict[str, tuple[int, int]](), dims.ranks
        for name, size in dims.sizes:
            stride //= size
            strides[name] = stride, size
        self._strides = [strides[name] for name in over]

    def __getitem__(self, rank: int) -> ShardSpec:
        if not 0 <= rank < self.dims.ranks:
            raise KeyError(rank)
        return self.shards[tuple(rank // stride % size for stride, size in self._strides)]

    def __iter__(self) -> Iterator[int]:
        return iter(self.class_of_rank)

    def __len__(self) -> int:
        return len(self.shards) * (self.dims.ranks // self.dims.size(*self.over))

    @cached_property
    def pattern(self) -> tuple[tuple[str, ...], tuple[tuple[tuple[int, ...], int], ...]]:
        """Which indices have equal shards: the same for two tensors if the same ranks hold equal shards of both."""
        numbers = dict[ShardSpec, int]()
        classes = ((place, numbers.setdefault(spec, len(numbers))) for place, spec in self.shards.items())
        return self.over, tuple(classes)

    @property
    def class_of_rank(self) -> dict[int, int]:
        """Rank -> the number of its class, which is the same for ranks with equal shards; in ascending order."""
        others, classes = self._others(self.over), dict[int, int]()
        for place, number in self.pattern[1]:
            first = self._first_rank(place)
            classes.update(dict.fromkeys([first + other for other in others], number))
        return dict(sorted(classes.items()))

    def ranks_of_equal_shards(self, same_index: Container[str]) -> RankGroups:
        """Ranks that hold equal shards and have the same index in the dimensions `same_index`, in ascending order."""
        inside = self._others([*self.over, *(name for name, _ in self.dims.sizes if name in same_index)])
        firsts = self.dims.ranks_at_start_but_in(
            [name for name, _ in self.dims.sizes if name in same_index and name not in self.over]
        )
        alike = dict[object, list[int]]()
        for place, number in self.pattern[1]:
            indices = tuple(index for name, index in zip(self.over, place, strict=True) if name in same_index)
            alike.setdefault((number, indices), []).append(self._first_rank(place))
        offsets = [sorted(place + other for place in places for other in inside) for places in alike.values()]
        return tuple(sorted(tuple([first + offset for offset in each]) for each in offsets for first in firsts))

    def _first_rank(self, place: tuple[int, ...]) -> int:
        return sum(index * stride for index, (stride, _) in zip(place, self._strides, strict=True))

    def _others(self, names: Container[str]) -> list[int]:
        """Ranks at the start of these dimensions."""
        return self.dims.ranks_at_start_but_in([name for name, _ in self.dims.sizes if name not in names])
