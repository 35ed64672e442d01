"""The last word of a run, from the supervisor: ranks that are killed, or lose another one, cannot say why it ended."""

import os
import shutil
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from motet.core.errors import CheckpointSaveError, InputError, NumericalMismatchError, TrainingDivergedError
from motet.monitor.events import EVENTS_FILE, Event, RunEnded, RunEndReason, StepDone, parse_event, read_events
from motet.monitor.run_files import JsonlSink, SummarySink
from motet.monitor.summary import SUMMARY_FILE, summarize
from motet.train.faults import STOPPED, STOPPED_AT_ONCE
from motet.train.folder import JOB_FILE, LOGS, VERSIONS_FILE, replace_file
from motet.train.launch import Ended

_WRITTEN_ANEW = (JOB_FILE, VERSIONS_FILE, SUMMARY_FILE)
_REASONS: dict[int, RunEndReason] = {
    STOPPED: "stopped",
    STOPPED_AT_ONCE: "stopped",
    TrainingDivergedError.exit_code: "diverged",
    NumericalMismatchError.exit_code: "disagreed",
    CheckpointSaveError.exit_code: "save_failed",
}


def write_end(path: Path, ended: Ended) -> None:
    """Leave a failure in `logs/failure.txt`, and its cause as the last event where rank 0 could not know it.

    When that cannot be written or an old file is damaged, the cause must be told all the same: by the caller.
    """
    with suppress(OSError, InputError, CheckpointSaveError):
        _write_end(path, ended)


@dataclass(frozen=True)
class Before:
    """A run folder as a start found it, so that bad input can leave it like that."""

    path: Path
    contents: dict[str, bytes]
    """Of the files that a start writes anew; without a job.toml it was no run yet."""
    events_bytes: int

    @property
    def was_run(self) -> bool:
        return JOB_FILE in self.contents

    def undo_unless_trained(self) -> bool:
        """Take a start back before whose first step bad input was found: put the run back, or remove a new one."""
        if any(isinstance(event, StepDone) for event in self._events_since()):
            return False
        if not self.was_run:
            shutil.rmtree(self.path, ignore_errors=True)
            return True
        with suppress(OSError):  # what cannot be put back is no reason to hide why the start was refused
            for name in _WRITTEN_ANEW:
                if name in self.contents:
                    replace_file(self.path / name, self.contents[name])
                else:
                    (self.path / name).unlink(missing_ok=True)
            if (self.path / EVENTS_FILE).is_file():
                os.truncate(self.path / EVENTS_FILE, self.events_bytes)
        return True

    def _events_since(self) -> list[Event]:
        file = self.path / EVENTS_FILE
        lines = file.read_bytes()[self.events_bytes :].splitlines(keepends=True) if file.is_file() else []
        return [parse_event(line) for line in lines if line.endswith(b"\n")]


def remember(path: Path) -> Before:
    """What `path` holds before anything is written there."""
    names = [name for name in (*_WRITTEN_ANEW, EVENTS_FILE) if (path / name).is_file()]
    try:
        contents = {name: (path / name).read_bytes() for name in names}
    except OSError as error:
        raise InputError(f"cannot read {error.filename}: {error.strerror}; mend it or give another folder") from None
    events = contents.pop(EVENTS_FILE, b"")
    return Before(path, contents, events.rfind(b"\n") + 1)  # a line torn by a kill is cut off by whoever writes next


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
    with closing(JsonlSink(path)) as events_file:
        events_file.on_event(end)
    SummarySink(path).on_event(end)
