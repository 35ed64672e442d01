"""The last word of a run, from the supervisor: ranks that are killed, or lose another one, cannot say why it ended."""

import shutil
from contextlib import suppress
from pathlib import Path

from motet.core.errors import DivergedError, InputError, SaveError
from motet.monitor.events import EVENTS_FILE, Reason, RunEnded, StepDone, read_events
from motet.monitor.record import JsonlSink, SummarySink
from motet.monitor.summary import summarize
from motet.train.faults import STOPPED, STOPPED_AT_ONCE
from motet.train.folder import LOGS
from motet.train.launch import Ended

_REASONS: dict[int, Reason] = {
    STOPPED: "stopped",
    STOPPED_AT_ONCE: "stopped",
    DivergedError.exit_code: "diverged",
    SaveError.exit_code: "save_failed",
}


def write_end(path: Path, ended: Ended) -> None:
    """Leave a failure in `logs/failure.txt`, and its cause as the last event where rank 0 could not know it.

    When that cannot be written or an old file is damaged, the cause must be told all the same: by the caller.
    """
    with suppress(OSError, InputError, SaveError):
        _write_end(path, ended)


def forget_unless_trained(path: Path) -> None:
    """Remove a run folder in which bad input ended a fresh run before its first step."""
    file = path / EVENTS_FILE
    if not file.is_file() or not any(isinstance(event, StepDone) for event in read_events(file)):
        shutil.rmtree(path, ignore_errors=True)


def _write_end(path: Path, ended: Ended) -> None:
    failure = path / LOGS / "failure.txt"
    failure.unlink(missing_ok=True)
    if ended.traceback:
        failure.write_text(f"{ended.message}\n{ended.traceback}\n", encoding="utf-8")
    events = read_events(path / EVENTS_FILE) if ended.message and (path / EVENTS_FILE).is_file() else []
    if not events or (isinstance(events[-1], RunEnded) and events[-1].message in ended.message):
        return
    reason = _REASONS.get(ended.exit_code, "failed")
    end = RunEnded(reason=reason, steps=summarize(events).steps, message=ended.message)
    for sink in (JsonlSink(path), SummarySink(path)):
        sink.on_event(end)
        sink.close()
