"""Ranks start alike: modules and settings are compared, and parameters and buffers broadcast from the first rank."""

from collections.abc import Sequence
from itertools import zip_longest

import torch
from torch import nn

from motet.collectives.execute.api import RankGroupLike, all_reduce, broadcast
from motet.core.errors import InputError, PeerFailedError, check_input
from motet.models.blocks import find_blocks
from motet.parallel.process.module_inventory import persistent_buffers
from motet.parallel.process.process_group import RankGroup


def module_signature(module: nn.Module) -> list[str]:
    """A line for each parameter and block; ranks identify tensors by their position in this order."""
    blocks = set(find_blocks(module))
    parameters = [
        f"parameter {name} of shape {tuple(p.shape)}, {p.dtype}, {'trained' if p.requires_grad else 'frozen'}"
        for name, p in module.named_parameters()
    ]
    return parameters + [f"block {name}" for name, inner in module.named_modules() if inner in blocks]


def check_same_on_all_ranks(lines: Sequence[str], group: RankGroup) -> None:
    """Raise on all ranks if a rank has other lines than the first rank."""
    if group.world == 1:
        return
    encoded = "\n".join(lines).encode()
    size = torch.tensor([len(encoded)], device=group.device)
    broadcast(size, group)
    text = torch.tensor(list(encoded.ljust(int(size))[: int(size)]), dtype=torch.uint8, device=group.device)
    broadcast(text, group)
    first_lines = bytes(text.tolist()).decode().split("\n")
    difference = next(((a, b) for a, b in zip_longest(lines, first_lines, fillvalue="nothing more") if a != b), None)
    any_differs = torch.tensor([difference is not None], dtype=torch.int64, device=group.device)
    all_reduce(any_differs, group, op="max")
    if difference is not None:
        raise InputError(
            f"rank {group.rank} has {difference[0]}, where rank 0 has {difference[1]}; build the same module with the "
            "same settings on every rank"
        )
    if int(any_differs):
        raise PeerFailedError("another rank has not the module or the settings of rank 0, and says which")


def refuse_together(problem: str, group: RankGroup) -> None:
    """Raise on all ranks if any of them has a problem, a sentence; the first that has one says it."""
    refusing = torch.tensor([group.world - group.rank if problem else 0], device=group.device)
    all_reduce(refusing, group, op="max")
    if first := int(refusing):
        check_input(group.world - first != group.rank, problem)
        raise PeerFailedError(f"rank {group.world - first} refuses the run, and says why")


def broadcast_buffers(module: nn.Module, ranks: RankGroupLike) -> None:
    """Give all ranks the first rank's buffers: there is one set of them in every step, evaluation and checkpoint."""
    for buffer in persistent_buffers(module).values():
        if not buffer.is_contiguous():
            buffer.data = buffer.data.contiguous()
        broadcast(buffer.data, ranks)  # By `data`, autograd does not count a write: replica checks read the count


def broadcast_parameters_and_buffers(module: nn.Module, ranks: RankGroupLike) -> None:
    """Give all ranks the first rank's values, however the modules were initialised."""
    for parameter in module.parameters():
        parameter.data = parameter.data.contiguous()
        broadcast(parameter.data, ranks)
    broadcast_buffers(module, ranks)
