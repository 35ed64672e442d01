"""The process of one rank: do its work, leave a record, and never outlive the supervisor.
The work is any function `(rank_env, stop, *arguments) -> exit code`, named as `package.module:function`.

Signs of life: every rank writes a line to a pipe once a second, so that the supervisor notices a process that does
not run. A thread writes it, so a long step, an evaluation or a save is not a silence. A rank that runs and waits for
another one gives signs of life: each collective has its own timeout, `run.timeout_s`.
"""

import ctypes
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from motet.core.errors import CheckpointSaveError
from motet.parallel.process.launch_environment import RankEnvironment
from motet.train.launch.failures import RankExitRecord, run_and_record, stop_on_signals


def run_rank_function(rank_env: RankEnvironment, function: Callable[..., int], *arguments: str) -> RankExitRecord:
    """Call the function of this rank, which gets requests to stop as a flag."""
    with stop_on_signals() as stop:
        return run_and_record(rank_env.rank, lambda: function(rank_env, stop, *arguments))


def run_supervised_rank(rank_env: RankEnvironment, parent_pid: int, function_name: str, arguments: list[str]) -> int:
    """The main function of a supervised process. Returns its exit code, or ends the process."""
    exit_with_parent(parent_pid)

    def run_imported(*values: Any) -> int:  # imports torch, after the signals are in place
        module, _, name = function_name.partition(":")
        return int(getattr(import_module(module), name)(*values))

    record = run_rank_function(rank_env, run_imported, *arguments)
    folder = Path(rank_env.rendezvous.removeprefix("file://")).parent
    try:
        record.write(folder)
    except OSError as error:
        sentence = f"rank {rank_env.rank} cannot write {folder}: {error.strerror}; free some space there, or set TMPDIR"
        sys.stderr.write("".join(f"{text}\n" for text in (record.message, record.traceback, sentence) if text))
        hard_exit(CheckpointSaveError.exit_code)
    if record.error_message:
        hard_exit(record.exit_code)
    return record.exit_code


def hard_exit(exit_code: int) -> None:
    """End the process without any clean-up: after a failure, a group with lost ranks may wait for ever."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def exit_with_parent(parent_pid: int) -> None:
    """End this process when its parent ends, even if the parent was killed."""
    if sys.platform == "linux":
        if ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL) != 0:  # 1: PR_SET_PDEATHSIG
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    else:
        threading.Thread(target=_exit_when_orphaned, args=[parent_pid], daemon=True).start()
    if os.getppid() != parent_pid:  # it ended before
        os._exit(1)


def _exit_when_orphaned(parent_pid: int) -> None:
    while os.getppid() == parent_pid:
        time.sleep(0.5)
    os._exit(1)


BEAT_S = 1.0
# Importing torch from a slow disk may keep the interpreter's lock for some seconds, so a shorter silence says nothing.
SHORTEST_LIMIT_S = 10.0
_SUPERVISOR_GAP_S = 5.0  # A supervisor that did not run itself, as after Ctrl-Z and `fg`, has not seen a silence
_MAX_PLACE_LENGTH = 200
_STATES = {"T": "was stopped (SIGSTOP)", "t": "was stopped by a debugger", "D": "waited for a disk"}


def start_heartbeats(rank: int, descriptor: int) -> None:
    """Write the rank, and where its main thread is, to the supervisor's pipe from now on."""
    os.set_inheritable(descriptor, False)
    main_thread = threading.get_ident()

    def send() -> None:
        with suppress(BrokenPipeError):  # the supervisor has ended, and this process ends with it
            while True:
                line = f"{rank} {_place_of(main_thread)[:_MAX_PLACE_LENGTH]}\n"  # below PIPE_BUF, so it is not torn
                with suppress(BlockingIOError):  # the supervisor does not run, and the pipe is full
                    os.write(descriptor, line.encode(errors="replace"))
                time.sleep(BEAT_S)

    threading.Thread(target=send, name="heartbeats", daemon=True).start()


def _place_of(thread: int) -> str:
    frame = sys._current_frames().get(thread)
    if frame is None:
        return "its end"
    return f"{frame.f_code.co_name} ({'/'.join(Path(frame.f_code.co_filename).parts[-3:])}:{frame.f_lineno})"


class HeartbeatReceiver:
    """The supervisor's end of the pipe; `writer` is inherited by the ranks."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = max(limit_s, SHORTEST_LIMIT_S)
        self._reader, self.writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self.writer, False)
        self._polled_at_s, self._rest = time.monotonic(), ""
        self._seen_at_s = dict[int, float]()
        self._places = dict[int, str]()

    def expect(self, rank: int) -> None:
        """A process of this rank starts now."""
        self._seen_at_s[rank], self._places[rank] = time.monotonic(), "its start"

    def poll(self) -> None:
        """Read what the ranks have written."""
        now = time.monotonic()
        gap_s, self._polled_at_s = now - self._polled_at_s, now
        if gap_s > _SUPERVISOR_GAP_S:
            self._seen_at_s = {rank: seen_at_s + gap_s for rank, seen_at_s in self._seen_at_s.items()}
        with suppress(BlockingIOError):
            *lines, self._rest = (self._rest + os.read(self._reader, 1 << 16).decode(errors="replace")).split("\n")
            for rank, _, place in (line.partition(" ") for line in lines):
                if rank.isdecimal() and int(rank) in self._seen_at_s:
                    self._seen_at_s[int(rank)], self._places[int(rank)] = now, place

    def describe_silence(self, pids: dict[int, int]) -> tuple[list[int], str]:
        """The ranks of these processes that were silent for too long, and a sentence about them."""
        silence_s = {rank: self._polled_at_s - self._seen_at_s[rank] for rank in pids}
        if max(silence_s.values(), default=0.0) <= self.limit_s:
            return [], ""
        silent = [rank for rank in sorted(pids) if silence_s[rank] > self.limit_s - 2 * BEAT_S]
        details = [f"rank {rank} {_process_state(pids[rank])} in {self._places[rank]}" for rank in silent]
        names = f"rank{'s' * (len(silent) > 1)} {', '.join(map(str, silent))}"
        return silent, f"{names} gave no sign of life for {self.limit_s:g} s: {'; '.join(details)}"

    def close(self) -> None:
        os.close(self._reader)
        os.close(self.writer)


def _process_state(pid: int) -> str:
    with suppress(OSError, IndexError):  # only Linux has it
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
        return _STATES.get(state, "did not run")
    return "did not run"
