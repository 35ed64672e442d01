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
from motet.train.assemble import build_model
from motet.train.optimizer import make_optimizer
from motet.train.served.meet import Seat, posted, same_of
from motet.train.served.mirror import plan_of

SNAPSHOTS = "servers"
"""In the run folder."""


def run_server(seat: Seat, folder: Path) -> None:
    job = seat.job
    _, model = build_model(job, torch.device("cpu"))
    plan = plan_of(model.module, job)
    same = same_of(job, model.module, plan, None)
    del model
    snapshots = _snapshots(seat, folder)
    before, name = seat.before if seat.place.incarnation else "", seat.name
    for again in count(1):
        server_ends = _serve(seat, name, before, (plan, same), snapshots)
        if server_ends:
            break
        before, name = name, f"{seat.name}+{again}"  # others have its part; it may be their second
    if snapshots:
        snapshots.close()
        snapshots.clear()


def _serve(
    seat: Seat,
    name: str,
    before: str,
    known: tuple[ParameterPartition, dict[str, str]],
    snapshots: ServerSnapshots | None,
) -> bool:
    """Whether this is the end; else the server was out of reach for too long."""
    job, (plan, same) = seat.job, known
    view = ParameterPlacement(0, assign_replicas([piece.server_index for piece in plan.slices], job.layout.server))
    mine = [piece for piece, owned in enumerate(view.replicas) if name in owned.servers]
    keeper = ServerStateMachine(name, view, {piece: ServerSliceState(is_initialized=False) for piece in mine})
    if before:
        keeper = ServerStateMachine(name, ParameterPlacement(-1, view.replicas))
    shelf = ParameterStore(plan, partial(make_optimizer, settings=job.optimizer))
    with posted(seat, name, same) as post:
        server = ParameterServerProcess(keeper, shelf, post, job.run.timeout_s, snapshots)
        if before:
            server.offer_takeover(before)
        server.run()
        return server.has_ended


def _snapshots(seat: Seat, folder: Path) -> ServerSnapshots | None:
    """For a server that is the only one to have its pieces, and whose place another process may take."""
    server = seat.job.layout.server
    elastic = seat.place.rendezvous.startswith("file://")
    if server.copies > 1 or not server.snapshot_every or not elastic:
        return None
    return ServerSnapshots(snapshots_of(folder, seat.place) / seat.role, server.snapshot_every)


def snapshots_of(folder: Path, place: RankEnvironment) -> Path:
    """Of this start of the run, which has a place to meet of its own."""
    return folder / SNAPSHOTS / Path(place.rendezvous.removeprefix("file://")).parent.name


def forget_old(folder: Path, place: RankEnvironment) -> None:
    """Snapshots of earlier starts."""
    for old in (folder / SNAPSHOTS).glob("*"):
        if old != snapshots_of(folder, place):
            shutil.rmtree(old, ignore_errors=True)
