"""Hypotheses about tensors: equations with tensors of the reference, which hold up to rounding or do not, in words."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import get_args

import torch
from torch import Tensor

from motet.core.units import dtype_name
from motet.parity.compare.align_with_reference import format_numbered
from motet.parity.compare.tensor_differences import relative_distance
from motet.parity.diagnose import mismatch_evidence as fit
from motet.parity.diagnose.mismatch_evidence import SCALAR_KINDS, MismatchEvidence
from motet.parity.diagnose.tolerances import tolerances
from motet.parity.record.tensor_recorder import MASTER_PREFIX, TensorKey, TensorKind

NOT_UPDATED = "it was not updated"
MOSTLY_EQUAL_FRACTION = 0.9  # Fraction of the elements of a slice
# Ids in which a row of a batch may differ from the row that the data has: the samples of a verification get two ids of
# their row and step in place of others, so a row in the wrong place has two of each place
REPLACED_IDS = 4
IDS = ("tokens", "source", "targets")  # Samples with such ids
MIN_ELEMENTS_FOR_ROUNDING = 16  # Fewer do not distinguish rounding from other small mistakes
# A test for one mistake, for some kinds of tensors; its words are empty where it does not hold.
Hypothesis = tuple[Sequence[TensorKind], Callable[[MismatchEvidence], str]]


def explain(evidence: MismatchEvidence, hypotheses: Iterable[Hypothesis]) -> str:
    """The words of the first hypothesis that holds."""
    return next(filter(None, (test(evidence) for kinds, test in hypotheses if evidence.kind in kinds)), "")


def is_not_finite(e: MismatchEvidence) -> str:
    count = int((~e.value.isfinite()).sum())
    return f"{count} of its {e.value.numel()} elements are not finite" if count else ""


def is_unchanged(e: MismatchEvidence) -> str:
    before = e.value_before_step
    if before is None or not torch.equal(e.value, before.to(e.value.dtype)):
        return ""
    return "" if fit.is_equal_up_to_rounding(before, e.expected) else NOT_UPDATED + _master_text(e)


def _master_text(e: MismatchEvidence) -> str:
    key, differences = TensorKey("state", f"{MASTER_PREFIX}{e.name}"), e.located.all_differences if e.located else ()
    is_right = e.kind == "parameter" and any(d.key == key and d.is_rounding for d in differences)
    return ", though its master was: the model keeps the old" if is_right else ""


def is_rounded(e: MismatchEvidence) -> str:
    dtype = fit.find_rounding_dtype(e.value.double() - e.expected.double(), e.expected)
    return dtype and f"it was rounded to {dtype}"


def is_another_tensor(e: MismatchEvidence) -> str:
    for words, other in e.alternatives.items():
        is_candidate = other.shape == e.value.shape and other.any() and _are_same_rows(e, e.value, other)
        if is_candidate and not _are_same_rows(e, other, e.expected):
            return f"it is {words}"
    return ""


def _are_same_rows(e: MismatchEvidence, value: Tensor, other: Tensor) -> bool:
    """Equality up to rounding; of rows of ids, which a verification changes, equality of all but a few."""
    if e.kind != "sample" or e.name not in IDS or value.shape != other.shape:
        return fit.is_equal_up_to_rounding(value, other)
    different = (value != other).sum(-1)
    return value.shape[-1] > 2 * REPLACED_IDS and bool((different <= REPLACED_IDS).all())


def has_other_rows(e: MismatchEvidence) -> str:
    if _are_same_rows(e, e.value, e.expected):
        return ""
    for words, rows in e.alternative_rows.items():
        own_rows = e.value if e.value.ndim == 2 and e.value.shape[1:] == rows.shape[1:] else ()
        matches = [[n for n, other in enumerate(rows) if _are_same_rows(e, row, other)] for row in own_rows]
        if not matches or not all(matches):
            continue
        if len(matches) > 1 and len(e.value.unique(dim=0)) == 1:
            return f"each of its rows is like {format_numbered('row', matches[0])} of {words}"
        clearest = min(range(len(matches)), key=lambda index: len(matches[index]))
        first = matches[clearest][0] - clearest
        nearest = [min((abs(n - first - index), n) for n in found)[1] for index, found in enumerate(matches)]
        return f"it is of {format_numbered('row', nearest)} of {words}"
    return ""


def has_other_contributions(e: MismatchEvidence) -> str:
    return fit.explain_contributions(e.value, e.contributions, e.rank)


def update_is_scaled(e: MismatchEvidence) -> str:
    before = e.value_before_step
    if before is None or e.value.numel() == 1:
        return ""
    factors = fit.solve_coefficients(e.value - before, [e.expected - before])
    if not factors or factors[0] == 0:
        return NOT_UPDATED + _master_text(e) if factors else ""
    if fit.is_about(factors[0], 1):
        return ""
    meaning = fit.factor_meaning(factors[0], e.known_factors)
    return f"it was updated by {fit.format_factor(factors[0])} times what it should be{meaning}"


def is_scaled(e: MismatchEvidence) -> str:
    factors = fit.solve_coefficients(e.value, [e.expected])
    if not factors or factors[0] == 0:
        return "it is 0 throughout" if factors else ""
    if fit.is_about(factors[0], 1):
        return ""
    meaning = fit.factor_meaning(factors[0], e.known_factors)
    is_known = meaning or e.value.numel() > 1  # Any number is some factor times another
    return f"it is {fit.format_factor(factors[0])} times what it should be{meaning}" if is_known else ""


def is_another_slice(e: MismatchEvidence) -> str:
    """A slice of another tensor, or of the same one; most of it at least."""
    value, count = e.value.flatten().double(), e.value.numel()
    limit = tolerances().fit * float(value.abs().max()) if count > 1 else 0.0
    if not limit or _is_mostly_equal(value, e.expected.flatten().double(), limit):
        return ""
    largest = int(value.abs().argmax())
    for name, tensor in e.source_tensors.items():
        flat = tensor.flatten().double()
        matches = (flat - value[largest]).abs() <= tolerances().fit * value[largest].abs()
        for position in matches.nonzero()[:8, 0].tolist():
            first = position - largest
            low, high = max(first, 0), min(first + count, flat.numel())
            is_long = high - low > max(1, count // 2)
            if is_long and _is_mostly_equal(value[low - first : high - first], flat[low:high], limit):
                before = f"{-first} element{'s' * (first < -1)} before {name}"
                return f"it is the slice {f'at element {first} of {name}' if first >= 0 else before}"
    return ""


def _is_mostly_equal(value: Tensor, other: Tensor, limit: float) -> bool:
    nonzero = (value != 0) | (other != 0)  # Zeros are alike everywhere
    return float(((value - other).abs()[nonzero] <= limit).double().mean()) > MOSTLY_EQUAL_FRACTION


def has_another_term(e: MismatchEvidence) -> str:
    for words, other in e.alternatives.items():
        is_basis = other.shape == e.value.shape and other.numel() > 1  # Any number is some factor times another
        factors = fit.solve_coefficients(e.value - e.expected, [other]) if is_basis else None
        if factors and factors[0]:
            return f"it has {fit.format_factor(factors[0])} times {words} too much"
    return ""


def contribution_is_rounded(e: MismatchEvidence) -> str:
    return fit.explain_rounded_contribution(e.value.double() - e.expected.double(), e.contributions)


def has_low_precision(e: MismatchEvidence) -> str:
    """The error is as large as that of arithmetic in a smaller dtype, in a random direction; updates are left out."""
    expected = e.expected.double().flatten()
    error = e.value.double().flatten() - expected
    similarity = abs(float(torch.cosine_similarity(error, expected, 0)))
    is_noise = error.numel() >= MIN_ELEMENTS_FOR_ROUNDING and similarity <= 3 / math.sqrt(error.numel())
    if e.value_before_step is not None or not is_noise or tolerances().is_coarse:
        return ""
    size = relative_distance(e.value, e.expected)
    names = [dtype_name(dtype) for dtype, epsilon in fit.DTYPE_EPSILON.items() if epsilon / 50 < size < epsilon]
    return f"it differs as much as a computation in {names[0]}" if names else ""


LOSSES: tuple[TensorKind, ...] = ("sum", "evaluation")
TENSORS: tuple[TensorKind, ...] = tuple(kind for kind in get_args(TensorKind) if kind not in SCALAR_KINDS)
EXACT_HYPOTHESES: tuple[Hypothesis, ...] = (
    (TENSORS, is_not_finite),
    (TENSORS, is_unchanged),
    (TENSORS, is_rounded),
    (TENSORS, is_another_tensor),
    (TENSORS, has_other_rows),
    (TENSORS, has_other_contributions),
    (TENSORS, update_is_scaled),
    (TENSORS, is_scaled),
    (TENSORS, is_another_slice),
    (TENSORS, has_another_term),
    (TENSORS, contribution_is_rounded),
)
TENSOR_HYPOTHESES: tuple[Hypothesis, ...] = (*EXACT_HYPOTHESES, (TENSORS, has_low_precision))
