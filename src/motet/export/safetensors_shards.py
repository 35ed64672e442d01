"""Safetensors files that are written piece by piece, so that no file is ever in memory.

transformers would write the same files with the same index.
"""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from motet.checkpoint.safetensors_header import SAFETENSORS_DTYPES
from motet.core.errors import check_input
from motet.core.units import DTYPE_BYTES

PIECE_BYTES = 64 << 20  # Values that are in memory together, unless a tensor cannot be cut
_METADATA = {"format": "pt"}
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class ExportedTensor:
    """A tensor that is written to a file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: Callable[[], Iterator[Tensor]]  # Its elements in row-major order
    sources: tuple[str, ...]  # The tensors of the checkpoint that it is made of

    @property
    def size_bytes(self) -> int:
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


def file_dtype(name: str, dtype: str) -> str:
    """The name of a dtype in a safetensors file."""
    check_input(
        dtype in SAFETENSORS_DTYPES, f"{name} is {dtype}, which is not written to safetensors files; leave it out"
    )
    return SAFETENSORS_DTYPES[dtype]


def write_shards(
    folder: Path, tensors: Sequence[ExportedTensor], shard_bytes: float, *, stem: str = "model", progress: Progress
) -> None:
    """Write tensors to one file, or to several with an index if they are larger than `shard_bytes` together."""
    shards = _split(tensors, shard_bytes)
    names = [f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    names = names if len(shards) > 1 else [f"{stem}.safetensors"]
    total, written = sum(tensor.size_bytes for tensor in tensors), 0
    for name, shard in zip(names, shards, strict=True):
        for count in _write_file(folder / name, shard):
            written += count
            progress("exporting, MiB", written // 2**20, -(-total // 2**20))
    if len(shards) > 1:
        sizes = {"total_parameters": sum(prod(tensor.shape) for tensor in tensors), "total_size": total}
        weight_map = {tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        index = json.dumps({"metadata": sizes, "weight_map": weight_map}, indent=2, sort_keys=True) + "\n"
        (folder / f"{stem}.safetensors.index.json").write_text(index, encoding="utf-8")


def _split(tensors: Sequence[ExportedTensor], shard_bytes: float) -> list[list[ExportedTensor]]:
    """The tensors of each file. One that is larger than a file gets one alone."""
    shards, current, size_bytes = list[list[ExportedTensor]](), list[ExportedTensor](), 0
    for tensor in tensors:
        if tensor.size_bytes > shard_bytes:
            shards.append([tensor])
            continue
        if size_bytes + tensor.size_bytes > shard_bytes:
            shards.append(current)
            current, size_bytes = [], 0
        current.append(tensor)
        size_bytes += tensor.size_bytes
    return [*shards, current] if current or not shards else shards


def _write_file(path: Path, tensors: Sequence[ExportedTensor]) -> Iterator[int]:
    """Write a file; yields the bytes of each piece. Wider dtypes come first, so that all values are aligned."""
    ordered = sorted(tensors, key=lambda tensor: (-DTYPE_BYTES[tensor.dtype], tensor.name))
    entries, start = dict[str, object]({"__metadata__": _METADATA}), 0
    for tensor in ordered:
        stop, dtype = start + tensor.size_bytes, file_dtype(tensor.name, tensor.dtype)
        entries[tensor.name] = {"dtype": dtype, "shape": tensor.shape, "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in ordered:
            size_bytes = 0
            for piece in tensor.pieces():
                content = piece.contiguous().view(-1).view(torch.uint8).numpy().data
                file.write(content)
                size_bytes += len(content)
                yield len(content)
            assert size_bytes == tensor.size_bytes, (tensor.name, size_bytes)
        file.flush()
        os.fsync(file.fileno())
