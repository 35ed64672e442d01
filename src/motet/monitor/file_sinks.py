"""The sinks of the two files in every run folder: `events.jsonl`, and `summary.json` at the start and end."""

import os
from contextlib import suppress
from functools import partial
from pathlib import Path

from motet.core.atomic_file import open_without_links
from motet.core.errors import CheckpointSaveError, convert_os_errors
from motet.monitor.callback import Callback
from motet.monitor.events import EVENTS_FILE, Event, RunEnded, RunStarted, read_events
from motet.monitor.summary import summarize, write_summary


class JsonlSink(Callback):
    """Appends each event as a line, which the operating system has when the method returns: kill -9 loses none.
    An incomplete line of a killed attempt is cut off first. A full disk is a `CheckpointSaveError`, and so is a file
    that somebody has removed or replaced. A symbolic link is not followed."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / EVENTS_FILE
        remedy = "free some space or repair the folder"
        self._convert_errors = partial(convert_os_errors, f"write {self._path}", remedy, CheckpointSaveError)
        with self._convert_errors():
            folder.mkdir(parents=True, exist_ok=True)
            self._file = open_without_links(self._path, "a+b")
            self._identity = os.fstat(self._file.fileno())
            self._file.truncate(self._path.read_bytes().rfind(b"\n") + 1)

    def on_event(self, event: Event) -> None:
        line = event.model_dump_json().encode() + b"\n"
        if not self._is_in_place():
            raise CheckpointSaveError(
                f"{self._path} was moved, removed or replaced while the run was training, alone or with its folder; "
                "checkpoints are as they were left: put the folder back in its place, then --resume-from it"
            )
        with self._convert_errors():
            while line:  # a full disk may take a part of it
                line = line[self._file.write(line) :]

    def close(self) -> None:
        self._file.close()

    def _is_in_place(self) -> bool:
        with self._convert_errors(), suppress(FileNotFoundError, NotADirectoryError):
            return os.path.samestat(self._path.lstat(), self._identity)
        return False


class SummarySink(Callback):
    """Writes `summary.json` from the events in `events.jsonl`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_start(self, event: RunStarted | RunEnded) -> None:
        write_summary(summarize(read_events(self._folder / EVENTS_FILE)), self._folder)

    on_end = on_start
