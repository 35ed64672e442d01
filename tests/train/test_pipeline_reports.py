"""Reports of a pipeline: predicted waiting, and the loss, memory and time of all stages on rank 0."""

from pathlib import Path
from unittest.mock import patch

import pytest

from motet.monitor.events import EvaluationDone, StepDone, WarningIssued, read_events
from motet.monitor.summary import read_summary
from motet.parallel.layout import parse_layout, resolve_layout
from motet.parallel.process.launch_environment import RankEnvironment
from motet.train.job import Job
from motet.train.launch.entry_points import TrainRequest, run_launched_rank
from motet.train.launch.failures import RankExitRecord
from motet.train.pipeline import stage_usage
from motet.train.pipeline.predicted_bubble import bubble_warning
from ranks import Ranks
from train.runs import small_job


def warning(words: str, rows: int, *, reproducible: bool = False) -> str:
    settings = parse_layout(words)
    layout = resolve_layout(settings, settings.dims.ranks, rows, reproducible=reproducible)
    return bubble_warning(layout, rows)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("pp", "microbatches"), [(2, 1), (3, 4), (4, 8), (8, 8)])
def test_the_number_of_micro_batches_that_halves_the_bubble(schedule: str, pp: int, microbatches: int) -> None:
    """The published bubble is (p - 1) / (m + p - 1), so half of it has 2 m + p - 1 micro-batches."""
    text = warning(f"pp={pp} microbatches={microbatches} schedule={schedule}", microbatches)
    assert f"{(pp - 1) / (microbatches + pp - 1):.1%} of a step" in text
    needed = 2 * microbatches + pp - 1
    assert f"layout.microbatches={needed} and data.batch_sequences={needed} would halve that" in text


@pytest.mark.parametrize(
    ("words", "rows", "remedy"),
    [
        ("pp=2 dp=2 microbatches=2", 24, "; layout.microbatches=6 would halve"),  # 5 do not divide 12 rows
        ("pp=2 dp=2 microbatches=2", 8, "; layout.microbatches=5 and data.batch_sequences=10 would halve"),
        ("pp=2 dp=2", 4, "; data.batch_sequences=10 would halve"),
    ],
)
def test_the_remedy_fits_the_rows_of_a_rank(words: str, rows: int, remedy: str) -> None:
    assert remedy in warning(words, rows, reproducible="microbatches" not in words)


def test_a_pipeline_that_is_busy_gets_no_warning() -> None:
    assert not warning("pp=2 microbatches=8", 8) and not warning("dp=2", 8)


def _train(place: RankEnvironment, job: Job) -> RankExitRecord:
    return run_launched_rank(TrainRequest(job, None, []), place, lambda _: None)


def events_of(ranks: Ranks, world: int, job: Job) -> tuple[list[StepDone], list[EvaluationDone], list[str]]:
    for record in ranks.run_places(world, _train, job):
        assert record.exit_code == 0, record
    assert job.run.folder is not None
    events = read_events(Path(job.run.folder) / "events.jsonl")
    steps = [event for event in events if isinstance(event, StepDone)]
    texts = [event.text for event in events if isinstance(event, WarningIssued)]
    return steps, [event for event in events if isinstance(event, EvaluationDone)], texts


@pytest.mark.parametrize(
    ("words", "stages"),
    [
        (["layout.pp=2", "layout.microbatches=2"], [(0,), (1,)]),
        (["layout.pp=2", "layout.chunks=2", "layout.schedule=zb-v"], [(0, 3), (1, 2)]),
    ],
    ids=["1f1b", "zb-v"],
)
def test_rank_0_reports_the_loss_and_the_accuracy_of_the_last_stage(
    ranks: Ranks, tmp_path: Path, words: list[str], stages: list[tuple[int, ...]]
) -> None:
    settings = ["run.steps=2", "model.layers=4", "data.batch_sequences=8"]
    alone, one_rank, _ = events_of(
        ranks, 1, small_job(tmp_path, *settings, f"run.folder={tmp_path / 'alone'}", model="classify")
    )
    job = small_job(tmp_path, *settings, *words, f"run.folder={tmp_path / 'run'}", model="classify")
    steps, evaluations, texts = events_of(ranks, 2, job)
    assert [step.loss for step in steps] == pytest.approx([step.loss for step in alone], rel=1e-12)
    for evaluation, expected in zip(evaluations, one_rank, strict=True):
        assert expected.accuracy is not None and evaluation.accuracy == expected.accuracy
        assert evaluation.loss == pytest.approx(expected.loss, rel=1e-12)
    assert any("will wait for 33.3% of a step" in text for text in texts) == ("zb-v" not in str(words))
    for step in steps:
        assert [usage.stages for usage in step.pipeline] == stages
        assert step.memory_bytes == max(usage.memory_bytes for usage in step.pipeline)
        assert step.memory_bytes == step.pipeline[step.memory_rank].memory_bytes
        assert all(0 < usage.compute_s < step.step_time_s for usage in step.pipeline)
    summary = read_summary(tmp_path / "run")
    # Linux corrects its peak of resident memory by a few pages: a later step may report less than an earlier one.
    peak = max(step.memory_bytes for step in steps)
    assert (summary.peak_bytes, [usage.stages for usage in summary.pipeline]) == (peak, stages)


def _hold_memory(place: RankEnvironment, job: Job) -> RankExitRecord:
    with patch.object(stage_usage, "peak_memory_bytes", lambda _: (3, 7)[place.rank]):
        return _train(place, job)


def test_the_memory_of_a_run_is_that_of_the_rank_that_holds_most(ranks: Ranks, tmp_path: Path) -> None:
    job = small_job(tmp_path, "run.steps=1", f"run.folder={tmp_path / 'run'}")
    for record in ranks.run_places(2, _hold_memory, job):
        assert record.exit_code == 0, record
    (step,) = [event for event in read_events(tmp_path / "run/events.jsonl") if isinstance(event, StepDone)]
    assert (step.memory_rank, step.memory_bytes, step.pipeline) == (1, 7, ())
