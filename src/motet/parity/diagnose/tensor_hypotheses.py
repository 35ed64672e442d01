"""Hypotheses about tensors: equations between a tensor and what the reference has, and what they mean in words.

A hypothesis knows of no mistake; its equation holds up to rounding or does not.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, get_args

import torch
from torch import Tensor

from motet.collectives.compression.byte_messages import dtype_name
from motet.parity.compare.align_with_reference import join_numbers
from motet.parity.compare.tensor_differences import relative_distance
from motet.parity.diagnose.contribution_fit import explain_contributions, explain_rounded_contribution
from motet.parity.diagnose.linear_fit import (
    DTYPE_EPSILON,
    FIT_TOLERANCE,
    factor_meaning,
    find_rounding_dtype,
    format_factor,
    is_equal_up_to_rounding,
    solve_coefficients,
)
from motet.parity.diagnose.mismatch_evidence import MismatchEvidence
from motet.parity.record.tensor_recorder import MASTER_PREFIX, TensorKey, TensorKind

NOT_UPDATED = "it was not updated"
MOSTLY_EQUAL_FRACTION = 0.9  # Of the elements of a slice
MIN_ELEMENTS_FOR_ROUNDING = 16  # Fewer do not tell rounding from other small mistakes


class Hypothesis(NamedTuple):
    """A test of what went wrong, for some kinds of tensors; its words are empty where it does not hold."""

    kinds: frozenset[TensorKind]
    explain: Callable[[MismatchEvidence], str]


def explain(evidence: MismatchEvidence, hypotheses: Sequence[Hypothesis]) -> str:
    """The words of the first hypothesis that holds."""
    evidence = evidence.as_numbers()
    attempts = (row.explain(evidence) for row in hypotheses if evidence.kind in row.kinds)
    return next(filter(None, attempts), "")


def is_not_finite(e: MismatchEvidence) -> str:
    count = int((~e.value.isfinite()).sum())
    return f"{count} of its {e.value.numel()} elements are not finite" if count else ""


def is_unchanged(e: MismatchEvidence) -> str:
    before = e.value_before_step
    if before is None or not torch.equal(e.value, before.to(e.value.dtype)):
        return ""
    return "" if is_equal_up_to_rounding(before, e.expected) else NOT_UPDATED + _master_text(e)


def _master_text(e: MismatchEvidence) -> str:
    """The master of a model's parameter may be right."""
    if e.kind != "parameter" or e.located is None:
        return ""
    master_key = TensorKey("state", f"{MASTER_PREFIX}{e.name}")
    is_right = any(d.key == master_key and d.is_rounding for d in e.located.all_differences)
    return ", though its master was: the model keeps the old" if is_right else ""


def is_rounded(e: MismatchEvidence) -> str:
    dtype = find_rounding_dtype(e.value.double() - e.expected.double(), e.expected)
    return dtype and f"it was rounded to {dtype}"


def is_another_tensor(e: MismatchEvidence) -> str:
    for words, other in e.alternatives.items():
        is_distinct = other.shape == e.value.shape and other.any() and not is_equal_up_to_rounding(other, e.expected)
        if is_distinct and is_equal_up_to_rounding(e.value, other):
            return f"it is {words}"
    return ""


def has_other_rows(e: MismatchEvidence) -> str:
    for words, rows in e.alternative_rows.items():
        if e.value.ndim != 2 or e.value.shape[1:] != rows.shape[1:]:
            continue
        matches = [[n for n, other in enumerate(rows) if is_equal_up_to_rounding(row, other)] for row in e.value]
        if not all(matches):
            continue
        if len(matches) > 1 and len(e.value.unique(dim=0)) == 1:
            return f"each of its rows is like row{'s' * (len(matches[0]) > 1)} {join_numbers(matches[0])} of {words}"
        clearest = min(range(len(matches)), key=lambda index: len(matches[index]))
        first = matches[clearest][0] - clearest
        nearest = [min((abs(n - first - index), n) for n in rows_)[1] for index, rows_ in enumerate(matches)]
        return f"it is of row{'s' * (len(matches) > 1)} {join_numbers(nearest)} of {words}"
    return ""


def has_other_contributions(e: MismatchEvidence) -> str:
    return explain_contributions(e.value, e.contributions, previous=e.previous_contributions, rank=e.rank)


def update_is_scaled(e: MismatchEvidence) -> str:
    before = e.value_before_step
    if before is None or e.value.numel() == 1:
        return ""
    factors = solve_coefficients(e.value - before, [e.expected - before])
    if factors is None:
        return ""
    if factors[0] == 0:
        return NOT_UPDATED + _master_text(e)
    meaning = factor_meaning(factors[0], e.known_factors)
    return f"it was updated by {format_factor(factors[0])} times what it should be{meaning}"


def is_scaled(e: MismatchEvidence) -> str:
    factors = solve_coefficients(e.value, [e.expected])
    if factors is None:
        return ""
    if factors[0] == 0:
        return "it is 0 throughout"
    meaning = factor_meaning(factors[0], e.known_factors)
    if e.value.numel() == 1 and not meaning:  # Any number is some factor times another
        return ""
    return f"it is {format_factor(factors[0])} times what it should be{meaning}"


def is_another_slice(e: MismatchEvidence) -> str:
    """A slice of another tensor, or of the same one; most of it at least."""
    value = e.value.flatten().double()
    if value.numel() < 2 or not float(value.abs().max()):
        return ""
    limit = FIT_TOLERANCE * float(value.abs().max())
    if _is_mostly_equal(value, e.expected.flatten().double(), limit):
        return ""
    count, largest = value.numel(), int(value.abs().argmax())
    for name, tensor in e.source_tensors.items():
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
    nonzero = (value != 0) | (other != 0)  # Zeros are alike everywhere
    return float(((value - other).abs()[nonzero] <= limit).double().mean()) > MOSTLY_EQUAL_FRACTION


def has_another_term(e: MismatchEvidence) -> str:
    for words, other in e.alternatives.items():
        if other.shape != e.value.shape or other.numel() < 2:  # Any number is some factor times another
            continue
        factors = solve_coefficients(e.value - e.expected, [other])
        if factors is not None and factors[0]:
            return f"it has {format_factor(factors[0])} times {words} too much"
    return ""


def contribution_is_rounded(e: MismatchEvidence) -> str:
    return explain_rounded_contribution(e.value.double() - e.expected.double(), e.contributions)


def has_low_precision(e: MismatchEvidence) -> str:
    """The error is as large as that of arithmetic in a smaller dtype, and points anywhere; in updates any does."""
    expected = e.expected.double().flatten()
    error = e.value.double().flatten() - expected
    similarity = abs(float(torch.cosine_similarity(error, expected, 0)))
    is_noise = error.numel() >= MIN_ELEMENTS_FOR_ROUNDING and similarity <= 3 / math.sqrt(error.numel())
    if e.value_before_step is not None or not is_noise:
        return ""
    size = relative_distance(e.value, e.expected)
    names = [dtype_name(dtype) for dtype, epsilon in DTYPE_EPSILON.items() if epsilon / 50 < size < epsilon]
    return f"it differs as much as what is computed in {names[0]} does" if names else ""


SCALARS: frozenset[TensorKind] = frozenset({"sum", "norm", "evaluation", "loss"})
TENSORS: frozenset[TensorKind] = frozenset(get_args(TensorKind)) - SCALARS
EXACT_HYPOTHESES = tuple(
    Hypothesis(TENSORS, test)
    for test in (
        is_not_finite,
        is_unchanged,
        is_rounded,
        is_another_tensor,
        has_other_rows,
        has_other_contributions,
        update_is_scaled,
        is_scaled,
        is_another_slice,
        has_another_term,
        contribution_is_rounded,
    )
)
TENSOR_HYPOTHESES = (*EXACT_HYPOTHESES, Hypothesis(TENSORS, has_low_precision))
