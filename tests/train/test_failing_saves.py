"""A save that fails while training goes on ends the run on all ranks, with one sentence; what stays is told."""

import errno
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from motet.checkpoint import background_writer
from motet.checkpoint.data_files import DataFileWriter
from motet.core.errors import MotetError, TrainingDivergedError
from motet.monitor.events import CheckpointSaved, CheckpointStarted, RunEnded, WarningIssued, read_events
from motet.monitor.sinks import Callback
from motet.parallel.process.launch_environment import RankEnvironment
from motet.train.job import Job
from motet.train.launch.failures import StopFlag
from motet.train.loop import TrainingLoop, run_rank
from motet.train.state import TrainingState
from ranks import Ranks
from train.runs import run_job, small_job

SENTENCES = {
    "disk": (r"could not save .*step-00000020 \(No space left on device\): it needs", "5 "),
    "index": (r"could not save .*step-00000002 \(No space left on device\): it needs", "5 "),
    "nan": ("the parameters are not finite after step 2, so they are not saved", "4 "),
}


def _train(place: RankEnvironment, job: Job, folder: Path, broken_rank: int, fault: str) -> str:
    """The error of a run in which one rank cannot write its checkpoint, or has a parameter that is no number."""
    with pytest.MonkeyPatch.context() as patch:
        start = TrainingState.start_save

        def fail(*_: object, **__: object) -> None:
            time.sleep(0.3 if fault == "index" else 0.05)  # Until the ranks have agreed that all have written
            raise OSError(errno.ENOSPC, "No space left on device", str(folder))

        def spoil(self: TrainingState, step: int) -> Path:
            if step == 2:
                self.optimizer.sharded_parameters.local_masters[0].view(-1)[0] = torch.nan
            return start(self, step)

        if place.rank == broken_rank and fault == "disk":
            patch.setattr(DataFileWriter, "write_box", fail)
        elif place.rank == broken_rank and fault == "index":
            patch.setattr(background_writer, "publish", fail)
        elif place.rank == broken_rank:
            patch.setattr(TrainingState, "start_save", spoil)
        try:
            run_job(place, job, folder)
        except MotetError as error:
            return f"{error.exit_code} {error}"
    return "no error"


@pytest.mark.parametrize(("fault", "broken_rank"), [("disk", 0), ("disk", 1), ("index", 0), ("nan", 0), ("nan", 1)])
def test_the_failure_of_one_rank_ends_the_run_on_all(
    ranks: Ranks, tmp_path: Path, fault: str, broken_rank: int
) -> None:
    """Long before the next save. Updates of states on disk, which would wait until they are written, go on."""
    step = 20 if fault == "disk" else 2
    settings = ["memory.optimizer=disk", f"memory.folder={tmp_path}", "run.steps=60"]
    # Its third step would end with a loss that is no number
    settings = settings if fault == "disk" else ["run.steps=2"]
    job, run = small_job(tmp_path, f"checkpoint.every={step}", "layout.zero=2", *settings), tmp_path / "run"
    first, second = ranks.run_places(2, _train, job, run, broken_rank, fault, timeout_s=120)
    assert first == second
    text, code = SENTENCES[fault]
    assert re.search(text, first) and first.startswith(code)
    assert [path.name for path in (run / "checkpoints").iterdir()] == []
    events = read_events(run / "events.jsonl")
    assert [event.step for event in events if isinstance(event, CheckpointStarted)] == [step]
    assert isinstance(events[-1], RunEnded) and events[-1].steps < 2 * step


def _train_until_an_error(place: RankEnvironment, job: Job, folder: Path) -> bool:
    """Whether the checkpoint that the first rank writes slowly is there when this rank ends with an error."""
    with pytest.MonkeyPatch.context() as patch:
        write = DataFileWriter.write_box

        def write_slowly(self: DataFileWriter, *arguments: Any) -> None:
            time.sleep(0.05 * (place.rank == 0))
            write(self, *arguments)

        def diverge(_: TrainingLoop, done: int, __: object) -> None:
            if done == 3:
                raise TrainingDivergedError("a loss that is no number")

        patch.setattr(DataFileWriter, "write_box", write_slowly)
        patch.setattr(TrainingLoop, "_check_divergence", diverge)
        with pytest.raises(TrainingDivergedError, match="no number"):
            run_job(place, job, folder)
    return (folder / "checkpoints/step-00000002").is_dir()


def test_a_run_that_fails_completes_the_checkpoint_of_an_earlier_step(ranks: Ranks, tmp_path: Path) -> None:
    """All ranks stay until the first has it, since it would be ended with the first that is gone."""
    job = small_job(tmp_path, "checkpoint.every=2", "layout.zero=2", "run.steps=20")
    assert ranks.run_places(2, _train_until_an_error, job, tmp_path / "run", timeout_s=120) == [True, True]
    *_, saved, end = read_events(tmp_path / "run/events.jsonl")
    assert isinstance(saved, CheckpointSaved) and saved.step == 2 and isinstance(end, RunEnded)


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
