"""Spans and counters, by which every package reports its work and its duration to the sink of the package monitor.
Without a sink `span` returns a shared object that does nothing (benchmarks/trace_cost.py measures it). The sink brings
the clock: that of the host, or one that marks the work of a CUDA device."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class TraceSpan:
    """The time of an action of a rank in a step, measured by a run or predicted by a plan; `start_s` orders repeats."""

    step: int
    rank: int
    action: str
    start_s: float  # Seconds since the start of the step
    duration_s: float
    depth: int = 0  # Number of open spans of the same thread around this span


class TraceSink(Protocol):
    """A receiver of spans and counts, from several threads."""

    def on_span(self, action: str, start: Any, stop: Any, depth: int) -> None:
        """A span ended; its times are those of the clock that was installed with the sink."""

    def on_count(self, name: str, value: float) -> None: ...


# A context manager for a named piece of work, such as torch.profiler.record_function.
ProfilerRange = Callable[[str], AbstractContextManager[object]]


class _OpenTraceSpan:
    __slots__ = ("action", "profiler_range", "start")

    def __init__(self, action: str) -> None:
        self.action = action
        self.profiler_range = None if _state.profiler_range is None else _state.profiler_range(action)

    def __enter__(self) -> None:
        if self.profiler_range is not None:
            self.profiler_range.__enter__()
        _thread.depth += 1
        self.start = _state.now()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        stop = _state.now()
        _thread.depth -= 1
        if _state.sink is not None:
            _state.sink.on_span(self.action, self.start, stop, _thread.depth)
        if self.profiler_range is not None:
            self.profiler_range.__exit__(kind, error, trace)


class _TraceState:
    sink: TraceSink | None = None
    now: Callable[[], Any] = staticmethod(time.perf_counter)
    profiler_range: ProfilerRange | None = None


class _ThreadSpanDepth(threading.local):
    depth = 0


_state = _TraceState()
_thread = _ThreadSpanDepth()
_NO_OP_SPAN = nullcontext()


def span(action: str) -> AbstractContextManager[None]:
    """A context manager that reports the duration of an action to the installed sink."""
    return _NO_OP_SPAN if _state.sink is None else _OpenTraceSpan(action)


def count(name: str, value: float) -> None:
    """Report an increment of a counter, such as bytes sent or samples read, to the installed sink."""
    if _state.sink is not None:
        _state.sink.on_count(name, value)


@contextmanager
def install_sink(sink: TraceSink, now: Callable[[], Any] = time.perf_counter) -> Iterator[None]:
    """Install a sink for the duration of the block, with the clock that times its spans."""
    before = _state.sink, _state.now
    _state.sink, _state.now = sink, now
    try:
        yield
    finally:
        _state.sink, _state.now = before


@contextmanager
def profiler_ranges(profiler_range: ProfilerRange) -> Iterator[None]:
    """Also open a profiler range for every reported span, for the duration of the block."""
    before, _state.profiler_range = _state.profiler_range, profiler_range
    try:
        yield
    finally:
        _state.profiler_range = before


SLOW_S = 3.0


@contextmanager
def log_if_slow(log: Callable[[str], None], text: str) -> Iterator[None]:
    """Log the text if the block takes over three seconds, while it runs."""
    timer = threading.Timer(SLOW_S, log, [text])
    timer.daemon = True
    try:
        timer.start()
        yield
    finally:
        timer.cancel()
        if timer.is_alive():
            timer.join()  # A line that it is writing stands before those of the caller, also of an error


PROGRESS_INTERVAL_S = 10.0


def progress_if_slow(
    log: Callable[[str], None], now: Callable[[], float] = time.monotonic
) -> Callable[[str, int, int], None]:
    """A function `(task, completed, total)` that logs progress after three seconds, and then every ten. It has no
    thread, so that its caller may fork."""
    next_s = now() + SLOW_S

    def report(task: str, completed: int, total: int) -> None:
        nonlocal next_s
        if now() >= next_s:
            log(f"{task}: {completed:,} of {total:,} ...")
            next_s = now() + PROGRESS_INTERVAL_S

    return report
