"""The shard of a tensor that a rank holds: a product of spans, one or several along each dimension."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import prod

ShardBox = tuple[tuple[int, ...], tuple[int, ...]]  # Offsets and lengths along the dimensions of the whole tensor


@dataclass(frozen=True)
class ShardSpec:
    """A fused query, key and value has three spans along its first dimension; a split vocabulary one, and padding."""

    shape: tuple[int, ...]  # Of the whole
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
