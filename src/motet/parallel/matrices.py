"""The matrices in what travels flat, for codecs that need them: whole rows of parameters, as far as they are in it."""

from collections.abc import Mapping, Sequence
from math import ceil, prod
from typing import NamedTuple

from motet.collectives.compression.codec_options import PowerSGDCodecOptions
from motet.parallel.buckets import Bucket

Shape = tuple[int, ...]


class Matrix(NamedTuple):
    """Where one stands, in elements from the start of what travels."""

    start: int
    rows: int
    columns: int

    @property
    def stop(self) -> int:
        return self.start + self.rows * self.columns


class Sum(NamedTuple):
    """What one reduction adds up: a flat tensor, and the matrices in it."""

    numel: int
    matrices: tuple[Matrix, ...] = ()
    gaps: tuple[tuple[int, int], ...] = ()
    """(start, stop) of what belongs to no parameter."""

    def cut(self, codec: PowerSGDCodecOptions, dtype: str) -> list[slice | Matrix]:
        """In order: the matrices that the codec makes smaller, and what lies between."""
        found: list[slice | Matrix] = []
        at = 0
        for matrix in self.matrices:
            if codec.factor_shape(matrix[1:], dtype) is None:
                continue
            if matrix.start > at:
                found.append(slice(at, matrix.start))
            found.append(matrix)
            at = matrix.stop
        return [*found, slice(at, self.numel)] if at < self.numel else found


class Sums(NamedTuple):
    """Those of a step, by their numbers."""

    each: tuple[Sum, ...]
    dtype: str


def sums_of_buckets(buckets: Sequence[Bucket], shard: int | None, shapes: Mapping[str, Shape], dtype: str) -> Sums:
    """Of whole buckets, or of one shard of each."""
    parts = [slice(b.start, b.stop) if shard is None else b.shard(shard) for b in buckets]
    return Sums(tuple(_sum_of(bucket, part, shapes) for bucket, part in zip(buckets, parts, strict=True)), dtype)


def sums_of_rows(units: Sequence[Sequence[Shape]], shards: int, dtype: str) -> tuple[Sums, Sums]:
    """(whole units, a shard of each) at stage 3: as many rows of each parameter as the first shard has, in a row."""
    found = []
    for shapes in units:
        matrices, at = [], 0
        for shape in shapes:
            rows, columns = ceil(shape[0] / shards), prod(shape[1:])
            if len(shape) > 1:
                matrices.append(Matrix(at, rows, columns))
            at += rows * columns
        found.append(Sum(at, tuple(matrices)))
    return Sums(tuple(Sum(shards * part.numel) for part in found), dtype), Sums(tuple(found), dtype)


def _sum_of(bucket: Bucket, part: slice, shapes: Mapping[str, Shape]) -> Sum:
    """What is left of a row that the part cuts belongs to no matrix."""
    found = []
    bounds = [part.start, *(at for m in bucket.members for at in (m.start, m.stop)), part.stop]
    cut = [min(max(at, part.start), part.stop) - part.start for at in bounds]
    gaps = tuple((start, stop) for start, stop in zip(cut[::2], cut[1::2], strict=True) if start < stop)
    for member in bucket.members:
        shape = shapes.get(member.name, ())
        columns = prod(shape[1:])
        if len(shape) < 2 or columns == 0:
            continue
        first = max(0, ceil((part.start - member.start) / columns))
        last = min(shape[0], (part.stop - member.start) // columns)
        if last > first:
            found.append(Matrix(member.start + first * columns - part.start, last - first, columns))
    return Sum(part.stop - part.start, tuple(found), gaps)
