"""What must be alike on all ranks, compared before training: other modules or settings would go unnoticed otherwise."""

from collections.abc import Sequence
from itertools import zip_longest

import torch
from torch import nn

from motet.collectives.execute.api import all_reduce, broadcast
from motet.core.errors import InputError, PeerFailedError
from motet.parallel.data_parallel.wrap_policy import find_blocks
from motet.parallel.process.process_group import RankGroup


def module_signature(module: nn.Module) -> list[str]:
    """A line for each parameter and block, in order: by the place in these lists ranks know what others send."""
    blocks = set(find_blocks(module))
    return [
        *(
            f"parameter {name} of shape {tuple(p.shape)}, {p.dtype}, {'trained' if p.requires_grad else 'frozen'}"
            for name, p in module.named_parameters()
        ),
        *(f"block {name}" for name, inner in module.named_modules() if inner in blocks),
    ]


def check_same_on_all_ranks(lines: Sequence[str], group: RankGroup) -> None:
    """Every rank must have the lines of the first one."""
    if group.world == 1:
        return
    encoded = "\n".join(lines).encode()
    size = torch.tensor([len(encoded)], device=group.device)
    broadcast(size, group)
    text = torch.zeros(int(size), dtype=torch.uint8)
    if group.rank == 0:
        text = torch.frombuffer(bytearray(encoded), dtype=torch.uint8).clone()
    text = text.to(group.device)
    broadcast(text, group)
    rank0_lines = bytes(text.tolist()).decode().split("\n")
    difference = next(((a, b) for a, b in zip_longest(lines, rank0_lines, fillvalue="nothing more") if a != b), None)
    any_differs = torch.tensor([difference is not None], dtype=torch.int64, device=group.device)
    all_reduce(any_differs, group, op="max")
    if difference is not None:
        raise InputError(
            f"rank {group.rank} has {difference[0]}, where rank 0 has {difference[1]}; build the same module with the same "
            "settings on every rank"
        )
    if int(any_differs):
        raise PeerFailedError("another rank has not the module or the settings of rank 0, and says which")
