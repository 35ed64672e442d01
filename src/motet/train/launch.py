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
from motet.train.faults import STOPPED, STOPPED_AT_ONCE, Record, StopFlag, first_cause, read_record

POLL_S = 0.03
RECORDS_S = 1.0
"""How long the others may take to tell their side of a failure."""
TERMINATE_S = 0.5
"""Between SIGTERM and SIGKILL for what is left of a failed group."""
TAIL_LINES = 20
LATE_S = 10.0
"""How long the others may take to end after their desk."""


@dataclass(frozen=True)
class Elastic:
    """Ranks that may end while the others go on, unless they say that the work itself is wrong."""

    servers: range = range(0)
    """Each is needed, and another process may take its place."""
    workers: range = range(0)
    """The others do without it, if there is one left."""
    spares: int = 0
    """Processes that may take the place of another, in all."""
    has_desk: bool = True
    """Rank 0, by whose end the others end."""


@dataclass(frozen=True)
class Launch:
    """What to start on this machine."""

    command: tuple[str, ...]
    """Starts one rank, which finds its place in the environment and leaves a record."""
    ranks: int
    environment: Mapping[str, str]
    logs: Path
    """Where the output of all ranks but rank 0 goes."""
    restarts: int = 0
    output: int | None = None
    """File descriptor for the stdout of rank 0; our own when not given."""
    elastic: Elastic | None = None
    desk: str = ""
    """HOST:PORT of a desk that is there already."""
    farewell: str = "stopping after this step and saving"
    """What ranks do that are asked to stop."""


@dataclass(frozen=True)
class Ended:
    """How a group of ranks ended. The message is empty when there is nothing to complain about."""

    exit_code: int
    message: str = ""
    traceback: str = ""
    stop_requested: bool = False

    def pass_on_stop(self) -> None:
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


def launch(start: Launch, tell: Callable[[str], None]) -> Ended:
    """Run the ranks until all are done, starting them again after a failure as often as allowed."""
    with _signals() as stop:
        for attempt in range(start.restarts + 1):
            ended = _run_group(start, attempt, stop, tell)
            # Bad input, divergence and a full disk would only come again.
            if ended.exit_code != RankFailedError.exit_code or attempt == start.restarts or stop.flag.requested:
                return replace(ended, stop_requested=stop.flag.requested)
            tell(f"{ended.message}; starting again from the last checkpoint ({attempt + 1} of {start.restarts})")
    raise AssertionError("unreachable: the last attempt returns")


@dataclass
class _Stop:
    """What signals have asked for so far."""

    flag: StopFlag = field(default_factory=StopFlag)
    at_once: bool = False

    def handle(self, number: int, frame: FrameType | None) -> None:
        self.at_once = self.flag.request() or self.at_once


@contextmanager
def _signals() -> Iterator[_Stop]:
    stop = _Stop()
    # SIGHUP: the terminal was closed.
    before = {s: signal.signal(s, stop.handle) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _run_group(start: Launch, attempt: int, stop: _Stop, tell: Callable[[str], None]) -> Ended:
    # A fresh folder (mode 0700) for each attempt: a store must not remember dead ranks.
    with tempfile.TemporaryDirectory(prefix="motet-") as folder:
        group = _Group(start, attempt, Path(folder))
        try:
            group.begin()
            _watch(group, stop, tell)
            ended = _judge(group, stop)
        except BaseException:
            _end(group.ranks, patience_s=0.0)
            raise
        if ended.message or start.elastic:
            _end(group.ranks, patience_s=0.0 if stop.at_once else TERMINATE_S)
        return ended


@dataclass
class _Rank:
    """One rank process, and what is known of its end."""

    rank: int
    process: subprocess.Popen[bytes]
    records: Path
    log: Path
    log_start: int
    """Where the log began to be ours: earlier attempts stand before it."""
    life: int = 0
    """How many processes had this place before."""
    ended_s: float = 0.0

    def poll(self) -> int | None:
        code = self.process.poll()
        if code is not None and not self.ended_s:
            self.ended_s = time.time() - POLL_S  # it may have happened as early as the last look
        return code

    def record(self) -> Record | None:
        return read_record(self.records, self.rank)

    def ended_badly(self) -> bool:
        """It should end with a record, and with the exit code that the record gives."""
        code = self.poll()
        record = self.record() if code is not None else None
        return code is not None and (record is None or bool(record.sentence) or code != record.exit_code)


@dataclass
class _Group:
    """The ranks of one attempt."""

    start: Launch
    attempt: int
    folder: Path
    ranks: list[_Rank] = field(default_factory=list)
    spent: int = 0
    """Spares that were started."""

    def begin(self) -> None:
        if self.start.desk:
            coordinator_address_file(_place(self.start, self.attempt, 0, self.folder)).write_text(
                self.start.desk, encoding="utf-8"
            )
        for rank in range(self.start.ranks):
            self.ranks.append(_start_rank(self.start, self.attempt, rank, self.folder))

    @property
    def is_over(self) -> bool:
        """The desk has come to its end, and the others can be of no more use."""
        elastic = self.start.elastic
        return (
            elastic is not None
            and elastic.has_desk
            and self.ranks[0].poll() is not None
            and not self.ranks[0].ended_badly()
        )

    def bear(self, tell: Callable[[str], None]) -> None:
        """What the others can: let another process take the place of one that ended, or go on without it."""
        elastic = self.start.elastic
        if elastic is None or (elastic.has_desk and self.ranks[0].poll() is not None):
            return
        for rank in [rank for rank in self.ranks if rank.ended_badly()]:
            record = rank.record()
            own_fault = record is not None and not (record.secondary and elastic.has_desk)
            if own_fault or not (rank.rank in elastic.servers or rank.rank in elastic.workers):
                continue
            sentence = _failure(rank).sentence
            others = [r for r in self.ranks if r.rank in elastic.workers and r is not rank and r.poll() is None]
            if self.spent < elastic.spares:
                self.spent += 1
                tell(f"{sentence}; another process takes its place ({self.spent} of {elastic.spares})")
                _end([rank], patience_s=0.0)  # with what it has started
                rank.records.joinpath(f"rank-{rank.rank}.json").unlink(missing_ok=True)
                self.ranks[self.ranks.index(rank)] = _start_rank(
                    self.start, self.attempt, rank.rank, self.folder, rank.life + 1
                )
            elif rank.rank not in elastic.servers and others:
                tell(f"{sentence}; the others go on")
                self.ranks.remove(rank)


def _place(start: Launch, attempt: int, rank: int, folder: Path) -> RankEnvironment:
    return RankEnvironment(rank, start.ranks, rank, start.ranks, attempt, f"file://{folder}/store")


def _start_rank(start: Launch, attempt: int, rank: int, folder: Path, life: int = 0) -> _Rank:
    place = replace(_place(start, attempt, rank, folder), life=life)
    path = start.logs / f"rank-{rank}.txt"
    with ExitStack() as files:
        log = None if rank == 0 and not start.desk else files.enter_context(path.open("ab"))
        process = subprocess.Popen(
            start.command,
            env={**start.environment, **environment_variables_for(place), "MOTET_SUPERVISOR": str(os.getpid())},
            stdin=subprocess.DEVNULL,
            stdout=log or start.output,
            stderr=log,
            start_new_session=True,  # the terminal's Ctrl-C and hang-up come to us alone
        )
        return _Rank(rank, process, folder, path, log.tell() if log else 0, life)


def _watch(group: _Group, stop: _Stop, tell: Callable[[str], None]) -> None:
    """Wait until all have ended, one has ended badly (and the others had time to say why), or nobody may go on."""
    forwarded = False
    deadline = float("inf")
    while not stop.at_once and time.monotonic() < deadline:
        if stop.flag.requested and not forwarded:
            forwarded = True
            tell(f"{group.start.farewell}; Ctrl-C once more stops at once")
            has_desk = group.start.elastic is not None and group.start.elastic.has_desk
            _signal_all(group.ranks[:1] if has_desk else group.ranks, signal.SIGTERM)  # a desk tells the others
        if all(rank.poll() is not None for rank in group.ranks):
            return
        group.bear(tell)
        if deadline == float("inf"):
            if any(rank.ended_badly() for rank in group.ranks):
                deadline = time.monotonic() + RECORDS_S
            elif group.is_over:
                deadline = time.monotonic() + LATE_S
        time.sleep(POLL_S)


def _judge(group: _Group, stop: _Stop) -> Ended:
    """What the exit codes and records of the ranks come to."""
    if stop.at_once:
        return Ended(STOPPED_AT_ONCE, "stopped at once")
    ranks = group.ranks[:1] if group.is_over else group.ranks
    codes = [rank.poll() for rank in ranks]
    if stop.flag.requested and -signal.SIGTERM in codes:
        return Ended(STOPPED, "stopped while the ranks were starting")
    failures = [_failure(rank) for rank in ranks if rank.ended_badly()]
    if not failures:
        return Ended(max(code or 0 for code in codes))
    cause = first_cause(failures)
    return Ended(cause.exit_code, cause.sentence, cause.traceback)


def _failure(rank: _Rank) -> Record:
    """What a rank says of its failure, or what is to be seen when it could not say anything."""
    record, code = rank.record(), rank.poll()
    assert code is not None
    if record and record.sentence:
        return replace(record, sentence=record.message)
    if code < 0:
        names = [f" ({known.name})" for known in signal.Signals if known == -code]  # some have none
        sentence = f"rank {rank.rank} was killed by signal {-code}{''.join(names[:1])}"
    else:
        sentence = f"rank {rank.rank} ended with exit code {code} in the middle of its work"
    if code == -signal.SIGKILL:
        sentence += "; if nobody did that, the machine ran out of memory"
    return Record(rank.rank, rank.ended_s, RankFailedError.exit_code, sentence, _last_words(rank))


def _last_words(rank: _Rank) -> str:
    written = rank.log.read_bytes()[rank.log_start :] if rank.log.is_file() else b""
    lines = written.decode(errors="replace").splitlines()
    return "\n".join(["its last words:", *lines[-TAIL_LINES:]]) if lines else ""


def _signal_all(ranks: list[_Rank], number: signal.Signals) -> None:
    for rank in ranks:
        if rank.poll() is None:
            rank.process.send_signal(number)


def _end(ranks: list[_Rank], patience_s: float) -> None:
    """End what still runs, with everything that it has started."""
    if patience_s:
        _signal_all(ranks, signal.SIGTERM)
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline and any(rank.poll() is None for rank in ranks):
        time.sleep(POLL_S)
    for rank in ranks:
        with suppress(ProcessLookupError):
            os.killpg(rank.process.pid, signal.SIGKILL)
    for rank in ranks:
        rank.process.wait()
