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

from motet.collectives.backend.arena import READY, Arena, make_memory, open_memory
from motet.collectives.backend.errors import CollectiveError, PeerLostError
from motet.collectives.backend.links import Link
from motet.collectives.backend.neighbours import Neighbour

_CONNECT_S = 2.0
_TOKEN_BYTES = 32


@dataclass(frozen=True)
class Card:
    """What a rank tells the others about itself."""

    host: str
    pid: int
    born: str
    """When the process started, in the kernel's ticks: a number of a dead process may be used again."""
    addresses: tuple[str, ...] = ()
    port: int = 0


@dataclass(frozen=True)
class Meeting:
    """Who is where."""

    rank: int
    cards: tuple[Card, ...]
    arena: Arena

    @property
    def local(self) -> dict[int, int]:
        """The ranks of this host, and their numbers within it."""
        here = self.cards[self.rank].host
        return {rank: i for i, rank in enumerate(r for r, card in enumerate(self.cards) if card.host == here)}

    def neighbours(self) -> dict[int, Neighbour]:
        return {
            local: Neighbour(rank, _process(rank, self.cards[rank]))
            for rank, local in self.local.items()
            if rank != self.rank
        }


def host_identity() -> str:
    """Processes with the same one can share memory, and see each other's processes."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    spaces = [Path(f"/proc/self/ns/{name}").stat().st_ino for name in ("net", "pid")]
    return "/".join(map(str, [boot, *spaces, os.getuid()]))


def born(pid: int) -> str:
    """When a process started."""
    # The name of the program, in parentheses, may hold anything.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


def meet(store: Store, rank: int, ranks: int, timeout_s: float) -> tuple[Meeting, dict[int, tuple[Link, Link]]]:
    """Exchange cards, attach to this host's memory, and connect to the ranks of other hosts."""
    server = socket.create_server(("", 0), backlog=2 * ranks)
    card = Card(host_identity(), os.getpid(), born(os.getpid()), _addresses(), server.getsockname()[1])
    store.set(f"card/{rank}", json.dumps(asdict(card)))
    cards = tuple(_card(store.get(f"card/{other}")) for other in range(ranks))
    same = [other for other in range(ranks) if cards[other].host == card.host]
    leader = same[0]
    if leader == rank:
        descriptor = make_memory(len(same))
        store.set(f"memory/{rank}", str(descriptor))
    else:
        descriptor = _open(rank, leader, cards[leader], int(store.get(f"memory/{leader}")))
    arena = Arena(len(same), descriptor)
    arena.words[arena.word(same.index(rank), READY)] = 1
    if leader == rank:
        _wait_for_all(arena, rank, same, timeout_s)
    os.close(descriptor)
    with server:
        far = [other for other in range(ranks) if other not in same]
        server.settimeout(timeout_s)
        return Meeting(rank, cards, arena), connect(store, server, rank, cards, far)


def _wait_for_all(arena: Arena, rank: int, same: list[int], timeout_s: float) -> None:
    """Whoever has made the memory keeps it open until all have mapped it."""
    deadline = time.monotonic() + timeout_s
    while absent := [other for i, other in enumerate(same) if not arena.words[arena.word(i, READY)]]:
        if time.monotonic() > deadline:
            raise PeerLostError(f"rank {rank}: ranks {absent} of this host did not join the group in {timeout_s:g} s")
        time.sleep(0.0005)


def _card(text: bytes) -> Card:
    found = json.loads(text)
    return Card(found["host"], found["pid"], found["born"], tuple(found["addresses"]), found["port"])


def _open(rank: int, leader: int, card: Card, descriptor: int) -> int:
    try:
        return open_memory(card.pid, descriptor)
    except OSError as error:
        raise CollectiveError(
            f"rank {rank} cannot open the memory that rank {leader} (process {card.pid}) shares: {error}; "
            "start all ranks of a host as the same user, or use the backend gloo"
        ) from error


def _process(rank: int, card: Card) -> int:
    """A descriptor of a rank's process, which tells when it ends."""
    try:
        descriptor = os.pidfd_open(card.pid)
        if born(card.pid) == card.born:
            return descriptor
        os.close(descriptor)
    except (ProcessLookupError, FileNotFoundError):
        pass  # It is gone: said below, with the case that its number is used again.
    raise PeerLostError(f"the process of rank {rank} has ended before the group was complete")


def _addresses() -> tuple[str, ...]:
    """Where this host may be reached, loopback last."""
    found = [
        address.address
        for addresses in psutil.net_if_addrs().values()
        for address in addresses
        if address.family == socket.AF_INET
    ]
    return tuple(sorted(set(found), key=lambda address: (address.startswith("127."), address)))


def connect(
    store: Store, server: socket.socket, rank: int, cards: tuple[Card, ...], far: list[int]
) -> dict[int, tuple[Link, Link]]:
    """Two sockets to every rank of another host: for collectives and for messages. The higher rank calls the lower."""
    if not far:
        return {}
    if rank == 0:
        store.set("token", uuid.uuid4().hex)
    token = store.get("token")[:_TOKEN_BYTES]
    streams: dict[tuple[int, int], socket.socket] = {}
    for other in far:
        if other < rank:
            for kind in (0, 1):
                streams[other, kind] = _call(rank, other, cards[other], token, kind)
    missing = 2 * sum(other > rank for other in far)
    while missing:
        try:
            stream, _ = server.accept()
        except TimeoutError:
            absent = [other for other in far if other > rank and (other, 1) not in streams]
            raise PeerLostError(f"rank {rank}: ranks {absent}, on other hosts, did not connect") from None
        stream.settimeout(_CONNECT_S)
        greeting = _exactly(stream, _TOKEN_BYTES + 5)
        if greeting[:_TOKEN_BYTES] != token:
            stream.close()
            continue
        stream.sendall(token)
        streams[int.from_bytes(greeting[_TOKEN_BYTES:-1], "little"), greeting[-1]] = stream
        missing -= 1
    return {other: (Link(other, streams[other, 0]), Link(other, streams[other, 1])) for other in far}


def _call(rank: int, other: int, card: Card, token: bytes, kind: int) -> socket.socket:
    """Connect to whichever address of a rank answers with the group's token."""
    for address in card.addresses:
        try:
            stream = socket.create_connection((address, card.port), timeout=_CONNECT_S)
            stream.sendall(token + rank.to_bytes(4, "little") + bytes([kind]))
            if _exactly(stream, _TOKEN_BYTES) == token:
                return stream
            stream.close()
        except OSError:
            continue
    raise CollectiveError(
        f"rank {rank} cannot reach rank {other} at any of {', '.join(card.addresses)}, port {card.port}; "
        "check the network between the hosts"
    )


def _exactly(stream: socket.socket, count: int) -> bytes:
    received = b""
    while len(received) < count and (more := stream.recv(count - len(received))):
        received += more
    return received
