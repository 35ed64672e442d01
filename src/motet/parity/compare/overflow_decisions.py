"""The decisions of ranks about a step whose gradients overflow, and whether the loss scale changes the update."""

import math
from typing import NamedTuple

from motet.parity.compare.planned_records import format_numbered
from motet.parity.record.tensor_recorder import RecordsByRank
from motet.precision.loss_scaling import SMALLEST_SCALE

MAX_CHANGE = 0.05  # Of a norm with another scale, by which other small gradients underflow


class LossScaleMistake(NamedTuple):
    """The first mistake of ranks in the order of their steps."""

    place: str
    rank: int
    cause: str


def find_loss_scale_mistake(records_by_rank: RecordsByRank, *, is_dynamic: bool) -> LossScaleMistake | None:
    """Compare the numbers of ranks (record/overflow_steps.py) with each other and with what has to follow."""
    ranks = [{record.name: float(record.value) for record in records} for records in records_by_rank]
    scale, overflowing = int(ranks[0]["scale"]), len(ranks) - 1
    if unaware := [rank for rank, numbers in enumerate(ranks) if not numbers["is skipped"]]:
        cause = (
            f"gradients overflow on rank {overflowing} alone, and {format_numbered('rank', unaware)} updates its part"
        )
        return LossScaleMistake("the decision to skip a step", unaware[0], f"{cause}; all ranks must skip the step")
    expected = max(scale // 2, SMALLEST_SCALE) if is_dynamic else scale
    for name, place, words in (
        ("scale after it", "the loss scale after an overflow", "after a step that overflows it"),
        ("scale from a checkpoint", "the loss scale from a checkpoint", f"it was saved as {expected}, and restored it"),
    ):
        if wrong := [rank for rank, numbers in enumerate(ranks) if numbers[name] != expected]:
            value = f"{ranks[wrong[0]][name]:g}, not {expected}"
            return LossScaleMistake(place, wrong[0], f"{words} is {value}, on {format_numbered('rank', wrong)}")
    return _find_scaled_norm(ranks, scale)


def _find_scaled_norm(ranks: list[dict[str, float]], scale: int) -> LossScaleMistake | None:
    for name, place in (("norm", "the gradient norm"), ("clipped", "the clipped gradients")):
        for rank, numbers in enumerate(ranks):
            norm, other, other_scale = numbers[name], numbers[f"{name} with the other scale"], numbers["other scale"]
            if not norm or not math.isfinite(norm) or abs(other / norm - 1) <= MAX_CHANGE:
                continue
            cause = (
                f"with loss scale {other_scale:g} {place} are {other / norm:.3g} times those with loss scale {scale}"
            )
            cause = cause.replace("norm are", "norm is").replace("those", "that") if name == "norm" else cause
            near = any(
                abs(other / norm * factor - 1) <= MAX_CHANGE for factor in (other_scale / scale, scale / other_scale)
            )
            cause += ": the scale is not divided out, or not before gradients are clipped" if near else ""
            return LossScaleMistake(place, rank, cause)
    return None
