"""What must be alike on all ranks, compared before training: other modules or settings would go unnoticed otherwise."""

from collections.abc import Sequence
from itertools import zip_longest

import torch
from torch import nn

from motet.collectives.execute.api import all_reduce, broadcast
from motet.core.errors import InputError, PeerFailedError
from motet.parallel.group import Group
from motet.parallel.wrap import blocks_of


def described(module: nn.Module) -> list[str]:
    """A line for each parameter and block, in order: by the place in these lists ranks know what others send."""
    blocks = set(blocks_of(module))
    return [
        *(
            f"parameter {name} of shape {tuple(p.shape)}, {p.dtype}, {'trained' if p.requires_grad else 'frozen'}"
            for name, p in module.named_parameters()
        ),
        *(f"block {name}" for name, inner in module.named_modules() if inner in blocks),
    ]


def refuse_unlike(lines: Sequence[str], ranks: Group) -> None:
    """Every rank must have the lines of the first one."""
    if ranks.world == 1:
        return
    mine = "\n".join(lines).encode()
    size = torch.tensor([len(mine)], device=ranks.device)
    broadcast(size, ranks)
    text = torch.zeros(int(size), dtype=torch.uint8)
    if ranks.rank == 0:
        text = torch.frombuffer(bytearray(mine), dtype=torch.uint8).clone()
    text = text.to(ranks.device)
    broadcast(text, ranks)
    firsts = bytes(text.tolist()).decode().split("\n")
    unlike = next(((a, b) for a, b in zip_longest(lines, firsts, fillvalue="nothing more") if a != b), None)
    someone = torch.tensor([unlike is not None], dtype=torch.int64, device=ranks.device)
    all_reduce(someone, ranks, op="max")
    if unlike is not None:
        raise InputError(
            f"rank {ranks.rank} has {unlike[0]}, where rank 0 has {unlike[1]}; build the same module with the same "
            "settings on every rank"
        )
    if int(someone):
        raise PeerFailedError("another rank has not the module or the settings of rank 0, and says which")
