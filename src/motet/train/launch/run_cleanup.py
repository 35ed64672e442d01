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
from motet.train.launch.failures import KILLED_EXIT_CODE, STOPPED_EXIT_CODE
from motet.train.launch.run_folder import JOB_FILE, LOGS_FOLDER, VERSIONS_FILE, write_file_atomically
from motet.train.launch.supervisor import LaunchExitStatus

_OVERWRITTEN_FILES = (JOB_FILE, VERSIONS_FILE, SUMMARY_FILE)
_REASONS: dict[int, RunEndReason] = {
    STOPPED_EXIT_CODE: "stopped",
    KILLED_EXIT_CODE: "stopped",
    TrainingDivergedError.exit_code: "diverged",
    NumericalMismatchError.exit_code: "disagreed",
    CheckpointSaveError.exit_code: "save_failed",
}


def record_run_end(path: Path, exit_status: LaunchExitStatus) -> None:
    """Leave a failure in `logs/failure.txt`, and its cause as the last event where rank 0 could not know it.

    When that cannot be written or an old file is damaged, the cause must be told all the same: by the caller.
    """
    with suppress(OSError, InputError, CheckpointSaveError):
        _write_run_end(path, exit_status)


@dataclass(frozen=True)
class RunFolderSnapshot:
    """A run folder as a start found it, so that bad input can leave it like that."""

    path: Path
    contents: dict[str, bytes]  # Of the files that a start writes anew; without a job.toml it was no run yet
    events_bytes: int

    @property
    def had_run(self) -> bool:
        return JOB_FILE in self.contents

    def restore_unless_trained(self) -> bool:
        """Take a start back before whose first step bad input was found: put the run back, or remove a new one."""
        if any(isinstance(event, StepDone) for event in self._new_events()):
            return False
        if not self.had_run:
            shutil.rmtree(self.path, ignore_errors=True)
            return True
        with suppress(OSError):  # what cannot be put back is no reason to hide why the start was refused
            for name in _OVERWRITTEN_FILES:
                if name in self.contents:
                    write_file_atomically(self.path / name, self.contents[name])
                else:
                    (self.path / name).unlink(missing_ok=True)
            if (self.path / EVENTS_FILE).is_file():
                os.truncate(self.path / EVENTS_FILE, self.events_bytes)
        return True

    def _new_events(self) -> list[Event]:
        file = self.path / EVENTS_FILE
        lines = file.read_bytes()[self.events_bytes :].splitlines(keepends=True) if file.is_file() else []
        return [parse_event(line) for line in lines if line.endswith(b"\n")]


def snapshot_run_folder(path: Path) -> RunFolderSnapshot:
    """What `path` holds before anything is written there."""
    names = [name for name in (*_OVERWRITTEN_FILES, EVENTS_FILE) if (path / name).is_file()]
    try:
        contents = {name: (path / name).read_bytes() for name in names}
    except OSError as error:
        raise InputError(f"cannot read {error.filename}: {error.strerror}; mend it or give another folder") from None
    events = contents.pop(EVENTS_FILE, b"")
    return RunFolderSnapshot(
        path, contents, events.rfind(b"\n") + 1
    )  # a line torn by a kill is cut off by whoever writes next


def _write_run_end(path: Path, exit_status: LaunchExitStatus) -> None:
    failure_file = path / LOGS_FOLDER / "failure.txt"
    failure_file.unlink(missing_ok=True)
    if exit_status.traceback:
        failure_file.write_text(f"{exit_status.message}\n{exit_status.traceback}\n", encoding="utf-8")
    events = read_events(path / EVENTS_FILE) if exit_status.message and (path / EVENTS_FILE).is_file() else []
    if not events or (isinstance(events[-1], RunEnded) and events[-1].message in exit_status.message):
        return
    reason = _REASONS.get(exit_status.exit_code, "failed")
    run_ended = RunEnded(reason=reason, steps=summarize(events).steps, message=exit_status.message)
    with closing(JsonlSink(path)) as events_file:
        events_file.on_event(run_ended)
    SummarySink(path).on_event(run_ended)
