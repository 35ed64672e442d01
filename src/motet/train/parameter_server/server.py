"""A server of a run: keeps its pieces of the parameters until the desk says that this is the end."""

import shutil
from functools import partial
from itertools import count
from pathlib import Path

import torch

from motet.parallel.parameter_server.process.parameter_store import ParameterPartition, ParameterStore
from motet.parallel.parameter_server.process.server_process import ParameterServerProcess
from motet.parallel.parameter_server.process.server_snapshots import ServerSnapshots
from motet.parallel.parameter_server.protocol.messages import ParameterPlacement
from motet.parallel.parameter_server.protocol.server_state_machine import ServerSliceState, ServerStateMachine
from motet.parallel.parameter_server.server_settings import assign_replicas
from motet.parallel.process.launch_environment import RankEnvironment
from motet.train.build import build_model
from motet.train.optimizer.sharded_optimizer import make_torch_optimizer
from motet.train.parameter_server.coordinator_parameters import build_partition
from motet.train.parameter_server.process_roles import ParameterServerRole, build_handshake, open_transport

SNAPSHOTS_FOLDER = "servers"  # In the run folder


def run_server(role: ParameterServerRole, folder: Path) -> None:
    job = role.job
    _, model = build_model(job, torch.device("cpu"))
    partition = build_partition(model.module, job)
    handshake = build_handshake(job, model.module, partition, None)
    del model
    snapshots = _open_snapshots(role, folder)
    predecessor_name, name = role.predecessor_name if role.rank_env.incarnation else "", role.process_name
    for attempt in count(1):
        server_ends = _serve_once(role, name, predecessor_name, (partition, handshake), snapshots)
        if server_ends:
            break
        predecessor_name, name = name, f"{role.process_name}+{attempt}"  # others have its part; it may be their second
    if snapshots:
        snapshots.close()
        snapshots.clear()


def _serve_once(
    role: ParameterServerRole,
    name: str,
    predecessor_name: str,
    partition_and_handshake: tuple[ParameterPartition, dict[str, str]],
    snapshots: ServerSnapshots | None,
) -> bool:
    """Whether this is the end; else the server was out of reach for too long."""
    job, (partition, handshake) = role.job, partition_and_handshake
    placement = ParameterPlacement(
        0, assign_replicas([slice_id.server_index for slice_id in partition.slices], job.layout.server)
    )
    server_slices = [piece for piece, replicas in enumerate(placement.replicas) if name in replicas.servers]
    state_machine = ServerStateMachine(
        name, placement, {piece: ServerSliceState(is_initialized=False) for piece in server_slices}
    )
    if predecessor_name:
        state_machine = ServerStateMachine(name, ParameterPlacement(-1, placement.replicas))
    store = ParameterStore(partition, partial(make_torch_optimizer, settings=job.optimizer))
    with open_transport(role, name, handshake) as transport:
        server = ParameterServerProcess(state_machine, store, transport, job.run.timeout_s, snapshots)
        if predecessor_name:
            server.offer_takeover(predecessor_name)
        server.run()
        return server.has_ended


def _open_snapshots(role: ParameterServerRole, folder: Path) -> ServerSnapshots | None:
    """For a server that is the only one to have its pieces, and whose place another process may take."""
    server = role.job.layout.server
    elastic = role.rank_env.rendezvous.startswith("file://")
    if server.copies > 1 or not server.snapshot_every or not elastic:
        return None
    return ServerSnapshots(snapshots_folder(folder, role.rank_env) / role.role_name, server.snapshot_every)


def snapshots_folder(folder: Path, rank_env: RankEnvironment) -> Path:
    """Of this start of the run, which has a place to meet of its own."""
    return folder / SNAPSHOTS_FOLDER / Path(rank_env.rendezvous.removeprefix("file://")).parent.name


def delete_old_snapshots(folder: Path, rank_env: RankEnvironment) -> None:
    """Snapshots of earlier starts."""
    for old_folder in (folder / SNAPSHOTS_FOLDER).glob("*"):
        if old_folder != snapshots_folder(folder, rank_env):
            shutil.rmtree(old_folder, ignore_errors=True)
