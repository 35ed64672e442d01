"""Signs of life: every rank writes a line to a pipe once a second, so that the supervisor notices a process that does
not run. A thread writes it, so a long step, an evaluation or a save is no silence. A rank that runs and waits for
another one is not noticed here: each collective has its own timeout, `run.timeout_s`."""

import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

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
