"""The phases of a rehearsal: their time, the peak of the host's memory, and a line of progress for long ones."""

import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from motet.cluster.local_device import peak_memory_bytes
from motet.core import trace
from motet.core.errors import InputError
from motet.core.trace import log_if_slow
from motet.memory import storage_tracker

_VALUE_WORDS = ("on meta tensors", "meta tensor", "Meta tensor")  # In what torch says where a value is read


def _waiting_problem(error: BaseException) -> str:
    outside = ("/torch/", storage_tracker.__file__)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not any(path in f.filename for path in outside)]
    where = f"{frames[-1].filename}, line {frames[-1].lineno} ({frames[-1].line})"
    return (
        f"a step reads a value of a tensor on its device, which makes the host wait, and cannot be rehearsed: {where}; "
        "keep the number on the device"
    )


@dataclass(frozen=True)
class RehearsalPhase:
    """A part of the start of a rank, or its step."""

    name: str
    seconds: float
    peak_host_bytes: int  # Of this process, up to the end of the phase


@dataclass
class PhaseRecorder:
    """Records the phases of a rank. Parts of a phase are the outermost spans of the code that a rank runs."""

    log: Callable[[str], None]
    phases: list[RehearsalPhase] = field(default_factory=list)
    _shows_parts: bool = False

    @contextmanager
    def phase(self, name: str, *, shows_parts: bool = False) -> Iterator[None]:
        """Record what runs inside; with `shows_parts`, each of its outermost spans in its place."""
        self._shows_parts, start_s = shows_parts, time.perf_counter()
        try:
            with log_if_slow(self.log, f"rehearsal: {name} ..."), ExitStack() as stack:
                if shows_parts:
                    stack.enter_context(trace.install_sink(self))
                yield
        except RuntimeError as error:
            if any(words in str(error) for words in _VALUE_WORDS):
                raise InputError(_waiting_problem(error)) from error
            raise
        if not shows_parts:
            self._add(name, time.perf_counter() - start_s)

    def on_span(self, action: str, *of_span: float) -> None:
        """Record a part of the phase that is under way."""
        start, stop, depth = of_span
        if depth == 0:
            self._add(action, stop - start)

    def on_count(self, name: str, value: float) -> None:
        """Do nothing: collectives are counted where they reach the process group."""

    def _add(self, name: str, seconds: float) -> None:
        self.phases.append(RehearsalPhase(name, seconds, peak_memory_bytes("cpu")))
