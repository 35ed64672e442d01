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
from motet.parallel.process.rank_consistency import module_signature
from motet.train.job import Job

WORK_ITEMS_ENTRY = "shares"  # What the desk says of how a step is cut
ADDRESS_POLL_INTERVAL_S = 0.05


@dataclass(frozen=True)
class ParameterServerRole:
    """What one process is in a run."""

    job: Job
    rank_env: RankEnvironment
    # `desk`, `s0` and so on, `w0` and so on; those of workers that joined begin with the name of their machine.
    role_name: str
    sibling_errors: list[BaseException] = field(default_factory=list)  # What a thread beside this one ended with

    @property
    def process_name(self) -> str:
        """Another one for each process that takes the place of one that ended."""
        return f"{self.role_name}.{self.rank_env.incarnation}" if self.rank_env.incarnation else self.role_name

    @property
    def predecessor_name(self) -> str:
        """Whose place it takes."""
        return replace(self, rank_env=replace(self.rank_env, incarnation=self.rank_env.incarnation - 1)).process_name

    @property
    def is_worker(self) -> bool:
        return self.role_name.rpartition("/")[2].startswith("w")

    @property
    def has_joined_late(self) -> bool:
        """While the run went on already."""
        return "/" in self.role_name

    @property
    def colocated_server(self) -> "ParameterServerRole | None":
        """That of the server that is a thread of this worker, if one is."""
        server_index = self.rank_env.rank - 1
        if (
            self.job.layout.server.placement == "dedicated"
            or self.has_joined_late
            or server_index >= self.job.layout.server.count
        ):
            return None
        return replace(self, role_name=f"s{server_index}")


def assign_role(job: Job, rank_env: RankEnvironment) -> ParameterServerRole:
    extra_processes = extra_process_count(job.layout.server)
    if rank_env.rank == 0:
        return ParameterServerRole(job, rank_env, COORDINATOR)
    if rank_env.rank < extra_processes:
        return ParameterServerRole(job, rank_env, f"s{rank_env.rank - 1}")
    return ParameterServerRole(job, rank_env, f"w{rank_env.rank - extra_processes}")


def rank_env_among_workers(role: ParameterServerRole) -> RankEnvironment:
    """As if there were only workers on this machine."""
    rank_env = role.rank_env
    first_rank = rank_env.rank - rank_env.local_rank
    local_non_workers = max(0, min(extra_process_count(role.job.layout.server) - first_rank, rank_env.local_world))
    if role.has_joined_late:  # with others that all work
        local_non_workers = 0
    workers = max(1, rank_env.local_world - local_non_workers)
    return replace(rank_env, local_rank=max(0, rank_env.local_rank - local_non_workers), local_world=workers)


def build_handshake(
    job: Job, module: nn.Module, partition: ParameterPartition, data: BatchLoader | None
) -> dict[str, str]:
    """What must be the same in every process: others would train on what does not belong together."""
    server = job.layout.server
    shared_layout = (
        partition.buckets,
        partition.slices,
        partition.optimizer_groups,
        partition.compression,
        partition.delay_compensation,
        job.precision.recipe,
    )
    layout = crc32(repr((shared_layout, server.count, server.copies, server.mode, server.staleness)).encode())
    frozen = [p.detach().cpu().contiguous().view(-1) for p in module.parameters() if not p.requires_grad]
    digest = crc32(repr(module_signature(module)).encode())
    for tensor in frozen:
        digest = crc32(tensor_bytes(tensor), digest)
    handshake = {"model": f"{digest:08x}", "layout": f"{layout:08x}"}
    return handshake | ({"data": data.fingerprint} if data else {})


@contextmanager
def open_transport(role: ParameterServerRole, name: str, handshake: dict[str, str]) -> Iterator[TcpTransport]:
    """Connected to the desk, or the desk itself."""
    server = role.job.layout.server
    host, port = None if role.is_worker else _reachable_host(role.rank_env), 0
    local = role.rank_env.rendezvous.startswith("file://")
    if server.listen is not None and (name == COORDINATOR or (local and not role.is_worker)):
        host, listened = parse_address(server.listen, "layout.server.listen")
        port = listened if name == COORDINATOR else 0
    try:
        transport = TcpTransport(name, handshake | {"name": role.job.name}, server.eviction_timeout_s / 2, host, port)
    except OSError as error:
        raise InputError(
            f"cannot listen at {host}:{port}: {error.strerror}; give layout.server.listen an address of this machine "
            "and a free port"
        ) from None
    try:
        if name == COORDINATOR:
            _publish_coordinator_address(role, *transport.address)
        else:
            transport.connect(COORDINATOR, _coordinator_address(role))
        yield transport
    finally:
        transport.close()


def _publish_coordinator_address(role: ParameterServerRole, host: str, port: int) -> None:
    rank_env = role.rank_env
    if rank_env.rendezvous.startswith("file://"):
        _write_atomically(coordinator_address_file(rank_env), f"{host}:{port}")
        return
    with rendezvous_store(rank_env, role.job.run.timeout_s) as (_, store):
        store.set(f"desk-{rank_env.attempt}", f"{host}:{port}")


def _write_atomically(path: Path, address: str) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(address, encoding="utf-8")
    partial.rename(path)


def _coordinator_address(role: ParameterServerRole) -> tuple[str, int]:
    rank_env, timeout_s = role.rank_env, role.job.run.timeout_s
    if rank_env.rendezvous.startswith("file://"):
        path, deadline_s = coordinator_address_file(rank_env), time.monotonic() + timeout_s
        while not path.exists():
            if time.monotonic() > deadline_s:
                raise PeerFailedError(f"the parameter server's desk has not begun within {timeout_s:g} s")
            time.sleep(ADDRESS_POLL_INTERVAL_S)
        return parse_address(path.read_text(encoding="utf-8"), "the desk's address")
    with rendezvous_store(rank_env, timeout_s) as (_, store):
        return parse_address(store.get(f"desk-{rank_env.attempt}").decode(), "the desk's address")


def _reachable_host(rank_env: RankEnvironment) -> str:
    """The address of this machine that leads to where the ranks meet."""
    if not rank_env.rendezvous.startswith("tcp://"):
        return "127.0.0.1"
    host, _, port = rank_env.rendezvous.removeprefix("tcp://").rpartition(":")
    (family, *_, address), *_ = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing
        local_address: str = probe.getsockname()[0]
    if local_address.startswith("127.") and rank_env.local_world < rank_env.world:
        raise InputError(
            f"{host}, where the ranks meet, is this machine's loopback address here, which others cannot reach; give "
            "the launcher an address of the network"
        )
    return local_address
