"""Training in the process that calls."""

from pathlib import Path

import pytest

import motet
from motet.monitor.events import StepDone
from motet.monitor.summary import read_summary
from train.runs import small_job


class _Heard(motet.Callback):
    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_step(self, event: StepDone) -> None:
        self.steps.append(event.step)


def test_a_run_from_python_is_told_and_continued(tmp_path: Path) -> None:
    changes = ["run.steps=4", f"run.folder={tmp_path / 'run'}"]
    first, second = _Heard(), _Heard()
    folder, outcome = motet.run(small_job(tmp_path, *changes, "run.stop_at=2"), callbacks=[first])
    assert (folder, outcome.steps, outcome.finished) == (tmp_path / "run", 2, False)
    _, outcome = motet.run(small_job(tmp_path, *changes), callbacks=[second])
    assert outcome.finished and (first.steps, second.steps) == ([1, 2], [3, 4])
    assert read_summary(folder).finished and (folder / "versions.json").is_file()
    assert [step.step for step in motet.read_steps(folder / "events.jsonl")] == [1, 2, 3, 4]


def test_a_run_that_cannot_work_makes_no_folder(tmp_path: Path) -> None:
    job = small_job(tmp_path, f"run.folder={tmp_path / 'run'}", "data.batch_sequences=3", "layout.microbatches=2")
    with pytest.raises(motet.MotetError, match="cannot be cut evenly over 1 rank"):
        motet.run(job)
    assert not (tmp_path / "run").exists()
