"""Ranks start alike: modules and settings are compared, and parameters and buffers broadcast from the first rank."""

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from types import CellType, FunctionType

import numpy as np
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
    """A line for each attribute besides parameters, buffers and modules, with what its value consists of. Where a
    factory draws random numbers or reads values of parameters, it depends on whether parameters have values."""
    names = {id(t): name for named in (module.named_parameters(), module.named_buffers()) for name, t in named}
    return [
        f"{type(inner).__name__} {name} with {key} = {', '.join(_leaves(value, names, set()))}"
        for name, inner in module.named_modules()
        for key, value in sorted(vars(inner).items())
        if key not in ("_parameters", "_buffers", "_modules")
    ]


def _leaves(value: object, names: Mapping[int, str], seen: set[int]) -> Iterator[str]:
    """Numbers, texts and tensors that a value consists of; other objects have no memory address in them."""
    if isinstance(value, Tensor | np.ndarray):
        yield names.get(id(value)) or f"a tensor of shape {tuple(value.shape)}, {value.dtype}, {_checksum(value)}"
    elif isinstance(value, bool | int | float | str):
        yield repr(value)
    elif id(value) not in seen:
        seen.add(id(value))
        yield type(value).__name__
        parts: Iterable[object] = ()
        if isinstance(value, Mapping):
            parts = (part for key, each in value.items() for part in (key if isinstance(key, str) else "", each))
        elif isinstance(value, list | tuple | partial):
            parts = (value.func, value.args, value.keywords) if isinstance(value, partial) else value
        elif isinstance(value, FunctionType):
            parts = (cell.cell_contents for cell in value.__closure__ or () if cell != CellType())  # not empty
        for part in parts:
            yield from _leaves(part, names, seen)


def _checksum(values: Tensor | np.ndarray) -> str:
    """A checksum of the bytes of a tensor or an array."""
    if isinstance(values, Tensor) and (values.is_meta or values.layout != torch.strided):
        return f"{values.device}, {values.layout}"
    array = (
        values.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy() if isinstance(values, Tensor) else values
    )
    return f"{zlib.crc32(array.tobytes()):08x}"


def all_ranks(condition: bool, group: RankGroup) -> bool:
    """Whether a condition holds on all ranks."""
    flag = torch.tensor(int(condition), device=group.decision_device)
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
    first_lines = broadcast_text("\n".join(lines), group).split("\n")
    return next(((a, b) for a, b in zip_longest(lines, first_lines, fillvalue="nothing more") if a != b), None)


def broadcast_text(text: str, group: RankGroup) -> str:
    """The text of the first rank."""
    encoded, device = text.encode(), group.decision_device
    size = torch.tensor([len(encoded)], device=device)
    broadcast(size, group)
    received = torch.frombuffer(bytearray(encoded.ljust(int(size))[: int(size)]), dtype=torch.uint8).to(device)
    broadcast(received, group)
    return received.cpu().numpy().tobytes().decode()


def refuse_together(problem: str, group: RankGroup) -> None:
    """Raise on all ranks if any of them has a problem, a sentence; the first that has one says it."""
    refusing = torch.tensor([group.world - group.rank if problem else 0], device=group.decision_device)
    all_reduce(refusing, group, op="max")
    if first := int(refusing):
        check_input(group.world - first != group.rank, problem)
        raise PeerFailedError(f"rank {group.world - first} refuses the run, and says why")


def broadcast_buffers(module: nn.Module, ranks: RankGroup, *, only_persistent: bool = True) -> None:
    """Give all ranks the first rank's buffers: there is one set of them in every step, evaluation and checkpoint.
    Buffers that are not persistent are computed when a module is built; a rank may have them on the meta device."""
    for buffer in persistent_buffers(module).values() if only_persistent else module.buffers():
        if buffer.is_meta and ranks.device.type != "meta":
            torch.utils.swap_tensors(buffer, torch.empty_like(buffer, device=ranks.device))
        if not buffer.is_contiguous():
            buffer.data = buffer.data.contiguous()
        broadcast(buffer.data, ranks)  # By `data`, autograd does not count a write: replica checks read the count
