"""How a rank stops: on request, by its own failure, or because another rank failed.
A request (Ctrl-C, SIGTERM) only sets a flag, which the loop reads once a step. A failure becomes a record, which says
whether this rank is the cause or only lost its connection to the rank that is."""

import json
import math
import os
import re
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

from motet.core import errors
from motet.core.atomic_file import write_file_atomically

STOPPED_EXIT_CODE = 130
KILLED_EXIT_CODE = 137

# One Ctrl-C may arrive twice, from the terminal and from a launcher; a signal after this time is a second request.
SIGNAL_DEBOUNCE_S = 0.3


@dataclass
class StopFlag:
    """Set from outside when the run should stop; the loop reads it once a step, on every rank together."""

    requested: bool = False
    first_request_s: float = math.inf
    is_immediate: bool = False  # A second request came

    def request(self) -> None:
        self.is_immediate = self.is_immediate or time.monotonic() - self.first_request_s >= SIGNAL_DEBOUNCE_S
        if not self.requested:
            self.requested, self.first_request_s = True, time.monotonic()

    def exit_on_sigterm(self) -> None:
        """SIGTERM ends this process from here on, or now if it came already: there is nothing to save."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if self.requested:
            os.kill(os.getpid(), signal.SIGTERM)


@contextmanager
def handle_signals(handler: Callable[[int, FrameType | None], None], *signals: signal.Signals) -> Iterator[None]:
    """While the block runs, `handler` gets these signals."""
    previous_handlers = {number: signal.signal(number, handler) for number in signals}
    try:
        yield
    finally:
        for number, previous in previous_handlers.items():
            signal.signal(number, previous)


@contextmanager
def stop_on_signals() -> Iterator[StopFlag]:
    """While the block runs, SIGINT and SIGTERM set the flag, and a second one ends the process immediately."""
    flag = StopFlag()

    def handle(number: int, frame: FrameType | None) -> None:
        flag.request()
        if flag.is_immediate:
            os._exit(KILLED_EXIT_CODE)

    with handle_signals(handle, signal.SIGINT, signal.SIGTERM):
        yield flag


@dataclass(frozen=True)
class RankExitRecord:
    """How the work of one rank ended."""

    rank: int
    time_s: float  # Time of the machine's clock, to find the first failure
    exit_code: int
    error_message: str = ""  # Empty if nothing went wrong
    traceback: str = ""  # Empty if the message is all that the user needs
    caused_by_peer: bool = False  # It failed only because another rank did

    @property
    def is_unanimous(self) -> bool:
        """Every rank saw the same numbers and ended for the same reason, so no rank is named as the cause."""
        return self.exit_code in (errors.TrainingDivergedError.exit_code, errors.ReplicaMismatchError.exit_code)

    @property
    def message(self) -> str:
        """The error message, with the rank that it is about."""
        names_rank = self.error_message and not self.is_unanimous
        return f"rank {self.rank} failed: {self.error_message}" if names_rank else self.error_message

    def write(self, folder: Path) -> None:
        """Leave the record for the supervisor, complete or not at all."""
        write_file_atomically(folder / f"rank-{self.rank}.json", json.dumps(asdict(self)).encode())


def read_exit_record(folder: Path, rank: int) -> RankExitRecord | None:
    """The record that a rank left, or None."""
    path = folder / f"rank-{rank}.json"
    return RankExitRecord(**json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else None


def run_and_record(rank: int, function: Callable[[], int]) -> RankExitRecord:
    """Call `function`, which returns its exit code, and record how it ended, whatever it raised."""
    try:
        return RankExitRecord(rank, time.time(), function())
    except BaseException as error:  # noqa: BLE001 - whatever ends a rank is recorded
        by_peer = is_caused_by_peer(error)
        if isinstance(error, errors.MotetError):
            return RankExitRecord(rank, time.time(), error.exit_code, str(error), caused_by_peer=by_peer)
        message, code = "".join(traceback.format_exception_only(error)).strip(), errors.RankFailedError.exit_code
        if isinstance(error, SystemExit):
            message = f"the code of this rank called sys.exit({error.code!r}) before its work was done"
            by_peer = False
        return RankExitRecord(rank, time.time(), code, message, _format_traceback(error), by_peer)


# Messages of Gloo, NCCL and the stores when the other side has ended or does not come (torch 2.11 to 2.13).
_PEER_LOST_PATTERN = re.compile(
    r"connection (closed|reset|refused|was closed)|closed by peer|broken pipe|socket closed|remote process exited"
    r"|timed out waiting|application timeout|pair closure|timed? ?out after|ncclRemoteError|ncclSystemError"
    r"|(recv|send)value failed|failed to recv|remote peer|gloo connectfullmesh failed|no route to host",
    re.IGNORECASE,
)
_PEER_LOST_ERROR_TYPES = {"DistBackendError", "DistNetworkError", "DistStoreError"}


def is_caused_by_peer(error: BaseException | None) -> bool:
    """Whether an error only says that another rank has ended or is late."""
    is_lost_peer = type(error) in (RuntimeError, ConnectionError) and _PEER_LOST_PATTERN.search(str(error))
    if is_lost_peer or isinstance(error, errors.PeerFailedError) or type(error).__name__ in _PEER_LOST_ERROR_TYPES:
        return True
    return error is not None and is_caused_by_peer(error.__cause__)


def root_cause(records: Sequence[RankExitRecord]) -> RankExitRecord:
    """The first failure that no other rank caused, or else the first."""
    return min(records, key=lambda record: (record.caused_by_peer, record.time_s))


_WRAPPER_MODULES = {f"motet.train.launch.{name}" for name in ("entry_points", "failures", "rank_main", "rank_process")}


def _format_traceback(error: BaseException) -> str:
    frames = error.__traceback__
    while frames and frames.tb_frame.f_globals.get("__name__") in _WRAPPER_MODULES:
        frames = frames.tb_next  # how a rank reaches its work does not matter
    return "".join(traceback.format_exception(type(error), error, frames)).rstrip()
