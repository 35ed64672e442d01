"""A run that is interrupted and resumed ends with the same bits as one that is not, with independent replicas too."""

import logging
import os
import random
import shutil
import signal
from pathlib import Path

import pytest
import torch

from checkpoint.forged import forge
from motet.checkpoint.settings import CheckpointSettings
from motet.monitor.events import CheckpointSaved, EvaluationDone, RunStarted, WarningIssued, read_events, read_steps
from motet.monitor.sinks import Callback
from motet.parallel.process.launch_environment import RankEnvironment
from motet.train.job import Job
from motet.train.launch.failures import StopFlag
from motet.train.loop import run_rank
from ranks import RankFailureError, Ranks
from train.runs import run_job, same_bits, saved_tensors, small_job

STEPS = "run.steps=12"
SGD = ["optimizer.name=sgd", "optimizer.momentum=0.9", "optimizer.nesterov=true", "layout.microbatches=2"]
DRAW = random.SystemRandom()


class _StopAt(StopFlag):
    """A request to stop, or kill -9, at the moment when this rank would begin step `at` (from 0) of this attempt."""

    def __init__(self, at: int, kills: bool) -> None:
        self._left, self._kills = at, kills

    @property
    def requested(self) -> bool:  # type: ignore[override]  # the loop reads it once a step
        self._left -= 1
        if self._left < 0 and self._kills:
            os.kill(os.getpid(), signal.SIGKILL)
        return self._left < 0


def _train(place: RankEnvironment, job: Job, folder: Path, on: int = -1, step: int = 0, kills: bool = True) -> int:
    return run_rank(job, place, folder, _StopAt(step, kills) if on == place.rank else StopFlag()).completed_steps


def _curve(folder: Path) -> list[tuple[float, float | None]]:
    return [(step.loss, step.grad_norm) for step in read_steps(folder / "events.jsonl")]


def _kill_and_resume(ranks: Ranks, folder: Path, world: int, *changes: str) -> dict[str, torch.Tensor]:
    """Some rank is killed at some step, other ones each time. Gives what the last checkpoint holds."""
    killed = (DRAW.randrange(world), DRAW.randrange(12))
    job = small_job(folder, STEPS, "checkpoint.every=4", *changes)
    whole, cut = folder / "whole", folder / "cut"
    logging.warning("killed = %s: (rank, step)", killed)  # shown with a failure, so that it can be had again
    ranks.run_places(world, _train, job, whole, timeout_s=120)
    with pytest.raises(RankFailureError, match=f"rank {killed[0]} failed: the process ended with code -9"):
        ranks.run_places(world, _train, job, cut, *killed, timeout_s=120)
    assert ranks.run_places(world, _train, job, cut, timeout_s=120) == [12] * world
    assert same_bits(saved_tensors(cut), saved_tensors(whole)) and _curve(cut) == _curve(whole)
    assert len(_curve(whole)) == 12
    return saved_tensors(cut)


@pytest.mark.proof  # The next but one is the same with more to restore
@pytest.mark.parametrize("world", [2, 3, 4])
def test_killed_and_resumed_is_bit_for_bit_the_same(ranks: Ranks, tmp_path: Path, world: int) -> None:
    _kill_and_resume(ranks, tmp_path, world, "precision.recipe=bf16")


@pytest.mark.proof
def test_so_it_is_with_momentum_and_micro_batches(ranks: Ranks, tmp_path: Path) -> None:
    _kill_and_resume(ranks, tmp_path, 2, "precision.recipe=bf16", *SGD)


def test_so_it_is_with_buffers_of_a_users_module_momentum_and_micro_batches(ranks: Ranks, tmp_path: Path) -> None:
    model = "model={factory='train.trainable_user_models:WithBatchNorm', arguments={vocab_size=260}, vocab_size=260}"
    saved = _kill_and_resume(ranks, tmp_path, 2, model, "precision.recipe=fp32", *SGD)
    assert saved["buffer/norm.num_batches_tracked"] == 2 * 12
    assert saved["buffer/norm.running_mean"].count_nonzero() == 8


@pytest.mark.parametrize(
    ("model", "recipe"),
    [
        ("gpt2", "fp32"),
        *(pytest.param("decoder", recipe, marks=pytest.mark.proof) for recipe in ("fp64", "fp32", "bf16")),
        *(pytest.param(*each, marks=pytest.mark.proof) for each in (("gpt2", "fp64"), ("gpt2", "bf16"))),
    ],
)
def test_two_halves_are_the_whole(ranks: Ranks, tmp_path: Path, recipe: str, model: str) -> None:
    changes = [STEPS, f"precision.recipe={recipe}", "layout.microbatches=2"]
    job = small_job(tmp_path, *changes, model=model)
    first = small_job(tmp_path, *changes, "run.stop_at=6", model=model)
    ranks.run_places(1, _train, job, tmp_path / "whole", timeout_s=120)
    assert ranks.run_places(1, _train, first, tmp_path / "halves", timeout_s=120) == [6]
    assert ranks.run_places(1, _train, job, tmp_path / "halves", timeout_s=120) == [12]
    assert same_bits(saved_tensors(tmp_path / "halves"), saved_tensors(tmp_path / "whole"))
    assert _curve(tmp_path / "halves") == _curve(tmp_path / "whole")


def test_another_number_of_ranks_continues_with_a_warning(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run_places(2, _train, small_job(tmp_path, STEPS, "run.stop_at=6"), tmp_path / "run", timeout_s=120)
    ranks.run_places(3, _train, small_job(tmp_path, STEPS), tmp_path / "run", timeout_s=120)
    ranks.run_places(1, _train, small_job(tmp_path, STEPS), tmp_path / "whole", timeout_s=120)
    assert "made with ranks = 2, this run has 3" in (tmp_path / "run/events.jsonl").read_text()
    for (loss, _), (expected, _) in zip(_curve(tmp_path / "run"), _curve(tmp_path / "whole"), strict=True):
        assert abs(loss - expected) < 1e-12 * expected


class _KillAfter(Callback):
    """Kills rank 0 when it reports the checkpoint of a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_checkpoint(self, event: CheckpointSaved) -> None:
        if event.step == self._step:
            os.kill(os.getpid(), signal.SIGKILL)


def _train_until_saved(place: RankEnvironment, job: Job, folder: Path, step: int) -> int:
    return run_rank(job, place, folder, StopFlag(), [_KillAfter(step)]).completed_steps


def test_a_run_killed_after_its_last_checkpoint_evaluates_and_leaves_nothing(ranks: Ranks, tmp_path: Path) -> None:
    job, whole, cut = small_job(tmp_path, STEPS, "checkpoint.every=4"), tmp_path / "whole", tmp_path / "cut"
    ranks.run_places(1, _train, job, whole, timeout_s=120)
    with pytest.raises(RankFailureError, match="the process ended with code -9"):
        ranks.run_places(1, _train_until_saved, job, cut, 12, timeout_s=120)
    (cut / "checkpoints/step-00000004.partial").mkdir()  # it was being deleted
    assert ranks.run_places(1, _train, job, cut, timeout_s=120) == [12]
    names, evaluations = [], []
    for folder in (whole, cut):
        names.append(sorted(path.name for path in (folder / "checkpoints").iterdir()))
        events = read_events(folder / "events.jsonl")
        evaluations.append([(e.split, e.loss) for e in events if isinstance(e, EvaluationDone)])
    assert names[0] == names[1] == ["step-00000008", "step-00000012"]
    assert evaluations[0] == evaluations[1] and [split for split, _ in evaluations[0]] == ["validation", "test"]
    assert same_bits(saved_tensors(cut), saved_tensors(whole)) and _curve(cut) == _curve(whole)


@pytest.mark.parametrize(
    ("name", "other"),
    [("threads", 3), pytest.param("torch", "2.1.0", marks=pytest.mark.proof), ("reproducible", "run"), ("step", 6)],
)
def test_what_changes_the_last_bits_is_told(ranks: Ranks, tmp_path: Path, name: str, other: int | str) -> None:
    """A changed file stands for a checkpoint of another machine; the step is unchanged."""
    ranks.run_places(1, _train, small_job(tmp_path, STEPS, "run.stop_at=6"), tmp_path / "run", timeout_s=120)
    where = tmp_path / "run/checkpoints/step-00000006"
    forge(where, "manifest.json" if name == "step" else "saved_by.json", lambda content: content.update({name: other}))
    ranks.run_places(1, _train, small_job(tmp_path, STEPS), tmp_path / "run", timeout_s=120)
    told = [event.text for event in read_events(tmp_path / "run/events.jsonl") if isinstance(event, WarningIssued)]
    expected = [] if name == "step" else [f"made with {name} = {other}, this run has"]
    found = [text for text in told if "bit for bit" in text]
    assert [part in text for part, text in zip(expected, found, strict=True)] == [True] * len(expected)


def test_all_ranks_stop_at_the_same_step_and_save(ranks: Ranks, tmp_path: Path) -> None:
    done = ranks.run_places(3, _train, small_job(tmp_path, STEPS), tmp_path / "run", 1, 4, False, timeout_s=120)
    assert done == [5] * 3 and (tmp_path / "run/checkpoints/step-00000005/manifest.json").is_file()


@pytest.mark.parametrize(
    ("outer", "saved"), [([], [1, 2, 3, 4]), (["outer.every=2"], [2, 4])], ids=["data parallel", "replicas"]
)
def test_the_clock_of_rank_0_decides_when_all_ranks_save(
    ranks: Ranks, tmp_path: Path, outer: list[str], saved: list[int]
) -> None:
    job = small_job(tmp_path, "run.steps=4", *outer)
    job = job.model_copy(update={"checkpoint": CheckpointSettings(every_minutes=1e-9)})
    assert ranks.run_places(2, run_job, job, tmp_path / "run", timeout_s=60) == [4, 4]
    events = list(read_events(tmp_path / "run/events.jsonl"))
    assert [event.step for event in events if isinstance(event, CheckpointSaved)] == saved
    (start,) = (event for event in events if isinstance(event, RunStarted))
    assert (start.checkpoint_every, start.checkpoint_every_minutes) == (None, 1e-9)
    (evaluation,) = (event for event in events if isinstance(event, EvaluationDone) and event.split == "validation")
    assert start.validation_targets == evaluation.targets
    assert start.steps_per_epoch == pytest.approx(4 / read_steps(tmp_path / "run/events.jsonl")[-1].epoch)


def test_the_clock_decides_nothing_where_steps_do() -> None:
    assert CheckpointSettings().minutes_between == 10
    assert CheckpointSettings(every=5).minutes_between is CheckpointSettings(every_minutes=0).minutes_between is None


STREAMING = ["outer.every=4", "outer.fragments=2", "outer.delay=1", "run.steps=10", "monitor.evaluate_batches=1"]
NORMED = "model={factory='train.trainable_user_models:WithBatchNorm', arguments={vocab_size=260}, vocab_size=260}"


def _judged(folder: Path) -> dict[int, float]:
    events = read_events(folder / "events.jsonl")
    return {event.step: event.loss for event in events if isinstance(event, EvaluationDone)}


HYBRID = ["layout.zero=3", "layout.shard_group=2", "run.on_nan=skip"]


@pytest.mark.parametrize(("world", "changes"), [(2, [NORMED]), (4, HYBRID)])
def test_a_break_and_evaluations_change_no_run(ranks: Ranks, tmp_path: Path, world: int, changes: list[str]) -> None:
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
    assert ranks.run_places(2, _train, job, tmp_path / "run", 1, 0, False) == [3, 3]
    assert len(read_steps(tmp_path / "run" / "events.jsonl")) == 3
    assert ranks.run_places(2, _train, job, tmp_path / "run") == [10, 10]


def test_a_step_that_is_not_finite_ends_the_run_at_the_next_meeting(ranks: Ranks, tmp_path: Path) -> None:
    bad = "model={factory='train.trainable_user_models:Normed', arguments={nan_at=2}}"
    job = small_job(tmp_path, bad, "outer.every=4", "run.steps=10")
    says = "stopped at step 4: a loss or gradient of some replica since the last outer step is not finite; its update"
    with pytest.raises(RankFailureError, match=says):
        ranks.run_places(2, _train, job, tmp_path / "run")
    assert [step.skipped for step in read_steps(tmp_path / "run" / "events.jsonl")] == [False, False, True, False]


@pytest.mark.parametrize(("first", "second"), [("float32", "float64"), ("float64", "float32")])
def test_masters_continue_in_another_dtype(ranks: Ranks, tmp_path: Path, first: str, second: str) -> None:
    """Wider ones hold the same numbers; narrower ones hold them rounded, as torch rounds them."""

    def job_of(steps: int, dtype: str, *more: str) -> Job:
        words = ("precision.recipe=fp32", f"precision.master_dtype={dtype}", "layout.zero=1", *more)
        return small_job(
            tmp_path, *words, f"run.steps={steps}", "optimizer.schedule.kind=constant", "checkpoint.every=1"
        )

    before, after = tmp_path / "before", tmp_path / "after"
    ranks.run_places(2, _train, job_of(4, first), before, timeout_s=120)
    shutil.copytree(before, after)
    ranks.run_places(2, _train, job_of(5, second, "optimizer.learning_rate=1e-30"), after, timeout_s=120)
    events = read_events(after / "events.jsonl")
    (remark,) = [event.text for event in events if isinstance(event, WarningIssued) and "masters" in event.text]
    assert f"has masters in {first}, this run in {second}" in remark
    assert ("rounded" in remark) == (second == "float32")
    old, new = saved_tensors(before), saved_tensors(after)
    masters = [name for name in old if name.startswith("master/")]
    dtype = getattr(torch, second)
    assert masters and all(torch.equal(new[name], old[name].to(dtype)) for name in masters)
