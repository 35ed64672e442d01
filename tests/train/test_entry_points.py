"""Training in the process that calls, and as a rank of somebody else's launcher."""

from dataclasses import replace
from pathlib import Path

import pytest

import motet
from motet.monitor.events import RunEnded, StepDone, read_events
from motet.monitor.summary import read_summary
from motet.parallel.process.launch_environment import RankEnvironment
from motet.train.job import Job
from motet.train.launch.entry_points import RUN_TOKEN_FILE, TrainRequest, run_launched_rank
from motet.train.launch.failures import RankExitRecord
from motet.train.launch.run_folder import snapshot_run_folder
from ranks import Ranks
from train.runs import TEXT, small_job


class _Heard(motet.Callback):
    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_step(self, event: StepDone) -> None:
        self.steps.append(event.step)


def test_a_run_from_python_is_told_and_continued(tmp_path: Path) -> None:
    changes = ["run.steps=4", f"run.folder={tmp_path / 'run'}"]
    first, second = _Heard(), _Heard()
    folder, outcome = motet.run(small_job(tmp_path, *changes, "run.stop_at=2"), callbacks=[first])
    assert (folder, outcome.completed_steps, outcome.is_finished) == (tmp_path / "run", 2, False)
    _, outcome = motet.run(small_job(tmp_path, *changes), callbacks=[second])
    assert outcome.is_finished and (first.steps, second.steps) == ([1, 2], [3, 4])
    assert read_summary(folder).finished and (folder / "versions.json").is_file()
    assert [step.step for step in motet.read_steps(folder / "events.jsonl")] == [1, 2, 3, 4]


def test_a_run_that_cannot_work_makes_no_folder(tmp_path: Path) -> None:
    job = small_job(tmp_path, f"run.folder={tmp_path / 'run'}", "data.batch_sequences=3", "layout.microbatches=2")
    with pytest.raises(motet.MotetError, match="cannot be cut evenly over 1 rank"):
        motet.run(job)
    assert not (tmp_path / "run").exists()


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def changeable_text(folder: Path) -> tuple[Path, list[str]]:
    """A copy of the small text, and the settings of a run that reads it."""
    text = folder / "text.txt"
    text.write_bytes(TEXT.read_bytes())
    return text, ["run.steps=4", f"run.folder={folder / 'run'}", f"data.source={text}"]


def test_a_run_that_is_refused_on_its_way_leaves_the_folder_as_it_was(tmp_path: Path) -> None:
    text, changes = changeable_text(tmp_path)
    motet.run(small_job(tmp_path, *changes, "run.stop_at=2"))
    text.write_bytes(TEXT.read_bytes().replace(b"the", b"The"))
    before = contents(tmp_path / "run")
    with pytest.raises(motet.MotetError, match="the data changed"):
        motet.run(small_job(tmp_path, *changes, "optimizer.learning_rate=0.5"))
    assert contents(tmp_path / "run") == before
    model = "model={factory='train.trainable_user_models:HiddenState'}"
    with pytest.raises(motet.MotetError, match="get_extra_state"):
        motet.run(small_job(tmp_path, "run.steps=4", f"run.folder={tmp_path / 'new'}", model))
    assert not (tmp_path / "new").exists()


def test_what_was_trained_is_not_taken_back(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    before = [snapshot_run_folder(folder)]
    for stop in (2, 3):
        motet.run(small_job(tmp_path, "run.steps=4", f"run.folder={folder}", f"run.stop_at={stop}"))
        before.append(snapshot_run_folder(folder))
    after = contents(folder)
    assert [start.had_run for start in before] == [False, True, True]
    assert [start.restore_unless_trained() for start in before] == [False, False, True] and contents(folder) == after


def test_files_are_put_back_byte_by_byte(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_bytes(b"name = 'x'\r\n")
    (tmp_path / "versions.json").write_bytes(b"\xff damaged")
    before, there = snapshot_run_folder(tmp_path), contents(tmp_path)
    for name in ("job.toml", "versions.json", "summary.json", "events.jsonl"):
        (tmp_path / name).write_bytes(b"")
    assert before.restore_unless_trained() and contents(tmp_path) == {**there, str(tmp_path / "events.jsonl"): b""}


def _joined(place: RankEnvironment, job: Job) -> tuple[RankExitRecord, list[str]]:
    told: list[str] = []
    return run_launched_rank(TrainRequest(job, None, []), place, told.append), told


def test_a_refusal_under_a_launcher_leaves_the_folder_as_it_was(ranks: Ranks, tmp_path: Path) -> None:
    text, changes = changeable_text(tmp_path)
    for record, _ in ranks.run_places(2, _joined, small_job(tmp_path, *changes, "run.stop_at=2")):
        assert record.exit_code == 0, record
    text.write_bytes(TEXT.read_bytes().replace(b"the", b"The"))
    before = contents(tmp_path / "run")
    for record, _ in ranks.run_places(2, _joined, small_job(tmp_path, *changes, "optimizer.learning_rate=0.5")):
        assert record.exit_code == 2 and "the data changed" in record.message
    assert contents(tmp_path / "run") == before


def _launched_alone(place: RankEnvironment, job: Job) -> list[str]:
    return _joined(replace(place, local_rank=0, local_world=1), job)[1]


def test_a_machine_without_rank_0_says_where_the_output_is(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks.run_places(
        2, _launched_alone, small_job(tmp_path, "run.steps=1", f"run.folder={tmp_path / 'run'}")
    )
    (line,) = second
    assert line.startswith(f"rank 1 trains here; rank 0 prints the progress and writes {tmp_path / 'run'} on its own")
    assert not any("prints the progress" in line for line in first)


def test_divergence_under_a_launcher_is_told_once(ranks: Ranks, tmp_path: Path) -> None:
    model = "model={factory='train.trainable_user_models:Normed', arguments={nan_at=2}}"
    job = small_job(tmp_path, "run.steps=4", f"run.folder={tmp_path / 'run'}", model)
    (first, told), (second, silent) = ranks.run_places(2, _joined, job)
    end = read_events(tmp_path / "run/events.jsonl")[-1]
    assert isinstance(end, RunEnded) and end.message.startswith("stopped at step 3: its loss is not finite (loss nan,")
    assert told[-1] == end.message and silent == []
    assert (first.exit_code, first.message, second.exit_code, second.message) == (4, "", 4, "")


def _trained_without_a_token(place: RankEnvironment, job: Job) -> tuple[RankExitRecord, list[str]]:
    return _joined(replace(place, token=None), job)


def test_ranks_of_one_host_share_a_token_file_while_they_train(ranks: Ranks, tmp_path: Path) -> None:
    changes = ["run.steps=2", f"run.folder={tmp_path / 'run'}", "layout.data=parameter_server"]
    changes.append("layout.server.placement=colocated")
    records = ranks.run_places(2, _trained_without_a_token, small_job(tmp_path, *changes))
    assert [record.exit_code for record, _ in records] == [0, 0], records
    assert not (tmp_path / "run" / RUN_TOKEN_FILE).exists()
