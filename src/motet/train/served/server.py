"""A server of a run: keeps its pieces of the parameters until the desk says that this is the end."""

import shutil
from functools import partial
from itertools import count
from pathlib import Path

import torch

from motet.parallel.place import Place
from motet.parallel.server.keeper import Keeper, Kept
from motet.parallel.server.protocol import View
from motet.parallel.server.serve import Server
from motet.parallel.server.settings import owners_of
from motet.parallel.server.shelf import Plan, Shelf
from motet.parallel.server.snapshot import Snapshots
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
    before, name = seat.before if seat.place.life else "", seat.name
    for again in count(1):
        server_ends = _serve(seat, name, before, (plan, same), snapshots)
        if server_ends:
            break
        before, name = name, f"{seat.name}+{again}"  # others have its part; it may be their second
    if snapshots:
        snapshots.close()
        snapshots.clear()


def _serve(seat: Seat, name: str, before: str, known: tuple[Plan, dict[str, str]], snapshots: Snapshots | None) -> bool:
    """Whether this is the end; else the server was out of reach for too long."""
    job, (plan, same) = seat.job, known
    view = View(0, owners_of([piece.server for piece in plan.pieces], job.layout.server))
    mine = [piece for piece, owned in enumerate(view.owners) if name in owned.servers]
    keeper = Keeper(name, view, {piece: Kept(there=False) for piece in mine})
    if before:
        keeper = Keeper(name, View(-1, view.owners))
    shelf = Shelf(plan, partial(make_optimizer, settings=job.optimizer))
    with posted(seat, name, same) as post:
        server = Server(keeper, shelf, post, job.run.timeout_s, snapshots)
        if before:
            server.take_place(before)
        server.run()
        return server.ended


def _snapshots(seat: Seat, folder: Path) -> Snapshots | None:
    """For a server that is the only one to have its pieces, and whose place another process may take."""
    server = seat.job.layout.server
    elastic = seat.place.rendezvous.startswith("file://")
    if server.copies > 1 or not server.snapshot_every or not elastic:
        return None
    return Snapshots(snapshots_of(folder, seat.place) / seat.role, server.snapshot_every)


def snapshots_of(folder: Path, place: Place) -> Path:
    """Of this start of the run, which has a place to meet of its own."""
    return folder / SNAPSHOTS / Path(place.rendezvous.removeprefix("file://")).parent.name


def forget_old(folder: Path, place: Place) -> None:
    """Snapshots of earlier starts."""
    for old in (folder / SNAPSHOTS).glob("*"):
        if old != snapshots_of(folder, place):
            shutil.rmtree(old, ignore_errors=True)
