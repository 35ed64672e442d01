"""The process group of a rank: its start, its rendezvous store, and decisions of rank 0 for all ranks.

A world of one has no process group. Every attempt of a restarted group has its key prefix in the store, because a store
that outlives its ranks still holds the addresses of dead ones.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore, Store, TCPStore

from motet.core.errors import MotetError, PeerFailedError, check_input
from motet.parallel.process.launch_environment import RankEnvironment, cpu_backend_name
from motet.parallel.torch_private import new_named_process_group

CpuBackend = Literal["auto", "motet", "gloo"]


@dataclass(frozen=True)
class RankGroup:
    """The ranks that work together, from the view of one of them."""

    rank: int
    world: int
    process_group: dist.ProcessGroup | None  # None in a world of one
    device: torch.device
    local_ranks: range | None = None  # Ranks of the world on this machine, where the launcher says so

    @property
    def decision_device(self) -> torch.device:
        """The device of numbers that ranks agree on before they train: in a rehearsal on the host, where they have
        values. Torch's fake process group leaves a tensor as this rank has it, so a rehearsed rank agrees with itself.
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
    from motet.collectives.shm_backend.shared_device import SHARED_DEVICE_BACKEND  # Importing it registers the backend

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
    """The store of all ranks. If it is opened before their group starts, the group is told that it exists.

    torchrun's store outlives the ranks, so that an attempt can read what an earlier one wrote.
    """
    timeout = timedelta(seconds=timeout_s)
    if rank_env.rendezvous.startswith("file://"):
        store = FileStore(rank_env.rendezvous.removeprefix("file://"), rank_env.world)
        store.set_timeout(timeout)
        return store
    host, _, port = rank_env.rendezvous.removeprefix("tcp://").rpartition(":")
    is_master = rank_env.rank == 0 and not rank_env.store_exists
    return TCPStore(host.strip("[]"), int(port), rank_env.world, is_master, timeout=timeout, wait_for_workers=False)
