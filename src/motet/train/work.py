"""The work of one rank: train the job of a run folder until its end, or until it is asked to stop."""

from pathlib import Path

from motet.parallel.process.launch_environment import RankEnvironment
from motet.train.faults import STOPPED, StopFlag
from motet.train.folder import stored_job
from motet.train.job import Job


def train_rank(place: RankEnvironment, stop: StopFlag, folder: str) -> int:
    """What a supervised rank does: the folder holds the job."""
    return train_in(stored_job(Path(folder)), place, Path(folder), stop)


def join_rank(place: RankEnvironment, stop: StopFlag, folder: str, host: str) -> int:
    """Be a worker of a run that goes on elsewhere; the folder holds its job."""
    from motet.train.served.run import run_joined  # torch is loaded here, after the signals are in place

    run_joined(stored_job(Path(folder)), place, host, stop)
    return STOPPED if stop.requested else 0


def train_in(job: Job, place: RankEnvironment, folder: Path, stop: StopFlag) -> int:
    """Train, and return the exit code."""
    if job.layout.uses_server_processes:
        from motet.train.served.run import run_served as run  # torch is loaded here, after the signals are in place
    else:
        from motet.train.assemble import run_rank as run

    outcome = run(job, place, folder, stop)
    as_asked = outcome.finished or outcome.steps == job.run.stop_at
    return 0 if as_asked else STOPPED
