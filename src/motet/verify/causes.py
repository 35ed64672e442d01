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

from motet.verify.equations import (
    EPSILON,
    FITS,
    WHOLE,
    coefficients,
    fits,
    is_about,
    lost_bits,
    meaning,
    named_dtype,
    number,
    relative,
)
from motet.verify.parts import listed
from motet.verify.sums import Share, of_a_rounded_share, of_shares

NOT_UPDATED = "it was not updated"
MOST = 0.9
"""Of the elements of a tensor that is told by them."""
ENOUGH = 16
"""Numbers to tell rounding from other small mistakes."""


@dataclass(frozen=True)
class Case:
    """A tensor that differs."""

    value: Tensor
    expected: Tensor
    rank: int | None
    sizes: Mapping[str, float]
    """What factors may come from: `dp` -> 4."""
    shares: Sequence[Share] = ()
    """That should make the sum."""
    others: Mapping[str, Tensor] = field(default_factory=dict)
    """In words -> a tensor that it might be instead."""
    before: Tensor | None = None
    """What it was before the step."""
    batches: Mapping[str, Tensor] = field(default_factory=dict)
    """In words -> rows that those of the value might be, where it is of some."""
    pool: Mapping[str, Tensor] = field(default_factory=dict)
    """Name -> flat tensor, a stretch of which the value might be."""
    older: Sequence[Share] = ()
    """Shares of the step before."""


def cause(case: Case, roughly: bool = True) -> str:
    """In words; empty where nothing fits. `roughly`: what is as far off as rounding is taken for that."""
    if case.value.dtype == torch.bool:
        case = replace(
            case,
            value=case.value.double(),
            expected=case.expected.double(),
            others={words: other.double() for words, other in case.others.items()},
            batches={words: batch.double() for words, batch in case.batches.items()},
            before=None if case.before is None else case.before.double(),
        )
    tries = (
        _not_finite, _left, _rounded, _instead, _rows, _summed, _updated, _scaled, _elsewhere, _with_something,
        _share_rounded, *([_coarse] if roughly else []),
    )  # fmt: skip
    return next((found for attempt in tries if (found := attempt(case))), "")


def _not_finite(case: Case) -> str:
    bad = int((~case.value.isfinite()).sum())
    return f"{bad} of its {case.value.numel()} elements are not finite" if bad else ""


def _left(case: Case) -> str:
    """Exactly what it was, where it should not be."""
    before = case.before
    if before is None or not torch.equal(case.value, before.to(case.value.dtype)) or fits(before, case.expected):
        return ""
    return NOT_UPDATED


def _rounded(case: Case) -> str:
    """It is off by what rounding each element of the expected one to a smaller dtype loses."""
    dtype = lost_bits(case.value.double() - case.expected.double(), case.expected)
    return dtype and f"it was rounded to {dtype}"


def _summed(case: Case) -> str:
    return of_shares(case.value, case.shares, case.older, case.rank)


def _share_rounded(case: Case) -> str:
    return of_a_rounded_share(case.value.double() - case.expected.double(), case.shares)


def _coarse(case: Case) -> str:
    """It is off by as much as arithmetic in a smaller dtype is, to all sides; of updates any small mistake is."""
    off, wanted = (case.value.double() - case.expected.double()).flatten(), case.expected.double().flatten()
    smooth = abs(float(torch.cosine_similarity(off, wanted, 0)))
    if case.before is not None or off.numel() < ENOUGH or smooth > 3 / math.sqrt(off.numel()):
        return ""
    far = relative(case.value, case.expected)
    fitting = [dtype for dtype, epsilon in EPSILON.items() if epsilon / 50 < far < epsilon]
    return f"it differs as much as what is computed in {named_dtype(fitting[0])} does" if fitting else ""


def _scaled(case: Case) -> str:
    factor = coefficients(case.value, [case.expected])
    if factor is None:
        return ""
    if factor[0] == 0:
        return "it is 0 throughout"
    if case.value.numel() == 1 and not meaning(factor[0], case.sizes):  # any number is some times another
        return ""
    return f"it is {number(factor[0])} times what it should be{meaning(factor[0], case.sizes)}"


def _instead(case: Case) -> str:
    for words, other in case.others.items():
        if other.shape != case.value.shape or not other.any() or fits(other, case.expected):
            continue
        if fits(case.value, other):
            return f"it is {words}"
    return ""


def _updated(case: Case) -> str:
    """By how much of what it should be updated by."""
    if case.before is None or case.value.numel() == 1:
        return ""
    factor = coefficients(case.value - case.before, [case.expected - case.before])
    if factor is None:
        return ""
    if factor[0] == 0:
        return NOT_UPDATED
    return f"it was updated by {number(factor[0])} times what it should be{meaning(factor[0], case.sizes)}"


def _rows(case: Case) -> str:
    """Rows of a batch that are in other places."""
    for words, batch in case.batches.items():
        if case.value.ndim != 2 or case.value.shape[1:] != batch.shape[1:]:
            continue
        places = [[place for place, other in enumerate(batch) if fits(row, other)] for row in case.value]
        if all(places) and len(places) > 1 and len(case.value.unique(dim=0)) == 1:
            return f"each of its rows is like row{'s' * (len(places[0]) > 1)} {listed(places[0])} of {words}"
        if all(places):
            sure = min(range(len(places)), key=lambda number: len(places[number]))
            first = places[sure][0] - sure
            nearest = [min((abs(place - first - n), place) for place in near)[1] for n, near in enumerate(places)]
            return f"it is of row{'s' * (len(places) > 1)} {listed(nearest)} of {words}"
    return ""


def _elsewhere(case: Case) -> str:
    """A stretch of another tensor, or of the same one; most of it at least."""
    value = case.value.flatten().double()
    if value.numel() < 2 or not float(value.abs().max()):
        return ""
    limit = FITS * float(value.abs().max())
    if _mostly(value, case.expected.flatten().double(), limit):
        return ""  # it belongs where it is
    count, anchor = value.numel(), int(value.abs().argmax())
    for name, tensor in case.pool.items():
        flat = tensor.flatten().double()
        near = (flat - value[anchor]).abs() <= FITS * value[anchor].abs()
        for place in near.nonzero()[:8, 0].tolist():
            first = place - anchor
            low, high = max(first, 0), min(first + count, flat.numel())
            is_long = high - low > max(1, count // 2)
            if is_long and _mostly(value[low - first : high - first], flat[low:high], limit):
                before = f"{-first} element{'s' * (first < -1)} before {name}"
                return f"it is what belongs {f'at element {first} of {name}' if first >= 0 else before}"
    return ""


def _mostly(value: Tensor, other: Tensor, limit: float) -> bool:
    """Whether they are the same, but for a few; zeros tell nothing."""
    told = (value != 0) | (other != 0)
    return float(((value - other).abs()[told] <= limit).double().mean()) > MOST


def _with_something(case: Case) -> str:
    """What should be there, and a multiple of something else."""
    for words, other in case.others.items():
        if other.shape != case.value.shape or other.numel() < 2:  # any number is some times another
            continue
        found = coefficients(case.value - case.expected, [other])
        if found is not None and found[0]:
            return f"it has {number(found[0])} times {words} too much"
    return ""


class Ingredient(NamedTuple):
    """Of a sum."""

    words: str
    value: Tensor
    times: float
    """How often it should be there."""


def made_of(value: Tensor, ingredients: Sequence[Ingredient], sizes: Mapping[str, float]) -> str:
    """What of the ingredients is there more or less often than it should."""
    there = [each for each in ingredients if each.times or float(each.value.abs().max())]
    found = coefficients(value, [each.value for each in there]) if value.numel() > len(there) else None
    if found is None:
        return ""
    pairs = list(zip(there, found, strict=True))
    ratios = {round(times / each.times, 6) for each, times in pairs if each.times}
    if len(pairs) > 1 and len(ratios) == 1 and all(each.times for each, _ in pairs) and ratios != {1.0}:
        factor = found[0] / there[0].times
        return f"all of it counts {number(factor)} times{meaning(factor, sizes)}"
    said = []
    for each, times in pairs:
        if abs(times - each.times) <= WHOLE * max(abs(each.times), WHOLE):
            continue
        if each.times and is_about(times / each.times, 0):
            said.append(f"{each.words} is missing")
        elif each.times:
            said.append(f"{each.words} counts {number(times / each.times)} times{meaning(times / each.times, sizes)}")
        else:
            said.append(f"{each.words} is in it, {number(times)} times, where it should not be")
    return "; ".join(said)


# --- numbers ---------------------------------------------------------------------------------------
