"""Saving a checkpoint so that an interruption at any moment leaves earlier ones complete, and loading one in place.
Everything is written to `step-N.partial` and flushed to disk, and only then renamed to `step-N`."""

import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from motet.checkpoint.manifest import (
    MANIFEST_FILE,
    PARTIAL_SUFFIX,
    CheckpointManifest,
    check_same_model,
    checkpoint_name,
    complete_checkpoints,
    is_compression_state,
    read_manifest,
    verify_checksums,
)
from motet.checkpoint.shard_boxes import CheckpointShard
from motet.core.dtypes import dtype_name
from motet.core.errors import CheckpointSaveError, InputError
from motet.core.units import format_bytes


def save_checkpoint(
    folder: Path,
    shards: Mapping[str, CheckpointShard],
    manifest: CheckpointManifest,
    *,
    keep: int,
    group: dist.ProcessGroup | None,
) -> Path:
    """Save what each rank writes; every rank calls it. Returns the folder of the checkpoint."""
    final = folder / checkpoint_name(manifest.step)
    partial = final.with_name(final.name + PARTIAL_SUFFIX)
    is_rank_zero = group is None or dist.get_rank(group) == 0
    try:
        if is_rank_zero:
            folder.mkdir(parents=True, exist_ok=True)
            for leftover in folder.glob(f"*{PARTIAL_SUFFIX}"):
                shutil.rmtree(leftover)
            partial.mkdir()
        if group is not None:
            dist.barrier(group)  # nobody writes into a folder that is still being cleared
        try:
            with _ignore_single_process_warning():
                files = save(dict(shards), checkpoint_id=str(partial), process_group=group, no_dist=group is None)
            if is_rank_zero:
                manifest.write(partial, other_tensors=_check_contents(files, manifest))
                _commit(partial, final)
        except BaseException:
            if is_rank_zero:
                shutil.rmtree(partial, ignore_errors=True)  # frees space for other files
            raise
    except (OSError, CheckpointException, RuntimeError) as error:
        free = shutil.disk_usage(final.parent).free if final.parent.exists() else 0
        raise CheckpointSaveError(
            f"could not save {final} ({_reason(error)}): it needs {format_bytes(manifest.size_bytes)} and "
            f"{format_bytes(free)} are free; earlier checkpoints are whole; make room or choose another run.folder, "
            "then --resume"
        ) from error
    for _, old in complete_checkpoints(folder)[:-keep] if is_rank_zero else ():
        doomed = old.with_name(old.name + PARTIAL_SUFFIX)  # half deleted, it must not look complete
        old.rename(doomed)
        shutil.rmtree(doomed)
    return final


def _check_contents(files: Metadata, manifest: CheckpointManifest) -> dict[str, tuple[list[int], str]]:
    """Check that the files hold each element of the manifest. Returns the shapes and dtypes of all other tensors."""
    others = {}
    for name, tensor in files.state_dict_metadata.items():
        assert isinstance(tensor, TensorStorageMetadata), name
        shape, dtype = list(tensor.size), dtype_name(tensor.properties.dtype)
        if name not in manifest.shapes:
            others[name] = shape, dtype
            continue
        elements, expected = sum(prod(chunk.sizes) for chunk in tensor.chunks), (manifest.shapes[name], prod(shape))
        assert (shape, elements) == expected, f"{name}: {elements} elements of {shape} are written, not {expected}"
    unwritten = {name for name, shape in manifest.shapes.items() if prod(shape)} - files.state_dict_metadata.keys()
    assert not unwritten, f"no rank writes {sorted(unwritten)}"
    return others


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
    manifest = read_manifest(folder)
    named = {manifest.stored_name(name): shard for name, shard in shards.items()}
    stored = manifest.all_shapes
    loaded = {n: s for n, s in named.items() if not is_compression_state(n) or stored.get(n) == list(s.size())}
    check_same_model(manifest, {name: list(s.size()) for name, s in loaded.items()} | dict(shapes or {}), folder)
    if group is None or dist.get_rank(group) == 0:
        verify_checksums(manifest, folder)
    try:
        with _ignore_single_process_warning():
            state = {name: shard for name, shard in loaded.items() if prod(shard.size())}
            load(state, checkpoint_id=str(folder), process_group=group, no_dist=group is None)
    except CheckpointException as error:  # a BaseException, which every rank gets
        cause = next(iter(error.failures.values()))[0]
        reason = (str(cause).strip() or type(cause).__name__).splitlines()[0].split(". ")[0].rstrip(".")
        raise InputError(f"checkpoint {folder} is damaged ({reason}); remove it to use the one before it") from None
    for shard in loaded.values():
        shard.zero_padding()
    return manifest


@contextmanager
def _ignore_single_process_warning() -> Iterator[None]:
    """Without a process group DCP says that it assumes one process, which is the case."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.distributed is.*")
        yield


def _commit(partial: Path, final: Path) -> None:
    _flush(partial / MANIFEST_FILE)
    _flush(partial)
    if final.exists():  # a step that was saved before, e.g. at the end of a run that is then extended
        old = final.with_name(f"{final.name}.old{PARTIAL_SUFFIX}")
        final.rename(old)
        shutil.rmtree(old)
    partial.rename(final)
    _flush(final.parent)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _reason(error: BaseException) -> str:
    chain = [wrapped[0] for wrapped in error.failures.values()] if isinstance(error, CheckpointException) else [error]
    for link in chain:
        chain.extend(inner for inner in (link.__cause__, link.__context__) if inner is not None and inner not in chain)
    refusal = next((link for link in chain if isinstance(link, OSError) and link.strerror), None)
    return str(refusal.strerror) if refusal else str(chain[0]).splitlines()[0]
