"""The ways in which a run starts: ranks of our own under a supervisor, one rank of torchrun or srun, or right here.

All check first, make the run folder last, and leave the work itself to `motet.train.work`.
"""

import secrets
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from motet.core.errors import InputError
from motet.data.corpus.build import ProgressCallback
from motet.data.corpus.prepare import prepare_data
from motet.monitor.callback import Callback
from motet.monitor.console import stderr_console
from motet.parallel.parameter_server.server_settings import extra_process_count as beside_workers
from motet.parallel.parameter_server.server_settings import parse_address
from motet.parallel.process.launch_environment import SINGLE_RANK, RankEnvironment, threads_for
from motet.train.ending import Before, remember, write_end
from motet.train.faults import STOPPED, Record, StopFlag, stop_on_signals
from motet.train.folder import LOGS, Choice, choose_folder, choose_resumed, held, write_start
from motet.train.job import Job
from motet.train.launch import Elastic, Ended, Launch, launch, rank_environment
from motet.train.preflight import check_data, check_job, check_memory, check_model
from motet.train.rank import run_work
from motet.train.versions import describe_start

if TYPE_CHECKING:
    from motet.train.assemble import Outcome

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Request:
    """What the user asks for."""

    job: Job
    resume_from: Path | None
    """The folder of the run to continue; by the rule of `run.folder` when not given."""
    command_line: list[str]


@dataclass(frozen=True)
class Outside:
    """What a supervisor is given of the world around it."""

    environment: Mapping[str, str]
    tell: Tell
    progress: Callable[[], AbstractContextManager[ProgressCallback]]
    """Hears of data while it is prepared."""
    output: int | None = None
    """File descriptor for the progress of training; stdout when not given."""


def supervise(request: Request, outside: Outside) -> tuple[Path, Ended]:
    """Train with local ranks of our own. Returns the run folder and how it ended."""
    job = request.job
    ranks = job.run.ranks
    check_job(job, ranks)
    check_memory(job, ranks)
    choice = _choose(request)
    with outside.progress() as progress:
        check_data(job, prepare_data(job.data, progress))
    threads = threads_for(RankEnvironment(0, ranks, 0, ranks, 0, ""), job.run.threads_wanted)
    with _opened(request, choice, ranks, threads, outside.tell) as before:
        path = before.path
        start = Launch(
            command=(sys.executable, "-m", "motet.cli.rank", "motet.train.work:train_rank", str(path)),
            ranks=ranks + helpers(job),
            environment=rank_environment(outside.environment, threads),
            logs=path / LOGS,
            restarts=job.run.restarts,
            output=outside.output,
            elastic=_elastic(job),
        )
        ended = launch(start, outside.tell)
        if ended.exit_code != InputError.exit_code or not before.undo_unless_trained():
            write_end(path, ended)
    return path, ended


def _elastic(job: Job) -> Elastic | None:
    beside = helpers(job)
    if not beside:
        return None
    return Elastic(
        range(1, 1 + job.layout.server.count),
        range(beside, beside + job.run.ranks),
        job.layout.server.max_process_restarts,
    )


def join_run(request: Request, desk: str, outside: Outside) -> Ended:
    """Work for a run that goes on elsewhere, with local workers of our own."""
    job = request.job
    if not job.layout.uses_server_processes:
        raise InputError(
            "--join is for runs with a parameter server; give the same job and settings as there, with "
            "layout.data=parameter_server"
        )
    parse_address(desk, "--join")
    check_model(job)
    check_memory(job, job.run.ranks)
    with outside.progress() as progress:
        check_data(job, prepare_data(job.data, progress))
    threads = threads_for(RankEnvironment(0, job.run.ranks, 0, job.run.ranks, 0, ""), job.run.threads_wanted)
    outside.tell(f"joining the run at {desk} with {job.run.ranks} worker{'s' * (job.run.ranks > 1)}")
    with tempfile.TemporaryDirectory(prefix="motet-") as folder:
        write_start(Path(folder), job, describe_start(job.run.ranks, threads, request.command_line))
        work, host = "motet.train.work:join_rank", f"{socket.gethostname()}-{secrets.token_hex(3)}"
        start = Launch(
            command=(sys.executable, "-m", "motet.cli.rank", work, folder, host),
            ranks=job.run.ranks,
            environment=rank_environment(outside.environment, threads),
            logs=Path(folder) / LOGS,
            elastic=Elastic(
                workers=range(job.run.ranks), spares=job.layout.server.max_process_restarts, has_desk=False
            ),
            desk=desk,
            farewell="leaving the run after this share",
        )
        return launch(start, outside.tell)


def helpers(job: Job) -> int:
    """Ranks beside those that compute: the desk of a parameter server, and its servers."""
    return beside_workers(job.layout.server) if job.layout.uses_server_processes else 0


def run(job: Job, callbacks: Sequence[Callback] = ()) -> "tuple[Path, Outcome]":
    """Train on one rank in this process (its main thread: Ctrl-C saves). Returns the run folder and how far it came.

    `run.folder` is found or made, continued or refused by the same rule as on the command line.
    """
    from motet.train.assemble import run_rank  # torch is loaded here

    if job.layout.uses_server_processes:
        raise InputError(
            f"layout.data = {job.layout.data!r} takes processes of its own; use `motet train`, or leave it out here"
        )
    job = job.model_copy(update={"run": job.run.model_copy(update={"ranks": 1})})
    check_job(job, 1)
    check_memory(job, 1)
    request = Request(job, None, sys.argv)
    choice = _choose(request)
    check_data(job, prepare_data(job.data))

    def tell(text: str) -> None:
        stderr_console().print(text, highlight=False)

    with (
        _opened(request, choice, 1, threads_for(SINGLE_RANK, job.run.threads_wanted), tell) as before,
        _taken_back(before),
        stop_on_signals() as stop,
    ):
        return before.path, run_rank(job, SINGLE_RANK, before.path, stop, callbacks)


def join(request: Request, place: RankEnvironment, tell: Tell) -> Record:
    """Be one rank of a group that torchrun or srun started."""
    beside = helpers(request.job)
    workers = place.world - beside
    if workers < 1:
        raise InputError(
            f"layout.data = 'parameter_server' takes a rank for its desk and {beside - 1} for servers "
            f"(layout.server.count) beside the workers; start {beside + 1} ranks or more, not {place.world}"
        )
    check_job(request.job, workers)
    check_memory(request.job, place.local_world)
    check_data(request.job, prepare_data(request.job.data))
    record = run_work(place, lambda place, stop: _join(request, place, stop, tell))
    if not record.agreed:
        return record
    if place.rank == 0:
        tell(record.message)
    return replace(record, sentence="")


def _join(request: Request, place: RankEnvironment, stop: StopFlag, tell: Tell) -> int:
    from motet.parallel.process.process_group import (  # torch is loaded here, after the signals are in place
        broadcast_decision,
        read_decision,
        rendezvous_store,
    )
    from motet.train.work import train_in

    job = request.job
    with ExitStack() as stack:
        place, store = stack.enter_context(rendezvous_store(place, job.run.timeout_s))

        def decide() -> str:
            before = f"folder-{place.attempt - 1}"
            if place.attempt and store.check([before]):  # torchrun started the ranks again: the same run goes on
                path = read_decision(store, before)
                stack.enter_context(held(Path(path)))
                return path
            threads = threads_for(place, job.run.threads_wanted)
            opened = stack.enter_context(_opened(request, _choose(request), place.world, threads, tell))
            if opened.was_run:  # a new folder stays: the launcher may start the ranks again, for the same run
                stack.enter_context(_taken_back(opened))
            return str(opened.path.resolve())

        path = Path(broadcast_decision(store, place.rank, f"folder-{place.attempt}", decide))
        code = train_in(job, place, path, stop)
        if code == STOPPED and place.rank == 0:
            tell(f"continue with the same command and --resume-from {path}")
        return code


def _choose(request: Request) -> Choice:
    if request.resume_from is None:
        return choose_folder(request.job)
    return choose_resumed(request.job, request.resume_from)


@contextmanager
def _opened(request: Request, choice: Choice, ranks: int, threads: int, tell: Tell) -> Iterator[Before]:
    """The run folder, made, locked and described."""
    path = choice.make()
    with held(path):
        before = remember(path)
        with _taken_back(before):
            write_start(path, request.job, describe_start(ranks, threads, request.command_line))
        for remark in choice.remarks:
            tell(f"warning: {remark}")
        yield before


@contextmanager
def _taken_back(before: Before) -> Iterator[None]:
    """Bad input in the block leaves the run folder as it was."""
    try:
        yield
    except InputError:
        before.undo_unless_trained()
        raise
