"""The files of a checkpoint that hold tensors: the bytes of one chunk after another, and nothing else.
A rank writes one file, and holds one chunk at a time besides the tensors themselves."""

import os
import zlib
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from motet.checkpoint.manifest import CheckpointManifest, StoredFile, open_regular, refuse_damage
from motet.checkpoint.shard_boxes import CheckpointShard
from motet.checkpoint.tensor_index import StoredChunk, TensorIndex


def write_data_file(path: Path, shards: Mapping[str, CheckpointShard]) -> tuple[TensorIndex, StoredFile]:
    """Write the boxes of shards to a new file, which is on disk when this returns."""
    index: TensorIndex = {}
    size_bytes = checksum = 0
    with path.open("xb") as file:
        for name, shard in shards.items():
            for offsets, (lengths, _) in shard.boxes.items():
                content = shard.box_values(offsets).cpu().contiguous().view(-1).view(torch.uint8).numpy().data
                index.setdefault(name, []).append(StoredChunk(offsets, lengths, path.name, size_bytes, len(content)))
                file.write(content)
                size_bytes, checksum = size_bytes + len(content), zlib.crc32(content, checksum)
        file.flush()
        os.fsync(file.fileno())
    return index, StoredFile(size_bytes, checksum)


def read_data_files(
    folder: Path, manifest: CheckpointManifest, index: TensorIndex, *, shards: Mapping[str, CheckpointShard]
) -> None:
    """Fill shards from the chunks of their tensors, in the order of the files. The files were verified before."""
    reads = [(chunk, name) for name in shards for chunk in index.get(name, ()) if any(_overlaps(chunk, shards[name]))]
    reads.sort(key=lambda read: (read[0].file, read[0].start))
    dtypes = manifest.all_dtypes
    buffer = torch.empty(max((chunk.size_bytes for chunk, _ in reads), default=0), dtype=torch.uint8)
    with refuse_damage(folder):
        for name_of_file, in_file in groupby(reads, lambda read: read[0].file):
            with open_regular(folder / name_of_file) as file:
                for chunk, name in in_file:
                    values = _read_bytes(file, chunk, getattr(torch, dtypes[name]), buffer=buffer)
                    for target, inside in _overlaps(chunk, shards[name]):
                        target.copy_(values[inside])


def _overlaps(chunk: StoredChunk, shard: CheckpointShard) -> Iterator[tuple[Tensor, tuple[slice, ...]]]:
    """The elements of a shard that a chunk holds, as views, and where in the chunk they are."""
    for offsets, (lengths, _) in shard.boxes.items():
        spans = [
            (max(at, other), min(at + length, other + stored), at, other)
            for at, length, other, stored in zip(offsets, lengths, chunk.offsets, chunk.lengths, strict=True)
        ]
        if all(first < stop for first, stop, _, _ in spans):
            inside = tuple(slice(first - other, stop - other) for first, stop, _, other in spans)
            yield shard.box_values(offsets)[tuple(slice(first - at, stop - at) for first, stop, at, _ in spans)], inside


def _read_bytes(file: BinaryIO, chunk: StoredChunk, dtype: torch.dtype, *, buffer: Tensor) -> Tensor:
    """The elements of a chunk, in the memory of the buffer."""
    content = buffer[: chunk.size_bytes]
    file.seek(chunk.start)
    if file.readinto(content.numpy()) != chunk.size_bytes:  # type: ignore[attr-defined]  # a file has it
        raise ValueError(f"{chunk.file} has changed")
    return content.view(dtype).view(chunk.lengths)
