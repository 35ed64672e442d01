"""A save that fails while training goes on ends the run on all ranks, with one sentence; what stays is told."""

import errno
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from motet.checkpoint.data_files import DataFileWriter
from motet.core.errors import MotetError
from motet.monitor.events import CheckpointSaved, CheckpointStarted, RunEnded, WarningIssued, read_events
from motet.monitor.sinks import Callback
from motet.parallel.process.launch_environment import RankEnvironment
from motet.train.job import Job
from motet.train.launch.failures import StopFlag
from motet.train.loop import run_rank
from motet.train.state import TrainingState
from ranks import Ranks
from train.runs import run_job, small_job

SENTENCES = {
    "disk": (r"could not save .*step-00000002 \(No space left on device\): it needs", "5 "),
    "nan": ("the parameters are not finite after step 2, so they are not saved", "4 "),
}


def _train(place: RankEnvironment, job: Job, folder: Path, broken_rank: int, fault: str) -> str:
    """The error of a run in which one rank cannot write its second checkpoint, or has a parameter that is no number."""
    with pytest.MonkeyPatch.context() as patch:
        start = TrainingState.start_save

        def fail(*_: object) -> None:
            time.sleep(0.05)
            raise OSError(errno.ENOSPC, "No space left on device", str(folder))

        def spoil(self: TrainingState, step: int) -> Path:
            if step == 2:
                self.optimizer.sharded_parameters.local_masters[0].view(-1)[0] = torch.nan
            return start(self, step)

        if place.rank == broken_rank and fault == "disk":
            patch.setattr(DataFileWriter, "write_box", fail)
        elif place.rank == broken_rank:
            patch.setattr(TrainingState, "start_save", spoil)
        try:
            run_job(place, job, folder)
        except MotetError as error:
            return f"{error.exit_code} {error}"
    return "no error"


@pytest.mark.parametrize("broken_rank", [0, 1])
@pytest.mark.parametrize("fault", ["disk", "nan"])
def test_the_failure_of_one_rank_ends_the_run_on_all(
    ranks: Ranks, tmp_path: Path, broken_rank: int, fault: str
) -> None:
    steps = 20 if fault == "disk" else 2  # Its third step would end with a loss that is no number
    job, run = small_job(tmp_path, "checkpoint.every=2", "layout.zero=2", f"run.steps={steps}"), tmp_path / "run"
    first, second = ranks.run_places(2, _train, job, run, broken_rank, fault, timeout_s=120)
    assert first == second
    text, code = SENTENCES[fault]
    assert re.search(text, first) and first.startswith(code)
    assert [path.name for path in (run / "checkpoints").iterdir()] == []
    events = read_events(run / "events.jsonl")
    assert [event.step for event in events if isinstance(event, CheckpointStarted)] == [2]
    assert isinstance(events[-1], RunEnded) and events[-1].steps < 20


def _train_slowly(place: RankEnvironment, job: Job, folder: Path, slow_s: float, stops: bool = False) -> int:
    """A run with a slow disk, which is asked to stop after its first save has begun."""
    stop = StopFlag()

    class StopsAtSave(Callback):
        def on_checkpoint_started(self, event: CheckpointStarted) -> None:
            stop.requested = stops

    with pytest.MonkeyPatch.context() as patch:
        write = DataFileWriter.write_box

        def write_slowly(self: DataFileWriter, *arguments: Any) -> None:
            time.sleep(slow_s)
            write(self, *arguments)

        patch.setattr(DataFileWriter, "write_box", write_slowly)
        return run_rank(job, place, folder, stop, [StopsAtSave()]).completed_steps


def test_a_run_that_is_stopped_waits_for_its_checkpoints(ranks: Ranks, tmp_path: Path) -> None:
    """One is being written when the signal comes, and the last one follows."""
    job = small_job(tmp_path, "checkpoint.every=2", "run.steps=20")
    done = ranks.run_places(2, _train_slowly, job, tmp_path / "run", 0.05, True, timeout_s=120)
    assert done == [3, 3]
    assert sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir()) == ["step-00000002", "step-00000003"]
    events = read_events(tmp_path / "run/events.jsonl")
    assert isinstance(events[-1], RunEnded) and events[-1].reason == "stopped"
    assert [event.step for event in events if isinstance(event, CheckpointSaved)] == [2, 3]


def test_a_save_that_is_due_waits_for_the_one_before_and_says_so_once(ranks: Ranks, tmp_path: Path) -> None:
    job = small_job(tmp_path, "checkpoint.every=1", "checkpoint.keep=9", "run.steps=5")
    ranks.run_places(2, _train_slowly, job, tmp_path / "run", 0.05, timeout_s=120)
    events = read_events(tmp_path / "run/events.jsonl")
    warnings = [e.text for e in events if isinstance(e, WarningIssued) and "is still being written" in e.text]
    assert len(warnings) == 1 and "the checkpoint of step 2 is due" in warnings[0]
    order = [(type(e).__name__, e.step) for e in events if isinstance(e, CheckpointStarted | CheckpointSaved)]
    assert order == [(kind, step) for step in range(1, 6) for kind in ("CheckpointStarted", "CheckpointSaved")]


def test_multiples_of_keep_every_stay(ranks: Ranks, tmp_path: Path) -> None:
    job = small_job(tmp_path, "checkpoint.every=2", "checkpoint.keep=1", "checkpoint.keep_every=3", "run.steps=8")
    ranks.run_places(1, run_job, job, tmp_path / "run", timeout_s=120)
    names = sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir())
    assert names == [f"step-{step:08d}" for step in (3, 6, 8)]
