"""Reading a checkpoint back, in place, after its manifest was compared with what the job needs."""

import warnings
from pathlib import Path

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load

from motet.checkpoint.manifest import Manifest, is_carried, read_manifest, refuse_damaged, refuse_other_model
from motet.core.errors import InputError


def load_checkpoint(where: Path, state: dict[str, Tensor], group: dist.ProcessGroup | None) -> Manifest:
    """Fill the tensors of `state` from the checkpoint folder `where`; what only its layout can read stays as it is."""
    manifest = read_manifest(where)
    state = {n: t for n, t in state.items() if not is_carried(n) or manifest.shapes.get(n) == list(t.size())}
    refuse_other_model(manifest, {name: list(t.size()) for name, t in state.items()}, where)
    if group is None or dist.get_rank(group) == 0:
        refuse_damaged(manifest, where)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.distributed is.*")
        try:
            load(state, checkpoint_id=str(where), process_group=group, no_dist=group is None)
        except CheckpointException as error:  # a BaseException; every rank gets it, whichever of them had the trouble
            cause = next(iter(error.failures.values()))[0]
            what = (str(cause).strip() or type(cause).__name__).splitlines()[0]
            raise InputError(
                f"checkpoint {where} is damaged ({what.split('. ')[0]}); remove it to use the one before it"
            ) from None
    return manifest
