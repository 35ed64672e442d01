"""The process group of a rank: its start, its rendezvous store, decisions of rank 0, and buffers that it broadcasts.

A world of one has no process group. Every attempt of a restarted group has its key prefix in the store, because a store
that outlives its ranks still holds the addresses of dead ones.

Ranks start alike: modules and settings are compared, and parameters and buffers broadcast from the first rank.
"""

import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import zip_longest
from types import CellType, FunctionType
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import FileStore, PrefixStore, Store, TCPStore

from motet.collectives.execute.api import all_gather, all_reduce, broadcast
from motet.collectives.shm_backend.transport.rendezvous import host_identity
from motet.core.errors import InputError, MotetError, PeerFailedError, check_input
from motet.models.user_module import find_blocks
from motet.parallel.process.launch_environment import RankEnvironment, cpu_backend_name
from motet.parallel.process.module_inventory import load_buffers, persistent_buffers
from motet.parallel.torch_private import new_named_process_group

CpuBackend = Literal["auto", "motet", "gloo"]


@dataclass(frozen=True)
class RankGroup:
    """The ranks that work together, from the view of one of them."""

    rank: int
    world: int
    process_group: dist.ProcessGroup | None  # None in a world of one
    device: torch.device
    local_ranks: range | None = None  # Ranks of the world on this machine, where the launcher gives them

    @property
    def decision_device(self) -> torch.device:
        """The device of numbers that ranks agree on before they train: in a rehearsal on the host, where they have
        values. Torch's fake process group leaves a tensor unchanged, so a rehearsed rank agrees with itself.
        """
        return torch.device("cpu") if self.device.type == "meta" else self.device


def default_rank_group(device: torch.device) -> RankGroup:
    """All ranks of the process group that is started, or a world of one."""
    ranks = (dist.get_rank(), dist.get_world_size(), dist.group.WORLD) if dist.is_initialized() else (0, 1, None)
    return RankGroup(*ranks, device)


def new_process_group(group: RankGroup, ranks: Sequence[int]) -> dist.ProcessGroup | None:
    """A process group of these ranks of `group`, which need not be the world; None on other ranks.

    Ranks call this once for each set of disjoint groups: members with their group, and others with any of them.
    """
    assert group.process_group is not None
    world_ranks = dist.get_process_group_ranks(group.process_group)
    return new_named_process_group([world_ranks[rank] for rank in ranks])


def process_group_of_one() -> dist.ProcessGroup:
    """A process group of this rank alone, which FSDP2 needs, and which starts torch.distributed in a world of one."""
    if dist.is_initialized():
        process_group = new_named_process_group([dist.get_rank()])
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        process_group = dist.group.WORLD
    assert process_group is not None
    return process_group


@contextmanager
def world_of_one() -> Iterator[None]:
    """A context at whose end the group of `process_group_of_one` ends, if it has started torch.distributed."""
    was_initialized = dist.is_initialized()
    try:
        yield
    finally:
        if dist.is_initialized() and not was_initialized:
            dist.destroy_process_group()


def pick_device(
    kind: Literal["auto", "cpu", "cuda"], rank_env: RankEnvironment, *, share_device: bool = False
) -> torch.device:
    """The device of this rank; `auto` takes CUDA when there is a device for every local rank."""
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    needed = 1 if share_device else rank_env.local_world
    if kind == "cpu" or (kind == "auto" and devices < needed):
        return torch.device("cpu")
    check_input(devices, "run.device = 'cuda', but torch finds no CUDA device on this machine; use run.device=cpu")
    check_input(
        devices >= needed,
        f"run.device = 'cuda', but this machine has {devices} CUDA devices for {rank_env.local_world} local ranks; "
        f"start {devices} ranks here or use run.device=cpu",
    )
    return torch.device("cuda", rank_env.local_rank % devices)


@contextmanager
def start_process_group(
    rank_env: RankEnvironment,
    device: torch.device | str,
    timeout_s: float,
    *,
    cpu_backend: CpuBackend = "auto",
    share_device: bool = False,
) -> Iterator[RankGroup]:
    """Join the group, and leave it at the end. `timeout_s` bounds each wait for another rank. Ranks that share a device
    communicate through the CPU."""
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if rank_env.world == 1:
        with world_of_one():
            yield RankGroup(0, 1, None, device)
        return
    dist.init_process_group(
        backend=_shared_device_backends() if share_device else _backend_names(device, cpu_backend),
        store=PrefixStore(f"motet-{rank_env.attempt}", open_store(rank_env, timeout_s)),
        rank=rank_env.rank,
        world_size=rank_env.world,
        timeout=timedelta(seconds=timeout_s),
        device_id=device if device.type == "cuda" and not share_device else None,
    )
    try:
        yield RankGroup(rank_env.rank, rank_env.world, dist.group.WORLD, device, rank_env.local_ranks)
        # A rank that leaves closes its connections, so all ranks must have received everything before.
        dist.all_reduce(torch.zeros(1, device=device))
    finally:
        dist.destroy_process_group()


def _backend_names(device: torch.device, cpu_backend: CpuBackend) -> str:
    if device.type == "cuda":  # small decisions (the step to stop at, names of folders) stay on the CPU
        return "cpu:gloo,cuda:nccl"
    name = cpu_backend_name(cpu_backend)
    if name == "motet":
        from motet.collectives import shm_backend  # noqa: F401  (importing it registers the backend)
    return f"cpu:{name}"


def _shared_device_backends() -> str:
    check_input(cpu_backend_name("auto") == "motet", "run.share_device = true needs Linux on x86-64; leave it out")
    from motet.collectives.shm_backend.process_group import SHARED_DEVICE_BACKEND  # Importing it registers the backend

    return f"cpu:{SHARED_DEVICE_BACKEND},cuda:{SHARED_DEVICE_BACKEND}"


def broadcast_decision(store: Store, rank: int, key: str, *, decide: Callable[[], str]) -> str:
    """Rank 0's decision on every rank. If it fails with a MotetError, the others raise a PeerFailedError."""
    if rank != 0:
        return read_decision(store, key)
    try:
        value = decide()
    except MotetError as error:
        store.set(key, json.dumps({"failed": str(error)}))
        raise
    store.set(key, json.dumps({"value": value}))
    return value


def read_decision(store: Store, key: str) -> str:
    """Wait for rank 0's decision under this key."""
    decision = json.loads(store.get(key))
    if "failed" in decision:
        raise PeerFailedError(f"rank 0 failed: {decision['failed']}")
    return str(decision["value"])


def open_store(rank_env: RankEnvironment, timeout_s: float) -> Store:
    """The store of all ranks. A store that is opened before their group starts is reported to the group as existing.

    torchrun's store outlives the ranks, so that an attempt can read the keys of an earlier one.
    """
    timeout = timedelta(seconds=timeout_s)
    if rank_env.rendezvous.startswith("file://"):
        store = FileStore(rank_env.rendezvous.removeprefix("file://"), rank_env.world)
        store.set_timeout(timeout)
        return store
    host, _, port = rank_env.rendezvous.removeprefix("tcp://").rpartition(":")
    is_master = rank_env.rank == 0 and not rank_env.store_exists
    return TCPStore(host.strip("[]"), int(port), rank_env.world, is_master, timeout=timeout, wait_for_workers=False)


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
    """A line for each attribute besides parameters, buffers and modules, with the parts of its value. Where a
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


def ranks_on_this_host(group: RankGroup) -> int:
    """The ranks that run on this host, from one launch or several."""
    host = torch.tensor([zlib.crc32(host_identity().encode())], device=group.decision_device)
    hosts = host.new_empty(group.world)
    all_gather(hosts, host, group)
    return int((hosts == host).sum())


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
        raise PeerFailedError("another rank has another module or other settings than rank 0; see its error")


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
    """Raise on all ranks if any of them has a problem (a sentence), which the first of them reports."""
    refusing = torch.tensor([group.world - group.rank if problem else 0], device=group.decision_device)
    all_reduce(refusing, group, op="max")
    if first := int(refusing):
        check_input(group.world - first != group.rank, problem)
        raise PeerFailedError(f"rank {group.world - first} refuses the run; see its error")


def broadcast_buffers(
    module: nn.Module, ranks: RankGroup, *, only_persistent: bool = True, with_loads: bool = True
) -> None:
    """Give all ranks the first rank's buffers: there is one set of them in every step, evaluation and checkpoint.
    Buffers that are not persistent are computed when a module is built; a rank may have them on the meta device.
    Ranks change buffers of loads together, so that they stay equal without this."""
    skipped = set() if with_loads else set(load_buffers(module).values())
    for buffer in persistent_buffers(module).values() if only_persistent else module.buffers():
        if buffer in skipped:
            continue
        if buffer.is_meta and ranks.device.type != "meta":
            torch.utils.swap_tensors(buffer, torch.empty_like(buffer, device=ranks.device))
        if not buffer.is_contiguous():
            buffer.data = buffer.data.contiguous()
        broadcast(buffer.data, ranks)  # By `data`, autograd does not count a write: replica checks read the count
