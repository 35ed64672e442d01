"""Learning-rate factors over a run."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.train.optimizer.optimizer_settings import LearningRateScheduleSettings, learning_rate_factor

KINDS = ["constant", "linear", "cosine", "warmup-stable-decay"]


def _curve(steps: int, **settings: object) -> list[float]:
    schedule = LearningRateScheduleSettings.model_validate(settings)
    return [learning_rate_factor(schedule, step, steps) for step in range(steps)]


@pytest.mark.parametrize("kind", KINDS)
def test_warm_up_rises_evenly_to_the_full_rate(kind: str) -> None:
    assert _curve(100, kind=kind, warmup_steps=4)[:4] == [0.25, 0.5, 0.75, 1.0]


@pytest.mark.parametrize("kind", KINDS[1:])
def test_a_fall_ends_at_the_last_step(kind: str) -> None:
    assert _curve(50, kind=kind, warmup_steps=5, final_fraction=0.25)[-1] == pytest.approx(0.25, abs=1e-15)


def test_half_way_down() -> None:
    assert _curve(10, kind="linear", final_fraction=0.0)[4] == 0.5
    assert _curve(10, kind="cosine", final_fraction=0.0)[4] == pytest.approx(0.5)
    assert _curve(12, kind="cosine", final_fraction=0.0)[2] == pytest.approx((1 + math.cos(math.pi / 4)) / 2)


def test_stable_part_and_its_default_length() -> None:
    curve = _curve(20, kind="warmup-stable-decay", warmup_steps=2, final_fraction=0.0)
    assert curve[2:16] == [1.0] * 14 and curve[16:] == [0.75, 0.5, 0.25, 0.0]
    assert _curve(20, kind="warmup-stable-decay", decay_steps=2, final_fraction=0.0)[-3:] == [1.0, 0.5, 0.0]


@given(st.sampled_from(KINDS), st.integers(1, 60), st.integers(0, 80), st.none() | st.integers(1, 80), st.floats(0, 1))
def test_never_rises_after_warm_up(kind: str, steps: int, warmup: int, decay: int | None, final: float) -> None:
    curve = _curve(steps, kind=kind, warmup_steps=warmup, decay_steps=decay, final_fraction=final)
    assert all(0 <= factor <= 1 for factor in curve)
    after = curve[max(0, min(warmup, steps) - 1) :]
    assert all(later <= earlier + 1e-12 for earlier, later in pairwise(after))
