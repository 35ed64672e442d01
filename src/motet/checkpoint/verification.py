"""Whether the files of a checkpoint are unchanged; the complete and the damaged checkpoints of a folder.
Nothing here imports torch.
"""

import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import BinaryIO, NamedTuple

from motet.checkpoint.checkpoint_folders import checkpoints_folder, complete_checkpoints, is_checkpoint, step_of_name
from motet.checkpoint.manifest import (
    CheckpointManifest,
    open_regular,
    refuse_damage,
)
from motet.checkpoint.safetensors_header import DataBox, encode_header
from motet.checkpoint.tensor_index import StoredChunk, TensorIndex, chunks_by_file, read_checkpoint
from motet.core.errors import InputError, check_input

_BLOCK_BYTES = 4 * 2**20
_SPAN_BYTES = 64 * 2**20
_THREADS = 4


class _FileSpan(NamedTuple):
    """Consecutive chunks of a file, and all boxes of the file if its header is to be compared as well."""

    file: str
    chunks: Sequence[StoredChunk]
    header_boxes: Sequence[DataBox]


def verify_files(
    folder: Path, manifest: CheckpointManifest, index: TensorIndex, *, share: int = 0, shares: int = 1
) -> None:
    """Refuse a checkpoint with a changed data file; each of several ranks reads its share of the bytes."""
    spans = list(_spans(manifest, index, share=share, shares=shares))
    with refuse_damage(folder):
        if len(spans) <= 1:
            for span in spans:
                _verify_span(folder, span)
            return
        with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
            for _ in pool.map(partial(_verify_span, folder), spans):  # checksums are computed without Python's lock
                pass


def _spans(manifest: CheckpointManifest, index: TensorIndex, *, share: int, shares: int) -> Iterator[_FileSpan]:
    """The part of a rank: each chunk is in the share in which its first byte is."""
    files = chunks_by_file(index, manifest)
    total_bytes, position = sum(chunk.size_bytes for chunks in index.values() for chunk in chunks), 0
    for file, placed in files.items():
        span, header_boxes, span_bytes = list[StoredChunk](), list[DataBox](), 0
        for i, (chunk, _) in enumerate(placed):
            if position * shares // total_bytes == share:
                header_boxes = header_boxes if i else [box for _, box in placed]
                span.append(chunk)
                span_bytes += chunk.size_bytes
                if span_bytes >= _SPAN_BYTES:
                    yield _FileSpan(file, span, header_boxes)
                    span, header_boxes, span_bytes = [], [], 0
            position += chunk.size_bytes
        if span:
            yield _FileSpan(file, span, header_boxes)


def _verify_span(folder: Path, span: _FileSpan) -> None:
    """Raise a `ValueError` unless the bytes of a span are unchanged."""
    block = memoryview(bytearray(min(_BLOCK_BYTES, max(chunk.size_bytes for chunk in span.chunks))))
    with open_regular(folder / span.file) as file:
        if span.header_boxes:
            header = encode_header(span.header_boxes)
            if len(header) != span.chunks[0].start or file.read(len(header)) != header:
                raise ValueError(f"the header of {span.file} is not that of its tensors")
        file.seek(span.chunks[0].start)
        for chunk in span.chunks:
            if _checksum_of_next(file, chunk.size_bytes, block) != chunk.checksum:
                raise ValueError(f"{span.file} has changed")


def verify_tensors(folder: Path, index: TensorIndex, names: Iterable[str]) -> None:
    """Refuse a checkpoint in which a value of these tensors has changed. Less is read than all files."""
    chunks = sorted((chunk for name in names for chunk in index.get(name, [])), key=attrgetter("file", "start"))
    with refuse_damage(folder):
        for name, in_file in groupby(chunks, attrgetter("file")):
            with open_regular(folder / name) as file:
                for chunk in in_file:
                    file.seek(chunk.start)
                    block = memoryview(bytearray(min(_BLOCK_BYTES, chunk.size_bytes)))
                    if _checksum_of_next(file, chunk.size_bytes, block) != chunk.checksum:
                        raise ValueError(f"{name} has changed")


def _checksum_of_next(file: BinaryIO, size_bytes: int, block: memoryview) -> int:
    """The CRC-32 of the next bytes of a file, or of fewer where it ends."""
    checksum = 0
    while size_bytes and (count := file.readinto(block[:size_bytes])):  # type: ignore[attr-defined]  # a file has it
        checksum, size_bytes = zlib.crc32(block[:count], checksum), size_bytes - count
    return checksum


@dataclass(frozen=True)
class CheckpointVerdict:
    """A checkpoint, which is complete unless it has a problem."""

    path: str
    step: int | None  # None if it is not a checkpoint, such as the rest of an interrupted save
    files: int
    size_bytes: int
    problem: str | None = None


def checkpoint_verdicts(run: Path) -> Iterator[CheckpointVerdict]:
    """Read all files of each checkpoint of a run, of a folder of checkpoints, or of one checkpoint."""
    folder = checkpoints_folder(run)
    if is_checkpoint(run):
        yield _verdict_of(run)
        return
    checkpoints = {path for _, path in complete_checkpoints(folder)}
    check_input(checkpoints, f"{run} holds no checkpoint; give a run, its folder of checkpoints or one checkpoint")
    for path in sorted(folder.iterdir()):
        verdict = _verdict_of(path) if path in checkpoints else CheckpointVerdict(str(path), None, *_size_of(path))
        if path.exists():  # a run that goes on may have deleted it
            yield verdict


def _verdict_of(checkpoint: Path) -> CheckpointVerdict:
    step, problem = step_of_name(checkpoint.absolute().name), None
    try:
        manifest, index = read_checkpoint(checkpoint)
        verify_files(checkpoint, manifest, index)
        step = manifest.step
    except InputError as error:
        problem = str(error)
    return CheckpointVerdict(str(checkpoint), step, *_size_of(checkpoint), problem)


def _size_of(path: Path) -> tuple[int, int]:
    files = [each for each in path.rglob("*") if each.is_file()] if path.is_dir() else [path]
    return len(files), sum(each.lstat().st_size for each in files if each.is_symlink() or each.exists())
