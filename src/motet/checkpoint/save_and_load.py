"""Saving a checkpoint so that an interruption at any moment leaves a complete one, and loading one in place.
Everything is written to `step-N.partial` and flushed to disk, and only then renamed to `step-N`. No rank reads a tensor
before all ranks know that every file is unchanged.

The files of a checkpoint that hold tensors: the bytes of one chunk after another, and nothing else.
A rank writes one file, and holds one chunk at a time besides the tensors themselves.

A shard of a tensor as a checkpoint stores it: a run of its elements, as boxes of the whole tensor.
Checkpoints hold whole shapes and nothing about the layout that wrote them, so any other layout can read them.
"""

import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import groupby
from math import prod
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from motet.checkpoint.manifest import (
    MANIFEST_FILE,
    PARTIAL_SUFFIX,
    REPLACED_SUFFIX,
    SAVED_BY_FILE,
    TENSORS_FILE,
    CheckpointManifest,
    StoredChunk,
    StoredFile,
    TensorIndex,
    check_same_model,
    checkpoint_name,
    complete_checkpoints,
    index_problems,
    index_to_text,
    is_compression_state,
    open_regular,
    read_checkpoint,
    read_manifest,
    refuse_damage,
    verify_files,
    write_durably,
)
from motet.checkpoint.writers import convert_save_errors
from motet.core.errors import CheckpointSaveError, MotetError, convert_os_errors
from motet.core.units import DTYPE_BYTES, dtype_name
from motet.parallel.shard_spec import ShardSpec


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
    if file.readinto(content.numpy()) != chunk.size_bytes:  # type: ignore[attr-defined]  # a file has this method
        raise ValueError(f"{chunk.file} has changed")
    return content.view(dtype).view(chunk.lengths)


ResultT = TypeVar("ResultT")


class _WrittenByRank(NamedTuple):
    """The files and tensors of one rank, for the manifest and the index."""

    files: dict[str, StoredFile]
    chunks: TensorIndex
    tensors: dict[str, tuple[list[int], str]]  # Whole shapes and dtypes


def save_checkpoint(
    folder: Path,
    shards: Mapping[str, CheckpointShard],
    manifest: CheckpointManifest,
    *,
    keep: int,
    group: dist.ProcessGroup | None,
) -> Path:
    """Save the shards that each rank writes; every rank calls it. Returns the folder of the checkpoint."""
    final = folder / checkpoint_name(manifest.step)
    unfinished = final.with_name(final.name + PARTIAL_SUFFIX)
    rank = 0 if group is None else dist.get_rank(group)

    errors = partial(convert_save_errors, final, manifest.size_bytes)

    @errors()
    def prepare() -> None:
        if rank == 0:
            _prepare(unfinished, manifest)

    @errors()
    def write() -> _WrittenByRank:
        return _write(unfinished / f"rank-{rank:05d}.bin", shards)

    @errors()
    def finish() -> None:
        if rank == 0:
            _describe(unfinished, manifest, by_rank)
            _commit(unfinished, final)
            _delete_all_but(folder, keep)

    try:
        _on_all_ranks(group, prepare)  # nobody writes into a folder that is still being cleared
        by_rank = _gather(_on_all_ranks(group, write), group)
        _on_all_ranks(group, finish)
    except BaseException:
        if rank == 0:
            shutil.rmtree(unfinished, ignore_errors=True)  # frees space for other files
        raise
    return final


def clear_interrupted_saves(folder: Path, *, keep: int, group: dist.ProcessGroup | None) -> None:
    """Clear the rests of a killed run besides its newest checkpoints; every rank calls it. A save does the same."""

    def clear() -> None:
        if group is None or dist.get_rank(group) == 0:
            with convert_os_errors(f"clear {folder}", "make the folder writable, then --resume", CheckpointSaveError):
                _clear(folder)
                _delete_all_but(folder, keep)

    _on_all_ranks(group, clear)


def _on_all_ranks(group: dist.ProcessGroup | None, action: Callable[[], ResultT]) -> ResultT:
    """Call the action on every rank. An error of one for the user is raised on all of them."""
    result, failure = None, None
    try:
        result = action()
    except MotetError as error:
        failure = error
    failures: list[MotetError | None] = [failure]
    if group is not None:
        failures = [None] * dist.get_world_size(group)
        dist.all_gather_object(failures, failure, group=group)
    if first := next(filter(None, [failure, *failures]), None):
        raise first
    return result  # type: ignore[return-value]  # without an error it is the action's result


def _gather(written: _WrittenByRank, group: dist.ProcessGroup | None) -> list[_WrittenByRank]:
    """Gather the lists of written files on the first rank; others get nothing."""
    if group is None:
        return [written]
    by_rank = [written] * dist.get_world_size(group) if dist.get_rank(group) == 0 else None
    dist.gather_object(written, by_rank, group=group, group_dst=0)
    return by_rank or []


def _prepare(unfinished: Path, manifest: CheckpointManifest) -> None:
    """Clear the rests of interrupted saves. A replaced checkpoint whose successor is missing gets its name back."""
    for name, dtype in manifest.dtypes.items():
        if dtype not in DTYPE_BYTES:
            raise CheckpointSaveError(
                f"could not save {name}: a checkpoint cannot hold {dtype}; give it another dtype, or register a buffer "
                "with persistent=False"
            )
    unfinished.parent.mkdir(exist_ok=True)
    _clear(unfinished.parent)
    unfinished.mkdir()


def _clear(folder: Path) -> None:
    for leftover in folder.glob(f"*{PARTIAL_SUFFIX}"):
        shutil.rmtree(leftover)
    for replaced in folder.glob(f"step-*{REPLACED_SUFFIX}"):
        successor = replaced.with_suffix("")
        if successor.exists():
            _delete(replaced)
        else:
            replaced.rename(successor)


def _write(path: Path, shards: Mapping[str, CheckpointShard]) -> _WrittenByRank:
    tensors = {name: (list(shard.spec.shape), dtype_name(shard.values.dtype)) for name, shard in shards.items()}
    if not any(shard.boxes for shard in shards.values()):
        return _WrittenByRank({}, {}, tensors)
    index, file = write_data_file(path, shards)
    return _WrittenByRank({path.name: file}, index, tensors)


def _describe(unfinished: Path, manifest: CheckpointManifest, by_rank: Sequence[_WrittenByRank]) -> None:
    """Write the files about the tensors, the manifest last."""
    index: TensorIndex = {}
    for name, chunks in (item for written in by_rank for item in written.chunks.items()):
        index.setdefault(name, []).extend(chunks)
    tensors = {name: tensor for written in by_rank for name, tensor in written.tensors.items()}
    others = {name: tensor for name, tensor in tensors.items() if name not in manifest.shapes}
    saved_by = replace(
        manifest.saved_by,
        shapes={name: shape for name, (shape, _) in others.items()},
        dtypes={name: dtype for name, (_, dtype) in others.items()},
    )
    files = {name: file for written in by_rank for name, file in written.files.items()}
    for problem in index_problems(
        index, replace(manifest, saved_by=saved_by), {n: f.size_bytes for n, f in files.items()}
    ):
        raise AssertionError(problem)
    files[SAVED_BY_FILE] = write_durably(unfinished / SAVED_BY_FILE, json.dumps(asdict(saved_by), indent=1))
    files[TENSORS_FILE] = write_durably(unfinished / TENSORS_FILE, index_to_text(index))
    checksums, sizes = (
        {name: getattr(files[name], key) for name in sorted(files)} for key in ("checksum", "size_bytes")
    )
    complete = replace(manifest, saved_by=saved_by, checksums=checksums, sizes=sizes)
    write_durably(unfinished / MANIFEST_FILE, complete.to_text())
    _flush(unfinished)


def _commit(unfinished: Path, final: Path) -> None:
    """Rename; a checkpoint of the same step, e.g. of a run that is then extended, stays readable until that is done."""
    replaced = final.with_name(final.name + REPLACED_SUFFIX)
    if final.exists():
        final.rename(replaced)
    unfinished.rename(final)
    _flush(final.parent)
    if replaced.exists():
        _delete(replaced)


def _delete_all_but(folder: Path, keep: int) -> None:
    for _, old in complete_checkpoints(folder)[:-keep]:
        _delete(old)


def _delete(checkpoint: Path) -> None:
    """Rename first: half deleted, it must not look complete."""
    with convert_os_errors(f"delete {checkpoint}", "make the folder writable, then --resume", CheckpointSaveError):
        doomed = checkpoint.with_name(checkpoint.name + PARTIAL_SUFFIX)
        checkpoint.rename(doomed)
        shutil.rmtree(doomed)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_shared_manifest(folder: Path, group: dist.ProcessGroup | None) -> CheckpointManifest:
    """The manifest of a checkpoint; all ranks refuse one that a rank cannot read. Every rank calls it."""
    return _on_all_ranks(group, lambda: read_manifest(folder))


def load_checkpoint(
    folder: Path,
    shards: Mapping[str, CheckpointShard],
    group: dist.ProcessGroup | None,
    *,
    shapes: Mapping[str, list[int]] | None = None,
) -> CheckpointManifest:
    """Load shards in place; compression state of another layout is left unchanged.

    `shapes` are the tensors of the job's manifest, of which a rank may hold some; by default these shards.
    """

    def verify() -> tuple[CheckpointManifest, TensorIndex, dict[str, CheckpointShard]]:
        manifest, index = read_checkpoint(folder)
        stored = manifest.all_shapes
        loaded = {
            name: shard
            for name, shard in shards.items()
            if not is_compression_state(name) or stored.get(name) == list(shard.spec.shape)
        }
        own_shapes = {name: list(shard.spec.shape) for name, shard in loaded.items()}
        check_same_model(manifest, own_shapes | dict(shapes or {}), folder)
        rank, world = (dist.get_rank(group), dist.get_world_size(group)) if group is not None else (0, 1)
        verify_files(folder, manifest, share=rank, shares=world)
        return manifest, index, loaded

    manifest, index, loaded = _on_all_ranks(group, verify)
    _on_all_ranks(group, lambda: read_data_files(folder, manifest, index, shards=loaded))
    for shard in loaded.values():
        shard.zero_padding()
    return manifest
