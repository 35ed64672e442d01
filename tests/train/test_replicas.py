"""Jobs with independent replicas: evaluation, checkpoints, requests to stop, and steps that are not finite."""

from pathlib import Path

import pytest

from motet.monitor.events import EvaluationDone, read_events, read_steps
from motet.parallel.process.launch_environment import RankEnvironment
from motet.train.build import run_rank
from motet.train.job import Job
from motet.train.launch.failures import StopFlag
from ranks import RankFailureError, Ranks
from train.runs import same_bits, saved_tensors, small_job

STREAMING = ["outer.every=4", "outer.fragments=2", "outer.delay=1", "run.steps=10", "monitor.evaluate_batches=1"]
NORMED = "model={factory='train.trainable_user_models:WithBatchNorm', arguments={vocab_size=260}, vocab_size=260}"


def _train(place: RankEnvironment, job: Job, folder: Path, stops: int = -1) -> int:
    """`stops`: the rank that is asked to stop at its start."""
    return run_rank(job, place, folder, StopFlag(requested=place.rank == stops)).completed_steps


def _judged(folder: Path) -> dict[int, float]:
    events = read_events(folder / "events.jsonl")
    return {event.step: event.loss for event in events if isinstance(event, EvaluationDone)}


HYBRID = ["layout.zero=3", "layout.shard_group=2", "run.on_nan=skip"]


@pytest.mark.parametrize(("world", "changes"), [(2, [NORMED]), (4, HYBRID)])
def test_a_run_is_the_same_with_a_break_and_evaluations(
    ranks: Ranks, tmp_path: Path, world: int, changes: list[str]
) -> None:
    job = small_job(tmp_path, *STREAMING, *changes)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    ranks.run_places(world, _train, job, whole)
    often = small_job(tmp_path, *STREAMING, *changes, "monitor.evaluate_every=1")
    stopped = small_job(tmp_path, *STREAMING, *changes, "monitor.evaluate_every=1", "run.stop_at=7")
    assert ranks.run_places(world, _train, stopped, cut) == [7] * world
    assert ranks.run_places(world, _train, often, cut) == [10] * world
    assert same_bits(saved_tensors(cut), saved_tensors(whole))
    losses = [[step.loss for step in read_steps(folder / "events.jsonl")] for folder in (cut, whole)]
    assert losses[0] == losses[1]
    judged = _judged(cut)
    assert judged[10] == _judged(whole)[10]
    if NORMED in changes:  # its buffers are the first rank's, after every step
        return
    moves = [judged[step] != judged[step - 1] for step in range(2, 11)]
    assert moves == [step in (3, 5, 7, 9, 10) for step in range(2, 11)]  # when a fragment is merged, and at the end


@pytest.mark.parametrize(("world", "recipe"), [(3, "fp32"), (2, "bf16")])
def test_at_the_end_all_replicas_are_one_model(ranks: Ranks, tmp_path: Path, world: int, recipe: str) -> None:
    job = small_job(tmp_path, "outer.every=4", "run.steps=6", f"precision.recipe={recipe}")
    ranks.run_places(world, _train, job, tmp_path / "run")
    saved = saved_tensors(tmp_path / "run")
    names = [name.partition("/")[2] for name in saved if name.startswith("master/")]
    assert len(names) > 10
    for name in names:
        for replica in range(world):
            assert saved[f"replica-{replica}/master/{name}"].equal(saved[f"master/{name}"])
    assert not saved[f"replica-1/exp_avg/{names[0]}"].equal(saved[f"exp_avg/{names[0]}"])


def test_a_request_to_stop_is_heard_at_the_next_meeting(ranks: Ranks, tmp_path: Path) -> None:
    job = small_job(tmp_path, "outer.every=3", "run.steps=10")
    assert ranks.run_places(2, _train, job, tmp_path / "run", 1) == [3, 3]
    assert len(read_steps(tmp_path / "run" / "events.jsonl")) == 3
    assert ranks.run_places(2, _train, job, tmp_path / "run") == [10, 10]


def test_a_step_that_is_not_finite_ends_the_run_at_the_next_meeting(ranks: Ranks, tmp_path: Path) -> None:
    bad = "model={factory='train.trainable_user_models:Normed', arguments={nan_at=2}}"
    job = small_job(tmp_path, bad, "outer.every=4", "run.steps=10")
    says = "stopped at step 4: a loss or gradient of some replica since the last outer step is not finite; its update"
    with pytest.raises(RankFailureError, match=says):
        ranks.run_places(2, _train, job, tmp_path / "run")
    assert [step.skipped for step in read_steps(tmp_path / "run" / "events.jsonl")] == [False, False, True, False]
