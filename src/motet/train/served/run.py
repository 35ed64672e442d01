"""Be what a rank is in a run with a parameter server."""

import threading
from collections.abc import Sequence
from pathlib import Path

import torch

from motet.monitor.callback import Callback
from motet.parallel.parameter_server.protocol.messages import COORDINATOR
from motet.parallel.process.launch_environment import RankEnvironment, threads_for
from motet.train.assemble import Outcome, numerics
from motet.train.faults import StopFlag
from motet.train.job import Job
from motet.train.served.desk import Beside, run_desk
from motet.train.served.meet import Seat, among_workers, seat_of
from motet.train.served.server import run_server
from motet.train.served.worker import run_worker


def run_served(
    job: Job, place: RankEnvironment, folder: Path, stop: StopFlag, callbacks: Sequence[Callback] = ()
) -> Outcome:
    return run_seat(seat_of(job, place), folder, stop, callbacks)


def run_joined(job: Job, place: RankEnvironment, host: str, stop: StopFlag) -> None:
    """Be a worker more of a run that goes on elsewhere; `host` tells its name from those of others."""
    run_seat(Seat(job, place, f"{host}/w{place.rank}"), Path(), stop)


def run_seat(seat: Seat, folder: Path, stop: StopFlag, callbacks: Sequence[Callback] = ()) -> Outcome:
    torch.set_num_threads(threads_for(among_workers(seat), seat.job.run.threads))
    with numerics(seat.job):
        if seat.role == COORDINATOR:
            return run_desk(seat, Beside(folder, stop, callbacks))
        if not seat.is_worker:
            run_server(seat, folder)
        elif seat.server is None:
            run_worker(seat, stop)
        else:
            _run_both(seat, seat.server, folder, stop)
    return Outcome(0, 0)


def _run_both(seat: Seat, server: Seat, folder: Path, stop: StopFlag) -> None:
    """A worker with a server that is a thread beside it; whose failure is told is that of the server, if it has one."""

    def serve() -> None:
        try:
            with numerics(server.job):
                run_server(server, folder)
        except BaseException as error:  # noqa: BLE001  # told by the other thread
            seat.failed.append(error)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        run_worker(seat, stop)
        thread.join()
    finally:
        if seat.failed:
            raise seat.failed[0]
