"""Who is who in a run with a parameter server, where they meet, and what must be the same for all.

Its ranks are numbered in this order: the desk, the servers, the workers. The desk's address is what they have to know:
under our own supervisor it is in a file beside the store, with torchrun or srun in the store.
"""

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from zlib import crc32

from torch import nn

from motet.core.errors import InputError, PeerFailedError
from motet.data.samples.loader import BatchLoader
from motet.parallel.parameter_server.process.parameter_store import ParameterPartition, tensor_bytes
from motet.parallel.parameter_server.process.tcp_transport import TcpTransport
from motet.parallel.parameter_server.protocol.messages import COORDINATOR
from motet.parallel.parameter_server.server_settings import extra_process_count, parse_address
from motet.parallel.process.launch_environment import RankEnvironment, coordinator_address_file
from motet.parallel.process.process_group import rendezvous_store
from motet.parallel.process.rank_consistency import described
from motet.train.job import Job

SHARES = "shares"
"""What the desk says of how a step is cut."""
LOOK_S = 0.05


@dataclass(frozen=True)
class Seat:
    """What one process is in a run."""

    job: Job
    place: RankEnvironment
    role: str
    """`desk`, `s0` and so on, `w0` and so on; those of workers that joined begin with the name of their machine."""
    failed: list[BaseException] = field(default_factory=list)
    """What a thread beside this one ended with."""

    @property
    def name(self) -> str:
        """Another one for each process that takes the place of one that ended."""
        return f"{self.role}.{self.place.incarnation}" if self.place.incarnation else self.role

    @property
    def before(self) -> str:
        """Whose place it takes."""
        return replace(self, place=replace(self.place, life=self.place.incarnation - 1)).name

    @property
    def is_worker(self) -> bool:
        return self.role.rpartition("/")[2].startswith("w")

    @property
    def has_joined(self) -> bool:
        """While the run went on already."""
        return "/" in self.role

    @property
    def server(self) -> "Seat | None":
        """That of the server that is a thread of this worker, if one is."""
        number = self.place.rank - 1
        if self.job.layout.server.placement == "own" or self.has_joined or number >= self.job.layout.server.count:
            return None
        return replace(self, role=f"s{number}")


def seat_of(job: Job, place: RankEnvironment) -> Seat:
    beside = extra_process_count(job.layout.server)
    if place.rank == 0:
        return Seat(job, place, COORDINATOR)
    if place.rank < beside:
        return Seat(job, place, f"s{place.rank - 1}")
    return Seat(job, place, f"w{place.rank - beside}")


def among_workers(seat: Seat) -> RankEnvironment:
    """As if there were only workers on this machine."""
    place = seat.place
    first = place.rank - place.local_rank
    others = max(0, min(extra_process_count(seat.job.layout.server) - first, place.local_world))
    if seat.has_joined:  # with others that all work
        others = 0
    workers = max(1, place.local_world - others)
    return replace(place, local_rank=max(0, place.local_rank - others), local_world=workers)


def same_of(job: Job, module: nn.Module, plan: ParameterPartition, data: BatchLoader | None) -> dict[str, str]:
    """What must be the same in every process: others would train on what does not belong together."""
    server = job.layout.server
    known = (
        plan.buckets,
        plan.slices,
        plan.optimizer_groups,
        plan.compression,
        plan.delay_compensation,
        job.precision.recipe,
    )
    layout = crc32(repr((known, server.count, server.copies, server.mode, server.staleness)).encode())
    frozen = [p.detach().cpu().contiguous().view(-1) for p in module.parameters() if not p.requires_grad]
    digest = crc32(repr(described(module)).encode())
    for tensor in frozen:
        digest = crc32(tensor_bytes(tensor), digest)
    found = {"model": f"{digest:08x}", "layout": f"{layout:08x}"}
    return found | ({"data": data.fingerprint} if data else {})


@contextmanager
def posted(seat: Seat, name: str, same: dict[str, str]) -> Iterator[TcpTransport]:
    """Connected to the desk, or the desk itself."""
    server = seat.job.layout.server
    host, port = None if seat.is_worker else _own_host(seat.place), 0
    local = seat.place.rendezvous.startswith("file://")
    if server.listen is not None and (name == COORDINATOR or (local and not seat.is_worker)):
        host, listened = parse_address(server.listen, "layout.server.listen")
        port = listened if name == COORDINATOR else 0
    try:
        post = TcpTransport(name, same | {"name": seat.job.name}, server.eviction_timeout_s / 2, host, port)
    except OSError as error:
        raise InputError(
            f"cannot listen at {host}:{port}: {error.strerror}; give layout.server.listen an address of this machine "
            "and a free port"
        ) from None
    try:
        if name == COORDINATOR:
            _tell_address(seat, *post.address)
        else:
            post.connect(COORDINATOR, _address(seat))
        yield post
    finally:
        post.close()


def _tell_address(seat: Seat, host: str, port: int) -> None:
    place = seat.place
    if place.rendezvous.startswith("file://"):
        _write(coordinator_address_file(place), f"{host}:{port}")
        return
    with rendezvous_store(place, seat.job.run.timeout_s) as (_, store):
        store.set(f"desk-{place.attempt}", f"{host}:{port}")


def _write(path: Path, address: str) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(address, encoding="utf-8")
    partial.rename(path)


def _address(seat: Seat) -> tuple[str, int]:
    place, limit_s = seat.place, seat.job.run.timeout_s
    if place.rendezvous.startswith("file://"):
        path, end = coordinator_address_file(place), time.monotonic() + limit_s
        while not path.exists():
            if time.monotonic() > end:
                raise PeerFailedError(f"the parameter server's desk has not begun within {limit_s:g} s")
            time.sleep(LOOK_S)
        return parse_address(path.read_text(encoding="utf-8"), "the desk's address")
    with rendezvous_store(place, limit_s) as (_, store):
        return parse_address(store.get(f"desk-{place.attempt}").decode(), "the desk's address")


def _own_host(place: RankEnvironment) -> str:
    """The address of this machine that leads to where the ranks meet."""
    if not place.rendezvous.startswith("tcp://"):
        return "127.0.0.1"
    host, _, port = place.rendezvous.removeprefix("tcp://").rpartition(":")
    (family, *_, address), *_ = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing
        found: str = probe.getsockname()[0]
    if found.startswith("127.") and place.local_world < place.world:
        raise InputError(
            f"{host}, where the ranks meet, is this machine's loopback address here, which others cannot reach; give "
            "the launcher an address of the network"
        )
    return found
