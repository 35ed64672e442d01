"""The rendezvous of a group: ranks find the ranks of their host, map its memory, and connect to other hosts."""

import json
import os
import socket
import time
import uuid
from pathlib import Path
from typing import NamedTuple

import psutil
from torch.distributed import Store

from motet.collectives.errors import CollectiveError, PeerLostError
from motet.collectives.shm_backend.transport import shared_memory as shm
from motet.collectives.shm_backend.transport.local_peers import LocalPeerProcess, LocalPeerSync
from motet.collectives.shm_backend.transport.sockets import PeerSocket

_CONNECT_S = 2.0
_TOKEN_BYTES = 32


class RankContactInfo(NamedTuple):
    """The host, process and addresses of a rank, as the store has them."""

    host: str
    pid: int
    born: str  # The start of the process in kernel ticks, since the pid of a dead process may be used again
    addresses: list[str]
    port: int


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
    server = socket.create_server(("", 0), backlog=2 * ranks)
    pid, port = os.getpid(), server.getsockname()[1]
    contact = RankContactInfo(host_identity(), pid, process_start_ticks(pid), _host_addresses(), port)
    store.set(f"card/{rank}", json.dumps(contact))
    contacts = [RankContactInfo(*json.loads(store.get(f"card/{other}"))) for other in range(ranks)]
    names = list(dict.fromkeys(other.host for other in contacts))
    local_ranks = [other for other in range(ranks) if contacts[other].host == contact.host]
    leader, local_rank = local_ranks[0], local_ranks.index(rank)
    if leader == rank:
        descriptor = shm.create_shared_memory(len(local_ranks))
        store.set(f"memory/{rank}", str(descriptor))
    else:
        descriptor = _open_leader_memory(rank, leader, contacts[leader], descriptor=int(store.get(f"memory/{leader}")))
    memory = shm.SharedMemorySegment(len(local_ranks), descriptor)
    memory.words[memory.word_index(local_rank, shm.PUBLISHED_ROUND)] = 1
    if leader == rank:
        _wait_until_all_mapped(memory, local_ranks, timeout_s)
    os.close(descriptor)
    with server:
        server.settimeout(timeout_s)
        remote = {other: contacts[other] for other in range(ranks) if other not in local_ranks}
        streams = _connect_remote_ranks(store, server, rank, contacts=remote)
    sockets = [{other: PeerSocket(other, streams[other, kind]) for other in remote} for kind in range(2)]
    pidfds = {local: _open_pidfd(other, contacts[other]) for local, other in enumerate(local_ranks) if other != rank}
    peers = {local: LocalPeerProcess(local_ranks[local], pidfd) for local, pidfd in pidfds.items()}
    local_peers = LocalPeerSync(memory, local_rank, peers, rank=rank, timeout_s=timeout_s)
    return RendezvousResult(tuple(names.index(other.host) for other in contacts), local_peers, *sockets)


def _wait_until_all_mapped(memory: shm.SharedMemorySegment, local_ranks: list[int], timeout_s: float) -> None:
    """Keep the memory open in its leader, the first of the ranks, until all have mapped it."""
    deadline = time.monotonic() + timeout_s
    indices = {rank: memory.word_index(local, shm.PUBLISHED_ROUND) for local, rank in enumerate(local_ranks)}
    while absent := [rank for rank, index in indices.items() if not memory.words[index]]:
        if time.monotonic() > deadline:
            problem = f"ranks {absent} of this host did not join the group in {timeout_s:g} s"
            raise PeerLostError(f"rank {local_ranks[0]}: {problem}")
        time.sleep(0.0005)


def _open_leader_memory(rank: int, leader: int, contact: RankContactInfo, *, descriptor: int) -> int:
    try:
        return os.open(f"/proc/{contact.pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise CollectiveError(
            f"rank {rank} cannot open the memory that rank {leader} (process {contact.pid}) shares: {error}; "
            "start all ranks of a host as the same user, or use the backend gloo"
        ) from error


def _open_pidfd(rank: int, contact: RankContactInfo) -> int:
    try:
        descriptor = os.pidfd_open(contact.pid)
        if process_start_ticks(contact.pid) == contact.born:
            return descriptor
        os.close(descriptor)
    except (ProcessLookupError, FileNotFoundError):
        pass  # The process has ended, as in the case that its pid is used again.
    raise PeerLostError(f"the process of rank {rank} has ended before the group was complete")


def _host_addresses() -> list[str]:
    interfaces = psutil.net_if_addrs().values()
    addresses = {entry.address for entries in interfaces for entry in entries if entry.family == socket.AF_INET}
    return sorted(addresses, key=lambda address: (address.startswith("127."), address))


def _connect_remote_ranks(
    store: Store, server: socket.socket, rank: int, *, contacts: dict[int, RankContactInfo]
) -> dict[tuple[int, int], socket.socket]:
    """Open two streams to every rank of another host, for collectives (0) and messages (1), from the higher rank."""
    if not contacts:
        return {}
    if rank == 0:
        store.set("token", uuid.uuid4().hex)
    token = store.get("token")[:_TOKEN_BYTES]
    streams: dict[tuple[int, int], socket.socket] = {}
    for other, contact in contacts.items():
        for kind in range(2) if other < rank else ():
            streams[other, kind] = _connect_to_rank(rank, other, contact, token=token, kind=kind)
    while len(streams) < 2 * len(contacts):
        try:
            stream, _ = server.accept()
        except TimeoutError:
            absent = [other for other in contacts if other > rank and (other, 1) not in streams]
            raise PeerLostError(f"rank {rank}: ranks {absent}, on other hosts, did not connect") from None
        stream.settimeout(_CONNECT_S)
        greeting = _receive_exactly(stream, _TOKEN_BYTES + 5)
        if greeting[:_TOKEN_BYTES] != token:
            stream.close()
            continue
        stream.sendall(token)
        streams[int.from_bytes(greeting[_TOKEN_BYTES:-1], "little"), greeting[-1]] = stream
    return streams


def _connect_to_rank(rank: int, other: int, contact: RankContactInfo, *, token: bytes, kind: int) -> socket.socket:
    for address in contact.addresses:
        try:
            stream = socket.create_connection((address, contact.port), timeout=_CONNECT_S)
            stream.sendall(token + rank.to_bytes(4, "little") + bytes([kind]))
            if _receive_exactly(stream, _TOKEN_BYTES) == token:
                return stream
            stream.close()
        except OSError:
            continue
    raise CollectiveError(
        f"rank {rank} cannot reach rank {other} at any of {', '.join(contact.addresses)}, port {contact.port}; "
        "check the network between the hosts"
    )


def _receive_exactly(stream: socket.socket, count: int) -> bytes:
    received = b""
    while len(received) < count and (more := stream.recv(count - len(received))):
        received += more
    return received
