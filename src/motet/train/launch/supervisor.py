"""The supervisor of local ranks: starts them, watches them, and ends them together.
One message reports the first cause of a failure. Ctrl-C reaches only the supervisor, which passes it on; ranks cannot
outlive it. It never imports torch, so that nothing can block the process that notices a failure.
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from motet.core.errors import CheckpointSaveError, RankFailedError, convert_os_errors
from motet.core.locked_folders import locked_folder, remove_abandoned_folders
from motet.core.text_files import open_without_links
from motet.core.token_authentication import new_run_token, read_run_token
from motet.parallel.process.launch_environment import (
    RankEnvironment,
    coordinator_address_file,
    environment_variables_for,
)
from motet.train.launch import failures
from motet.train.launch.rank_process import HeartbeatReceiver

_PREFIX = "motet-locked-"


def locked_temporary_folder() -> AbstractContextManager[Path]:
    """A folder among the temporary ones, which does not outlive a killed process for long."""
    return locked_folder(Path(tempfile.gettempdir()), _PREFIX)


def remove_abandoned_temporary_folders() -> None:
    """Remove the temporary folders of this user whose owner has ended."""
    remove_abandoned_folders(Path(tempfile.gettempdir()), _PREFIX)


POLL_S = 0.03
EXIT_RECORD_WAIT_S = 1.0  # How long the other ranks may take to record a failure
SIGTERM_GRACE_S = 0.5  # Between SIGTERM and SIGKILL for the remaining ranks of a failed group
LOG_TAIL_LINES = 20
COORDINATOR_EXIT_GRACE_S = 10.0  # How long the other ranks may run after the coordinator has ended


@dataclass(frozen=True)
class ElasticRankPolicy:
    """Ranks that may end while the others continue, unless they report that the work itself is wrong."""

    servers: range = range(0)  # Each is needed, and another process may replace it
    workers: range = range(0)  # The others continue without one if at least one is left
    spares: int = 0  # How many processes may be replaced
    has_coordinator: bool = False  # Rank 0, whose end ends the others


@dataclass(frozen=True)
class LaunchSpec:
    """The ranks to start on this machine."""

    command: tuple[str, ...]  # `package.module:function` of a rank, and the arguments of the function
    ranks: int
    environment: Mapping[str, str]
    log_folder: Path  # Receives the output of all ranks but rank 0
    max_restarts: int = 0
    stdout_fd: int | None = None  # File descriptor for the stdout of rank 0; the supervisor's by default
    elastic_policy: ElasticRankPolicy = ElasticRankPolicy()
    coordinator_address: str = ""  # HOST:PORT of a coordinator that runs elsewhere
    stop_message: str = "stopping after this step and saving"  # What ranks do after a stop request
    threads: int = 1  # Threads of each rank
    timeout_s: float = 600.0  # How long a rank may give no sign of life
    problem: Callable[[], str] = str  # Why the run cannot go on, such as a removed run folder; empty while it can


@dataclass(frozen=True)
class LaunchExitStatus:
    """How a group of ranks ended. The message is empty if nothing went wrong."""

    exit_code: int
    message: str = ""
    traceback: str = ""
    stop_requested: bool = False

    def raise_if_stopped(self) -> None:
        """Ctrl-C, for commands that do not report ranks that were stopped."""
        if self.stop_requested:
            raise KeyboardInterrupt


def rank_environment(base: Mapping[str, str], threads: int) -> dict[str, str]:
    """The environment of ranks that all run on this machine."""
    loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    return {
        **({"GLOO_SOCKET_IFNAME": loopback[0]} if loopback else {}),  # whatever the host name resolves to
        # Threads that wait spin only briefly: next to another busy process the default is 30 times as slow, and on a
        # free machine no faster (measured, 2 threads on 2 cores).
        "GOMP_SPINCOUNT": "1000",
        "PYTHONFAULTHANDLER": "1",  # a crash in native code leaves its Python stack
        **base,
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
    }


def launch_ranks(spec: LaunchSpec, log: Callable[[str], None]) -> LaunchExitStatus:
    """Run the ranks until all have ended, and restart them after a failure as often as allowed."""
    token = read_run_token(spec.environment) or new_run_token()
    spec = replace(spec, environment={**spec.environment, **token.environment()})
    stop = failures.StopFlag()
    with failures.handle_signals(lambda number, _: stop.request(number), *failures.STOP_SIGNALS):
        for attempt in range(spec.max_restarts + 1):
            status = _run_attempt(spec, attempt, stop, log=log)
            # Bad input, divergence and a full disk would only come again.
            is_retryable = status.exit_code == RankFailedError.exit_code and not stop.requested
            if not is_retryable or attempt == spec.max_restarts:
                break
            log(f"{status.message}; starting again from the last checkpoint ({attempt + 1} of {spec.max_restarts})")
    return replace(status, stop_requested=stop.requested)


def _run_attempt(
    spec: LaunchSpec, attempt: int, stop: failures.StopFlag, *, log: Callable[[str], None]
) -> LaunchExitStatus:
    # A fresh folder (mode 0700) for each attempt: a store must not remember dead ranks.
    with (
        locked_temporary_folder() as folder,
        closing(HeartbeatReceiver(spec.timeout_s)) as heartbeats,
    ):
        launch = _LaunchAttempt(spec, attempt, folder, heartbeats)
        try:
            launch.start_ranks()
            launch.wait_for_end(stop, log)
            status = launch.exit_status(stop)
        except BaseException:
            _terminate(launch.ranks, grace_s=0.0)
            raise
        if status.message or spec.elastic_policy.workers:
            is_hopeless = stop.is_immediate or spec.problem()
            _terminate(launch.ranks, grace_s=0.0 if is_hopeless else SIGTERM_GRACE_S)
        return status


@dataclass
class _RankProcess:
    rank: int
    process: subprocess.Popen[bytes]
    records_folder: Path
    log_file: Path
    log_offset: int  # Earlier attempts wrote the log up to here
    incarnation: int = 0  # How many processes had this rank before
    ended_at_s: float = 0.0
    silence: str = ""  # Why the supervisor killed it, if it gave no sign of life

    def poll(self) -> int | None:
        if self.process.poll() is not None and not self.ended_at_s:
            self.ended_at_s = time.time() - POLL_S  # it may have ended right after the last poll
        return self.process.returncode

    def exit_record(self) -> failures.RankExitRecord | None:
        return failures.read_exit_record(self.records_folder, self.rank)

    def has_failed(self) -> bool:
        code = self.poll()
        record = self.exit_record() if code is not None else None
        return code is not None and (record is None or bool(record.error_message) or code != record.exit_code)

    def failure_record(self) -> failures.RankExitRecord:
        """The record of its failure, or a record of how the process ended if it left none."""
        record, code = self.exit_record(), self.process.wait()
        if record and record.error_message:
            return replace(record, error_message=record.message)
        sentence = f"rank {self.rank} ended with exit code {code} in the middle of its work"
        if code < 0:
            names = [f" ({known.name})" for known in signal.Signals if known == -code]  # some signals have no name
            remark = "; if nobody did that, the machine ran out of memory" if code == -signal.SIGKILL else ""
            sentence = self.silence or f"rank {self.rank} was killed by signal {-code}{''.join(names[:1])}{remark}"
        output = self.log_file.read_bytes()[self.log_offset :] if self.log_file.is_file() else b""
        lines = output.decode(errors="replace").splitlines()
        log_tail = "\n".join(["its last words:", *lines[-LOG_TAIL_LINES:]]) if lines else ""
        return failures.RankExitRecord(self.rank, self.ended_at_s, RankFailedError.exit_code, sentence, log_tail)


@dataclass
class _LaunchAttempt:
    spec: LaunchSpec
    attempt: int
    folder: Path
    heartbeats: HeartbeatReceiver
    ranks: list[_RankProcess] = field(default_factory=list)
    used_spares: int = 0

    def start_ranks(self) -> None:
        if self.spec.coordinator_address:
            coordinator_address_file(self._rank_env(0, 0)).write_text(self.spec.coordinator_address, encoding="utf-8")
        for rank in range(self.spec.ranks):  # if one does not start, the ones before it are ended
            self.ranks.append(self._start_rank(rank))

    def _rank_env(self, rank: int, incarnation: int) -> RankEnvironment:
        ranks, store = self.spec.ranks, f"file://{self.folder}/store"
        return RankEnvironment(rank, ranks, rank, ranks, self.attempt, store, incarnation=incarnation)

    def _start_rank(self, rank: int, incarnation: int = 0) -> _RankProcess:
        spec, path = self.spec, self.spec.log_folder / f"rank-{rank}.txt"
        variables = rank_environment(spec.environment, spec.threads)
        variables |= environment_variables_for(self._rank_env(rank, incarnation))
        variables |= {"MOTET_SUPERVISOR": str(os.getpid()), "MOTET_HEARTBEATS": str(self.heartbeats.writer)}
        self.heartbeats.expect(rank)
        with ExitStack() as files:
            log = None
            if rank or spec.coordinator_address:
                with convert_os_errors(f"write {path}", "repair the folder or give another one"):
                    log = files.enter_context(open_without_links(path, "ab"))
            process = subprocess.Popen(
                [sys.executable, "-m", "motet.cli.run_rank_function", *spec.command],
                env=variables,
                pass_fds=(self.heartbeats.writer,),
                stdin=subprocess.DEVNULL,
                stdout=log or spec.stdout_fd,
                stderr=log,
                start_new_session=True,  # Ctrl-C and hang-up of the terminal reach only the supervisor
            )
            return _RankProcess(rank, process, self.folder, path, log.tell() if log else 0, incarnation)

    def _coordinator_has_finished(self) -> bool:
        first = self.ranks[0]
        return self.spec.elastic_policy.has_coordinator and first.poll() is not None and not first.has_failed()

    def wait_for_end(self, stop: failures.StopFlag, log: Callable[[str], None]) -> None:
        """Wait until all ranks have ended, or one failed and the others had time to say why, or an immediate stop."""
        forwarded, deadline = False, float("inf")
        while not stop.is_immediate and not self.spec.problem() and time.monotonic() < deadline:
            if stop.requested and not forwarded:
                forwarded = True
                log(f"{self.spec.stop_message}; Ctrl-C once more stops immediately")
                # A coordinator stops the others.
                _signal_all(self.ranks[:1] if self.spec.elastic_policy.has_coordinator else self.ranks, signal.SIGTERM)
            if all(rank.poll() is not None for rank in self.ranks):
                return
            self._kill_silent_ranks()
            self._handle_failures(log)
            has_failed = any(rank.has_failed() for rank in self.ranks)
            if deadline == float("inf") and (has_failed or self._coordinator_has_finished()):
                deadline = time.monotonic() + (EXIT_RECORD_WAIT_S if has_failed else COORDINATOR_EXIT_GRACE_S)
            time.sleep(POLL_S)

    def _kill_silent_ranks(self) -> None:
        self.heartbeats.poll()
        silent, sentence = self.heartbeats.describe_silence(
            {rank.rank: rank.process.pid for rank in self.ranks if rank.poll() is None}
        )
        for rank in self.ranks:
            if rank.rank in silent:
                rank.silence = sentence
                _terminate([rank], grace_s=0.0)

    def _handle_failures(self, log: Callable[[str], None]) -> None:
        policy = self.spec.elastic_policy
        if policy.has_coordinator and self.ranks[0].poll() is not None:
            return
        for rank in [rank for rank in self.ranks if rank.has_failed()]:
            record = rank.exit_record()
            is_root_cause = record is not None and not (record.caused_by_peer and policy.has_coordinator)
            if is_root_cause or not (rank.rank in policy.servers or rank.rank in policy.workers):
                continue
            sentence = rank.failure_record().error_message
            if self.used_spares < policy.spares:
                self.used_spares += 1
                log(f"{sentence}; another process takes its place ({self.used_spares} of {policy.spares})")
                _terminate([rank], grace_s=0.0)  # with its child processes
                rank.records_folder.joinpath(f"rank-{rank.rank}.json").unlink(missing_ok=True)
                self.ranks[self.ranks.index(rank)] = self._start_rank(rank.rank, rank.incarnation + 1)
            elif rank.rank not in policy.servers and any(
                other.rank in policy.workers and other is not rank and other.poll() is None for other in self.ranks
            ):
                log(f"{sentence}; the others go on")
                self.ranks.remove(rank)

    def exit_status(self, stop: failures.StopFlag) -> LaunchExitStatus:
        if stop.is_immediate:
            return LaunchExitStatus(failures.KILLED_EXIT_CODE, "stopped immediately")
        if problem := self.spec.problem():
            return LaunchExitStatus(CheckpointSaveError.exit_code, problem)
        ranks = self.ranks[:1] if self._coordinator_has_finished() else self.ranks
        codes = [rank.poll() for rank in ranks]
        if stop.requested and -signal.SIGTERM in codes:
            return LaunchExitStatus(failures.STOPPED_EXIT_CODE, "stopped while the ranks were starting")
        records = [rank.failure_record() for rank in ranks if rank.has_failed()]
        if not records:
            return LaunchExitStatus(max(code or 0 for code in codes))
        failure = failures.root_cause(records)
        return LaunchExitStatus(failure.exit_code, failure.error_message, failure.traceback)


def _signal_all(ranks: list[_RankProcess], signal_number: signal.Signals) -> None:
    for rank in ranks:
        if rank.poll() is None:
            rank.process.send_signal(signal_number)


def _terminate(ranks: list[_RankProcess], grace_s: float) -> None:
    if grace_s:
        _signal_all(ranks, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline and any(rank.poll() is None for rank in ranks):
        time.sleep(POLL_S)
    for rank in ranks:
        with suppress(ProcessLookupError):  # the group has all child processes
            os.killpg(rank.process.pid, signal.SIGKILL)
    for rank in ranks:
        rank.process.wait()
