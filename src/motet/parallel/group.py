"""The group of ranks that a process belongs to: how it is started, agreed with, and left.

A world of one has no process group at all. Every attempt of a restarted group meets on a key prefix of its own, because
a store that outlives its ranks still holds the addresses of dead ones.
"""

import json
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore

from motet.core.errors import InputError, MotetError, PeerFailedError
from motet.parallel.place import Place

CpuBackend = Literal["auto", "motet", "gloo"]


@dataclass(frozen=True)
class Group:
    """The ranks that work together, as this one sees them."""

    rank: int
    world: int
    process_group: dist.ProcessGroup | None
    """None in a world of one."""
    device: torch.device


def pick_device(kind: Literal["auto", "cpu", "cuda"], place: Place) -> torch.device:
    """The device of this rank; `auto` takes CUDA when every local rank can have a device of its own."""
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if kind == "cpu" or (kind == "auto" and devices < place.local_world):
        return torch.device("cpu")
    if not devices:
        raise InputError("run.device = 'cuda', but torch finds no CUDA device on this machine; use run.device=cpu")
    if devices < place.local_world:
        raise InputError(
            f"run.device = 'cuda', but this machine has {devices} CUDA devices for {place.local_world} local ranks; "
            f"start {devices} ranks here or use run.device=cpu"
        )
    return torch.device("cuda", place.local_rank)


@contextmanager
def start_group(
    place: Place, device: torch.device | str, timeout_s: float, cpu_backend: CpuBackend = "auto"
) -> Iterator[Group]:
    """Join the others, and leave quietly at the end. `timeout_s` bounds each wait for another rank."""
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if place.world == 1:
        yield Group(0, 1, None, device)
        return
    dist.init_process_group(
        backend=_backends(device, cpu_backend),
        store=PrefixStore(f"motet-{place.attempt}", _open_store(place, timeout_s)),
        rank=place.rank,
        world_size=place.world,
        timeout=timedelta(seconds=timeout_s),
        device_id=device if device.type == "cuda" else None,
    )
    try:
        yield Group(place.rank, place.world, dist.group.WORLD, device)
        # Whoever leaves first closes its connections: not before everybody has received what it was sent.
        dist.all_reduce(torch.zeros(1, device=device))
    finally:
        dist.destroy_process_group()


def _backends(device: torch.device, cpu_backend: CpuBackend) -> str:
    if device.type == "cuda":  # small agreements (the step to stop at, names of folders) stay on the CPU
        return "cpu:gloo,cuda:nccl"
    if cpu_backend == "auto":
        cpu_backend = "motet" if sys.platform == "linux" and platform.machine() == "x86_64" else "gloo"
    if cpu_backend == "motet":
        from motet.collectives import shm_backend
    return f"cpu:{cpu_backend}"


@contextmanager
def meeting(place: Place, timeout_s: float) -> Iterator[tuple[Place, Store]]:
    """A store that all ranks share before their group starts, and the place with which to start the group then.

    torchrun's store outlives the ranks, so that what one attempt left there can be read by the next.
    """
    store = _open_store(place, timeout_s)
    yield replace(place, served=True), store


def agree(store: Store, rank: int, key: str, decide: Callable[[], str]) -> str:
    """What rank 0 decides, on every rank. When it fails with a MotetError, the others end with a PeerError."""
    if rank != 0:
        return answer(store, key)
    try:
        value = decide()
    except MotetError as error:
        store.set(key, json.dumps({"failed": str(error)}))
        raise
    store.set(key, json.dumps({"value": value}))
    return value


def answer(store: Store, key: str) -> str:
    """What rank 0 has decided under this key; waits for it."""
    found = json.loads(store.get(key))
    if "failed" in found:
        raise PeerFailedError(f"rank 0 failed: {found['failed']}")
    return str(found["value"])


def _open_store(place: Place, timeout_s: float) -> Store:
    timeout = timedelta(seconds=timeout_s)
    if place.rendezvous.startswith("file://"):
        store = FileStore(place.rendezvous.removeprefix("file://"), place.world)
        store.set_timeout(timeout)
        return store
    host, _, port = place.rendezvous.removeprefix("tcp://").rpartition(":")
    serves = place.rank == 0 and not place.served
    return TCPStore(host.strip("[]"), int(port), place.world, is_master=serves, timeout=timeout, wait_for_workers=False)
