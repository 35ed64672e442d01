"""Saving a checkpoint so that an interruption at any moment leaves earlier ones complete, and loading one in place.
Everything is written to `step-N.partial` and flushed to disk, and only then renamed to `step-N`."""

import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
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
from motet.core.errors import CheckpointSaveError, InputError
from motet.core.units import format_bytes


def save_checkpoint(
    folder: Path, state: dict[str, Tensor], manifest: CheckpointManifest, *, keep: int, group: dist.ProcessGroup | None
) -> Path:
    """Save the state of all ranks; every rank calls it. Returns the folder of the checkpoint."""
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
                save(state, checkpoint_id=str(partial), process_group=group, no_dist=group is None)
            if is_rank_zero:
                manifest.write(partial)
                _commit(partial, final)
        except BaseException:
            if is_rank_zero:
                shutil.rmtree(partial, ignore_errors=True)  # frees space for other files
            raise
    except (OSError, CheckpointException, RuntimeError) as error:
        free = shutil.disk_usage(final.parent).free if final.parent.exists() else 0
        size = sum(t.nbytes for t in state.values())
        raise CheckpointSaveError(
            f"could not save {final} ({_reason(error)}): it needs {format_bytes(size)} and {format_bytes(free)} are "
            f"free; earlier checkpoints are whole; make room or choose another run.folder, then --resume"
        ) from error
    for _, old in complete_checkpoints(folder)[:-keep] if is_rank_zero else ():
        doomed = old.with_name(old.name + PARTIAL_SUFFIX)  # half deleted, it must not look complete
        old.rename(doomed)
        shutil.rmtree(doomed)
    return final


def load_checkpoint(folder: Path, state: dict[str, Tensor], group: dist.ProcessGroup | None) -> CheckpointManifest:
    """Load the tensors of `state` in place; compression state of another layout is left unchanged."""
    manifest = read_manifest(folder)
    state = {n: t for n, t in state.items() if not is_compression_state(n) or manifest.shapes.get(n) == list(t.size())}
    check_same_model(manifest, {name: list(t.size()) for name, t in state.items()}, folder)
    if group is None or dist.get_rank(group) == 0:
        verify_checksums(manifest, folder)
    try:
        with _ignore_single_process_warning():
            load(state, checkpoint_id=str(folder), process_group=group, no_dist=group is None)
    except CheckpointException as error:  # a BaseException, which every rank gets
        cause = next(iter(error.failures.values()))[0]
        reason = (str(cause).strip() or type(cause).__name__).splitlines()[0].split(". ")[0]
        raise InputError(f"checkpoint {folder} is damaged ({reason}); remove it to use the one before it") from None
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
