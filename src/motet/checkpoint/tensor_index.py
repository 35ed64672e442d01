"""The index of a checkpoint, `tensors.json`: the place of each tensor's elements in the files, read with every check.
Nothing here imports torch.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, groupby
from math import prod
from operator import attrgetter
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import ConfigDict, Field, TypeAdapter

from motet.checkpoint.manifest import (
    TENSORS_FILE,
    CheckpointManifest,
    Checksum,
    Count,
    FileName,
    TensorName,
    read_listed,
    read_manifest,
    refuse_damage,
    validate_json,
    verify_listing,
)
from motet.checkpoint.safetensors_header import DataBox
from motet.core.direct_io import ALIGNMENT
from motet.core.units import DTYPE_BYTES

Box = tuple[tuple[int, ...], tuple[int, ...]]  # Offsets and lengths in the whole tensor


class StoredChunk(NamedTuple):
    """A box of a tensor, and where its bytes are: its elements in row-major order."""

    offsets: Annotated[tuple[Count, ...], Field(max_length=64)]
    lengths: Annotated[tuple[Annotated[int, Field(ge=1, le=2**53)], ...], Field(max_length=64)]
    file: FileName
    start: Count
    size_bytes: Annotated[int, Field(ge=1, le=2**53)]
    checksum: Checksum  # CRC-32 of these bytes

    @property
    def box(self) -> Box:
        return self.offsets, self.lengths


TensorIndex = dict[str, list[StoredChunk]]
_INDEX = TypeAdapter(dict[TensorName, list[StoredChunk]], config=ConfigDict(strict=True))


def index_to_text(index: Mapping[str, Sequence[StoredChunk]]) -> str:
    """The content of `tensors.json`: a list for each chunk, in the order of the fields of `StoredChunk`."""
    return json.dumps(index, separators=(",", ":"))


def read_checkpoint(folder: Path) -> tuple[CheckpointManifest, TensorIndex]:
    """The manifest and the index of a checkpoint, which agree with each other and with the files that are there."""
    manifest = read_manifest(folder)
    with refuse_damage(folder):
        verify_listing(folder, manifest)
        index = validate_json(_INDEX, TENSORS_FILE, read_listed(folder, manifest, TENSORS_FILE))
        for problem in index_problems(index, manifest):
            raise ValueError(f"{TENSORS_FILE}: {problem}")
    return manifest, index


def chunks_by_file(index: TensorIndex, manifest: CheckpointManifest) -> dict[str, list[tuple[StoredChunk, DataBox]]]:
    """The chunks of each data file in the order of their bytes, with the boxes that they hold."""
    shapes, dtypes = manifest.all_shapes, manifest.all_dtypes
    placed = [
        (chunk, DataBox(name, dtypes[name], tuple(shapes[name]), chunk.offsets, chunk.lengths))
        for name, chunks in index.items()
        for chunk in chunks
    ]
    placed.sort(key=lambda each: (each[0].file, each[0].start))
    return {file: list(each) for file, each in groupby(placed, lambda each: each[0].file)}


def index_problems(index: TensorIndex, manifest: CheckpointManifest) -> Iterator[str]:
    """List what is wrong: chunks must hold each element of each tensor once, and fill the files without a gap."""
    shapes, dtypes, file_sizes = manifest.all_shapes, manifest.all_dtypes, manifest.sizes
    for name in sorted(index.keys() - shapes.keys()):
        yield f"{name!r} is not in the manifest"
    for name, shape in shapes.items():
        yield from tensor_problems(name, shape, index.get(name, []))
        itemsize = DTYPE_BYTES[dtypes[name]]
        for chunk in index.get(name, []):
            size_bytes = prod(chunk.lengths) * itemsize
            if chunk.size_bytes != size_bytes:
                yield f"{name}: size_bytes = {chunk.size_bytes} must be {size_bytes} for {chunk.lengths}"
            if chunk.start % itemsize:
                yield f"{name}: start = {chunk.start} must be a multiple of {itemsize}, the bytes of an element"
    chunks = sorted((chunk for each in index.values() for chunk in each), key=attrgetter("file", "start"))
    by_file = {file: list(each) for file, each in groupby(chunks, attrgetter("file"))}
    for file in sorted(by_file.keys() ^ manifest.data_files):
        yield f"{file} holds tensors and must be in both the manifest and the index"
    for file in sorted(by_file.keys() & manifest.data_files):
        first = by_file[file][0].start
        ends = [first, *(chunk.start + chunk.size_bytes for chunk in by_file[file])]
        starts = [*(chunk.start for chunk in by_file[file]), file_sizes[file]]
        if starts != ends or first % ALIGNMENT or not first:
            yield (
                f"the chunks in {file} must fill its {file_sizes[file]} bytes one after the other, from a multiple of "
                f"{ALIGNMENT} on"
            )


def tensor_problems(name: str, shape: list[int], chunks: Sequence[StoredChunk]) -> Iterator[str]:
    """List what is wrong with the chunks of a tensor, which must hold each element once."""
    for chunk in chunks:
        if not len(chunk.offsets) == len(chunk.lengths) == len(shape):
            yield f"{name}: a chunk has {len(chunk.lengths)} dimensions, and the tensor {len(shape)}"
        elif any(at + n > m for at, n, m in zip(chunk.offsets, chunk.lengths, shape, strict=True)):
            yield f"{name}: the chunk of {chunk.lengths} at {chunk.offsets} is not inside {shape}"
    elements = sum(prod(chunk.lengths) for chunk in chunks)
    if elements != prod(shape):
        yield f"{name}: {elements} elements of {shape} are there, and must be {prod(shape)}"
    elif have_overlap([(chunk.offsets, chunk.lengths) for chunk in chunks]):
        yield f"{name}: an element is there twice"


def have_overlap(boxes: Sequence[Box], *, dim: int = 0, undivided: int = 0) -> bool:
    """Whether two boxes share an element. Planes that cut no box divide them, first across `dim`."""
    if len(boxes) < 2:
        return False
    dims = len(boxes[0][0])
    if undivided == dims:  # no plane divides them
        return any(intersection(a, b) for a, b in combinations(boxes, 2))
    ordered, end, groups = sorted(boxes, key=lambda box: box[0][dim]), -1, list[list[Box]]()
    for offsets, lengths in ordered:
        if offsets[dim] >= end:
            groups.append([])
        groups[-1].append((offsets, lengths))
        end = max(end, offsets[dim] + lengths[dim])
    undivided = undivided + 1 if len(groups) == 1 else 0
    return any(have_overlap(group, dim=(dim + 1) % dims, undivided=undivided) for group in groups)


def intersection(a: Box, b: Box) -> Box | None:
    """The elements that are in both boxes."""
    offsets = tuple(max(x, y) for x, y in zip(a[0], b[0], strict=True))
    stops = (min(x + n, y + m) for x, n, y, m in zip(*a, *b, strict=True))
    lengths = tuple(stop - first for first, stop in zip(offsets, stops, strict=True))
    return (offsets, lengths) if all(length > 0 for length in lengths) else None


def box_slices(box: Box, origin: Sequence[int]) -> tuple[slice, ...]:
    """The slices of a box in a tensor whose first element is at the origin."""
    return tuple(slice(first - at, first - at + n) for first, n, at in zip(*box, origin, strict=True))
