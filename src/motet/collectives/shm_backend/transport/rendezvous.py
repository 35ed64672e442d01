"""The rendezvous of a group: ranks find the ranks of their host, map its memory, and connect to other hosts."""

import os
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from torch.distributed import Store

from motet.collectives.program import PeerLostError
from motet.collectives.shm_backend.transport import shared_memory as shm
from motet.collectives.shm_backend.transport.host_connections import (
    KINDS,
    connect_to_other_hosts,
    publish_value,
    read_value,
)
from motet.collectives.shm_backend.transport.local_peers import LocalPeerProcess, LocalPeerSync
from motet.collectives.shm_backend.transport.sockets import PeerSocket
from motet.core.errors import convert_os_errors

_CONTACT_PATTERN = re.compile(r"(\d{1,9}) (\d{1,20}) ([ -~]{1,300})")
_MEMORY_PATTERN = re.compile(r"(\d{1,9})")


class RankContactInfo(NamedTuple):
    """The process and the host of a rank, as the store has them."""

    pid: int
    born: str  # The start of the process in kernel ticks, since the pid of a dead process may be used again
    host: str


class RendezvousResult(NamedTuple):
    """The hosts of all ranks, and the connections to the other ranks."""

    hosts: tuple[int, ...]  # The index of the host of each rank
    local_peers: LocalPeerSync
    collective_sockets: dict[int, PeerSocket]
    message_sockets: dict[int, PeerSocket]


def host_identity() -> str:
    """An identity that two processes share if they can share memory and see each other's pids."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    spaces = [Path(f"/proc/self/ns/{name}").stat().st_ino for name in ("net", "pid")]
    return "/".join(map(str, [boot, *spaces, os.getuid()]))


def process_start_ticks(pid: int) -> str:
    """The start of a process in kernel ticks since boot."""
    # The name of the program, in parentheses, may contain spaces.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


def establish_connections(store: Store, rank: int, ranks: int, *, timeout_s: float) -> RendezvousResult:
    """Exchange contacts, map the memory of this host, and connect to the ranks of other hosts."""
    contact = RankContactInfo(os.getpid(), process_start_ticks(os.getpid()), host_identity())
    store.set(f"contact/{rank}", "{} {} {}".format(*contact))
    contacts = [contact if other == rank else _read_contact(store, other) for other in range(ranks)]
    names = list(dict.fromkeys(other.host for other in contacts))
    local_ranks = [other for other in range(ranks) if contacts[other].host == contact.host]
    remote_ranks = [other for other in range(ranks) if other not in local_ranks]
    memory = _share_memory(store, rank, {other: contacts[other] for other in local_ranks}, timeout_s=timeout_s)
    streams = connect_to_other_hosts(store, rank, remote_ranks, timeout_s=timeout_s) if remote_ranks else {}
    sockets = [{other: PeerSocket(other, streams[other, kind]) for other in remote_ranks} for kind in KINDS]
    pidfds = {local: _open_pidfd(other, contacts[other]) for local, other in enumerate(local_ranks) if other != rank}
    peers = {local: LocalPeerProcess(local_ranks[local], pidfd) for local, pidfd in pidfds.items()}
    local_peers = LocalPeerSync(memory, local_ranks.index(rank), peers, rank=rank, timeout_s=timeout_s)
    return RendezvousResult(tuple(names.index(other.host) for other in contacts), local_peers, *sockets)


def _read_contact(store: Store, rank: int) -> RankContactInfo:
    pid, born, host = read_value(store, f"contact/{rank}", _CONTACT_PATTERN, writer=rank)
    return RankContactInfo(int(pid), born, host)


def _share_memory(
    store: Store, rank: int, local_contacts: dict[int, RankContactInfo], *, timeout_s: float
) -> shm.SharedMemorySegment:
    """Map the memory that the first of the local ranks makes."""
    local_ranks = list(local_contacts)
    leader, key = local_ranks[0], f"memory/{local_ranks[0]}"
    if leader == rank:
        descriptor = int(publish_value(store, key, lambda: str(shm.create_shared_memory(len(local_ranks)))))
    else:
        (number,) = read_value(store, key, _MEMORY_PATTERN, writer=leader)
        descriptor = shm.open_shared_memory(len(local_ranks), local_contacts[leader].pid, int(number))
    try:
        memory = shm.SharedMemorySegment(len(local_ranks), descriptor)
        memory.words[memory.word_index(local_ranks.index(rank), shm.PUBLISHED_ROUND)] = 1
        if leader == rank:
            _wait_until_all_mapped(memory, local_ranks, timeout_s)
    finally:
        os.close(descriptor)
    return memory


def _wait_until_all_mapped(memory: shm.SharedMemorySegment, local_ranks: list[int], timeout_s: float) -> None:
    """Keep the memory open in its leader, the first of the ranks, until all have mapped it."""
    deadline = time.monotonic() + timeout_s
    indices = {rank: memory.word_index(local, shm.PUBLISHED_ROUND) for local, rank in enumerate(local_ranks)}
    while absent := [rank for rank, index in indices.items() if not memory.words[index]]:
        if time.monotonic() > deadline:
            problem = f"ranks {absent} of this host did not join the group in {timeout_s:g} s"
            raise PeerLostError(f"rank {local_ranks[0]}: {problem}")
        time.sleep(0.0005)


def _open_pidfd(rank: int, contact: RankContactInfo) -> int:
    unless_ended = suppress(ProcessLookupError, FileNotFoundError)  # Its pid may also be used again
    with convert_os_errors(f"watch the process of rank {rank}", "use the backend gloo"), unless_ended:
        descriptor = os.pidfd_open(contact.pid)
        if process_start_ticks(contact.pid) == contact.born:
            return descriptor
        os.close(descriptor)
    raise PeerLostError(f"the process of rank {rank} has ended before the group was complete")
