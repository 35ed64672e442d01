"""The end of a rank: on request, by its own failure, or because another rank failed.
A request (Ctrl-C, SIGTERM, SIGUSR1) only sets a flag, which the loop reads once a step. A failure becomes a record,
which says whether this rank is the cause or only lost its connection to the rank that is."""

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
from motet.core.text_files import write_file_atomically

STOPPED_EXIT_CODE = 130
KILLED_EXIT_CODE = 137

# Schedulers send these some time before they end a job (Slurm's --signal, SGE's -notify), and may repeat them; SIGXCPU
# comes once a second. They ask to save and stop, however often they come.
NOTICE_SIGNALS = frozenset({signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU})
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGHUP, *NOTICE_SIGNALS)

# One Ctrl-C may arrive twice, from the terminal and from a launcher; a signal after this time is a second request.
SIGNAL_DEBOUNCE_S = 0.3


@dataclass
class StopFlag:
    """Set from outside when the run should stop; the loop reads it once a step, on every rank together."""

    requested: bool = False
    first_request_s: float = math.inf
    is_immediate: bool = False  # A second request came
    problem: str = ""  # Why the run cannot go on, found by another thread

    def request(self, number: int = signal.SIGTERM) -> None:
        """Ask to stop. A signal of a scheduler counts neither as the first nor as the second of two requests."""
        self.requested = True
        if number not in NOTICE_SIGNALS:
            self.is_immediate = self.is_immediate or time.monotonic() - self.first_request_s >= SIGNAL_DEBOUNCE_S
            self.first_request_s = min(self.first_request_s, time.monotonic())

    def report_problem(self, problem: str) -> None:
        """The run cannot go on; its next step raises this."""
        self.problem = problem

    def is_requested(self) -> bool:
        """Whether the run should stop and save. Raises if it cannot go on."""
        if self.problem:
            raise errors.CheckpointSaveError(self.problem)
        return self.requested

    def exit_on_sigterm(self) -> None:
        """SIGTERM ends this process from here on, or now if it came already: there is nothing to save."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if self.requested:
            os.kill(os.getpid(), signal.SIGTERM)


@contextmanager
def handle_signals(handler: Callable[[int, FrameType | None], None], *signals: signal.Signals) -> Iterator[None]:
    """While the block runs, `handler` gets these signals; a hang-up that `nohup` ignores stays ignored."""
    ignores_hangup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    handled = [number for number in signals if number != signal.SIGHUP or not ignores_hangup]
    previous_handlers = {number: signal.signal(number, handler) for number in handled}
    try:
        yield
    finally:
        for number, previous in previous_handlers.items():
            signal.signal(number, previous)


def interrupt(number: int, frame: FrameType | None) -> None:
    """A handler that treats a signal as Ctrl-C, so that no process or folder is left behind."""
    raise KeyboardInterrupt


@contextmanager
def stop_on_signals() -> Iterator[StopFlag]:
    """While the block runs, a stop signal sets the flag, and a second request ends the process immediately."""
    flag = StopFlag()

    def handle(number: int, frame: FrameType | None) -> None:
        flag.request(number)
        if flag.is_immediate:
            os._exit(KILLED_EXIT_CODE)

    with handle_signals(handle, *STOP_SIGNALS):
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
        by_peer, error = is_caused_by_peer(error), device_memory_error(error) or error
        if isinstance(error, errors.MotetError):
            return RankExitRecord(rank, time.time(), error.exit_code, str(error), caused_by_peer=by_peer)
        message, code = "".join(traceback.format_exception_only(error)).strip(), errors.RankFailedError.exit_code
        if isinstance(error, SystemExit):
            message = f"the code of this rank called sys.exit({error.code!r}) before its work was done"
            by_peer = False
        return RankExitRecord(rank, time.time(), code, message, _format_traceback(error), by_peer)


_CUDA_SIZES = (  # Sentences of torch's allocator (2.11 to 2.13)
    ("the operation needs {} more", re.compile(r"Tried to allocate ([\d.]+ \w+)")),
    ("{} are allocated", re.compile(r"([\d.]+ \w+) is allocated by PyTorch")),
    ("the limit is {} (memory.device_limit)", re.compile(r"([\d.]+ \w+) allowed")),
    ("the GPU has {}", re.compile(r"has a total capacity of ([\d.]+ \w+)")),
)


def device_memory_error(error: BaseException) -> errors.DeviceMemoryError | None:
    """One sentence for the error of a GPU's allocator, else None."""
    if type(error).__name__ != "OutOfMemoryError":
        return None
    matches = ((text, pattern.search(str(error))) for text, pattern in _CUDA_SIZES)
    sizes = [text.format(match[1]) for text, match in matches if match]
    shown = f" ({', '.join(sizes)})" if sizes else ""
    sentence = f"the device has too little memory{shown}; {errors.DEVICE_MEMORY_REMEDIES}"
    return errors.DeviceMemoryError(sentence).with_traceback(error.__traceback__)


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
