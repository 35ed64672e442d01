"""The roles of a parameter-server run, and the transport that connects them.
Ranks are numbered in this order: the coordinator, the servers, the workers. The coordinator publishes its address in a
file next to the store under our own launcher, and in the store under torchrun or srun.

The partition of the parameters and its checksum, which all processes of a run compute alike.
"""

import socket
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from zlib import crc32

from torch import nn

from motet.collectives.compression.codecs import parse_codec
from motet.core.errors import PeerFailedError, check_input, convert_os_errors
from motet.core.text_files import write_file_atomically
from motet.data.samples.loader import BatchLoader
from motet.parallel.parameter_server.process.server_process import (
    ParameterSlicingPlan,
    PushPullCompression,
    tensor_bytes,
)
from motet.parallel.parameter_server.process.tcp_transport import TcpTransport
from motet.parallel.parameter_server.protocol.messages import COORDINATOR, slice_parameters
from motet.parallel.parameter_server.server_settings import extra_process_count, parse_address
from motet.parallel.process.launch_environment import RankEnvironment, coordinator_address_file
from motet.parallel.process.process_group import module_signature, open_store
from motet.train.job import Job
from motet.train.optimizer.module_plan import group_parameters

WORK_ITEMS_ENTRY = "work_items_per_step"  # An entry of the coordinator's handshake
ADDRESS_POLL_INTERVAL_S = 0.05


@dataclass(frozen=True)
class ParameterServerRoleContext:
    """The role of one process in a run."""

    job: Job
    rank_env: RankEnvironment
    role_name: str  # `coordinator`, `s0`, `w0`; `host/w0` for a worker that joined while the run went on
    sibling_errors: list[BaseException] = field(default_factory=list)  # Errors of the process's other threads

    @property
    def process_name(self) -> str:
        """The role, with a number for a process that replaces one that ended."""
        return f"{self.role_name}.{self.rank_env.incarnation}" if self.rank_env.incarnation else self.role_name

    @property
    def predecessor_name(self) -> str:
        return replace(self, rank_env=replace(self.rank_env, incarnation=self.rank_env.incarnation - 1)).process_name

    @property
    def is_worker(self) -> bool:
        return self.role_name.rpartition("/")[2].startswith("w")

    @property
    def has_joined_late(self) -> bool:
        return "/" in self.role_name

    @property
    def colocated_server(self) -> "ParameterServerRoleContext | None":
        """The role of the server that runs as a thread of this worker, if any."""
        server, server_index = self.job.layout.server, self.rank_env.rank - 1
        if server.placement == "dedicated" or self.has_joined_late or server_index >= server.count:
            return None
        return replace(self, role_name=f"s{server_index}")

    @property
    def rank_env_among_workers(self) -> RankEnvironment:
        """The rank environment as if only workers ran on this machine."""
        env = self.rank_env  # the machine of a late worker has workers alone
        non_workers = 0 if self.has_joined_late else extra_process_count(self.job.layout.server)
        local_non_workers = max(0, min(non_workers - (env.rank - env.local_rank), env.local_world))
        workers = max(1, env.local_world - local_non_workers)
        return replace(env, local_rank=max(0, env.local_rank - local_non_workers), local_world=workers)


@contextmanager
def open_transport(
    role: ParameterServerRoleContext, name: str, handshake: dict[str, str], *, partition: ParameterSlicingPlan
) -> Iterator[TcpTransport]:
    """Connect to the coordinator, or listen as the coordinator."""
    server = role.job.layout.server
    host, port = None if role.is_worker else _reachable_host(role.rank_env), 0
    local = role.rank_env.rendezvous.startswith("file://")
    if server.listen is not None and (name == COORDINATOR or (local and not role.is_worker)):
        host, listened = parse_address(server.listen, "layout.server.listen")
        port = listened if name == COORDINATOR else 0
    handshake, timeout_s = handshake | {"name": role.job.name}, server.eviction_timeout_s / 2
    remedy = "give layout.server.listen an address of this machine and a free port"
    with convert_os_errors(f"listen at {host}:{port}", remedy):
        token, payload_sizes = role.rank_env.token, partition.payload_sizes
        assert token is not None
        transport = TcpTransport(
            name,
            handshake,
            timeout_s,
            token=token,
            payload_sizes=payload_sizes,
            host=host,
            port=port,
            start_timeout_s=role.job.run.timeout_s,
        )
    with closing(transport):
        if name == COORDINATOR:
            _publish_coordinator_address(role, *transport.address)
        else:
            transport.connect(COORDINATOR, _coordinator_address(role))
        yield transport


def _publish_coordinator_address(role: ParameterServerRoleContext, host: str, port: int) -> None:
    rank_env = role.rank_env
    if rank_env.rendezvous.startswith("file://"):
        write_file_atomically(coordinator_address_file(rank_env), f"{host}:{port}".encode())
        return
    open_store(rank_env, role.job.run.timeout_s).set(f"coordinator-{rank_env.attempt}", f"{host}:{port}")


def _coordinator_address(role: ParameterServerRoleContext) -> tuple[str, int]:
    rank_env, timeout_s = role.rank_env, role.job.run.timeout_s
    if rank_env.rendezvous.startswith("file://"):
        path, deadline_s = coordinator_address_file(rank_env), time.monotonic() + timeout_s
        while not path.exists():
            if time.monotonic() > deadline_s:
                raise PeerFailedError(f"the parameter server's coordinator has not started within {timeout_s:g} s")
            time.sleep(ADDRESS_POLL_INTERVAL_S)
        return parse_address(path.read_text(encoding="utf-8"), "the coordinator's address")
    published = open_store(rank_env, timeout_s).get(f"coordinator-{rank_env.attempt}")
    return parse_address(published.decode(), "the coordinator's address")


def _reachable_host(rank_env: RankEnvironment) -> str:
    if not rank_env.rendezvous.startswith("tcp://"):
        return "127.0.0.1"
    host, _, port = rank_env.rendezvous.removeprefix("tcp://").rpartition(":")
    (family, *_, address), *_ = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing
        local_address = str(probe.getsockname()[0])
    check_input(
        not local_address.startswith("127.") or rank_env.local_world >= rank_env.world,
        f"the rendezvous address {host} is this machine's loopback address here, which others cannot reach; give "
        "the launcher an address of the network",
    )
    return local_address


def build_partition(module: nn.Module, job: Job) -> ParameterSlicingPlan:
    """The slices of the module's parameters; the same in every process."""
    server, recipe = job.layout.server, job.precision.resolved
    named = {name: p for name, p in module.named_parameters() if p.requires_grad}
    groups = group_parameters(module, job.optimizer)
    group_indices = {name: index for index, members in enumerate(groups.values()) for name in members}
    sizes = {name: (group_indices[name], p.numel()) for name, p in named.items()}
    buckets, slices = slice_parameters(sizes, server.slice_numel(recipe.compute), server.count)
    codec_texts = server.compress_pushes, server.compress_pulls
    push_codec, pull_codec = (parse_codec(text) if text else None for text in codec_texts)
    compression = PushPullCompression(push_codec, pull_codec, server.error_feedback, job.run.seed)
    return ParameterSlicingPlan(buckets, slices, recipe, tuple(groups), compression, server.delay_compensation)


def build_handshake(
    job: Job, module: nn.Module, partition: ParameterSlicingPlan, *, data: BatchLoader | None = None
) -> dict[str, str]:
    """Checksums of the values that must be equal in every process."""
    server, p = job.layout.server, partition
    shared = p.buckets, p.slices, p.optimizer_groups, p.compression, p.delay_compensation, p.recipe
    layout = crc32(repr((shared, server.count, server.copies, server.mode, server.staleness)).encode())
    model = crc32(repr(module_signature(module)).encode())
    for parameter in module.parameters():
        if not parameter.requires_grad:
            model = crc32(tensor_bytes(parameter.detach().cpu().contiguous().view(-1)), model)
    return {"model": f"{model:08x}", "layout": f"{layout:08x}"} | ({"data": data.fingerprint} if data else {})
