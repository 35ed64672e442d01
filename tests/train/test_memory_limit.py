"""Ranks at stage 3 train a model under a limit of their data that its complete weights would exceed."""

import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest.mock import patch

import pytest

from data_limit import data_bytes, data_limit
from environment import uncounted
from motet.cluster.host_limits import keep_freed_memory
from motet.core.text_files import to_toml
from motet.models.settings import DecoderSettings
from motet.models.spec.model_spec import spec_from_settings
from motet.monitor.event_dispatcher import EventDispatcher
from motet.monitor.events import StepDone, read_events
from motet.parallel.process.process_group import RankGroup
from motet.train.build import build_components
from motet.train.job import Job
from motet.train.launch.failures import StopFlag
from motet.train.launch.run_folder import job_to_tree
from motet.train.loop import KEPT_BLOCK_BYTES_STAGE_3, run_training
from motet.train.optimizer import module_plan
from motet.train.run_report import RunReport
from ranks import RankFailureError, Ranks
from train.runs import small_job

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA limits mapped memory on Linux only")
# Blocks of 13 MB, of which stage 3 gathers few at once, and activations of 8 tokens.
MODEL = "model={{family='decoder', vocab_size=260, context=8, layers={}, hidden=512, heads=8, ffn_hidden=1376}}"
SETTINGS = ("data.sequence_length=8", "data.batch_sequences=8", "precision.recipe=fp32", "monitor.evaluate_batches=1")


def settings_of(layout: str, layers: int, *more: str) -> list[str]:
    words = [f"layout.{word}" for word in layout.split()]
    return [*SETTINGS, MODEL.format(layers), *words, "monitor.sample_tokens=2", *more]


def weight_bytes(job: Job) -> int:
    assert isinstance(job.model, DecoderSettings)
    return 4 * spec_from_settings(job.model).parameter_count


def train_within(group: RankGroup, job: Job, folder: str, fractions: tuple[float, float]) -> tuple[int, int]:
    """Build, and then resume, train, evaluate, sample and save, within what an idle process has and these fractions of
    the weights. Returns the step from which it began, and completed steps."""
    keep_freed_memory(KEPT_BLOCK_BYTES_STAGE_3)
    idle, (to_build, to_train) = data_bytes(), fractions
    unchecked = patch.object(module_plan, "check_rank_memory") if to_build < to_train else nullcontext()
    with data_limit(idle + to_build * weight_bytes(job)), unchecked:
        parts = build_components(job, group, Path(folder))
    with data_limit(idle + to_train * weight_bytes(job)):
        resume_point = parts.state.restore_newest()
        progress = run_training(RunReport(job, parts, EventDispatcher()), resume_point, StopFlag())
    return resume_point.completed_steps, progress.completed_steps


def idle_bytes(group: RankGroup) -> int:
    return data_bytes()


@contextmanager
def new_ranks() -> Iterator[Ranks]:
    pool = Ranks()
    try:
        yield pool
    finally:
        pool.close()


def check_refused(ranks: Ranks, folder: Path, world: int, job: Job) -> None:
    with pytest.raises(RankFailureError, match=r"layout 'dp=\d zero=0' takes .* RLIMIT_DATA "):
        ranks.run(world, train_within, job, str(folder / "stage-0"), (0.75, 0.75))


@pytest.mark.proof
def test_four_ranks_with_sgd(ranks: Ranks, tmp_path: Path) -> None:
    """A step gathers as much as its state has where blocks are few, so only the building has a small limit."""
    small = small_job(tmp_path, *settings_of("zero=3", 1, "run.steps=1"))
    ranks.run(
        4, train_within, small, str(tmp_path / "first"), (1e3, 1e3)
    )  # what torch imports on first use is not small
    for first, last in ((0, 2), (2, 3)):
        job = small_job(tmp_path, *settings_of("zero=3", 4, "optimizer.name=sgd", f"run.steps={last}"))
        assert ranks.run(4, train_within, job, str(tmp_path / "run"), (0.75, 1.5)) == [(first, last)] * 4
    check_refused(ranks, tmp_path, 4, small_job(tmp_path, *settings_of("zero=0", 4, "optimizer.name=sgd")))


LAYERS = 36  # Of 13 MB each


@pytest.mark.proof
def test_eight_ranks_with_adamw(tmp_path: Path) -> None:
    """The state of a rank is half of the weights; the limit is three quarters, for new processes each time."""
    for first, last in ((0, 2), (2, 4)):
        job = small_job(tmp_path, *settings_of("zero=3", LAYERS, f"run.steps={last}"))
        with new_ranks() as ranks:
            done = ranks.run(8, train_within, job, str(tmp_path / "run"), (0.75, 0.75), timeout_s=1800)
            assert done == [(first, last)] * 8
    with new_ranks() as ranks:
        check_refused(ranks, tmp_path, 8, small_job(tmp_path, *settings_of("zero=0", LAYERS)))


@pytest.mark.proof
def test_the_command_under_ulimit(tmp_path: Path) -> None:
    with new_ranks() as ranks:
        idle = max(ranks.run(8, idle_bytes))
    for last in (2, 4):
        settings = settings_of("zero=3", LAYERS, f"run.steps={last}", f"run.folder={tmp_path}/run")
        job = small_job(tmp_path, *settings)
        limit = idle + weight_bytes(job) * 3 // 4
        (tmp_path / "job.toml").write_text(to_toml(job_to_tree(job)))
        command = [sys.executable, "-m", "motet", "train", str(tmp_path / "job.toml"), "--ranks", "8"]
        limited = ["bash", "-c", f"ulimit -d {limit >> 10}; exec {shlex.join(command)}"]
        subprocess.run(limited, cwd=tmp_path, env=uncounted(), check=True)
    events = [event for event in read_events(tmp_path / "run/events.jsonl") if isinstance(event, StepDone)]
    assert [event.step for event in events] == [1, 2, 3, 4]
