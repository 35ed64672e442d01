"""The files of a checkpoint that hold tensors: safetensors files, the bytes of one box after another.
A rank writes one file, and holds a few pieces of it besides the tensors themselves.

A shard of a tensor as a checkpoint stores it: a run of its elements, as boxes of the whole tensor.
Checkpoints hold whole shapes and nothing about the layout that wrote them, so any other layout can read them.
"""

import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import groupby
from math import prod
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import torch
from torch import Tensor

from motet.checkpoint.manifest import CheckpointManifest, open_regular, refuse_damage
from motet.checkpoint.safetensors_header import MAX_HEADER_BYTES, DataBox, encode_header
from motet.checkpoint.tensor_index import StoredChunk, TensorIndex, box_slices, intersection
from motet.core.direct_io import PIECE_BYTES, DirectFile, IoThreads, aligned_buffer, padded_bytes
from motet.core.units import DTYPE_BYTES, dtype_name
from motet.parallel.shard_spec import ShardSpec

# Pieces in memory: one that is filled, and one for each thread that writes.
_PIECES = 4


@dataclass(frozen=True, eq=False)
class CheckpointShard:
    """Consecutive elements of a shard, in local order, saved from and loaded into the memory of `values`."""

    values: Tensor
    spec: ShardSpec
    start: int
    boxes: dict[tuple[int, ...], tuple[tuple[int, ...], slice]]  # Offset in the tensor -> lengths, elements of shard

    @staticmethod
    def from_values(
        values: Tensor, spec: ShardSpec, start: int = 0, *, parts: Iterable[tuple[int, int]] | None = None
    ) -> "CheckpointShard":
        """The elements of a shard from `start` on; only these `parts`, (first, stop), are saved or loaded."""
        ranges = [(start, start + values.numel())] if parts is None else parts
        boxes = (each for first, stop in ranges for each in spec.boxes(first, stop))
        by_offset = {offsets: (lengths, elements) for (offsets, lengths), elements in boxes}
        return CheckpointShard(values.detach(), spec, start, by_offset)

    @staticmethod
    def from_tensor(tensor: Tensor) -> "CheckpointShard":
        """A tensor that one rank holds and writes completely."""
        return CheckpointShard.from_values(tensor, ShardSpec.full(tuple(tensor.shape)))

    def zero_padding(self) -> None:
        """Set the elements that no checkpoint holds to zero: those of the run that are in no box."""
        inside = (edge for _, elements in self.boxes.values() for edge in (elements.start, elements.stop))
        edges = [self.start, *inside, self.start + self.values.numel()]
        for first, stop in zip(edges[::2], edges[1::2], strict=True) if self.spec.padding else ():
            self.values.view(-1)[first - self.start : stop - self.start].zero_()

    def box_values(self, offsets: tuple[int, ...]) -> Tensor:
        """The elements of a box, as a view."""
        lengths, elements = self.boxes[offsets]
        first, stop = elements.start - self.start, elements.stop - self.start
        if self.values.is_contiguous():
            return self.values.view(-1)[first:stop].view(lengths)
        row = prod(self.spec.local_shape[1:])  # only complete tensors have other strides, and are cut between rows
        return self.values[first // row : stop // row]


@dataclass(eq=False)
class _StagedPiece:
    """Aligned memory for bytes on their way to a file."""

    memory: memoryview
    tasks: "list[Future[None]]" = field(default_factory=list)  # What still reads it

    def wait(self) -> memoryview:
        """The memory, which nothing reads any more."""
        for task in self.tasks:
            task.result()
        self.tasks.clear()
        return self.memory


class DataFile(NamedTuple):
    """A data file that is on disk: its bytes, and where in it the boxes are."""

    size_bytes: int
    chunks: TensorIndex


class DataFileWriter:
    """Writes the boxes of tensors, which are known beforehand, to a new data file.

    `write_box` copies a box into pieces, of which there are a few; threads write them and compute checksums. An
    `OSError` of such a thread is raised by a later call. Boxes are ordered by the bytes of an element, the largest
    first, so that each begins at a multiple of them.
    """

    def __init__(self, path: Path, boxes: Iterable[DataBox]) -> None:
        self.boxes = sorted(boxes, key=lambda box: -DTYPE_BYTES[box.dtype])
        header = encode_header(self.boxes)
        assert len(header) <= MAX_HEADER_BYTES, f"{path}: {len(self.boxes)} boxes need a header of {len(header)} bytes"
        self.size_bytes = len(header) + sum(box.size_bytes for box in self.boxes)
        self._header_bytes, self._position, self._checksums = len(header), 0, [0] * len(self.boxes)
        self._piece_bytes = min(PIECE_BYTES, padded_bytes(self.size_bytes))
        count = min(_PIECES, -(-self.size_bytes // self._piece_bytes))
        self._free = deque(_StagedPiece(aligned_buffer(self._piece_bytes)) for _ in range(count))
        self._threads, self._checksum_thread = IoThreads(), ThreadPoolExecutor(1, thread_name_prefix="motet-crc")
        self._boxes_written = 0
        self._file = DirectFile(path, create=True, mode=0o666, warn_of_buffered_io=False)
        try:
            self._file.set_length(padded_bytes(self.size_bytes))
            self._file.probe_direct_io()
            self._stage(torch.frombuffer(bytearray(header), dtype=torch.uint8), box_id=None)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "DataFileWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write_box(self, box: DataBox, values: Tensor) -> None:
        """Write the next of `boxes`. Its elements may change when this returns."""
        box_id = self._boxes_written
        assert box == self.boxes[box_id] and tuple(values.shape) == box.lengths, (box, self.boxes[box_id], values.shape)
        self._boxes_written += 1
        self._stage(values.detach().contiguous().view(-1).view(torch.uint8), box_id=box_id)

    def finish(self) -> DataFile:
        """Wait until everything is on disk."""
        assert self._boxes_written == len(self.boxes), f"{self._boxes_written} of {len(self.boxes)} boxes"
        if inside := self._position % self._piece_bytes:
            self._stage(torch.zeros(padded_bytes(inside) - inside, dtype=torch.uint8), box_id=None)
        if inside := self._position % self._piece_bytes:
            self._submit(inside)
        for piece in self._free:
            piece.wait()
        self._file.set_length(self.size_bytes)
        self._file.sync()
        chunks, start = TensorIndex(), self._header_bytes
        for box, checksum in zip(self.boxes, self._checksums, strict=True):
            chunk = StoredChunk(box.offsets, box.lengths, self._file.path.name, start, box.size_bytes, checksum)
            chunks.setdefault(box.name, []).append(chunk)
            start += box.size_bytes
        return DataFile(self.size_bytes, chunks)

    def close(self) -> None:
        """Wait for the threads and close the file, which is complete only after `finish`."""
        self._threads.close()
        self._checksum_thread.shutdown()
        self._file.close()

    def _stage(self, content: Tensor, *, box_id: int | None) -> None:
        """Copy bytes to the pieces, and let threads write those pieces that are full."""
        done = 0
        while done < content.numel():
            piece, inside = self._free[0], self._position % self._piece_bytes
            memory = piece.memory if inside else piece.wait()
            count = min(self._piece_bytes - inside, content.numel() - done)
            part = memory[inside : inside + count]
            # By one thread, since those of torch compute the next step; without Python's lock
            np.frombuffer(part, dtype=np.uint8)[:] = content[done : done + count].numpy()
            if box_id is not None:
                piece.tasks.append(self._checksum_thread.submit(self._add_to_checksum, box_id, part))
            done, self._position = done + count, self._position + count
            if inside + count == self._piece_bytes:
                self._submit(self._piece_bytes)

    def _add_to_checksum(self, box_id: int, part: memoryview) -> None:
        self._checksums[box_id] = zlib.crc32(part, self._checksums[box_id])

    def _submit(self, count: int) -> None:
        """Write the first bytes of the piece that was filled; the next one is the piece that has waited longest."""
        piece, position = self._free[0], self._position - count
        piece.tasks.append(self._threads.write(self._file, piece.memory[:count], position))
        self._free.rotate(-1)


def boxes_of(shards: Mapping[str, CheckpointShard]) -> list[DataBox]:
    """The boxes of shards."""
    return [
        DataBox(name, dtype_name(shard.values.dtype), shard.spec.shape, offsets, lengths)
        for name, shard in shards.items()
        for offsets, (lengths, _) in shard.boxes.items()
    ]


def write_data_file(path: Path, shards: Mapping[str, CheckpointShard]) -> DataFile:
    """Write the boxes of shards to a new file, which is on disk when this returns."""
    with DataFileWriter(path, boxes_of(shards)) as writer:
        for box in writer.boxes:
            writer.write_box(box, shards[box.name].box_values(box.offsets))
        return writer.finish()


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
        if box := intersection((offsets, lengths), chunk.box):
            yield shard.box_values(offsets)[box_slices(box, offsets)], box_slices(box, chunk.offsets)


def _read_bytes(file: BinaryIO, chunk: StoredChunk, dtype: torch.dtype, *, buffer: Tensor) -> Tensor:
    """The elements of a chunk, in the memory of the buffer."""
    content = buffer[: chunk.size_bytes]
    file.seek(chunk.start)
    if file.readinto(content.numpy()) != chunk.size_bytes:  # type: ignore[attr-defined]  # a file has this method
        raise ValueError(f"{chunk.file} has changed")
    return content.view(dtype).view(chunk.lengths)
