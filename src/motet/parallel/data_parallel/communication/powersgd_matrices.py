"""The matrices in flat buffers, for codecs that need them: complete rows of parameters within the buffer."""

from collections.abc import Mapping, Sequence
from math import ceil, prod
from typing import NamedTuple

from motet.collectives.compression.codecs import PowerSGDCodec
from motet.parallel.data_parallel.buckets import Bucket

Shape = tuple[int, ...]


class MatrixView(NamedTuple):
    """A matrix in a flat buffer, which starts at element `start`."""

    start: int
    rows: int
    columns: int

    @property
    def stop(self) -> int:
        return self.start + self.rows * self.columns


class ReductionBufferSpec(NamedTuple):
    """The flat buffer of one reduction, and the matrices in it."""

    numel: int
    matrices: tuple[MatrixView, ...] = ()
    padding: tuple[tuple[int, int], ...] = ()  # (start, stop) of elements that belong to no parameter

    def split_for_powersgd(self, codec: PowerSGDCodec, dtype: str) -> list[slice | MatrixView]:
        """The matrices that the codec makes smaller, and the slices between them, in order."""
        segments: list[slice | MatrixView] = []
        offset = 0
        for matrix in (m for m in self.matrices if codec.factor_shape(m[1:], dtype) is not None):
            if matrix.start > offset:
                segments.append(slice(offset, matrix.start))
            segments.append(matrix)
            offset = matrix.stop
        return [*segments, slice(offset, self.numel)] if offset < self.numel else segments


class StepReductionSpecs(NamedTuple):
    """The buffers of a step, by bucket or FSDP unit."""

    buffers: tuple[ReductionBufferSpec, ...]
    dtype: str


def row_shard_reduction_spec(shapes: Sequence[Shape], shards: int) -> ReductionBufferSpec:
    """A shard of a unit at stage 3: it has as many rows of each parameter as the first shard."""
    matrices, offset = [], 0
    for shape in shapes:
        rows, columns = ceil(shape[0] / shards), prod(shape[1:])
        if len(shape) > 1:
            matrices.append(MatrixView(offset, rows, columns))
        offset += rows * columns
    return ReductionBufferSpec(offset, tuple(matrices))


def bucket_reduction_spec(bucket: Bucket, flat_slice: slice, shapes: Mapping[str, Shape]) -> ReductionBufferSpec:
    """A slice of a bucket; the rest of a row that the slice cuts is in no matrix."""
    start, stop = flat_slice.start, flat_slice.stop
    bounds = [start, *(bound for member in bucket.members for bound in (member.start, member.stop)), stop]
    clipped = [min(max(bound, start), stop) - start for bound in bounds]
    padding = tuple((low, high) for low, high in zip(clipped[::2], clipped[1::2], strict=True) if low < high)
    matrices = []
    for member in bucket.members:
        shape = shapes.get(member.name, ())
        columns = prod(shape[1:])
        if len(shape) > 1 and columns:
            first = max(0, ceil((start - member.start) / columns))
            last = min(shape[0], (stop - member.start) // columns)
            if last > first:
                matrices.append(MatrixView(member.start + first * columns - start, last - first, columns))
    return ReductionBufferSpec(stop - start, tuple(matrices), padding)
