"""The two files that every run folder gets: `events.jsonl` while it goes, `summary.json` at its start and end."""

import os
from pathlib import Path

from motet.core.errors import CheckpointSaveError
from motet.monitor.callback import Callback
from motet.monitor.events import EVENTS_FILE, Event, RunEnded, RunStarted, read_events
from motet.monitor.summary import summarize, write_summary


class JsonlSink(Callback):
    """Appends each event as a line that the operating system has before the method returns: kill -9 loses none.

    What a killed attempt wrote half is cut off first. A disk that is full is a `SaveError`.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / EVENTS_FILE
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("a+b", buffering=0)
            _truncate_torn_line(self._path)
        except OSError as error:
            raise self._error(error) from error

    def on_event(self, event: Event) -> None:
        line = event.to_json().encode() + b"\n"
        try:
            while line:  # a full disk takes a part of it and refuses the rest
                line = line[self._file.write(line) :]
        except OSError as error:
            raise self._error(error) from error

    def close(self) -> None:
        self._file.close()

    def _error(self, error: OSError) -> CheckpointSaveError:
        return CheckpointSaveError(f"cannot write {self._path}: {error.strerror}; free some space or mend the folder")


class SummarySink(Callback):
    """Writes `summary.json` from what `events.jsonl` holds by then."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_start(self, event: RunStarted) -> None:
        self._write()

    def on_end(self, event: RunEnded) -> None:
        self._write()

    def _write(self) -> None:
        write_summary(summarize(read_events(self._folder / EVENTS_FILE)), self._folder)


def _truncate_torn_line(path: Path) -> None:
    content = path.read_bytes()
    complete_bytes = content.rfind(b"\n") + 1
    if complete_bytes < len(content):
        os.truncate(path, complete_bytes)
