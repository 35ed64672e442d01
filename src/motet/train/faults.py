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

STOPPED = 130
STOPPED_AT_ONCE = 137

# One Ctrl-C may arrive twice (from the terminal and from a launcher); what comes later than this is a second one.
ECHO_S = 0.3


@dataclass
class StopFlag:
    """Set from outside when the run should stop; the loop reads it once a step, on every rank together."""

    requested: bool = False
    first_s: float = 0.0

    def request(self) -> bool:
        """Note one request to stop; True when it is a second one."""
        if not self.requested:
            self.requested, self.first_s = True, time.monotonic()
            return False
        return time.monotonic() - self.first_s >= ECHO_S

    def end_this_process(self) -> None:
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
            os._exit(STOPPED_AT_ONCE)

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield flag
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass(frozen=True)
class Record:
    """How the work of one rank ended."""

    rank: int
    time_s: float
    """Seconds of the machine's clock, to tell which failure came first."""
    exit_code: int
    sentence: str = ""
    """What went wrong; empty when nothing did."""
    traceback: str = ""
    """Empty when the sentence is all that the user needs."""
    secondary: bool = False
    """It failed only because another rank did."""

    @property
    def agreed(self) -> bool:
        """Every rank saw the same numbers and came to this end together: none is to blame."""
        return self.exit_code in (TrainingDivergedError.exit_code, NumericalMismatchError.exit_code)

    @property
    def message(self) -> str:
        """The sentence, with the rank that it is about."""
        return self.sentence if self.agreed or not self.sentence else f"rank {self.rank} failed: {self.sentence}"

    def write(self, folder: Path) -> None:
        """Leave the record where the supervisor looks, whole or not at all."""
        partial = folder / f"rank-{self.rank}.partial"
        partial.write_text(json.dumps(asdict(self)), encoding="utf-8")
        partial.rename(folder / f"rank-{self.rank}.json")


def read_record(folder: Path, rank: int) -> Record | None:
    """The record that a rank left, if it did."""
    path = folder / f"rank-{rank}.json"
    return Record(**json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else None


def guarded(rank: int, work: Callable[[], int]) -> Record:
    """Do the work, which returns its exit code, and say how it ended, whatever it raised."""
    try:
        return Record(rank, time.time(), work())
    except MotetError as error:
        return Record(rank, time.time(), error.exit_code, str(error), secondary=is_secondary(error))
    except SystemExit as error:
        sentence = f"the code of this rank called sys.exit({error.code!r}) before its work was done"
        return Record(rank, time.time(), RankFailedError.exit_code, sentence, _traceback_of(error))
    except BaseException as error:  # noqa: BLE001 - whatever ends a rank is told
        sentence = "".join(traceback.format_exception_only(error)).strip()
        return Record(
            rank, time.time(), RankFailedError.exit_code, sentence, _traceback_of(error), secondary=is_secondary(error)
        )


# What Gloo, NCCL and the stores say when the other side is gone or does not come (torch 2.11 to 2.13).
_LOST = re.compile(
    r"connection (closed|reset|refused|was closed)|closed by peer|broken pipe|socket closed|remote process exited"
    r"|timed out waiting|application timeout|pair closure|timed? ?out after|ncclRemoteError|ncclSystemError"
    r"|(recv|send)value failed|failed to recv|remote peer|gloo connectfullmesh failed|no route to host",
    re.IGNORECASE,
)
_LOST_TYPES = {"DistBackendError", "DistNetworkError", "DistStoreError"}


def is_secondary(error: BaseException | None) -> bool:
    """Whether an error only says that another rank is gone or late."""
    if error is None:
        return False
    if isinstance(error, PeerFailedError) or type(error).__name__ in _LOST_TYPES:
        return True
    if type(error) in (RuntimeError, ConnectionError) and _LOST.search(str(error)):
        return True
    return is_secondary(error.__cause__)


def first_cause(records: Sequence[Record]) -> Record:
    """The failure that the others follow from: the earliest that is a cause of its own, or else the earliest."""
    return min(records, key=lambda record: (record.secondary, record.time_s))


_CALLERS = {f"motet.train.{name}" for name in ("faults", "rank", "start", "work")}


def _traceback_of(error: BaseException) -> str:
    frames = error.__traceback__
    while frames and frames.tb_frame.f_globals.get("__name__") in _CALLERS:
        frames = frames.tb_next  # how a rank comes to its work is no news
    return "".join(traceback.format_exception(type(error), error, frames)).rstrip()
