"""How the ranks of a group find each other: who shares a host, the memory of that host, and sockets between hosts."""

import json
import os
import socket
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
from torch._C._distributed_c10d import Store

from motet.collectives.shm_backend.errors import CollectiveError, PeerLostError
from motet.collectives.shm_backend.transport.local_peers import LocalPeerProcess
from motet.collectives.shm_backend.transport.shared_memory import (
    PUBLISHED_ROUND,
    SharedMemorySegment,
    create_shared_memory,
    open_shared_memory,
)
from motet.collectives.shm_backend.transport.sockets import PeerSocket

_CONNECT_S = 2.0
_TOKEN_BYTES = 32


@dataclass(frozen=True)
class RankContactInfo:
    """What a rank tells the others about itself."""

    host: str
    pid: int
    born: str  # When the process started, in the kernel's ticks: a number of a dead process may be used again
    addresses: tuple[str, ...] = ()
    port: int = 0


@dataclass(frozen=True)
class RendezvousResult:
    """Who is where."""

    rank: int
    contacts: tuple[RankContactInfo, ...]
    shared_memory: SharedMemorySegment

    @property
    def local_index(self) -> dict[int, int]:
        """The ranks of this host, and their numbers within it."""
        own_host = self.contacts[self.rank].host
        return {rank: i for i, rank in enumerate(r for r, card in enumerate(self.contacts) if card.host == own_host)}

    def local_peers(self) -> dict[int, LocalPeerProcess]:
        return {
            local: LocalPeerProcess(rank, _open_pidfd(rank, self.contacts[rank]))
            for rank, local in self.local_index.items()
            if rank != self.rank
        }


def host_identity() -> str:
    """Processes with the same one can share memory, and see each other's processes."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    spaces = [Path(f"/proc/self/ns/{name}").stat().st_ino for name in ("net", "pid")]
    return "/".join(map(str, [boot, *spaces, os.getuid()]))


def process_start_ticks(pid: int) -> str:
    """When a process started."""
    # The name of the program, in parentheses, may hold anything.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


def establish_connections(
    store: Store, rank: int, ranks: int, timeout_s: float
) -> tuple[RendezvousResult, dict[int, tuple[PeerSocket, PeerSocket]]]:
    """Exchange cards, attach to this host's memory, and connect to the ranks of other hosts."""
    server = socket.create_server(("", 0), backlog=2 * ranks)
    own_contact = RankContactInfo(
        host_identity(), os.getpid(), process_start_ticks(os.getpid()), _host_addresses(), server.getsockname()[1]
    )
    store.set(f"card/{rank}", json.dumps(asdict(own_contact)))
    contacts = tuple(_parse_contact(store.get(f"card/{other}")) for other in range(ranks))
    local_ranks = [other for other in range(ranks) if contacts[other].host == own_contact.host]
    leader = local_ranks[0]
    if leader == rank:
        descriptor = create_shared_memory(len(local_ranks))
        store.set(f"memory/{rank}", str(descriptor))
    else:
        descriptor = _open_leader_memory(rank, leader, contacts[leader], int(store.get(f"memory/{leader}")))
    shared_memory = SharedMemorySegment(len(local_ranks), descriptor)
    shared_memory.words[shared_memory.word_index(local_ranks.index(rank), PUBLISHED_ROUND)] = 1
    if leader == rank:
        _wait_until_all_mapped(shared_memory, rank, local_ranks, timeout_s)
    os.close(descriptor)
    with server:
        remote_ranks = [other for other in range(ranks) if other not in local_ranks]
        server.settimeout(timeout_s)
        return RendezvousResult(rank, contacts, shared_memory), connect_remote_ranks(
            store, server, rank, contacts, remote_ranks
        )


def _wait_until_all_mapped(
    shared_memory: SharedMemorySegment, rank: int, local_ranks: list[int], timeout_s: float
) -> None:
    """Whoever has made the memory keeps it open until all have mapped it."""
    deadline = time.monotonic() + timeout_s
    while absent := [
        other
        for i, other in enumerate(local_ranks)
        if not shared_memory.words[shared_memory.word_index(i, PUBLISHED_ROUND)]
    ]:
        if time.monotonic() > deadline:
            raise PeerLostError(f"rank {rank}: ranks {absent} of this host did not join the group in {timeout_s:g} s")
        time.sleep(0.0005)


def _parse_contact(text: bytes) -> RankContactInfo:
    fields = json.loads(text)
    return RankContactInfo(fields["host"], fields["pid"], fields["born"], tuple(fields["addresses"]), fields["port"])


def _open_leader_memory(rank: int, leader: int, contact: RankContactInfo, descriptor: int) -> int:
    try:
        return open_shared_memory(contact.pid, descriptor)
    except OSError as error:
        raise CollectiveError(
            f"rank {rank} cannot open the memory that rank {leader} (process {contact.pid}) shares: {error}; "
            "start all ranks of a host as the same user, or use the backend gloo"
        ) from error


def _open_pidfd(rank: int, contact: RankContactInfo) -> int:
    """A descriptor of a rank's process, which tells when it ends."""
    try:
        descriptor = os.pidfd_open(contact.pid)
        if process_start_ticks(contact.pid) == contact.born:
            return descriptor
        os.close(descriptor)
    except (ProcessLookupError, FileNotFoundError):
        pass  # It is gone: said below, with the case that its number is used again.
    raise PeerLostError(f"the process of rank {rank} has ended before the group was complete")


def _host_addresses() -> tuple[str, ...]:
    """Where this host may be reached, loopback last."""
    addresses_v4 = [
        address.address
        for addresses in psutil.net_if_addrs().values()
        for address in addresses
        if address.family == socket.AF_INET
    ]
    return tuple(sorted(set(addresses_v4), key=lambda address: (address.startswith("127."), address)))


def connect_remote_ranks(
    store: Store, server: socket.socket, rank: int, contacts: tuple[RankContactInfo, ...], remote_ranks: list[int]
) -> dict[int, tuple[PeerSocket, PeerSocket]]:
    """Two sockets to every rank of another host: for collectives and for messages. The higher rank calls the lower."""
    if not remote_ranks:
        return {}
    if rank == 0:
        store.set("token", uuid.uuid4().hex)
    token = store.get("token")[:_TOKEN_BYTES]
    streams: dict[tuple[int, int], socket.socket] = {}
    for other in remote_ranks:
        if other < rank:
            for kind in (0, 1):
                streams[other, kind] = _connect_to_rank(rank, other, contacts[other], token, kind)
    missing = 2 * sum(other > rank for other in remote_ranks)
    while missing:
        try:
            stream, _ = server.accept()
        except TimeoutError:
            absent = [other for other in remote_ranks if other > rank and (other, 1) not in streams]
            raise PeerLostError(f"rank {rank}: ranks {absent}, on other hosts, did not connect") from None
        stream.settimeout(_CONNECT_S)
        greeting = _receive_exactly(stream, _TOKEN_BYTES + 5)
        if greeting[:_TOKEN_BYTES] != token:
            stream.close()
            continue
        stream.sendall(token)
        streams[int.from_bytes(greeting[_TOKEN_BYTES:-1], "little"), greeting[-1]] = stream
        missing -= 1
    return {
        other: (PeerSocket(other, streams[other, 0]), PeerSocket(other, streams[other, 1])) for other in remote_ranks
    }


def _connect_to_rank(rank: int, other: int, contact: RankContactInfo, token: bytes, kind: int) -> socket.socket:
    """Connect to whichever address of a rank answers with the group's token."""
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
