"""Loading a checkpoint in place, after comparing its manifest with the tensors of the job."""

import warnings
from pathlib import Path

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load

from motet.checkpoint.manifest import (
    CheckpointManifest,
    check_same_model,
    is_compression_state,
    read_manifest,
    verify_checksums,
)
from motet.core.errors import InputError


def load_checkpoint(folder: Path, state: dict[str, Tensor], group: dist.ProcessGroup | None) -> CheckpointManifest:
    """Load the tensors of `state` in place; compression state of another layout is left unchanged."""
    manifest = read_manifest(folder)
    state = {n: t for n, t in state.items() if not is_compression_state(n) or manifest.shapes.get(n) == list(t.size())}
    check_same_model(manifest, {name: list(t.size()) for name, t in state.items()}, folder)
    if group is None or dist.get_rank(group) == 0:
        verify_checksums(manifest, folder)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.distributed is.*")
        try:
            load(state, checkpoint_id=str(folder), process_group=group, no_dist=group is None)
        except CheckpointException as error:  # a BaseException, which every rank gets
            cause = next(iter(error.failures.values()))[0]
            reason = (str(cause).strip() or type(cause).__name__).splitlines()[0]
            raise InputError(
                f"checkpoint {folder} is damaged ({reason.split('. ')[0]}); remove it to use the one before it"
            ) from None
    return manifest
