"""The scale of the loss: when it halves and doubles, and when a run ends."""

import pytest

from motet.core.errors import TrainingDivergedError
from motet.precision.recipe import LossScaler, PrecisionSettings
from motet.train.job import load_job
from refusals import refused


def after(scaler: LossScaler, outcomes: str) -> LossScaler:
    """`.` is a good step and `x` an overflow."""
    for outcome in outcomes:
        scaler = scaler.after_overflow() if outcome == "x" else scaler.after_step()
        scaler.check_can_continue()
    return scaler


@pytest.mark.parametrize(
    ("start", "outcomes", "scale"),
    [
        (65536, "", 65536),
        (65536, "x", 32768),
        (65536, "xx.x", 8192),
        (8, "...", 16),
        (8, "..x..", 4),  # Good steps count anew after an overflow
        (8, "..x...", 8),
        (8, "......", 32),
        (2**24, "...", 2**24),
        (2, "xxxxx", 1),
        (2, "xxxxx...", 2),
    ],
)
def test_the_scale_halves_after_an_overflow_and_doubles_after_good_steps(start: int, outcomes: str, scale: int) -> None:
    assert after(LossScaler(start, growth_steps=3), outcomes).scale == scale


def test_ten_overflows_in_a_row_at_scale_1_end_the_run() -> None:
    scaler = after(LossScaler(2), "x" + "x" * 9 + "." + "x" * 9)
    with pytest.raises(TrainingDivergedError, match="10 steps in a row with loss scale 1, the smallest"):
        after(scaler, "x")


def test_a_static_scale_stays_and_ten_overflows_end_the_run() -> None:
    assert after(LossScaler(64, None), "x" * 9 + "." * 5000 + "x" * 9).scale == 64
    with pytest.raises(TrainingDivergedError, match=r"static precision.loss_scale = 64; .* set precision.loss_scale="):
        after(LossScaler(64, None), "x" * 10)


def test_a_restored_scaler_goes_on_where_it_was_saved() -> None:
    saved = after(LossScaler(8, 3), "x..")
    assert LossScaler(65536, 3).restored(saved.state()) == saved
    assert after(LossScaler(65536, 3).restored(saved.state()), ".").scale == 8
    assert LossScaler(64, None).restored(saved.state()) == LossScaler(64, None)


@pytest.mark.parametrize(
    ("count", "targets"), [(0, 1), (1, 1), (2, 2), (2.5, 4), (2047, 2048), (2048, 2048), (2049, 4096)]
)
def test_backward_of_a_sum_begins_with_the_scale_divided_by_the_targets(count: float, targets: int) -> None:
    scaler = LossScaler(1024, 3).with_targets(count)
    assert (scaler.targets, scaler.backward_scale) == (targets, 1024 / targets)
    assert after(scaler, "...").targets == after(scaler, "x").targets == targets


def test_only_fp16_has_a_scaler() -> None:
    assert PrecisionSettings(recipe="bf16").make_loss_scaler() is None
    assert PrecisionSettings(recipe="fp16").make_loss_scaler() == LossScaler(65536, 2000)
    assert PrecisionSettings(recipe="fp16", loss_scale=128).make_loss_scaler() == LossScaler(128, None)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["precision.loss_scale=8"], "precision.loss_scale = 8 has no effect with precision.recipe = 'fp32'"),
        (
            ["precision.recipe=fp16", "precision.loss_scale=8", "precision.loss_scale_growth_steps=3"],
            "precision.loss_scale_growth_steps = 3 has no effect with precision.loss_scale = 8",
        ),
        (["precision.recipe=fp16", "precision.loss_scale_initial=3"], "is not a power of two"),
        (["precision.recipe=fp16", "precision.reduce_dtype=float16"], "precision.reduce_dtype"),
    ],
)
def test_settings_that_cannot_work_are_refused(overrides: list[str], sentence: str) -> None:
    refused(sentence, load_job, "tiny", overrides)
