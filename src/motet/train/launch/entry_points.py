"""The ways in which a run starts: local ranks under a supervisor, one rank of torchrun or srun, or this process.
All check first, create the run folder last, and leave the work to `motet.train.launch.rank_main`.

The work of one rank: train the job of a run folder until its end, or until it is asked to stop.
"""

import secrets
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from motet.core.errors import InputError, check_input
from motet.core.token_authentication import (
    HOW_TO_GIVE_A_TOKEN,
    RunToken,
    new_run_token,
    read_run_token,
    read_token_file,
    write_token_file,
)
from motet.data.corpus.build import ProgressCallback
from motet.data.corpus.prepare import prepare_data
from motet.monitor.sinks import Callback
from motet.monitor.stdout_stderr import stderr_console
from motet.parallel.parameter_server.server_settings import extra_process_count, parse_address
from motet.parallel.process.launch_environment import SINGLE_RANK, RankEnvironment, cpu_backend_name, threads_for
from motet.train.job import Job
from motet.train.launch.failures import STOPPED_EXIT_CODE, RankExitRecord, StopFlag, stop_on_signals
from motet.train.launch.place_choice import choose_places
from motet.train.launch.preflight import (
    check_compiler,
    check_data,
    check_experts,
    check_job,
    check_memory,
    check_model,
    check_split,
)
from motet.train.launch.rank_process import run_rank_function
from motet.train.launch.run_folder import (
    LOGS_FOLDER,
    RunFolderChoice,
    RunFolderSnapshot,
    check_trusted,
    choose_resumed_run,
    choose_run_folder,
    collect_provenance,
    lock_run_folder,
    read_stored_job,
    record_run_end,
    snapshot_run_folder,
    write_run_start,
)
from motet.train.launch.supervisor import (
    ElasticRankPolicy,
    LaunchExitStatus,
    LaunchSpec,
    launch_ranks,
    locked_temporary_folder,
    remove_abandoned_temporary_folders,
)

if TYPE_CHECKING:
    from motet.train.loop import RunProgress


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
        from motet.train.loop import run_rank as run

    outcome = run(job, rank_env, folder, stop)
    return 0 if outcome.is_finished or outcome.completed_steps == job.run.stop_at else STOPPED_EXIT_CODE


LogFunction = Callable[[str], None]
RUN_TOKEN_FILE = "run.token"  # A file in the run folder, while ranks of one host train without a token of the user


@dataclass(frozen=True)
class TrainRequest:
    """The job that the user wants to run, and where."""

    job: Job
    resume_from: Path | None  # The run folder to resume; if None, `run.folder` decides
    command_line: list[str]
    is_trusted: bool = False  # Functions of the job may run whoever can change the run folder

    def choose_folder(self) -> RunFolderChoice:
        choice = choose_resumed_run(self.job, self.resume_from) if self.resume_from else choose_run_folder(self.job)
        if not choice.is_numbered:
            check_trusted(self.job, choice.path, is_trusted=self.is_trusted)
        return choice


@dataclass(frozen=True)
class SupervisorIO:
    """The environment of a supervisor, and its output."""

    environment: Mapping[str, str]
    log: LogFunction
    show_progress: Callable[[], AbstractContextManager[ProgressCallback]]  # Shows the preparation of data
    stdout_fd: int | None = None  # File descriptor for the progress of training; stdout by default


def supervise_local_ranks(request: TrainRequest, io: SupervisorIO) -> tuple[Path, LaunchExitStatus]:
    """Train with local ranks. Returns the run folder and how the run ended."""
    remove_abandoned_temporary_folders()  # Also those of a killed run that had finished, so that resuming it is refused
    request = replace(request, job=choose_places(request.job, io.log))
    job, ranks = request.job, request.job.run.ranks
    check_job(job, ranks)
    check_split(job, ranks)
    check_experts(job, io.log)
    token = read_run_token(io.environment)
    if job.layout.uses_server_processes and job.layout.server.listen is not None:
        _check_token_of_hosts(token, "layout.server.listen lets other hosts join the run")
    check_compiler(job)
    check_memory(job, range(ranks + server_process_count(job)), ranks)
    folder_choice = request.choose_folder()
    threads = _check_data_and_count_threads(job, io)
    stop = StopFlag()
    with _open_run_folder(request, folder_choice, stop, ranks=ranks, threads=threads, log=io.log) as snapshot:
        path, server_processes, server = snapshot.path, server_process_count(job), job.layout.server
        workers = range(server_processes, server_processes + ranks)
        policy = ElasticRankPolicy(range(1, 1 + server.count), workers, server.max_process_restarts, True)
        spec = LaunchSpec(
            command=("motet.train.launch.entry_points:train_rank", str(path), *["trusted"] * request.is_trusted),
            ranks=ranks + server_processes,
            environment=io.environment,
            threads=threads,
            log_folder=path / LOGS_FOLDER,
            max_restarts=job.run.restarts,
            stdout_fd=io.stdout_fd,
            elastic_policy=policy if server_processes else ElasticRankPolicy(),
            timeout_s=job.run.timeout_s,
            problem=lambda: stop.problem,
        )
        exit_status = launch_ranks(spec, io.log)
        if exit_status.exit_code != InputError.exit_code or not snapshot.restore_unless_trained():
            record_run_end(path, exit_status)
    return path, exit_status


def join_remote_run(request: TrainRequest, coordinator_address: str, io: SupervisorIO) -> LaunchExitStatus:
    """Start local workers for a run with a parameter server on other machines."""
    job, ranks = request.job, request.job.run.ranks
    check_input(
        job.layout.uses_server_processes,
        f"--join: layout.data = {job.layout.data!r} has no parameter server; give the same job and settings as "
        "there, with layout.data=parameter_server",
    )
    parse_address(coordinator_address, "--join")
    _check_token_of_hosts(read_run_token(io.environment), "--join takes the token of the run")
    check_model(job)
    first = server_process_count(job)
    check_memory(job, range(first, first + ranks), ranks)
    threads = _check_data_and_count_threads(job, io)
    io.log(f"joining the run at {coordinator_address} with {ranks} worker{'s' * (ranks > 1)}")
    with locked_temporary_folder() as folder:
        write_run_start(folder, job, collect_provenance(ranks, threads, request.command_line))
        host = f"{socket.gethostname()}-{secrets.token_hex(3)}"
        spec = LaunchSpec(
            command=("motet.train.launch.entry_points:join_rank", str(folder), host),
            ranks=ranks,
            environment=io.environment,
            threads=threads,
            log_folder=folder / LOGS_FOLDER,
            elastic_policy=ElasticRankPolicy(workers=range(ranks), spares=job.layout.server.max_process_restarts),
            coordinator_address=coordinator_address,
            stop_message="leaving the run after this work item",
        )
        return launch_ranks(spec, io.log)


def _check_token_of_hosts(token: RunToken | None, problem: str) -> None:
    check_input(token is not None, f"{problem}: {HOW_TO_GIVE_A_TOKEN}")


def _check_data_and_count_threads(job: Job, io: SupervisorIO) -> int:
    with io.show_progress() as progress:
        check_data(job, prepare_data(job.data, progress))
    ranks = job.run.ranks
    return threads_for(RankEnvironment(0, ranks, 0, ranks, 0, ""), job.run.requested_threads)


def server_process_count(job: Job) -> int:
    """Processes in addition to the workers: the coordinator of a parameter server, and its servers."""
    return extra_process_count(job.layout.server) if job.layout.uses_server_processes else 0


def run(job: Job, callbacks: Sequence[Callback] = ()) -> "tuple[Path, RunProgress]":
    """Train on one rank in this process (its main thread: Ctrl-C saves). Returns the run folder and how far it came.
    `run.folder` is created, resumed or refused as on the command line."""
    from motet.train.loop import run_rank  # torch is loaded here

    check_input(
        not job.layout.uses_server_processes,
        f"layout.data = {job.layout.data!r} takes several processes; use `motet train`, or leave it out here",
    )
    log = partial(stderr_console().print, highlight=False)
    job = choose_places(job.model_copy(update={"run": job.run.model_copy(update={"ranks": 1})}), log)
    check_job(job, 1)
    check_compiler(job)
    check_memory(job, range(1), 1)
    request = TrainRequest(job, None, sys.argv, is_trusted=True)  # The caller's job runs, whatever the folder holds
    folder_choice = request.choose_folder()
    check_data(job, prepare_data(job.data))
    threads = threads_for(SINGLE_RANK, job.run.requested_threads)
    with (
        stop_on_signals() as stop,
        _open_run_folder(request, folder_choice, stop, ranks=1, threads=threads, log=log) as snapshot,
        _undo_on_input_error(snapshot),
    ):
        return snapshot.path, run_rank(job, SINGLE_RANK, snapshot.path, stop, callbacks)


def run_launched_rank(request: TrainRequest, rank_env: RankEnvironment, log: LogFunction) -> RankExitRecord:
    """Be one rank of a group that torchrun or srun started."""
    job, server_processes = request.job, server_process_count(request.job)
    workers = rank_env.world - server_processes
    check_input(
        workers >= 1,
        f"layout.data = 'parameter_server' takes a rank for its coordinator and {server_processes - 1} for servers "
        f"(layout.server.count), besides the workers; start {server_processes + 1} ranks or more, not "
        f"{rank_env.world}",
    )
    check_job(job, workers)
    check_split(job, workers)
    uses_motet = job.run.device == "cpu" and cpu_backend_name(job.run.cpu_backend) == "motet"
    if rank_env.world > rank_env.local_world and (server_processes or uses_motet):
        setting = "layout.data = 'parameter_server'" if server_processes else "run.cpu_backend = 'motet'"
        _check_token_of_hosts(rank_env.token, f"{setting} connects processes of several hosts")
    check_compiler(job)
    check_memory(job, rank_env.local_ranks, workers)
    check_data(job, prepare_data(job.data))
    record = run_rank_function(rank_env, lambda rank_env, stop: _train_launched_rank(request, rank_env, stop, log=log))
    if not record.is_unanimous:
        return record
    if rank_env.rank == 0:
        log(record.message)
    return replace(record, error_message="")


def _train_launched_rank(request: TrainRequest, rank_env: RankEnvironment, stop: StopFlag, *, log: LogFunction) -> int:
    # torch is loaded here, after the signals are in place
    from motet.parallel.process.process_group import broadcast_decision, open_store, read_decision

    job, store = request.job, open_store(rank_env, request.job.run.timeout_s)
    rank_env = replace(rank_env, store_exists=True)
    makes_token = job.layout.uses_server_processes and rank_env.token is None  # All ranks are on this host
    with ExitStack() as stack:

        def prepare_folder() -> str:
            path = open_or_reuse_folder()
            if makes_token:
                stack.callback(Path(path, RUN_TOKEN_FILE).unlink, missing_ok=True)
                write_token_file(Path(path, RUN_TOKEN_FILE), new_run_token())
            return path

        def open_or_reuse_folder() -> str:
            previous_key = f"folder-{rank_env.attempt - 1}"
            if rank_env.attempt and store.check([previous_key]):  # torchrun restarted the ranks of the same run
                path = read_decision(store, previous_key)
                stack.enter_context(lock_run_folder(Path(path), stop.report_problem))
                return path
            folder_choice, threads = request.choose_folder(), threads_for(rank_env, job.run.requested_threads)
            opened = _open_run_folder(request, folder_choice, stop, ranks=rank_env.world, threads=threads, log=log)
            snapshot = stack.enter_context(opened)
            if snapshot.had_run:  # a new folder stays: the launcher may restart the ranks of the same run
                stack.enter_context(_undo_on_input_error(snapshot))
            return str(snapshot.path.resolve())

        path = Path(broadcast_decision(store, rank_env.rank, f"folder-{rank_env.attempt}", decide=prepare_folder))
        if makes_token:
            rank_env = replace(rank_env, token=read_token_file(path / RUN_TOKEN_FILE))
        if rank_env.local_rank == 0 and 0 not in rank_env.local_ranks:
            ranks, host = rank_env.local_ranks, rank_env.rendezvous.removeprefix("tcp://").rpartition(":")[0]
            names = (
                f"ranks {ranks[0]} to {ranks[-1]} of {rank_env.world} train" if ranks[1:] else f"rank {ranks[0]} trains"
            )
            log(f"{names} here; rank 0 prints the progress and writes {path} on its own machine ({host or 'this one'})")
        code = train_in_run_folder(job, rank_env, path, stop)
        if code == STOPPED_EXIT_CODE and rank_env.rank == 0:
            log(f"continue with the same command and --resume-from {path}")
        return code


@contextmanager
def _open_run_folder(
    request: TrainRequest,
    folder_choice: RunFolderChoice,
    stop: StopFlag,
    *,
    ranks: int,
    threads: int,
    log: LogFunction,
) -> Iterator[RunFolderSnapshot]:
    path = folder_choice.create()
    with lock_run_folder(path, stop.report_problem):
        snapshot = snapshot_run_folder(path)
        with _undo_on_input_error(snapshot):
            write_run_start(path, request.job, collect_provenance(ranks, threads, request.command_line))
        for remark in folder_choice.remarks:
            log(f"warning: {remark}")
        yield snapshot


@contextmanager
def _undo_on_input_error(snapshot: RunFolderSnapshot) -> Iterator[None]:
    try:
        yield
    except InputError:
        snapshot.restore_unless_trained()
        raise
