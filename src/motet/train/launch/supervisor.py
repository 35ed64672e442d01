"""The supervisor of local ranks: starts them, watches them, and ends them together.

One message tells the first cause of a failure. Ctrl-C reaches only the supervisor, which passes it on; ranks cannot
outlive it. It never imports torch, so that a rank that fails is noticed by a process that nothing can block.
"""

import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType

from motet.core.errors import RankFailedError
from motet.parallel.process.launch_environment import (
    RankEnvironment,
    coordinator_address_file,
    environment_variables_for,
)
from motet.train.launch.failures import (
    KILLED_EXIT_CODE,
    STOPPED_EXIT_CODE,
    RankExitRecord,
    StopFlag,
    read_exit_record,
    root_cause,
)

POLL_S = 0.03
EXIT_RECORD_WAIT_S = 1.0  # How long the others may take to tell their side of a failure
SIGTERM_GRACE_S = 0.5  # Between SIGTERM and SIGKILL for what is left of a failed group
LOG_TAIL_LINES = 20
COORDINATOR_EXIT_GRACE_S = 10.0  # How long the others may take to end after their desk


@dataclass(frozen=True)
class ElasticRankPolicy:
    """Ranks that may end while the others go on, unless they say that the work itself is wrong."""

    servers: range = range(0)  # Each is needed, and another process may take its place
    workers: range = range(0)  # The others do without it, if there is one left
    spares: int = 0  # Processes that may take the place of another, in all
    has_coordinator: bool = True  # Rank 0, by whose end the others end


@dataclass(frozen=True)
class LaunchSpec:
    """What to start on this machine."""

    command: tuple[str, ...]  # Starts one rank, which finds its place in the environment and leaves a record
    ranks: int
    environment: Mapping[str, str]
    log_folder: Path  # Where the output of all ranks but rank 0 goes
    max_restarts: int = 0
    stdout_fd: int | None = None  # File descriptor for the stdout of rank 0; our own when not given
    elastic_policy: ElasticRankPolicy | None = None
    coordinator_address: str = ""  # HOST:PORT of a desk that is there already
    stop_message: str = "stopping after this step and saving"  # What ranks do that are asked to stop


@dataclass(frozen=True)
class LaunchExitStatus:
    """How a group of ranks ended. The message is empty when there is nothing to complain about."""

    exit_code: int
    message: str = ""
    traceback: str = ""
    stop_requested: bool = False

    def raise_if_stopped(self) -> None:
        """Ctrl-C, for commands that have nothing to say about ranks that were stopped."""
        if self.stop_requested:
            raise KeyboardInterrupt


def rank_environment(base: Mapping[str, str], threads: int) -> dict[str, str]:
    """The environment of ranks that all are on this machine."""
    loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    return {
        **({"GLOO_SOCKET_IFNAME": loopback[0]} if loopback else {}),  # whatever this host's name resolves to
        # Threads that wait spin a little only: beside another busy process the default is 30 times as slow, and on a
        # free machine no faster (measured, 2 threads on 2 cores).
        "GOMP_SPINCOUNT": "1000",
        "PYTHONFAULTHANDLER": "1",  # a crash in native code leaves its Python stack
        **base,
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
    }


def launch_ranks(spec: LaunchSpec, log: Callable[[str], None]) -> LaunchExitStatus:
    """Run the ranks until all are done, starting them again after a failure as often as allowed."""
    with _capture_signals() as stop:
        for attempt in range(spec.max_restarts + 1):
            exit_status = _run_attempt(spec, attempt, stop, log)
            # Bad input, divergence and a full disk would only come again.
            if (
                exit_status.exit_code != RankFailedError.exit_code
                or attempt == spec.max_restarts
                or stop.flag.requested
            ):
                return replace(exit_status, stop_requested=stop.flag.requested)
            log(
                f"{exit_status.message}; starting again from the last checkpoint ({attempt + 1} of {spec.max_restarts})"
            )
    raise AssertionError("unreachable: the last attempt returns")


@dataclass
class _StopRequest:
    """What signals have asked for so far."""

    flag: StopFlag = field(default_factory=StopFlag)
    is_immediate: bool = False

    def handle(self, number: int, frame: FrameType | None) -> None:
        self.is_immediate = self.flag.request() or self.is_immediate


@contextmanager
def _capture_signals() -> Iterator[_StopRequest]:
    stop = _StopRequest()
    # SIGHUP: the terminal was closed.
    previous_handlers = {s: signal.signal(s, stop.handle) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield stop
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)


def _run_attempt(spec: LaunchSpec, attempt: int, stop: _StopRequest, log: Callable[[str], None]) -> LaunchExitStatus:
    # A fresh folder (mode 0700) for each attempt: a store must not remember dead ranks.
    with tempfile.TemporaryDirectory(prefix="motet-") as folder:
        launch_attempt = _LaunchAttempt(spec, attempt, Path(folder))
        try:
            launch_attempt.start_ranks()
            _wait_for_end(launch_attempt, stop, log)
            exit_status = _exit_status(launch_attempt, stop)
        except BaseException:
            _terminate(launch_attempt.ranks, grace_s=0.0)
            raise
        if exit_status.message or spec.elastic_policy:
            _terminate(launch_attempt.ranks, grace_s=0.0 if stop.is_immediate else SIGTERM_GRACE_S)
        return exit_status


@dataclass
class _RankProcess:
    """One rank process, and what is known of its end."""

    rank: int
    process: subprocess.Popen[bytes]
    records_folder: Path
    log_file: Path
    log_offset: int  # Where the log began to be ours: earlier attempts stand before it
    incarnation: int = 0  # How many processes had this place before
    ended_at_s: float = 0.0

    def poll(self) -> int | None:
        code = self.process.poll()
        if code is not None and not self.ended_at_s:
            self.ended_at_s = time.time() - POLL_S  # it may have happened as early as the last look
        return code

    def exit_record(self) -> RankExitRecord | None:
        return read_exit_record(self.records_folder, self.rank)

    def has_failed(self) -> bool:
        """It should end with a record, and with the exit code that the record gives."""
        code = self.poll()
        record = self.exit_record() if code is not None else None
        return code is not None and (record is None or bool(record.error_message) or code != record.exit_code)


@dataclass
class _LaunchAttempt:
    """The ranks of one attempt."""

    spec: LaunchSpec
    attempt: int
    folder: Path
    ranks: list[_RankProcess] = field(default_factory=list)
    used_spares: int = 0  # Spares that were started

    def start_ranks(self) -> None:
        if self.spec.coordinator_address:
            coordinator_address_file(_rank_env(self.spec, self.attempt, 0, self.folder)).write_text(
                self.spec.coordinator_address, encoding="utf-8"
            )
        for rank in range(self.spec.ranks):
            self.ranks.append(_start_rank(self.spec, self.attempt, rank, self.folder))

    @property
    def coordinator_has_finished(self) -> bool:
        """The desk has come to its end, and the others can be of no more use."""
        policy = self.spec.elastic_policy
        return (
            policy is not None
            and policy.has_coordinator
            and self.ranks[0].poll() is not None
            and not self.ranks[0].has_failed()
        )

    def handle_failures(self, log: Callable[[str], None]) -> None:
        """What the others can: let another process take the place of one that ended, or go on without it."""
        policy = self.spec.elastic_policy
        if policy is None or (policy.has_coordinator and self.ranks[0].poll() is not None):
            return
        for rank in [rank for rank in self.ranks if rank.has_failed()]:
            record = rank.exit_record()
            is_root_cause = record is not None and not (record.caused_by_peer and policy.has_coordinator)
            if is_root_cause or not (rank.rank in policy.servers or rank.rank in policy.workers):
                continue
            sentence = _failure_record(rank).error_message
            remaining_workers = [
                r for r in self.ranks if r.rank in policy.workers and r is not rank and r.poll() is None
            ]
            if self.used_spares < policy.spares:
                self.used_spares += 1
                log(f"{sentence}; another process takes its place ({self.used_spares} of {policy.spares})")
                _terminate([rank], grace_s=0.0)  # with what it has started
                rank.records_folder.joinpath(f"rank-{rank.rank}.json").unlink(missing_ok=True)
                self.ranks[self.ranks.index(rank)] = _start_rank(
                    self.spec, self.attempt, rank.rank, self.folder, rank.incarnation + 1
                )
            elif rank.rank not in policy.servers and remaining_workers:
                log(f"{sentence}; the others go on")
                self.ranks.remove(rank)


def _rank_env(spec: LaunchSpec, attempt: int, rank: int, folder: Path) -> RankEnvironment:
    return RankEnvironment(rank, spec.ranks, rank, spec.ranks, attempt, f"file://{folder}/store")


def _start_rank(spec: LaunchSpec, attempt: int, rank: int, folder: Path, incarnation: int = 0) -> _RankProcess:
    rank_env = replace(_rank_env(spec, attempt, rank, folder), incarnation=incarnation)
    path = spec.log_folder / f"rank-{rank}.txt"
    with ExitStack() as files:
        log = None if rank == 0 and not spec.coordinator_address else files.enter_context(path.open("ab"))
        process = subprocess.Popen(
            spec.command,
            env={**spec.environment, **environment_variables_for(rank_env), "MOTET_SUPERVISOR": str(os.getpid())},
            stdin=subprocess.DEVNULL,
            stdout=log or spec.stdout_fd,
            stderr=log,
            start_new_session=True,  # the terminal's Ctrl-C and hang-up come to us alone
        )
        return _RankProcess(rank, process, folder, path, log.tell() if log else 0, incarnation)


def _wait_for_end(launch_attempt: _LaunchAttempt, stop: _StopRequest, log: Callable[[str], None]) -> None:
    """Wait until all have ended, one has ended badly (and the others had time to say why), or nobody may go on."""
    forwarded = False
    deadline = float("inf")
    while not stop.is_immediate and time.monotonic() < deadline:
        if stop.flag.requested and not forwarded:
            forwarded = True
            log(f"{launch_attempt.spec.stop_message}; Ctrl-C once more stops at once")
            has_coordinator = (
                launch_attempt.spec.elastic_policy is not None and launch_attempt.spec.elastic_policy.has_coordinator
            )
            _signal_all(
                launch_attempt.ranks[:1] if has_coordinator else launch_attempt.ranks, signal.SIGTERM
            )  # a desk tells the others
        if all(rank.poll() is not None for rank in launch_attempt.ranks):
            return
        launch_attempt.handle_failures(log)
        if deadline == float("inf"):
            if any(rank.has_failed() for rank in launch_attempt.ranks):
                deadline = time.monotonic() + EXIT_RECORD_WAIT_S
            elif launch_attempt.coordinator_has_finished:
                deadline = time.monotonic() + COORDINATOR_EXIT_GRACE_S
        time.sleep(POLL_S)


def _exit_status(launch_attempt: _LaunchAttempt, stop: _StopRequest) -> LaunchExitStatus:
    """What the exit codes and records of the ranks come to."""
    if stop.is_immediate:
        return LaunchExitStatus(KILLED_EXIT_CODE, "stopped at once")
    ranks = launch_attempt.ranks[:1] if launch_attempt.coordinator_has_finished else launch_attempt.ranks
    codes = [rank.poll() for rank in ranks]
    if stop.flag.requested and -signal.SIGTERM in codes:
        return LaunchExitStatus(STOPPED_EXIT_CODE, "stopped while the ranks were starting")
    failures = [_failure_record(rank) for rank in ranks if rank.has_failed()]
    if not failures:
        return LaunchExitStatus(max(code or 0 for code in codes))
    root_failure = root_cause(failures)
    return LaunchExitStatus(root_failure.exit_code, root_failure.error_message, root_failure.traceback)


def _failure_record(rank: _RankProcess) -> RankExitRecord:
    """What a rank says of its failure, or what is to be seen when it could not say anything."""
    record, code = rank.exit_record(), rank.poll()
    assert code is not None
    if record and record.error_message:
        return replace(record, error_message=record.message)
    if code < 0:
        names = [f" ({known.name})" for known in signal.Signals if known == -code]  # some have none
        sentence = f"rank {rank.rank} was killed by signal {-code}{''.join(names[:1])}"
    else:
        sentence = f"rank {rank.rank} ended with exit code {code} in the middle of its work"
    if code == -signal.SIGKILL:
        sentence += "; if nobody did that, the machine ran out of memory"
    return RankExitRecord(rank.rank, rank.ended_at_s, RankFailedError.exit_code, sentence, _log_tail(rank))


def _log_tail(rank: _RankProcess) -> str:
    output = rank.log_file.read_bytes()[rank.log_offset :] if rank.log_file.is_file() else b""
    lines = output.decode(errors="replace").splitlines()
    return "\n".join(["its last words:", *lines[-LOG_TAIL_LINES:]]) if lines else ""


def _signal_all(ranks: list[_RankProcess], signal_number: signal.Signals) -> None:
    for rank in ranks:
        if rank.poll() is None:
            rank.process.send_signal(signal_number)


def _terminate(ranks: list[_RankProcess], grace_s: float) -> None:
    """End what still runs, with everything that it has started."""
    if grace_s:
        _signal_all(ranks, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline and any(rank.poll() is None for rank in ranks):
        time.sleep(POLL_S)
    for rank in ranks:
        with suppress(ProcessLookupError):
            os.killpg(rank.process.pid, signal.SIGKILL)
    for rank in ranks:
        rank.process.wait()
