"""Spans and counters: the one way in which any room says what it is doing and for how long.

Nothing listens until monitor installs a sink. Without one, `span` hands out a shared object that does nothing
(benchmarks/trace_cost.py measures it). With one, the sink gets each span when it ends and each counter when it is
bumped. Work that a CUDA device does later is not waited for: a span is what the host saw.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol


@dataclass(frozen=True, slots=True)
class TraceSpan:
    """What a rank did in a step, and when: measured by a run or predicted by a plan, which meet on the first three.

    An action that a step does several times is told apart by the order of `start_s`.
    """

    step: int
    rank: int
    action: str
    start_s: float  # From the start of the step
    duration_s: float
    depth: int = 0  # How many spans of the same thread were open around this one


class TraceSink(Protocol):
    """Whoever listens. It may be called from several threads."""

    def on_span(self, action: str, start_s: float, duration_s: float, depth: int) -> None:
        """A span ended; `start_s` counts on time.perf_counter's clock."""

    def on_count(self, name: str, value: float) -> None: ...


# Something else that brackets a piece of work by its name, such as torch.profiler.record_function.
ProfilerRange = Callable[[str], AbstractContextManager[object]]


class _OpenTraceSpan:
    __slots__ = ("action", "mark", "start_s")

    def __init__(self, action: str) -> None:
        self.action = action
        self.mark = None if _state.mark is None else _state.mark(action)

    def __enter__(self) -> None:
        if self.mark is not None:
            self.mark.__enter__()
        _thread.depth += 1
        self.start_s = time.perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        duration_s = time.perf_counter() - self.start_s
        _thread.depth -= 1
        if _state.sink is not None:
            _state.sink.on_span(self.action, self.start_s, duration_s, _thread.depth)
        if self.mark is not None:
            self.mark.__exit__(kind, error, trace)


class _NoOpTraceSpan:
    __slots__ = ()

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


class _TraceState:
    sink: TraceSink | None = None
    mark: ProfilerRange | None = None


class _ThreadSpanDepth(threading.local):
    depth = 0


_state = _TraceState()
_thread = _ThreadSpanDepth()
_NO_OP_SPAN = _NoOpTraceSpan()


def span(action: str) -> _OpenTraceSpan | _NoOpTraceSpan:
    """`with span("forward"): ...` tells the installed sink how long it took."""
    return _NO_OP_SPAN if _state.sink is None else _OpenTraceSpan(action)


def count(name: str, value: float) -> None:
    """Tell the installed sink that `value` more of `name` happened (bytes sent, samples read)."""
    if _state.sink is not None:
        _state.sink.on_count(name, value)


@contextmanager
def install_sink(sink: TraceSink) -> Iterator[None]:
    """Let `sink` listen for as long as the block runs."""
    before, _state.sink = _state.sink, sink
    try:
        yield
    finally:
        _state.sink = before


@contextmanager
def profiler_ranges(mark: ProfilerRange) -> Iterator[None]:
    """Bracket every span that someone listens to with `mark` too, for as long as the block runs."""
    before, _state.mark = _state.mark, mark
    try:
        yield
    finally:
        _state.mark = before
