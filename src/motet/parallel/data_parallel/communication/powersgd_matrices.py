"""The matrices in what travels flat, for codecs that need them: whole rows of parameters, as far as they are in it."""

from collections.abc import Mapping, Sequence
from math import ceil, prod
from typing import NamedTuple

from motet.collectives.compression.powersgd import PowerSGDCodec
from motet.parallel.data_parallel.buckets import Bucket

Shape = tuple[int, ...]


class MatrixView(NamedTuple):
    """Where one stands, in elements from the start of what travels."""

    start: int
    rows: int
    columns: int

    @property
    def stop(self) -> int:
        return self.start + self.rows * self.columns


class ReductionBufferSpec(NamedTuple):
    """What one reduction adds up: a flat tensor, and the matrices in it."""

    numel: int
    matrices: tuple[MatrixView, ...] = ()
    padding: tuple[tuple[int, int], ...] = ()  # (start, stop) of what belongs to no parameter

    def split_for_powersgd(self, codec: PowerSGDCodec, dtype: str) -> list[slice | MatrixView]:
        """In order: the matrices that the codec makes smaller, and what lies between."""
        segments: list[slice | MatrixView] = []
        offset = 0
        for matrix in self.matrices:
            if codec.factor_shape(matrix[1:], dtype) is None:
                continue
            if matrix.start > offset:
                segments.append(slice(offset, matrix.start))
            segments.append(matrix)
            offset = matrix.stop
        return [*segments, slice(offset, self.numel)] if offset < self.numel else segments


class StepReductionSpecs(NamedTuple):
    """Those of a step, by their numbers."""

    buffers: tuple[ReductionBufferSpec, ...]
    dtype: str


def bucket_reduction_specs(
    buckets: Sequence[Bucket], shard: int | None, shapes: Mapping[str, Shape], dtype: str
) -> StepReductionSpecs:
    """Of whole buckets, or of one shard of each."""
    slices = [slice(b.start, b.stop) if shard is None else b.shard_slice(shard) for b in buckets]
    return StepReductionSpecs(
        tuple(_reduction_spec(bucket, part, shapes) for bucket, part in zip(buckets, slices, strict=True)), dtype
    )


def row_shard_reduction_specs(
    units: Sequence[Sequence[Shape]], shards: int, dtype: str
) -> tuple[StepReductionSpecs, StepReductionSpecs]:
    """(whole units, a shard of each) at stage 3: as many rows of each parameter as the first shard has, in a row."""
    specs = []
    for shapes in units:
        matrices, offset = [], 0
        for shape in shapes:
            rows, columns = ceil(shape[0] / shards), prod(shape[1:])
            if len(shape) > 1:
                matrices.append(MatrixView(offset, rows, columns))
            offset += rows * columns
        specs.append(ReductionBufferSpec(offset, tuple(matrices)))
    return StepReductionSpecs(
        tuple(ReductionBufferSpec(shards * part.numel) for part in specs), dtype
    ), StepReductionSpecs(tuple(specs), dtype)


def _reduction_spec(bucket: Bucket, flat_slice: slice, shapes: Mapping[str, Shape]) -> ReductionBufferSpec:
    """What is left of a row that the part cuts belongs to no matrix."""
    matrices = []
    bounds = [flat_slice.start, *(at for m in bucket.members for at in (m.start, m.stop)), flat_slice.stop]
    clipped = [min(max(at, flat_slice.start), flat_slice.stop) - flat_slice.start for at in bounds]
    padding = tuple((start, stop) for start, stop in zip(clipped[::2], clipped[1::2], strict=True) if start < stop)
    for member in bucket.members:
        shape = shapes.get(member.name, ())
        columns = prod(shape[1:])
        if len(shape) < 2 or columns == 0:
            continue
        first = max(0, ceil((flat_slice.start - member.start) / columns))
        last = min(shape[0], (flat_slice.stop - member.start) // columns)
        if last > first:
            matrices.append(MatrixView(member.start + first * columns - flat_slice.start, last - first, columns))
    return ReductionBufferSpec(flat_slice.stop - flat_slice.start, tuple(matrices), padding)
