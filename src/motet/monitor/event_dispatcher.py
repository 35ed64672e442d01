"""Hands what happens to everyone who listens: attaches the spans of a step, leaves out the steps that the job does not
want told, keeps a broken listener from ending the run, and moves the window of the profiler.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from motet.core import trace
from motet.core.errors import MotetError
from motet.monitor.callback import Callback
from motet.monitor.console_sink import ConsoleSink
from motet.monitor.events import Event, ProfileSaved, RunEnded, RunStarted, StepDone, WarningIssued
from motet.monitor.run_files import JsonlSink, SummarySink
from motet.monitor.settings import MonitorSettings
from motet.monitor.span_collector import SpanCollector

if TYPE_CHECKING:
    from rich.console import Console

    from motet.monitor.profile import TorchProfilerWindow


class EventDispatcher:
    """Use it as a context, and give it every event, also of steps that need not be told. `Monitor()` tells nobody."""

    def __init__(
        self,
        callbacks: Sequence[Callback] = (),
        every: int = 1,
        collector: SpanCollector | None = None,
        profiler: TorchProfilerWindow | None = None,
    ) -> None:
        self._callbacks = list(callbacks)
        self._failed_callbacks: list[Callback] = []
        self._every = every
        self._collector = collector
        self._profiler = profiler
        self._start: RunStarted | None = None
        self._unreported_step: StepDone | None = None
        self._exit_stack = ExitStack()

    def __enter__(self) -> EventDispatcher:
        if self._collector is not None:
            self._exit_stack.enter_context(trace.install_sink(self._collector))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with ExitStack() as closing:  # whatever fails, everyone is closed; the first, which keeps the events, last
            closing.callback(self._exit_stack.close)
            for callback in [*self._callbacks, *self._failed_callbacks]:
                closing.callback(self._close, callback)
            self._advance_profiler(None)

    def on_event(self, event: Event) -> None:
        """Tell everyone who wants to know. A `MotetError` of a callback is raised once all the others were told."""
        if not self._callbacks:
            return
        match event:
            case RunStarted():
                self._start = event
                if self._collector is not None:
                    self._collector.drain(0)
                self._dispatch(event)
                self._advance_profiler(event.first_step)
            case StepDone():
                self._on_step(event)
            case RunEnded():
                unreported_step, self._unreported_step = self._unreported_step, None
                if unreported_step is not None:
                    self._dispatch(unreported_step)
                self._advance_profiler(None)
                self._dispatch(event)
            case _:
                self._dispatch(event)

    def _on_step(self, event: StepDone) -> None:
        if self._collector is not None:
            spans, counters = self._collector.drain(event.step)
            event = event.model_copy(update={"spans": spans, "counters": counters})
        if self._is_reported(event):
            self._dispatch(event)
            self._unreported_step = None
        else:
            self._unreported_step = event  # told after all if it turns out to be the last
        self._advance_profiler(event.step + 1)

    def _is_reported(self, event: StepDone) -> bool:
        assert self._start is not None, "events begin with RunStarted"
        is_first_or_last = event.step in (self._start.first_step, self._start.last_step)
        return is_first_or_last or event.step % self._every == 0 or event.skipped or not math.isfinite(event.loss)

    def _dispatch(self, event: Event) -> None:
        warnings: list[WarningIssued] = []
        errors: list[MotetError] = []
        for callback in list(self._callbacks):
            try:
                callback.on_event(event)
            except Exception as problem:  # noqa: BLE001 - whatever it is, it is told, and the run goes on
                self._callbacks.remove(callback)
                self._failed_callbacks.append(callback)
                if isinstance(problem, MotetError):
                    errors.append(problem)
                else:
                    warnings.append(_warning(f"{type(callback).__name__} is left out from here on", problem))
        for warning in warnings:
            self._dispatch(warning)
        if errors:
            raise errors[0]

    def _close(self, callback: Callback) -> None:
        if callback in self._failed_callbacks:
            with suppress(Exception):  # that this one is broken was told already
                callback.close()
            return
        self._callbacks.remove(callback)
        try:
            callback.close()
        except Exception as problem:  # noqa: BLE001 - as above
            self._dispatch(_warning(f"{type(callback).__name__} did not close", problem))

    def _advance_profiler(self, step: int | None) -> None:
        """Step `step` is about to begin; None: no further one is."""
        if self._profiler is None:
            return
        profiler_event: ProfileSaved | WarningIssued | None
        profiler = self._profiler
        if step is None:
            self._profiler = None
        try:
            profiler_event = profiler.close() if step is None else profiler.step(step)
        except Exception as problem:  # noqa: BLE001 - as for a callback
            self._profiler = None
            profiler_event = _warning("the profiler is left out from here on", problem)
        if profiler_event is not None:
            self._dispatch(profiler_event)


def open_event_dispatcher(
    settings: MonitorSettings,
    folder: Path,
    job: Mapping[str, Any] | None = None,
    callbacks: Sequence[Callback] = (),
    terminal: Console | None = None,
) -> EventDispatcher:
    """What rank 0 of a run tells to whom. `folder` exists; `job` goes to trackers that keep settings."""
    trackers: list[Callback] = []
    if settings.wandb != "off":
        from motet.monitor.trackers import WandbSink

        trackers.append(WandbSink(folder, settings.wandb_project, settings.wandb, job or {}))
    if settings.tensorboard:
        from motet.monitor.trackers import TensorBoardSink

        trackers.append(TensorBoardSink(folder))
    profiler = None
    if settings.profile_from is not None:
        from motet.monitor.profile import TorchProfilerWindow

        profiler = TorchProfilerWindow(folder, settings.profile_from, settings.profile_steps)
    return EventDispatcher(
        [JsonlSink(folder), SummarySink(folder), ConsoleSink(folder, terminal), *trackers, *callbacks],
        every=settings.every,
        collector=SpanCollector() if settings.spans else None,
        profiler=profiler,
    )


def _warning(what: str, problem: Exception) -> WarningIssued:
    frame = traceback.extract_tb(problem.__traceback__)[-1]
    return WarningIssued(text=f"{what}: {type(problem).__name__}: {problem} ({frame.filename}:{frame.lineno})")
