"""The work of one rank: train the job of a run folder until its end, or until it is asked to stop."""

from pathlib import Path

from motet.parallel.process.launch_environment import RankEnvironment
from motet.train.job import Job
from motet.train.launch.failures import STOPPED_EXIT_CODE, StopFlag
from motet.train.launch.run_folder import read_stored_job
from motet.train.launch.run_folder_trust import check_trusted


def train_rank(rank_env: RankEnvironment, stop: StopFlag, folder: str, *options: str) -> int:
    """The function of a supervised rank; the folder holds the job, which the option `trusted` lets call functions."""
    job = read_stored_job(Path(folder))
    check_trusted(job, Path(folder), is_trusted="trusted" in options)  # Who can change the folder can do so at any time
    return train_in_run_folder(job, rank_env, Path(folder), stop)


def join_rank(rank_env: RankEnvironment, stop: StopFlag, folder: str, host: str) -> int:
    """The function of a worker that joins a run on other machines; the folder holds the job."""
    from motet.train.parameter_server.role_main import run_late_worker  # loads torch, after the signals are in place

    run_late_worker(read_stored_job(Path(folder)), rank_env, host, stop)
    return STOPPED_EXIT_CODE if stop.requested else 0


def train_in_run_folder(job: Job, rank_env: RankEnvironment, folder: Path, stop: StopFlag) -> int:
    """Train, and return the exit code."""
    if job.layout.uses_server_processes:
        from motet.train.parameter_server.role_main import run_parameter_server_rank as run
    else:
        from motet.train.build import run_rank as run

    outcome = run(job, rank_env, folder, stop)
    return 0 if outcome.is_finished or outcome.completed_steps == job.run.stop_at else STOPPED_EXIT_CODE
