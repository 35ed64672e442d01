"""The shard of a tensor that a rank holds: a product of spans, one or several along each dimension.

The shards of one tensor on all ranks, as classes: ranks with the same indices in some dimensions hold the same shard.
"""

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import prod

from motet.collectives.cost.alpha_beta import RankGroups
from motet.parallel.parallel_dims import ParallelDims

ShardBox = tuple[tuple[int, ...], tuple[int, ...]]  # Offsets and lengths along the dimensions of the whole tensor


@dataclass(frozen=True)
class ShardSpec:
    """A fused query, key and value has three spans along its first dimension; a split vocabulary one, and padding."""

    shape: tuple[int, ...]  # Shape of the whole tensor
    spans: tuple[tuple[tuple[int, int], ...], ...]  # (first, stop) along each dimension, in local order
    padding: tuple[int, ...] = ()  # Zeros after the spans of each dimension; empty: none

    @staticmethod
    def full(shape: tuple[int, ...]) -> "ShardSpec":
        """The spec of a rank that holds everything."""
        return ShardSpec(shape, tuple(((0, length),) for length in shape))

    @property
    def local_shape(self) -> tuple[int, ...]:
        padding = self.padding or (0,) * len(self.shape)
        return tuple(
            sum(stop - first for first, stop in spans) + zeros for spans, zeros in zip(self.spans, padding, strict=True)
        )

    @property
    def numel(self) -> int:
        """Elements of the whole that the rank holds, without padding."""
        return prod(sum(stop - first for first, stop in spans) for spans in self.spans)

    def overlaps(self, other: "ShardSpec") -> bool:
        """Whether two ranks hold the same element."""
        return all(
            any(max(a[0], b[0]) < min(a[1], b[1]) for a in mine for b in theirs)
            for mine, theirs in zip(self.spans, other.spans, strict=True)
        )

    def boxes(self, start: int, stop: int, *, dim: int = 0) -> Iterator[tuple[ShardBox, slice]]:
        """The local elements from `start` to `stop` in row-major order: boxes of the whole, each with its local slice.

        Padding is in no box. With `dim`, elements of one row along the dimensions before it.
        """
        if start >= stop:
            return
        if dim == len(self.shape):
            yield ((), ()), slice(start, stop)
            return
        inner, before = self.local_shape[dim + 1 :], 0
        row = prod(inner)
        inner_is_box = inner == tuple(spans[0][1] - spans[0][0] for spans in self.spans[dim + 1 :])
        for first, end in self.spans[dim]:
            begin, finish = max(start, before * row), min(stop, (before + end - first) * row)
            for at, until in pairwise(_row_boundaries(begin, finish, row, merge_rows=inner_is_box)):
                index, base = first + at // row - before, at // row * row
                if inner_is_box and at % row == 0 and until % row == 0:
                    offsets = (index, *(spans[0][0] for spans in self.spans[dim + 1 :]))
                    yield (offsets, ((until - at) // row, *inner)), slice(at, until)
                    continue
                for (offsets, lengths), local in self.boxes(at - base, until - base, dim=dim + 1):
                    yield ((index, *offsets), (1, *lengths)), slice(base + local.start, base + local.stop)
            before += end - first


def _row_boundaries(begin: int, end: int, row: int, *, merge_rows: bool) -> list[int]:
    """Ends of the pieces of a run of elements: complete rows, as one piece or one each, and incomplete ones."""
    rows = range(-(-begin // row), end // row + 1)
    inside = [*rows[:1], *rows[-1:]] if merge_rows else rows
    return sorted({begin, end, *(number * row for number in inside)}) if begin < end else []


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
        """The indices that have equal shards: the same for two tensors if the same ranks hold equal shards of both."""
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
