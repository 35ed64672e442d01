"""`motet train`: start the ranks of this machine, or be one rank of torchrun or srun."""

import itertools
import json as json_format
import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Exit, Option

from motet.cli.environment_variables import (
    read_environment,
    set_compiler_variables,
    set_device_variables,
    set_environment_variables,
)
from motet.cli.job_arguments import JobWords, load_job_or_config
from motet.cli.output import log, print_lines, show_progress, table_lines
from motet.core.errors import InputError, check_input
from motet.core.token_authentication import NO_AUTHENTICATION
from motet.core.user_cache import user_cache_folder
from motet.monitor.stdout_stderr import print_json, stderr_console, stdout_console
from motet.parallel.process.launch_environment import RankEnvironment, read_rank_environment

if TYPE_CHECKING:
    from motet.train.job import Job
    from motet.train.launch.entry_points import TrainRequest
    from motet.train.launch.failures import RankExitRecord
    from motet.train.launch.supervisor import LaunchExitStatus

DEFAULT_JOB = "tiny"
STDERR_FD = 2

# A launcher ends all ranks as soon as one has ended, so the rank that failed first gets time to report.
ROOT_CAUSE_WAIT_S = 2.0


def train_command(  # noqa: PLR0913 - a command's options
    *,
    words: JobWords = None,
    ranks: Annotated[int | None, Option(min=1, help="Local ranks to start (run.ranks).")] = None,
    run_folder: Annotated[str | None, Option(help="The run folder (run.folder).")] = None,
    resume: Annotated[bool, Option("--resume", help="Continue the newest run (of JOB, when given).")] = False,
    resume_from: Annotated[str | None, Option(metavar="RUN", help="Continue the run in this folder.")] = None,
    join: Annotated[
        str | None, Option(metavar="HOST:PORT", help="Work for the run with a parameter server at this address.")
    ] = None,
    no_auth: Annotated[
        bool, Option("--no-auth", help="Let processes of other hosts take part without a run token.")
    ] = False,
    trust: Annotated[
        bool, Option("--trust", help="Let a job call its functions though other users can change its run folder.")
    ] = False,
    rehearse: Annotated[
        bool,
        Option("--rehearse", help="Simulate one of --ranks, from its start through a first step, on the meta device."),
    ] = False,
    rank: Annotated[int | None, Option(min=0, help="The rank to rehearse; 0 by default.")] = None,
    all_kinds: Annotated[bool, Option("--all-kinds", help="Rehearse one rank of each kind.")] = False,
    print_job: Annotated[bool, Option("--print-job", help="Print the resolved job as TOML, and stop.")] = False,
    list_jobs: Annotated[bool, Option("--list-jobs", help="List the built-in jobs, and stop.")] = False,
    schema: Annotated[bool, Option("--schema", help="Print the JSON schema of a job, and stop.")] = False,
    json: Annotated[bool, Option("--json", help="Answer in JSON; progress goes to stderr.")] = False,
) -> None:
    """Train a model: with local ranks under a supervisor, or as one rank of torchrun or srun."""
    if list_jobs:
        _list_jobs(json)
    elif schema:
        from motet.train.job import Job

        print_json(Job.model_json_schema())
    else:
        if no_auth:
            set_environment_variables(NO_AUTHENTICATION.environment())
        options = {"run.ranks": ranks, "run.folder": run_folder}
        option_overrides = [f"{key}={json_format.dumps(value)}" for key, value in options.items() if value is not None]
        request = _train_request(words or [], option_overrides, resume=resume, resume_from=resume_from)
        request = replace(request, is_trusted=trust)
        is_without_effect = not rehearse and (all_kinds or rank is not None)
        check_input(not is_without_effect, "--rank and --all-kinds have no effect without --rehearse; add it")
        if print_job:
            _print_job(request.job, json)
        elif rehearse:
            from motet.cli.rehearsal_output import run_rehearsal

            request.choose_folder()  # Refused as at a start
            raise Exit(run_rehearsal(request.job, rank, all_kinds=all_kinds, json=json))
        else:
            set_device_variables(reproducible=request.job.run.reproducible is not None)
            set_compiler_variables(user_cache_folder())
            raise Exit(_run_training(request, ranks, json) if join is None else _join_run(request, join))


def _train_request(words: list[str], options: list[str], *, resume: bool, resume_from: str | None) -> "TrainRequest":
    from motet.train.job import split_job_and_overrides
    from motet.train.launch.entry_points import TrainRequest
    from motet.train.launch.run_folder import existing_run_folder, find_newest_run, read_stored_job

    name, settings = split_job_and_overrides(words)
    overrides = [*settings, *options]
    if name is not None or not (resume or resume_from):
        job = load_job_or_config(name or DEFAULT_JOB, overrides)
    run = None
    if resume_from:
        run = existing_run_folder(resume_from)
    elif resume:
        run = find_newest_run(job.name if name else None)
    if run is not None and name is None:  # the run continues with its own job
        job = read_stored_job(run, overrides)
        if not any(override.startswith("run.stop_at") for override in overrides):
            job = job.model_copy(update={"run": job.run.model_copy(update={"stop_at": None})})
    return TrainRequest(job, run, sys.argv)


def _run_training(request: "TrainRequest", ranks: int | None, json: bool) -> int:
    from motet.train.launch.entry_points import SupervisorIO, run_launched_rank, supervise_local_ranks
    from motet.train.launch.failures import STOP_SIGNALS, STOPPED_EXIT_CODE, handle_signals, interrupt

    environment = read_environment()
    rank_env = read_rank_environment(environment)
    if rank_env is None:
        supervisor_io = SupervisorIO(environment, log, show_progress, STDERR_FD if json else None)
        try:
            with handle_signals(interrupt, *STOP_SIGNALS):  # the supervisor of ranks has its own handler
                path, exit_status = supervise_local_ranks(request, supervisor_io)
        except KeyboardInterrupt:
            log("stopped before any rank was started")
            return STOPPED_EXIT_CODE
        return _report_run_end(path, exit_status, json)
    other_count = f"--ranks {ranks}, but the launcher started {rank_env.world} ranks; leave --ranks out"
    check_input(ranks in (None, rank_env.world), other_count)
    job = request.job.model_copy(update={"run": request.job.run.model_copy(update={"ranks": rank_env.world})})
    return _report_rank_exit(run_launched_rank(replace(request, job=job), rank_env, log), rank_env)


def _join_run(request: "TrainRequest", coordinator_address: str) -> int:
    from motet.train.launch.entry_points import SupervisorIO, join_remote_run

    environment = read_environment()
    by_launcher = "--join starts workers itself; give their number with --ranks, without torchrun or srun"
    check_input(read_rank_environment(environment) is None, by_launcher)
    exit_status = join_remote_run(request, coordinator_address, SupervisorIO(environment, log, show_progress))
    for text in filter(None, (exit_status.message, exit_status.traceback)):
        log(text)
    return exit_status.exit_code


def _report_run_end(path: Path, exit_status: "LaunchExitStatus", json: bool) -> int:
    from motet.monitor.summary import SUMMARY_FILE, read_summary
    from motet.train.launch.run_folder import newest_checkpoint_step

    summary = read_summary(path) if (path / SUMMARY_FILE).is_file() else None
    stderr_console().show_cursor(True)  # a rank that was killed while drawing leaves it hidden
    for text in filter(None, (exit_status.message, exit_status.traceback)):
        log(text)
    step = newest_checkpoint_step(path)
    if step is not None and not (summary and summary.finished) and exit_status.exit_code != InputError.exit_code:
        log(f"continue from step {step} with: motet train --resume-from {path}")
    if json and summary:
        print_json(summary.model_dump(mode="json"))
    return exit_status.exit_code


def _report_rank_exit(record: "RankExitRecord", rank_env: RankEnvironment) -> int:
    from motet.train.launch.rank_process import hard_exit

    who = f"rank {rank_env.rank} of {rank_env.world}"
    if record.caused_by_peer:
        log(f"{who} ends because another rank did: {record.error_message.splitlines()[0]}")
        time.sleep(ROOT_CAUSE_WAIT_S)
    elif record.error_message:
        log("\n".join(filter(None, [f"{who} failed: {record.error_message}", record.traceback])))
    if record.error_message:
        hard_exit(record.exit_code)
    return record.exit_code


def _list_jobs(json: bool) -> None:
    from motet.train.job import builtin_jobs

    descriptions = {name: _first_sentence(text) for name, text in builtin_jobs().items()}
    if json:
        print_json(descriptions)
        return
    print_lines(*table_lines(descriptions.items()))


def _first_sentence(text: str) -> str:
    lines = itertools.takewhile(lambda line: line.startswith("#"), text.splitlines())
    return re.split(r"(?<=\.)\s", " ".join(line.removeprefix("#").strip() for line in lines))[0]


def _print_job(job: "Job", json: bool) -> None:
    from motet.core.text_files import to_toml
    from motet.train.launch.run_folder import job_to_tree

    tree = job_to_tree(job)
    if json:
        print_json(tree)
    else:
        stdout_console().out(to_toml(tree), end="", highlight=False)
