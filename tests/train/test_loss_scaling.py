"""Training in float16: an overflow on one rank skips the step on all, and small gradients survive."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import motet
from motet.core.errors import TrainingDivergedError
from motet.monitor.events import EVENTS_FILE, GradientsOverflowed, read_events, read_steps
from motet.monitor.summary import read_summary
from motet.parallel.process.process_group import RankGroup
from motet.precision.recipe import LossScaler
from motet.train.build import TrainingComponents, build_components
from motet.train.engine import StepStats
from motet.train.job import Job, load_job
from ranks import Ranks
from train.runs import run_job, small_job

STEPS, OVERFLOW_STEP, SCALE = 4, 1, 16384
FP16 = "precision.recipe=fp16", f"precision.loss_scale_initial={SCALE}", "precision.loss_scale_growth_steps=2"


def place_overflow(parts: TrainingComponents, step: Callable[[], int], rank: int) -> None:
    """The gradient of the output of a norm is infinite on one rank, in one step."""
    if parts.group.rank != rank:
        return

    def on_forward(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
        if output.requires_grad and step() == OVERFLOW_STEP:
            output.register_hook(lambda gradient: gradient * torch.inf)

    norms = [m for m in parts.model.module.modules() if "Norm" in type(m).__name__ and next(m.parameters()).numel()]
    norms[-1 if rank else 0].register_forward_hook(on_forward)


def leave_out_update(parts: TrainingComponents, step: Callable[[], int]) -> None:
    """The step is computed, and nothing is updated; the scale is halved by hand."""
    optimizer = parts.engine.optimizer
    update = optimizer.update

    def perhaps_update(*arguments: Any) -> None:
        if step() != OVERFLOW_STEP:
            update(*arguments)

    optimizer.update = perhaps_update  # type: ignore[method-assign]


def train(group: RankGroup, job: Job, folder: Path, rank: int | None) -> dict[str, Any]:
    """An overflow on a rank, or (None) a run that leaves out the update of that step."""
    parts = build_components(job, group, folder / f"rank-{group.rank}")
    stepper, now, results = parts.make_train_step(job), 0, []
    if rank is None:
        leave_out_update(parts, lambda: now)
    else:
        place_overflow(parts, lambda: now, rank)
    optimizer = parts.engine.optimizer
    for now in range(STEPS):
        results.append(stepper.step(now, 0.003))
        if rank is None and now == OVERFLOW_STEP:
            assert optimizer.loss_scaler is not None
            optimizer.loss_scaler = replace(optimizer.loss_scaler, scale=SCALE // 2, good_steps=0)
    tensors = {n: p.values.clone() for n, p in _masters(parts).items()}
    state = {n: v for n, v in optimizer.state().items() if n == "step"}
    return {
        "masters": tensors,
        "counts": {n: v.item() for n, v in state.items() if isinstance(v, Tensor)},
        "losses": [r.loss for r in results],
        "norms": [r.grad_norm for r in results],
        "scales": [r.loss_scale for r in results],
        "skips": [(not r.is_finite, r.skipped_steps, r.overflow and r.overflow.next_loss_scale) for r in results],
    }


def _masters(parts: TrainingComponents) -> dict[str, Any]:
    spread = parts.engine.optimizer.sharded_parameters
    spread.wait_for_pending()
    return dict(spread.local_shards(spread.local_masters))


@pytest.mark.parametrize(
    ("ranks_needed", "rank", "layout"),
    [
        (4, 2, ["layout.zero=2"]),
        (4, 3, ["layout.tp=2"]),
        (2, 0, ["layout.pp=2", "layout.microbatches=2"]),
        (2, 1, ["layout.pp=2", "layout.microbatches=2"]),
        (2, 1, ["layout.zero=3"]),
    ],
    ids=["dp4 at stage 2", "tp2 x dp2", "first stage of pp2", "last stage of pp2", "dp2 at stage 3"],
)
def test_an_overflow_on_one_rank_skips_the_step_on_all(
    ranks: Ranks, tmp_path: Path, ranks_needed: int, rank: int, layout: list[str]
) -> None:
    job = small_job(tmp_path, *FP16, *layout)
    runs = ranks.run(ranks_needed, train, job, tmp_path / "overflow", rank)
    references = ranks.run(ranks_needed, train, job, tmp_path / "reference", None)
    for run, reference in zip(runs, references, strict=True):
        assert run["skips"] == [(False, 0, None), (True, 0, SCALE // 2), (False, 0, None), (False, 0, None)]
        assert run["scales"] == [SCALE, SCALE, SCALE // 2, SCALE // 2]
        assert run["counts"] == {"step": STEPS - 1}
        assert run["losses"] == reference["losses"]
        assert run["norms"][2:] == reference["norms"][2:]
        assert all(torch.equal(run["masters"][name], value) for name, value in reference["masters"].items())


class _Faint(nn.Module):
    """Its gradients are below the smallest float16: the loss is that of a thousandth of a small output."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


def _faint_loss(module: nn.Module, x: Tensor) -> Tensor:
    return (module(x.to(next(module.parameters()).dtype)).float() - 1).square().mean() * 1e-8


def _faint_updates(precision: Any) -> tuple[list[StepStats], Tensor, Any]:
    module = _Faint()
    engine = motet.parallelize(
        module,
        loss=_faint_loss,
        precision=precision,
        optimizer={"learning_rate": 0.01, "eps": 1e-20, "weight_decay": 0.0},
    )
    masters = engine.optimizer.sharded_parameters.local_masters
    before = torch.cat([master.clone().flatten() for master in masters])
    data = torch.randn(6, 8, 8, generator=torch.Generator().manual_seed(1))
    stats = [engine.step(x) for x in data]
    return stats, torch.cat([master.flatten() for master in masters]) - before, engine


def test_small_gradients_are_lost_without_scaling_and_follow_fp32_with_it() -> None:
    stats, update, _ = _faint_updates("fp32")
    lost_stats, lost, _ = _faint_updates({"recipe": "fp16", "loss_scale": 1})
    scaled_stats, scaled, _ = _faint_updates({"recipe": "fp16", "loss_scale": 2**24})
    assert [s.grad_norm for s in lost_stats] == [0.0] * 6
    assert lost.norm() == 0
    assert (scaled - update).norm() < 0.05 * update.norm()
    for a, b in zip(scaled_stats, stats, strict=True):
        assert a.grad_norm == pytest.approx(b.grad_norm, rel=0.01)
        assert a.loss == pytest.approx(b.loss, rel=0.01)
    assert scaled_stats[0].loss_scale == scaled_stats[-1].next_loss_scale == 2**24


def _overflowing_loss(module: nn.Module, x: Tensor) -> Tensor:
    output = module(x.to(next(module.parameters()).dtype))
    output.register_hook(lambda gradient: gradient * torch.inf)
    return output.float().square().mean()


def test_ten_overflows_in_a_row_at_scale_1_stop_a_custom_loop() -> None:
    settings = {"recipe": "fp16", "loss_scale_initial": 4}
    engine = motet.parallelize(_Faint(), loss=_overflowing_loss, precision=settings)
    before = [m.clone() for m in engine.optimizer.sharded_parameters.local_masters]
    x = torch.ones(2, 8)
    scales = [engine.step(x).next_loss_scale for _ in range(11)]
    assert scales == [2] + [1] * 10
    with pytest.raises(TrainingDivergedError, match="10 steps in a row with loss scale 1"):
        engine.step(x)
    assert all(map(torch.equal, before, engine.optimizer.sharded_parameters.local_masters))


def test_a_loss_that_is_not_finite_is_a_divergence() -> None:
    engine = motet.parallelize(_Faint(), loss=lambda m, x: m(x).float().sum() * torch.inf, precision="fp16")
    stats = engine.step(torch.ones(2, 8, dtype=torch.float16))
    assert (stats.is_finite, stats.is_overflow, stats.skipped_steps, stats.next_loss_scale) == (False, False, 1, 65536)


def _counters(engine: Any) -> LossScaler:
    return engine.optimizer.loss_scaler


def test_a_custom_loop_saves_the_scaler_and_reads_checkpoints_without_one(tmp_path: Path) -> None:
    _, _, engine = _faint_updates({"recipe": "fp16", "loss_scale_initial": 2**20, "loss_scale_growth_steps": 4})
    assert _counters(engine) == LossScaler(2**21, 4, good_steps=2)
    engine.save(tmp_path / "scaled", 6)
    other = motet.parallelize(_Faint(), precision={"recipe": "fp16", "loss_scale_growth_steps": 4})
    other.restore(tmp_path / "scaled")
    assert _counters(other) == _counters(engine)
    _, _, plain = _faint_updates("fp32")
    plain.save(tmp_path / "plain", 6)
    other.restore(tmp_path / "plain")
    assert _counters(other) == _counters(engine)


@pytest.mark.parametrize(
    ("world", "layout"),
    [(1, ""), (2, "zero=1"), (2, "tp=2"), (2, "pp=2 microbatches=4"), (2, "zero=3")],
)
@pytest.mark.proof
def test_no_update_of_tiny_is_skipped(ranks: Ranks, tmp_path: Path, world: int, layout: str) -> None:
    steps = "run.steps=2", "checkpoint.every=1000", "monitor.sample_tokens=0"
    job = load_job("tiny", ["precision.recipe=fp16", *(f"layout.{word}" for word in layout.split()), *steps])
    ranks.run_places(world, run_job, job, tmp_path / "run")
    assert [(step.skipped, step.loss_scale) for step in read_steps(tmp_path / "run" / EVENTS_FILE)] == [
        (False, 65536)
    ] * 2


def test_the_scale_is_that_of_the_mean_whatever_the_number_of_targets() -> None:
    """A loss that a million times as many targets add up to overflows once at most, and does not halve the scale."""
    assert _skips_with_targets(1) == [False, False, False, False]
    assert _skips_with_targets(1 << 20) == [True, False, False, False]


def _skips_with_targets(count: int) -> list[bool]:
    engine = motet.parallelize(_Faint(), loss=lambda m, x: (_sum(m, x) * count, count), precision="fp16")
    skips = [not engine.step(torch.ones(2, 8)).is_finite for _ in range(4)]
    assert engine.optimizer.loss_scaler is not None
    assert (engine.optimizer.loss_scale, engine.backward_scale) == (65536, 65536 / count)
    return skips


def _sum(module: nn.Module, x: Tensor) -> Tensor:
    return module(x.to(next(module.parameters()).dtype)).float().square().mean()


def test_a_run_shows_its_overflows_and_resumes_with_its_scale(ranks: Ranks, tmp_path: Path) -> None:
    overrides = "precision.recipe=fp16", "precision.loss_scale_initial=16777216", "precision.loss_scale_growth_steps=5"
    job = small_job(tmp_path, *overrides, "run.steps=14", "checkpoint.every=1000")
    first = job.model_copy(update={"run": job.run.model_copy(update={"stop_at": 11})})
    # A micro-batch has the same rows in both: its sums in float16 overflow at the same scale.
    job = job.model_copy(update={"layout": job.layout.model_copy(update={"microbatches": 2})})
    for each, folder, world in ((job, "whole", 1), (first, "resumed", 2), (job, "resumed", 1)):
        ranks.run_places(world, run_job, each, tmp_path / folder)
    whole, resumed = (read_steps(tmp_path / folder / EVENTS_FILE) for folder in ("whole", "resumed"))
    overflows = [e for e in read_events(tmp_path / "whole" / EVENTS_FILE) if isinstance(e, GradientsOverflowed)]
    assert overflows
    assert [e.step for e in overflows] == [s.step for s in whole if s.skipped]
    assert all(e.next_loss_scale * 2 == e.loss_scale for e in overflows)
    assert [s.loss_scale for s in whole] == [s.loss_scale for s in resumed]
    assert [s.loss for s in resumed] == pytest.approx([s.loss for s in whole], rel=1e-2)
    summary = read_summary(tmp_path / "whole")
    assert (summary.loss_scale, summary.overflows) == (whole[-1].loss_scale, len(overflows))
