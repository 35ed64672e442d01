"""Saving a checkpoint so that an interruption at any moment leaves a complete one, and loading one in place.
Everything is written to `step-N.partial` and flushed to disk, and only then renamed to `step-N`. No rank reads a tensor
before all ranks know that every file is unchanged.
"""

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch.distributed as dist

from motet.checkpoint.checkpoint_folders import (
    PARTIAL_SUFFIX,
    REPLACED_SUFFIX,
    checkpoint_name,
    complete_checkpoints,
)
from motet.checkpoint.data_files import CheckpointShard, read_data_files, write_data_file
from motet.checkpoint.manifest import (
    MANIFEST_FILE,
    SAVED_BY_FILE,
    TENSORS_FILE,
    CheckpointManifest,
    check_same_model,
    is_compression_state,
    read_manifest,
    write_durably,
)
from motet.checkpoint.safetensors_header import SAFETENSORS_DTYPES
from motet.checkpoint.tensor_index import TensorIndex, index_problems, index_to_text, read_checkpoint
from motet.checkpoint.verification import verify_files
from motet.checkpoint.writers import convert_save_errors
from motet.core.errors import CheckpointSaveError, MotetError, convert_os_errors
from motet.core.units import dtype_name

ResultT = TypeVar("ResultT")


class _WrittenByRank(NamedTuple):
    """The files and tensors of one rank, for the manifest and the index."""

    files: dict[str, int]  # Bytes of each
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
        return _write(unfinished / f"rank-{rank:05d}.safetensors", shards)

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
    if first := next(filter(None, failures), None):
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
        if dtype not in SAFETENSORS_DTYPES:
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
    file = write_data_file(path, shards)
    return _WrittenByRank({path.name: file.size_bytes}, file.chunks, tensors)


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
    sizes = {name: size_bytes for written in by_rank for name, size_bytes in written.files.items()}
    for problem in index_problems(index, replace(manifest, saved_by=saved_by, sizes=sizes)):
        raise AssertionError(problem)
    texts = {SAVED_BY_FILE: json.dumps(asdict(saved_by), indent=1), TENSORS_FILE: index_to_text(index)}
    written_json = {name: write_durably(unfinished / name, text) for name, text in texts.items()}
    sizes |= {name: file.size_bytes for name, file in written_json.items()}
    checksums = {name: file.checksum for name, file in written_json.items()}
    complete = replace(manifest, saved_by=saved_by, checksums=checksums, sizes=dict(sorted(sizes.items())))
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
        verify_files(folder, manifest, index, share=rank, shares=world)
        return manifest, index, loaded

    manifest, index, loaded = _on_all_ranks(group, verify)
    _on_all_ranks(group, lambda: read_data_files(folder, manifest, index, shards=loaded))
    for shard in loaded.values():
        shard.zero_padding()
    return manifest
