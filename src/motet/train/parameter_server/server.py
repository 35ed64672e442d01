"""A server of a run: holds its parameter slices until the coordinator ends the run."""

import shutil
from functools import partial
from itertools import count
from pathlib import Path

import torch

from motet.parallel.parameter_server.process.parameter_store import ParameterStore
from motet.parallel.parameter_server.process.server_process import ParameterServerProcess
from motet.parallel.parameter_server.process.server_snapshots import ServerSnapshots
from motet.parallel.parameter_server.process.tcp_transport import EvictedError
from motet.parallel.parameter_server.protocol.parameter_slices import initial_placement
from motet.parallel.parameter_server.protocol.server_state_machine import ServerSliceState, ServerStateMachine
from motet.parallel.process.launch_environment import RankEnvironment
from motet.train.build import build_model
from motet.train.optimizer.sharded_optimizer import make_torch_optimizer
from motet.train.parameter_server.build_parameter_slicing import build_handshake, build_partition
from motet.train.parameter_server.process_roles import ParameterServerRoleContext, open_transport

SNAPSHOTS_FOLDER = "servers"  # In the run folder


def run_server(role: ParameterServerRoleContext, folder: Path) -> None:
    """Run until the end. A server that is evicted offers its place again, under another name."""
    job, timeout_s = role.job, role.job.run.timeout_s
    _, model = build_model(job, torch.device("cpu"))
    partition = build_partition(model.module, job)
    handshake = build_handshake(job, model.module, partition)
    del model
    placement = initial_placement(partition.slices, job.layout.server.count, job.layout.server.copies)
    snapshots = _open_snapshots(role, folder)
    predecessor_name, name = role.predecessor_name if role.rank_env.incarnation else "", role.process_name
    for attempt in count(1):
        with open_transport(role, name, handshake, partition=partition) as transport:
            # A server that replaces another has another name, and no slices until the coordinator gives it some.
            slice_ids = [slice_id for slice_id, (servers, _) in enumerate(placement.replicas) if name in servers]
            slice_states = {slice_id: ServerSliceState(is_initialized=False) for slice_id in slice_ids}
            known_placement = placement._replace(epoch=-1) if predecessor_name else placement
            state_machine = ServerStateMachine(name, known_placement, slice_states)
            store = ParameterStore(partition, partial(make_torch_optimizer, settings=job.optimizer))
            server = ParameterServerProcess(state_machine, store, transport, timeout_s=timeout_s, snapshots=snapshots)
            if predecessor_name:
                server.offer_takeover(predecessor_name)
            try:
                server.run()
                break
            except EvictedError:
                predecessor_name, name = name, f"{role.process_name}+{attempt}"
    if snapshots:
        snapshots.close_and_delete()


def _open_snapshots(role: ParameterServerRoleContext, folder: Path) -> ServerSnapshots | None:
    """Snapshots are for a server whose slices have no second copy, and that the launcher can restart."""
    server = role.job.layout.server
    if server.copies > 1 or not server.snapshot_every or not role.rank_env.rendezvous.startswith("file://"):
        return None
    return ServerSnapshots(snapshots_folder(folder, role.rank_env) / role.role_name, server.snapshot_every)


def snapshots_folder(folder: Path, rank_env: RankEnvironment) -> Path:
    """The folder of this start of the run, named after its rendezvous."""
    return folder / SNAPSHOTS_FOLDER / Path(rank_env.rendezvous.removeprefix("file://")).parent.name


def delete_old_snapshots(folder: Path, rank_env: RankEnvironment) -> None:
    """Delete the snapshots of earlier starts."""
    for old_folder in (folder / SNAPSHOTS_FOLDER).glob("*"):
        if old_folder != snapshots_folder(folder, rank_env):
            shutil.rmtree(old_folder, ignore_errors=True)
