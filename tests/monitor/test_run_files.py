"""The two files of a run folder: appended line by line, repaired after a kill, honest about a full disk."""

import errno
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from example_events import ended, started, step, whole_run

from motet.core.errors import CheckpointSaveError
from motet.monitor.events import read_events
from motet.monitor.sinks import JsonlSink, SummarySink
from motet.monitor.summary import read_summary


def record(folder, events):
    sink = JsonlSink(folder)
    for event in events:
        sink.on_event(event)
    sink.close()
    return folder / "events.jsonl"


def test_attempts_go_on_in_one_file(tmp_path):
    record(tmp_path / "run", [started(), step(1)])
    path = record(tmp_path / "run", [started(first_step=2), step(2)])
    assert read_events(path) == [started(), step(1), started(first_step=2), step(2)]


def test_a_half_line_of_a_killed_attempt_is_cut_off(tmp_path):
    path = record(tmp_path, [started(), step(1)])
    with path.open("a") as file:
        file.write(step(2).model_dump_json()[:40])
    record(tmp_path, [started(first_step=2)])
    assert read_events(path) == [started(), step(1), started(first_step=2)]


def test_what_was_told_survives_a_kill(tmp_path):
    script = """
        import os, signal, sys
        from pathlib import Path
        sys.path.insert(0, sys.argv[1])
        from example_events import started, step
        from motet.monitor.sinks import JsonlSink
        sink = JsonlSink(Path(sys.argv[2]))
        for event in (started(), step(1), step(2)):
            sink.on_event(event)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(Path(__file__).parent), str(tmp_path)]
    assert subprocess.run(command, check=False, timeout=60).returncode == -9
    assert read_events(tmp_path / "events.jsonl") == [started(), step(1), step(2)]


def test_a_full_disk_is_a_save_error_and_the_file_can_be_gone_on_with(tmp_path, monkeypatch):
    sink = JsonlSink(tmp_path)
    sink.on_event(started())
    file, calls = sink._file, []

    class Full:
        def write(self, line):
            calls.append(line)
            if len(calls) == 1:
                return file.write(line[:10])
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sink, "_file", Full())
    sentence = r"cannot write .*events\.jsonl: No space left on device; free some space"
    with pytest.raises(CheckpointSaveError, match=sentence):
        sink.on_event(step(1))
    file.close()
    assert read_events(record(tmp_path, [started(first_step=1)])) == [started(), started(first_step=1)]


def test_a_folder_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointSaveError, match="cannot write"):
        JsonlSink(tmp_path / "file" / "run")


def test_the_summary_says_running_from_the_start_and_the_outcome_at_the_end(tmp_path):
    events = whole_run()
    file, outcome = JsonlSink(tmp_path), SummarySink(tmp_path)
    for happened, found in ((events[:-1], ("running", 0)), ([ended()], ("finished", 4))):
        for event in happened:
            file.on_event(event)
            outcome.on_event(event)
        assert (read_summary(tmp_path).exit_reason, read_summary(tmp_path).steps) == found
    file.close()
