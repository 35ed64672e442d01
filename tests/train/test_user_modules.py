"""Modules that were not written for motet are trained as their users expect, or refused with a sentence."""

import math
from pathlib import Path

import pytest
import torch

from motet.core.errors import InputError, TrainingDivergedError
from motet.monitor.events import EvaluationDone, StepDone, read_events
from motet.parallel.process.launch_environment import SINGLE_RANK
from motet.parallel.process.process_group import RankGroup
from motet.train.job import Job
from ranks import Ranks
from refusals import refused
from train.runs import run_job, same_bits, saved_tensors, small_job, train


def _job(folder: Path, factory: str, *overrides: str) -> Job:
    return small_job(folder, "run.steps=6", f"model={{factory='train.trainable_user_models:{factory}'}}", *overrides)


def test_replicas_start_from_the_same_values(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks.run(2, train, _job(tmp_path, "other_values_on_each_rank"), 3)
    assert all(torch.equal(value, second.parameters[name]) for name, value in first.parameters.items())


def _train_on_its_own_data(group: RankGroup, folder: Path) -> None:
    text = folder / f"{group.rank}.txt"
    text.write_text("one two three four " * (200 + group.rank))
    train(group, small_job(folder, f"data.source={text}"), 1)


def test_ranks_with_other_data_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"the data of rank 1 \(fingerprint .*\) is not that of rank 0"):
        ranks.run(2, _train_on_its_own_data, tmp_path)


@pytest.mark.parametrize("factory", ["Normed", "Noisy"])
def test_two_halves_are_the_whole(ranks: Ranks, tmp_path: Path, factory: str) -> None:
    """Also when saving in between: a checkpoint changes nothing about what is computed."""
    for name, changes in {"whole": [], "halves": ["run.stop_at=3", "checkpoint.every=2"]}.items():
        ranks.run_places(2, run_job, _job(tmp_path, factory, *changes), tmp_path / name)
    ranks.run_places(2, run_job, _job(tmp_path, factory), tmp_path / "halves")
    assert same_bits(saved_tensors(tmp_path / "whole"), saved_tensors(tmp_path / "halves"))


@pytest.mark.parametrize("reentrant", ["true", "false"])
def test_dropout_is_that_of_one_rank(ranks: Ranks, tmp_path: Path, reentrant: str) -> None:
    """Blocks are recomputed in backward, and one dropout is active in evaluation."""
    changes = [f"model.arguments={{reentrant={reentrant}}}", "monitor.evaluate_every=3", "monitor.evaluate_batches=2"]
    run_job(SINGLE_RANK, _job(tmp_path, "Recomputed", *changes), tmp_path / "alone")
    split = ["layout.zero=3", "layout.microbatches=2", "monitor.replica_check_every=2"]
    ranks.run_places(2, run_job, _job(tmp_path, "Recomputed", *changes, *split), tmp_path / "split")
    alone, several = (
        [e.loss for e in read_events(tmp_path / run / "events.jsonl") if isinstance(e, StepDone | EvaluationDone)]
        for run in ("alone", "split")
    )
    assert len(alone) >= 8 and several == pytest.approx(alone, rel=1e-12)
    parameters, expected = saved_tensors(tmp_path / "split"), saved_tensors(tmp_path / "alone")
    assert all(torch.allclose(parameters[name], expected[name], rtol=1e-10, atol=1e-12) for name in expected)


def test_a_skipped_step_leaves_nothing_behind(tmp_path: Path) -> None:
    run_job(SINGLE_RANK, _job(tmp_path, "Normed", "run.on_nan=skip", "model.arguments={nan_at=2}"), tmp_path / "run")
    events = read_events(tmp_path / "run/events.jsonl")
    assert [e.skipped for e in events if isinstance(e, StepDone)] == [False, False, True, False, False, False]
    assert all(math.isfinite(e.loss) for e in events if isinstance(e, EvaluationDone))
    assert all(t.isfinite().all() for t in saved_tensors(tmp_path / "run").values())


def test_weights_that_are_not_finite_are_never_saved(tmp_path: Path) -> None:
    rate = ["optimizer.learning_rate=1e308", "optimizer.schedule.kind=constant", "optimizer.schedule.warmup_steps=0"]
    job = small_job(tmp_path, "run.steps=1", "precision.recipe=fp32", *rate)
    with pytest.raises(
        TrainingDivergedError, match="stopped: the parameters are not finite after step 1, so they are not saved"
    ):
        run_job(SINGLE_RANK, job, tmp_path / "run")
    assert not list((tmp_path / "run").glob("checkpoints/step-*"))


def test_state_that_would_be_lost_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="keeps state in get_extra_state, which is not saved; keep it in a buffer"):
        run_job(SINGLE_RANK, _job(tmp_path, "HiddenState"), tmp_path / "run")


def test_a_buffer_that_the_first_forward_adds(tmp_path: Path) -> None:
    job = _job(tmp_path, "WithCache", "model.arguments={persistent=true}")
    refused(
        r"buffer cache was missing at the start and is \[3\] of int64 now", run_job, SINGLE_RANK, job, tmp_path / "run"
    )
    assert [e.step for e in read_events(tmp_path / "run/events.jsonl") if isinstance(e, StepDone)] == [1]
    job = _job(tmp_path, "WithCache", "model.arguments={persistent=false}")
    assert run_job(SINGLE_RANK, job, tmp_path / "other") == 6


@pytest.mark.parametrize("change", ["optimizer.weight_decay=0", "optimizer.learning_rate=0.1", "layout.microbatches=3"])
def test_what_may_change_on_resume_may(tmp_path: Path, change: str) -> None:
    for changes, steps in (["run.stop_at=2"], 2), ([change], 4):
        assert run_job(SINGLE_RANK, small_job(tmp_path, "run.steps=4", *changes), tmp_path / "run") == steps
