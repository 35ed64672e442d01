"""The end of a run, recorded by the supervisor, since killed ranks cannot report it; and undoing a refused start."""

import os
import shutil
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from motet.core.atomic_file import write_file_atomically
from motet.core.errors import CheckpointSaveError, InputError
from motet.monitor.events import EVENTS_FILE, RUN_END_REASONS, RunEnded, StepDone, parse_event, read_events
from motet.monitor.file_sinks import JsonlSink, SummarySink
from motet.monitor.summary import SUMMARY_FILE, summarize
from motet.train.launch.run_folder import JOB_FILE, LOGS_FOLDER, VERSIONS_FILE
from motet.train.launch.supervisor import LaunchExitStatus

_OVERWRITTEN_FILES = (JOB_FILE, VERSIONS_FILE, SUMMARY_FILE)


def record_run_end(path: Path, exit_status: LaunchExitStatus) -> None:
    """Write a failure to `logs/failure.txt`, and its cause as the last event if rank 0 could not know it.
    If that fails, or an old file is damaged, the caller still reports the cause."""
    failure_file, message = path / LOGS_FOLDER / "failure.txt", exit_status.message
    with suppress(OSError, InputError, CheckpointSaveError):
        failure_file.unlink(missing_ok=True)
        if exit_status.traceback:
            failure_file.write_text(f"{message}\n{exit_status.traceback}\n", encoding="utf-8")
        events = read_events(path / EVENTS_FILE) if message and (path / EVENTS_FILE).is_file() else []
        if events and not (isinstance(events[-1], RunEnded) and events[-1].message in message):
            reason = RUN_END_REASONS.get(exit_status.exit_code, "failed")
            run_ended = RunEnded(reason=reason, steps=summarize(events).steps, message=message)
            with closing(JsonlSink(path)) as events_file:
                events_file.on_event(run_ended)
            SummarySink(path).on_event(run_ended)


@dataclass(frozen=True)
class RunFolderSnapshot:
    """A run folder before a start, so that bad input can leave it unchanged."""

    path: Path
    contents: dict[str, bytes]  # The files that a start overwrites; without a job.toml it was no run yet
    events_bytes: int

    @property
    def had_run(self) -> bool:
        return JOB_FILE in self.contents

    def restore_unless_trained(self) -> bool:
        """Undo a start without a completed step: restore the earlier run, or remove the new one."""
        file = self.path / EVENTS_FILE
        lines = file.read_bytes()[self.events_bytes :].splitlines(keepends=True) if file.is_file() else []
        if any(isinstance(parse_event(line), StepDone) for line in lines if line.endswith(b"\n")):
            return False
        if not self.had_run:
            shutil.rmtree(self.path, ignore_errors=True)
            return True
        with suppress(OSError):  # a failure to restore must not hide why the start was refused
            for name in _OVERWRITTEN_FILES:
                if name in self.contents:
                    write_file_atomically(self.path / name, self.contents[name])
                else:
                    (self.path / name).unlink(missing_ok=True)
            if file.is_file():
                os.truncate(file, self.events_bytes)
        return True


def snapshot_run_folder(path: Path) -> RunFolderSnapshot:
    """Read a run folder before anything is written there."""
    names = [name for name in (*_OVERWRITTEN_FILES, EVENTS_FILE) if (path / name).is_file()]
    try:
        contents = {name: (path / name).read_bytes() for name in names}
    except OSError as error:
        raise InputError(f"cannot read {error.filename}: {error.strerror}; repair it or give another folder") from None
    events = contents.pop(EVENTS_FILE, b"")
    # An incomplete line is cut off by the next writer.
    return RunFolderSnapshot(path, contents, events.rfind(b"\n") + 1)
