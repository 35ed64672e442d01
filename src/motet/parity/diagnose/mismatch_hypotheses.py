"""Why a tensor differs, found by trying: what it would have to be made of, in numbers, to be what it is.

Nothing here knows of any mistake. Each hypothesis is an equation between tensors that is true or not, up to rounding:
the gradient that a rank has, say, is fitted by the shares of the ranks and micro-batches, and the coefficients say
which of them were left out, counted twice, or scaled.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from motet.parity.compare.align_with_reference import join_numbers
from motet.parity.diagnose.contribution_hypotheses import (
    MicroBatchContribution,
    explain_contributions,
    explain_rounded_contribution,
)
from motet.parity.diagnose.linear_fit import (
    COEFFICIENT_TOLERANCE,
    DTYPE_EPSILON,
    FIT_TOLERANCE,
    dtype_name,
    factor_meaning,
    find_rounding_dtype,
    format_factor,
    is_about,
    is_equal_up_to_rounding,
    relative_error,
    solve_coefficients,
)

NOT_UPDATED = "it was not updated"
MOSTLY_EQUAL_FRACTION = 0.9  # Of the elements of a tensor that is told by them
MIN_ELEMENTS_FOR_ROUNDING = 16  # Numbers to tell rounding from other small mistakes


@dataclass(frozen=True)
class TensorMismatch:
    """A tensor that differs."""

    value: Tensor
    expected: Tensor
    rank: int | None
    known_factors: Mapping[str, float]  # What factors may come from: `dp` -> 4
    contributions: Sequence[MicroBatchContribution] = ()  # That should make the sum
    alternatives: Mapping[str, Tensor] = field(default_factory=dict)  # In words -> a tensor that it might be instead
    value_before_step: Tensor | None = None  # What it was before the step
    # In words -> rows that those of the value might be, where it is of some.
    alternative_rows: Mapping[str, Tensor] = field(default_factory=dict)
    # Name -> flat tensor, a stretch of which the value might be.
    source_tensors: Mapping[str, Tensor] = field(default_factory=dict)
    previous_contributions: Sequence[MicroBatchContribution] = ()  # Shares of the step before


def explain_mismatch(mismatch: TensorMismatch, allows_rough_guess: bool = True) -> str:
    """In words; empty where nothing fits. `roughly`: what is as far off as rounding is taken for that."""
    if mismatch.value.dtype == torch.bool:
        mismatch = replace(
            mismatch,
            value=mismatch.value.double(),
            expected=mismatch.expected.double(),
            alternatives={words: other.double() for words, other in mismatch.alternatives.items()},
            alternative_rows={words: batch.double() for words, batch in mismatch.alternative_rows.items()},
            value_before_step=None if mismatch.value_before_step is None else mismatch.value_before_step.double(),
        )
    hypotheses = (
        _explain_not_finite, _explain_unchanged, _explain_rounded, _explain_swapped, _explain_wrong_rows, _explain_contributions, _explain_scaled_update, _explain_scaled, _explain_shifted, _explain_extra_term,
        _explain_rounded_contribution, *([_explain_low_precision] if allows_rough_guess else []),
    )  # fmt: skip
    return next((explanation for attempt in hypotheses if (explanation := attempt(mismatch))), "")


def _explain_not_finite(mismatch: TensorMismatch) -> str:
    nonfinite_count = int((~mismatch.value.isfinite()).sum())
    return f"{nonfinite_count} of its {mismatch.value.numel()} elements are not finite" if nonfinite_count else ""


def _explain_unchanged(mismatch: TensorMismatch) -> str:
    """Exactly what it was, where it should not be."""
    before = mismatch.value_before_step
    if (
        before is None
        or not torch.equal(mismatch.value, before.to(mismatch.value.dtype))
        or is_equal_up_to_rounding(before, mismatch.expected)
    ):
        return ""
    return NOT_UPDATED


def _explain_rounded(mismatch: TensorMismatch) -> str:
    """It is off by what rounding each element of the expected one to a smaller dtype loses."""
    dtype = find_rounding_dtype(mismatch.value.double() - mismatch.expected.double(), mismatch.expected)
    return dtype and f"it was rounded to {dtype}"


def _explain_contributions(mismatch: TensorMismatch) -> str:
    return explain_contributions(mismatch.value, mismatch.contributions, mismatch.previous_contributions, mismatch.rank)


def _explain_rounded_contribution(mismatch: TensorMismatch) -> str:
    return explain_rounded_contribution(mismatch.value.double() - mismatch.expected.double(), mismatch.contributions)


def _explain_low_precision(mismatch: TensorMismatch) -> str:
    """It is off by as much as arithmetic in a smaller dtype is, to all sides; of updates any small mistake is."""
    error, expected = (
        (mismatch.value.double() - mismatch.expected.double()).flatten(),
        mismatch.expected.double().flatten(),
    )
    similarity = abs(float(torch.cosine_similarity(error, expected, 0)))
    if (
        mismatch.value_before_step is not None
        or error.numel() < MIN_ELEMENTS_FOR_ROUNDING
        or similarity > 3 / math.sqrt(error.numel())
    ):
        return ""
    relative_size = relative_error(mismatch.value, mismatch.expected)
    fitting_dtypes = [dtype for dtype, epsilon in DTYPE_EPSILON.items() if epsilon / 50 < relative_size < epsilon]
    return f"it differs as much as what is computed in {dtype_name(fitting_dtypes[0])} does" if fitting_dtypes else ""


def _explain_scaled(mismatch: TensorMismatch) -> str:
    factor = solve_coefficients(mismatch.value, [mismatch.expected])
    if factor is None:
        return ""
    if factor[0] == 0:
        return "it is 0 throughout"
    if mismatch.value.numel() == 1 and not factor_meaning(
        factor[0], mismatch.known_factors
    ):  # any number is some times another
        return ""
    return (
        f"it is {format_factor(factor[0])} times what it should be{factor_meaning(factor[0], mismatch.known_factors)}"
    )


def _explain_swapped(mismatch: TensorMismatch) -> str:
    for description, alternative in mismatch.alternatives.items():
        if (
            alternative.shape != mismatch.value.shape
            or not alternative.any()
            or is_equal_up_to_rounding(alternative, mismatch.expected)
        ):
            continue
        if is_equal_up_to_rounding(mismatch.value, alternative):
            return f"it is {description}"
    return ""


def _explain_scaled_update(mismatch: TensorMismatch) -> str:
    """By how much of what it should be updated by."""
    if mismatch.value_before_step is None or mismatch.value.numel() == 1:
        return ""
    factor = solve_coefficients(
        mismatch.value - mismatch.value_before_step, [mismatch.expected - mismatch.value_before_step]
    )
    if factor is None:
        return ""
    if factor[0] == 0:
        return NOT_UPDATED
    return f"it was updated by {format_factor(factor[0])} times what it should be{factor_meaning(factor[0], mismatch.known_factors)}"


def _explain_wrong_rows(mismatch: TensorMismatch) -> str:
    """Rows of a batch that are in other places."""
    for description, rows in mismatch.alternative_rows.items():
        if mismatch.value.ndim != 2 or mismatch.value.shape[1:] != rows.shape[1:]:
            continue
        matching_rows = [
            [place for place, other in enumerate(rows) if is_equal_up_to_rounding(row, other)] for row in mismatch.value
        ]
        if all(matching_rows) and len(matching_rows) > 1 and len(mismatch.value.unique(dim=0)) == 1:
            return f"each of its rows is like row{'s' * (len(matching_rows[0]) > 1)} {join_numbers(matching_rows[0])} of {description}"
        if all(matching_rows):
            least_ambiguous = min(range(len(matching_rows)), key=lambda number: len(matching_rows[number]))
            first = matching_rows[least_ambiguous][0] - least_ambiguous
            row_numbers = [
                min((abs(place - first - n), place) for place in near)[1] for n, near in enumerate(matching_rows)
            ]
            return f"it is of row{'s' * (len(matching_rows) > 1)} {join_numbers(row_numbers)} of {description}"
    return ""


def _explain_shifted(mismatch: TensorMismatch) -> str:
    """A stretch of another tensor, or of the same one; most of it at least."""
    value = mismatch.value.flatten().double()
    if value.numel() < 2 or not float(value.abs().max()):
        return ""
    limit = FIT_TOLERANCE * float(value.abs().max())
    if _is_mostly_equal(value, mismatch.expected.flatten().double(), limit):
        return ""  # it belongs where it is
    count, largest = value.numel(), int(value.abs().argmax())
    for name, tensor in mismatch.source_tensors.items():
        flat = tensor.flatten().double()
        matches = (flat - value[largest]).abs() <= FIT_TOLERANCE * value[largest].abs()
        for position in matches.nonzero()[:8, 0].tolist():
            first = position - largest
            low, high = max(first, 0), min(first + count, flat.numel())
            is_long = high - low > max(1, count // 2)
            if is_long and _is_mostly_equal(value[low - first : high - first], flat[low:high], limit):
                before = f"{-first} element{'s' * (first < -1)} before {name}"
                return f"it is what belongs {f'at element {first} of {name}' if first >= 0 else before}"
    return ""


def _is_mostly_equal(value: Tensor, other: Tensor, limit: float) -> bool:
    """Whether they are the same, but for a few; zeros tell nothing."""
    nonzero = (value != 0) | (other != 0)
    return float(((value - other).abs()[nonzero] <= limit).double().mean()) > MOSTLY_EQUAL_FRACTION


def _explain_extra_term(mismatch: TensorMismatch) -> str:
    """What should be there, and a multiple of something else."""
    for description, alternative in mismatch.alternatives.items():
        if alternative.shape != mismatch.value.shape or alternative.numel() < 2:  # any number is some times another
            continue
        factor = solve_coefficients(mismatch.value - mismatch.expected, [alternative])
        if factor is not None and factor[0]:
            return f"it has {format_factor(factor[0])} times {description} too much"
    return ""


class ExpectedSummand(NamedTuple):
    """Of a sum."""

    description: str
    value: Tensor
    expected_factor: float  # How often it should be there


def explain_sum(value: Tensor, summands: Sequence[ExpectedSummand], known_factors: Mapping[str, float]) -> str:
    """What of the ingredients is there more or less often than it should."""
    present = [summand for summand in summands if summand.expected_factor or float(summand.value.abs().max())]
    fitted = solve_coefficients(value, [each.value for each in present]) if value.numel() > len(present) else None
    if fitted is None:
        return ""
    pairs = list(zip(present, fitted, strict=True))
    ratios = {round(factor_found / each.expected_factor, 6) for each, factor_found in pairs if each.expected_factor}
    if len(pairs) > 1 and len(ratios) == 1 and all(each.expected_factor for each, _ in pairs) and ratios != {1.0}:
        factor = fitted[0] / present[0].expected_factor
        return f"all of it counts {format_factor(factor)} times{factor_meaning(factor, known_factors)}"
    findings = []
    for each, times in pairs:
        if abs(times - each.expected_factor) <= COEFFICIENT_TOLERANCE * max(
            abs(each.expected_factor), COEFFICIENT_TOLERANCE
        ):
            continue
        if each.expected_factor and is_about(times / each.expected_factor, 0):
            findings.append(f"{each.description} is missing")
        elif each.expected_factor:
            findings.append(
                f"{each.description} counts {format_factor(times / each.expected_factor)} times{factor_meaning(times / each.expected_factor, known_factors)}"
            )
        else:
            findings.append(f"{each.description} is in it, {format_factor(times)} times, where it should not be")
    return "; ".join(findings)


# --- numbers ---------------------------------------------------------------------------------------
