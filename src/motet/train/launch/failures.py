"""How a rank stops: on request, by its own failure, or because another rank failed.

A request (Ctrl-C, SIGTERM) only sets a flag, which the loop reads once a step. A failure becomes a record that says
whether this rank is the cause or merely lost its connection to the one that is.
"""

import json
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

from motet.core.errors import (
    MotetError,
    NumericalMismatchError,
    PeerFailedError,
    RankFailedError,
    TrainingDivergedError,
)

STOPPED_EXIT_CODE = 130
KILLED_EXIT_CODE = 137

# One Ctrl-C may arrive twice (from the terminal and from a launcher); what comes later than this is a second one.
SIGNAL_DEBOUNCE_S = 0.3


@dataclass
class StopFlag:
    """Set from outside when the run should stop; the loop reads it once a step, on every rank together."""

    requested: bool = False
    first_request_s: float = 0.0

    def request(self) -> bool:
        """Note one request to stop; True when it is a second one."""
        if not self.requested:
            self.requested, self.first_request_s = True, time.monotonic()
            return False
        return time.monotonic() - self.first_request_s >= SIGNAL_DEBOUNCE_S

    def exit_on_sigterm(self) -> None:
        """For work that has nothing to save: SIGTERM is its end from here on, or now if it has come already."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if self.requested:
            os.kill(os.getpid(), signal.SIGTERM)


@contextmanager
def stop_on_signals() -> Iterator[StopFlag]:
    """While the block runs, SIGINT and SIGTERM set the flag, and a second one ends the process at once."""
    flag = StopFlag()

    def handle(number: int, frame: FrameType | None) -> None:
        if flag.request():
            os._exit(KILLED_EXIT_CODE)

    previous_handlers = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield flag
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)


@dataclass(frozen=True)
class RankExitRecord:
    """How the work of one rank ended."""

    rank: int
    time_s: float  # Seconds of the machine's clock, to tell which failure came first
    exit_code: int
    error_message: str = ""  # What went wrong; empty when nothing did
    traceback: str = ""  # Empty when the sentence is all that the user needs
    caused_by_peer: bool = False  # It failed only because another rank did

    @property
    def is_unanimous(self) -> bool:
        """Every rank saw the same numbers and came to this end together: none is to blame."""
        return self.exit_code in (TrainingDivergedError.exit_code, NumericalMismatchError.exit_code)

    @property
    def message(self) -> str:
        """The sentence, with the rank that it is about."""
        return (
            self.error_message
            if self.is_unanimous or not self.error_message
            else f"rank {self.rank} failed: {self.error_message}"
        )

    def write(self, folder: Path) -> None:
        """Leave the record where the supervisor looks, whole or not at all."""
        partial = folder / f"rank-{self.rank}.partial"
        partial.write_text(json.dumps(asdict(self)), encoding="utf-8")
        partial.rename(folder / f"rank-{self.rank}.json")


def read_exit_record(folder: Path, rank: int) -> RankExitRecord | None:
    """The record that a rank left, if it did."""
    path = folder / f"rank-{rank}.json"
    return RankExitRecord(**json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else None


def run_and_record(rank: int, function: Callable[[], int]) -> RankExitRecord:
    """Do the work, which returns its exit code, and say how it ended, whatever it raised."""
    try:
        return RankExitRecord(rank, time.time(), function())
    except MotetError as error:
        return RankExitRecord(rank, time.time(), error.exit_code, str(error), caused_by_peer=is_caused_by_peer(error))
    except SystemExit as error:
        error_message = f"the code of this rank called sys.exit({error.code!r}) before its work was done"
        return RankExitRecord(rank, time.time(), RankFailedError.exit_code, error_message, _format_traceback(error))
    except BaseException as error:  # noqa: BLE001 - whatever ends a rank is told
        error_message = "".join(traceback.format_exception_only(error)).strip()
        return RankExitRecord(
            rank,
            time.time(),
            RankFailedError.exit_code,
            error_message,
            _format_traceback(error),
            caused_by_peer=is_caused_by_peer(error),
        )


# What Gloo, NCCL and the stores say when the other side is gone or does not come (torch 2.11 to 2.13).
_PEER_LOST_PATTERN = re.compile(
    r"connection (closed|reset|refused|was closed)|closed by peer|broken pipe|socket closed|remote process exited"
    r"|timed out waiting|application timeout|pair closure|timed? ?out after|ncclRemoteError|ncclSystemError"
    r"|(recv|send)value failed|failed to recv|remote peer|gloo connectfullmesh failed|no route to host",
    re.IGNORECASE,
)
_PEER_LOST_ERROR_TYPES = {"DistBackendError", "DistNetworkError", "DistStoreError"}


def is_caused_by_peer(error: BaseException | None) -> bool:
    """Whether an error only says that another rank is gone or late."""
    if error is None:
        return False
    if isinstance(error, PeerFailedError) or type(error).__name__ in _PEER_LOST_ERROR_TYPES:
        return True
    if type(error) in (RuntimeError, ConnectionError) and _PEER_LOST_PATTERN.search(str(error)):
        return True
    return is_caused_by_peer(error.__cause__)


def root_cause(records: Sequence[RankExitRecord]) -> RankExitRecord:
    """The failure that the others follow from: the earliest that is a cause of its own, or else the earliest."""
    return min(records, key=lambda record: (record.caused_by_peer, record.time_s))


_WRAPPER_MODULES = {f"motet.train.launch.{name}" for name in ("entry_points", "failures", "rank_main", "rank_process")}


def _format_traceback(error: BaseException) -> str:
    frames = error.__traceback__
    while frames and frames.tb_frame.f_globals.get("__name__") in _WRAPPER_MODULES:
        frames = frames.tb_next  # how a rank comes to its work is no news
    return "".join(traceback.format_exception(type(error), error, frames)).rstrip()
