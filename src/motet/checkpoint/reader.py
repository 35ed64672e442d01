"""Reads the tensors of a checkpoint, and slices of them, without a job and without ranks."""

import zlib
from collections.abc import Sequence
from glob import escape
from itertools import groupby
from math import prod
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from motet.checkpoint.checkpoint_folders import find_checkpoint
from motet.checkpoint.manifest import open_regular, refuse_damage
from motet.checkpoint.tensor_index import Box, StoredChunk, box_slices, intersection, read_checkpoint
from motet.core.direct_io import PIECE_BYTES
from motet.core.errors import InputError, check_input, names_matching
from motet.core.units import DTYPE_BYTES

TensorKey = str | tuple[object, ...]


class CheckpointReader:
    """An open checkpoint: a mapping from the names of its tensors to their values.

        with motet.open_checkpoint("runs/mine-001") as checkpoint:
            weight = checkpoint["master/head.weight"]
            rows = checkpoint["master/head.weight", 0:10, :]

    A slice reads the boxes that it needs, and of these the rows. The checksum of a box is compared when it is read
    completely; `motet checkpoint verify` reads everything. A tensor is read anew each time, and held nowhere.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest, self.index = read_checkpoint(path)
        self._shapes, self._dtypes = self.manifest.all_shapes, self.manifest.all_dtypes

    def __enter__(self) -> "CheckpointReader":
        return self

    def __exit__(self, *_: object) -> None:
        """Release nothing: files are open only while they are read."""

    @property
    def step(self) -> int:
        """The steps that the run had completed."""
        return self.manifest.step

    @property
    def names(self) -> tuple[str, ...]:
        """All tensors: those of the model and its optimizer, then others that only the same layout continues with."""
        return tuple(self._shapes)

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(map(self.tensor_bytes, self.names))

    def shape(self, name: str) -> tuple[int, ...]:
        self._check_name(name)
        return tuple(self._shapes[name])

    def dtype(self, name: str) -> torch.dtype:
        self._check_name(name)
        dtype: torch.dtype = getattr(torch, self._dtypes[name])
        return dtype

    def tensor_bytes(self, name: str) -> int:
        return prod(self.shape(name)) * DTYPE_BYTES[self._dtypes[name]]

    def boxes(self, name: str) -> list[Box]:
        """Offsets and lengths of the boxes in which a tensor is stored, which are the cheapest to read."""
        self._check_name(name)
        return [chunk.box for chunk in self.index.get(name, [])]

    def __contains__(self, name: object) -> bool:
        return name in self._shapes

    def __getitem__(self, key: TensorKey) -> Tensor:
        """A tensor by its name, or a slice of it: the name, then a number, a slice or `...` for each dimension."""
        name, *indices = key if isinstance(key, tuple) else (key,)
        check_input(isinstance(name, str), f"checkpoint[{key!r}]: the name of a tensor must come first")
        assert isinstance(name, str)
        box, inside = _box_of_indices(name, self.shape(name), indices)
        return self.read_box(name, box)[inside]

    def read_box(self, name: str, box: Box, out: Tensor | None = None) -> Tensor:
        """Read the elements of a box into a new tensor, or into `out`, which has its lengths."""
        dtype = self.dtype(name)
        values = torch.empty(box[1], dtype=dtype) if out is None else out
        parts = [(chunk, inside) for chunk in self.index.get(name, []) if (inside := intersection(box, chunk.box))]
        parts.sort(key=lambda part: (part[0].file, part[0].start))
        with refuse_damage(self.path):
            for file_name, in_file in groupby(parts, lambda part: part[0].file):
                with open_regular(self.path / file_name) as file:
                    for chunk, inside in in_file:
                        _ChunkPart(file, chunk, dtype).read(values[box_slices(inside, box[0])], inside)
        return values

    def _check_name(self, name: str) -> None:
        if name not in self._shapes:
            problem = f"checkpoint {self.path} holds no tensor {{!r}}"
            names_matching([escape(name)], self._shapes, problem)
            raise InputError(problem.format(name))


def open_checkpoint(path: str | Path) -> CheckpointReader:
    """Open a checkpoint: its folder, or the newest one of a run or of a folder of checkpoints."""
    return CheckpointReader(find_checkpoint(Path(path)))


class _ChunkPart:
    """Reads rows of a chunk one after the other, a few megabytes at a time."""

    def __init__(self, file: BinaryIO, chunk: StoredChunk, dtype: torch.dtype) -> None:
        self._file, self._chunk, self._dtype, self._checksum = file, chunk, dtype, 0

    def read(self, target: Tensor, inside: Box) -> None:
        """Read a box inside of the chunk. A complete chunk must have its checksum."""
        chunk = self._chunk
        offsets = [first - at for first, at in zip(inside[0], chunk.offsets, strict=True)]
        rows = target if offsets else target.view(1)
        self._read_rows(rows, offsets or [0], chunk.lengths or [1])
        if inside == chunk.box and self._checksum != chunk.checksum:
            raise ValueError(f"{chunk.file} has changed")

    def _read_rows(self, target: Tensor, offsets: Sequence[int], lengths: Sequence[int], *, first: int = 0) -> None:
        """Read a box into the target; `first` is the number of the element where the part with these lengths begins."""
        row = prod(lengths[1:])
        if len(lengths) > 1 and row * self._dtype.itemsize > PIECE_BYTES:
            for i in range(target.shape[0]):
                self._read_rows(target[i], offsets[1:], lengths[1:], first=first + (offsets[0] + i) * row)
            return
        columns = tuple(slice(at, at + n) for at, n in zip(offsets[1:], target.shape[1:], strict=True))
        count = max(1, PIECE_BYTES // (row * self._dtype.itemsize))
        for i, rows in enumerate(target.split(count)):
            values = self._read_elements(first + (offsets[0] + i * count) * row, rows.shape[0] * row)
            rows.copy_(values.view(-1, *lengths[1:])[(slice(None), *columns)])

    def _read_elements(self, first: int, count: int) -> Tensor:
        content = bytearray(count * self._dtype.itemsize)
        self._file.seek(self._chunk.start + first * self._dtype.itemsize)
        if self._file.readinto(content) != len(content):  # type: ignore[attr-defined]  # a file has this method
            raise ValueError(f"{self._chunk.file} has changed")
        self._checksum = zlib.crc32(content, self._checksum)
        return torch.frombuffer(content, dtype=self._dtype)


def _box_of_indices(
    name: str, shape: tuple[int, ...], indices: Sequence[object]
) -> tuple[Box, tuple[int | slice, ...]]:
    """The box that holds the elements of Python's indices, and what to take of it."""
    wanted = list(indices)
    if Ellipsis in wanted:
        at = wanted.index(Ellipsis)
        wanted[at : at + 1] = [slice(None)] * (len(shape) - len(wanted) + 1)
    wanted += [slice(None)] * (len(shape) - len(wanted))
    check_input(len(wanted) == len(shape), f"{name} has {len(shape)} dimensions, not {len(wanted)}")
    offsets, lengths, inside = list[int](), list[int](), list[int | slice]()
    for dim, (index, length) in enumerate(zip(wanted, shape, strict=True)):
        if isinstance(index, int):
            check_input(-length <= index < length, f"{name}: index {index} must be in the {length} of dimension {dim}")
            first, stop = index % length, index % length + 1
            inside.append(0)
        else:
            is_range = isinstance(index, slice) and (index.step is None or index.step > 0)
            check_input(is_range, f"{name}: index {index!r} must be a number, a slice that goes forward or ...")
            assert isinstance(index, slice)
            first, stop, step = index.indices(length)
            inside.append(slice(None, None, step))
        offsets.append(first)
        lengths.append(max(0, stop - first))
    return (tuple(offsets), tuple(lengths)), tuple(inside)
