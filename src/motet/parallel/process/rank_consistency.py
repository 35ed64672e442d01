"""Ranks start alike: modules and settings are compared, and parameters and buffers broadcast from the first rank."""

from collections.abc import Sequence
from itertools import zip_longest

import torch
from torch import Tensor, nn

from motet.collectives.execute.api import all_reduce, broadcast
from motet.core.errors import InputError, PeerFailedError, check_input
from motet.models.blocks import find_blocks
from motet.parallel.process.module_inventory import persistent_buffers
from motet.parallel.process.process_group import RankGroup


def module_signature(module: nn.Module) -> list[str]:
    """A line for each parameter, block, buffer and tie; ranks identify tensors by their position in this order."""
    blocks, names = set(find_blocks(module)), dict[Tensor, str]()
    buffers, all_parameters = module.named_buffers(), module.named_parameters(remove_duplicate=False)
    parameters = [
        f"parameter {name} of shape {tuple(p.shape)}, {p.dtype}, {'trained' if p.requires_grad else 'frozen'}"
        for name, p in module.named_parameters()
    ]
    return [
        *parameters,
        *(f"block {name}" for name, inner in module.named_modules() if inner in blocks),
        *(f"buffer {name} of shape {tuple(b.shape)}, {b.dtype}" for name, b in buffers),
        *(f"{name} tied to {first}" for name, p in all_parameters if (first := names.setdefault(p, name)) != name),
    ]


def module_attributes(module: nn.Module) -> list[str]:
    """A line for each number and text that a module keeps, some of which may come from values of parameters."""
    return [
        f"{type(inner).__name__} {name} with {key} = {value!r}"
        for name, inner in module.named_modules()
        for key, value in sorted(vars(inner).items())
        if isinstance(value, bool | int | float | str)
    ]


def all_ranks(condition: bool, group: RankGroup) -> bool:
    """Whether a condition holds on all ranks."""
    flag = torch.tensor(int(condition), device=group.device)
    all_reduce(flag, group, op="min")
    return bool(flag)


def check_same_on_all_ranks(lines: Sequence[str], group: RankGroup) -> None:
    """Raise on all ranks if a rank has other lines than the first rank."""
    if group.world == 1:
        return
    difference = first_difference(lines, group)
    is_same_everywhere = all_ranks(difference is None, group)
    if difference is not None:
        raise InputError(
            f"rank {group.rank} has {difference[0]}, where rank 0 has {difference[1]}; build the same module with the "
            "same settings on every rank"
        )
    if not is_same_everywhere:
        raise PeerFailedError("another rank has not the module or the settings of rank 0, and says which")


def first_difference(lines: Sequence[str], group: RankGroup) -> tuple[str, str] | None:
    """The first line of this rank that differs, and that of the first rank."""
    encoded = "\n".join(lines).encode()
    size = torch.tensor([len(encoded)], device=group.device)
    broadcast(size, group)
    text = torch.frombuffer(bytearray(encoded.ljust(int(size))[: int(size)]), dtype=torch.uint8).to(group.device)
    broadcast(text, group)
    first_lines = text.cpu().numpy().tobytes().decode().split("\n")
    return next(((a, b) for a, b in zip_longest(lines, first_lines, fillvalue="nothing more") if a != b), None)


def refuse_together(problem: str, group: RankGroup) -> None:
    """Raise on all ranks if any of them has a problem, a sentence; the first that has one says it."""
    refusing = torch.tensor([group.world - group.rank if problem else 0], device=group.device)
    all_reduce(refusing, group, op="max")
    if first := int(refusing):
        check_input(group.world - first != group.rank, problem)
        raise PeerFailedError(f"rank {group.world - first} refuses the run, and says why")


def broadcast_buffers(module: nn.Module, ranks: RankGroup, *, only_persistent: bool = True) -> None:
    """Give all ranks the first rank's buffers: there is one set of them in every step, evaluation and checkpoint.
    Buffers that are not persistent are computed when a module is built; a rank may have them on the meta device."""
    for buffer in persistent_buffers(module).values() if only_persistent else module.buffers():
        if buffer.is_meta:
            torch.utils.swap_tensors(buffer, torch.empty_like(buffer, device=ranks.device))
        if not buffer.is_contiguous():
            buffer.data = buffer.data.contiguous()
        broadcast(buffer.data, ranks)  # By `data`, autograd does not count a write: replica checks read the count
