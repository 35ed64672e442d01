"""The case of docs/benchmarks/precision.md: gradients that float16 loses without a loss scale, and keeps with one."""

import sys
from pathlib import Path
from statistics import fmean

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "parts"))

from faint_gradients import WAYS, FaintRun, train_on_faint_gradients

STEPS = 30


@pytest.fixture(scope="module")
def runs() -> list[FaintRun]:
    return [train_on_faint_gradients(WAYS[way], 0, STEPS) for way in WAYS]


def test_fp16_loses_most_gradients_without_a_loss_scale_and_none_with_one(runs: list[FaintRun]) -> None:
    plain, unscaled, scaled = (run.shares for run in runs)
    assert plain.elements == unscaled.elements == scaled.elements
    for kind in ("parameters", "activations"):
        assert plain.share(kind) == 0
        assert unscaled.share(kind) > 0.5
        assert scaled.share(kind) < 0.01


def test_the_loss_stops_falling_without_a_loss_scale_and_follows_fp32_with_one(runs: list[FaintRun]) -> None:
    plain, unscaled, scaled = runs
    assert scaled.losses == pytest.approx(plain.losses, rel=0.1)
    assert fmean(unscaled.losses[-5:]) > 3 * fmean(plain.losses[-5:])
    assert {stats.loss_scale for stats in unscaled.stats} == {1}
    assert {stats.loss_scale for stats in scaled.stats} == {65536}
    assert not any(stats.is_overflow for run in runs for stats in run.stats)
