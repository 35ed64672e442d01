"""Passes the events of a run to its callbacks, with spans, without unreported steps; moves the profiler's window."""

from __future__ import annotations

import math
import threading
import time
import traceback
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from motet.cluster.device_clock import DeviceClock
from motet.core import trace
from motet.core.errors import MotetError, OutputClosedError
from motet.core.trace import TraceSpan
from motet.monitor.console_sink import ConsoleSink
from motet.monitor.events import Event, RunEnded, RunStarted, StepDone, WarningIssued
from motet.monitor.settings import MonitorSettings
from motet.monitor.sinks import Callback, JsonlSink, SummarySink, TensorBoardSink, WandbSink
from motet.monitor.stdout_stderr import stderr_console

if TYPE_CHECKING:
    from motet.monitor.profile import TorchProfilerWindow


_OUTPUT_CLOSED = "standard output is closed: the run stops after the next step and saves; send it to a file to go on"


class SpanCollector:
    """The spans and counters since the last `drain`. Spans of other threads overlap those of the main thread.

    The spans of a drawn step are timed by the clock of the device, if there is one: a span is then the time that the
    device took for the work that was started inside it. Other steps keep the clock of the host, which costs the device
    nothing.
    """

    def __init__(self, device_clock: DeviceClock | None = None) -> None:
        self._device_clock, self._is_drawn = device_clock, False
        self._zero_s = time.perf_counter()
        # A mark of the device's clock with the host's time when the device reached it: the last two, since a span may
        # begin before a step is drained and end after it.
        self._references = deque[tuple[Any, float]](maxlen=2)
        self._spans: list[tuple[str, Any, Any, int]] = []
        self._counters: defaultdict[str, float] = defaultdict(float)
        self._counters_lock = threading.Lock()  # += is two operations; a loader thread may count too

    def now(self) -> Any:
        """The time of a span that starts or stops: a mark of the device's clock in a drawn step."""
        return self._device_clock.now() if self._device_clock and self._is_drawn else time.perf_counter()

    def on_span(self, action: str, start: Any, stop: Any, depth: int) -> None:
        self._spans.append((action, start, stop, depth))

    def on_count(self, name: str, value: float) -> None:
        with self._counters_lock:
            self._counters[name] += value

    def drain(self, step: int, *, is_next_drawn: bool = False) -> tuple[tuple[TraceSpan, ...], dict[str, float]]:
        """The spans of rank 0 that ended since the last call, in order of start; times count from that call."""
        spans = [(action, self._host_s(start), self._host_s(stop), depth) for action, start, stop, depth in self._spans]
        if not self._is_drawn:  # An old reference would cost precision
            self._references.clear()
        self._spans, self._is_drawn = [], is_next_drawn
        if self._device_clock and is_next_drawn:
            mark = self._device_clock.now()
            self._device_clock.wait(mark)
            self._references.append((mark, time.perf_counter()))
        with self._counters_lock:
            counters, self._counters = self._counters, defaultdict(float)
        zero_s, self._zero_s = self._zero_s, time.perf_counter()
        ordered = sorted(spans, key=itemgetter(1, 3))
        in_step = (
            TraceSpan(step, 0, action, start - zero_s, stop - start, depth) for action, start, stop, depth in ordered
        )
        return tuple(in_step), dict(counters)

    def _host_s(self, time_or_mark: Any) -> float:
        if self._device_clock is None or isinstance(time_or_mark, float):
            return float(time_or_mark)
        mark, reached_s = self._references[0]
        return reached_s + self._device_clock.seconds(mark, time_or_mark)


class EventDispatcher:
    """A context that gets every event of a run, also of steps that are not reported."""

    def __init__(
        self,
        callbacks: Sequence[Callback] = (),
        every: int = 1,
        *,
        collector: SpanCollector | None = None,
        profiler: TorchProfilerWindow | None = None,
    ) -> None:
        self._callbacks, self._failed_callbacks = list(callbacks), list[Callback]()
        self._every, self._collector, self._profiler = every, collector, profiler
        self._start: RunStarted | None = None
        self._unreported_step: StepDone | None = None
        self.is_output_closed = False  # Nobody reads stdout any more, as after `head`
        self._exit_stack = ExitStack()

    def __enter__(self) -> EventDispatcher:
        if self._collector is not None:
            self._exit_stack.enter_context(trace.install_sink(self._collector, self._collector.now))
        return self

    def __exit__(self, *error: object) -> None:
        with ExitStack() as closing:  # all are closed whatever fails; the first, which keeps the events, last
            closing.callback(self._exit_stack.close)
            for callback in [*self._callbacks, *self._failed_callbacks]:
                closing.callback(self._close, callback)
            self._advance_profiler(None)

    def on_event(self, event: Event) -> None:
        """Pass an event to all callbacks. A `MotetError` of a callback is raised after all others were called."""
        if not self._callbacks:
            return
        match event:
            case RunStarted():
                self._start = event
                if self._collector is not None:
                    self._collector.drain(0, is_next_drawn=True)
                self._dispatch(event)
                self._advance_profiler(event.first_step)
            case StepDone():
                self._on_step(event)
            case RunEnded():
                if self._unreported_step is not None:
                    self._dispatch(self._unreported_step)
                self._advance_profiler(None)
                self._dispatch(event)
            case _:
                self._dispatch(event)

    def _on_step(self, event: StepDone) -> None:
        if self._collector is not None:
            spans, counters = self._collector.drain(event.step, is_next_drawn=self._is_due(event.step + 1))
            event = event.model_copy(update={"spans": spans, "counters": counters})
        is_reported = self._is_due(event.step) or event.skipped or not math.isfinite(event.loss)
        if is_reported:
            self._dispatch(event)
        self._unreported_step = None if is_reported else event  # it is reported if it turns out to be the last
        self._advance_profiler(event.step + 1)

    def is_reported(self, step: int) -> bool:
        """Whether somebody gets the events of a step, whatever happens in it."""
        return bool(self._callbacks) and self._is_due(step)

    def _is_due(self, step: int) -> bool:
        """Whether a step is reported, whatever happens in it."""
        assert self._start is not None, "events begin with RunStarted"
        return step in (self._start.first_step, self._start.last_step) or step % self._every == 0

    def _dispatch(self, event: Event) -> None:
        warnings, errors = [], []
        for callback in list(self._callbacks):
            try:
                callback.on_event(event)
            except Exception as problem:  # noqa: BLE001 - any error is reported, and the run continues
                self._callbacks.remove(callback)
                self._failed_callbacks.append(callback)
                if isinstance(problem, OutputClosedError):
                    self.is_output_closed = True
                    if not isinstance(event, RunEnded):
                        stderr_console().print(_OUTPUT_CLOSED, highlight=False)
                        warnings.append(WarningIssued(text=_OUTPUT_CLOSED))
                elif isinstance(problem, MotetError):
                    errors.append(problem)
                else:
                    warnings.append(_warning(f"{type(callback).__name__} is left out from here on", problem))
        for warning in warnings:
            self._dispatch(warning)
        if errors:
            raise errors[0]

    def _close(self, callback: Callback) -> None:
        if is_active := callback in self._callbacks:
            self._callbacks.remove(callback)
        try:
            callback.close()
        except Exception as problem:  # noqa: BLE001 - as above
            if is_active:  # otherwise its failure was reported before
                self._dispatch(_warning(f"{type(callback).__name__} did not close", problem))

    def _advance_profiler(self, step: int | None) -> None:
        if (profiler := self._profiler) is None:
            return
        event: Event | None
        if step is None:
            self._profiler = None
        try:
            event = profiler.close() if step is None else profiler.step(step)
        except Exception as problem:  # noqa: BLE001 - as for a callback
            self._profiler = None
            event = _warning("the profiler is left out from here on", problem)
        if event is not None:
            self._dispatch(event)


def open_event_dispatcher(
    settings: MonitorSettings,
    folder: Path,
    job: Mapping[str, Any] | None = None,
    *,
    callbacks: Sequence[Callback] = (),
    device_clock: DeviceClock | None = None,
) -> EventDispatcher:
    """The dispatcher of rank 0, for an existing run folder. Trackers that keep settings get `job`."""
    trackers: list[Callback] = []
    if settings.wandb != "off":
        trackers.append(WandbSink(folder, settings.wandb_project, settings.wandb, job or {}))
    if settings.tensorboard:
        trackers.append(TensorBoardSink(folder))
    profiler = None
    if settings.profile_from is not None:
        from motet.monitor.profile import TorchProfilerWindow

        profiler = TorchProfilerWindow(folder, settings.profile_from, settings.profile_steps)
    sinks = [JsonlSink(folder), SummarySink(folder), ConsoleSink(folder), *trackers, *callbacks]
    collector = SpanCollector(device_clock) if settings.spans else None
    return EventDispatcher(sinks, settings.every, collector=collector, profiler=profiler)


def _warning(effect: str, problem: Exception) -> WarningIssued:
    frame = traceback.extract_tb(problem.__traceback__)[-1]
    return WarningIssued(text=f"{effect}: {type(problem).__name__}: {problem} ({frame.filename}:{frame.lineno})")
