"""Why a tensor differs, found by trying: what it would have to be made of, in numbers, to be what it is.

Nothing here knows of any mistake. Each hypothesis is an equation between tensors that is true or not, up to rounding:
the gradient that a rank has, say, is fitted by the shares of the ranks and micro-batches, and the coefficients say
which of them were left out, counted twice, or scaled.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from motet.verify.compare import distance
from motet.verify.parts import listed

FITS = 1e-9
"""How far from an equation rounding may be; other mistakes are further away."""
SURE = 1e-11
"""The same where many equations are tried on few numbers."""
MOST_SHARES = 8
NOT_UPDATED = "it was not updated"
ROUNDED = 1e-3
"""How near what was lost is to what rounding loses; some elements may have been rounded the other way."""
WHOLE = 1e-7
"""How far a coefficient may be from a number that has a meaning."""
ENOUGH = 64
"""Numbers to tell rounding from other small mistakes."""
TARGETS = "target tokens"


class Share(NamedTuple):
    """What one micro-batch of one rank adds to a sum."""

    rank: int
    part: int
    value: Tensor
    targets: float


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


def cause(case: Case, roughly: bool = True) -> str:
    """In words; empty where nothing fits. `roughly`: what is as far off as rounding is taken for that."""
    if case.value.dtype == torch.bool:
        case = replace(
            case,
            value=case.value.double(),
            expected=case.expected.double(),
            others={words: other.double() for words, other in case.others.items()},
            batches={words: batch.double() for words, batch in case.batches.items()},
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
    for dtype in _EPSILON:
        lost = case.expected.to(dtype).double() - case.expected.double()
        is_lossy = case.expected.dtype != dtype and bool(lost.any())
        if is_lossy and relative(case.value.double() - case.expected.double(), lost) < ROUNDED:
            return f"it was rounded to {_named_dtype(dtype)}"
    return ""


def _coarse(case: Case) -> str:
    """It is off by as much as arithmetic in a smaller dtype is, to all sides; of updates any small mistake is."""
    off, wanted = (case.value.double() - case.expected.double()).flatten(), case.expected.double().flatten()
    if case.before is not None or off.numel() < ENOUGH or abs(float(torch.cosine_similarity(off, wanted, 0))) > 0.2:
        return ""
    far = relative(case.value, case.expected)
    fitting = [dtype for dtype, epsilon in _EPSILON.items() if epsilon / 50 < far < epsilon]
    return f"it differs as much as what is computed in {_named_dtype(fitting[0])} does" if fitting else ""


def _named_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_EPSILON = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def _scaled(case: Case) -> str:
    factor = coefficients(case.value, [case.expected])
    if factor is None:
        return ""
    if factor[0] == 0:
        return "it is 0 throughout"
    if case.value.numel() == 1 and not meaning(factor[0], case.sizes):  # any number is some times another
        return ""
    return f"it is {number(factor[0])} times what it should be{meaning(factor[0], case.sizes)}"


def meaning(factor: float, sizes: Mapping[str, float]) -> str:
    """What a factor may come from."""
    times = [name for name, size in sizes.items() if size not in (0, 1) and is_about(factor, size)]
    over = [name for name, size in sizes.items() if size not in (0, 1) and is_about(factor, 1 / size)]
    if times:
        return f": multiplied by {' = '.join([number(factor), *times])}"
    if over:
        return f": divided by {' = '.join([number(1 / factor), *over])}"
    if is_about(factor, 2) or is_about(factor, 0.5):
        return ": counted twice" if factor > 1 else ": halved"
    by_count = {name: size for name, size in sizes.items() if name.startswith(TARGETS) and size}
    whole = by_count.pop(TARGETS, 0.0)
    for name, size in by_count.items():
        if size != whole and (is_about(factor, whole / size) or is_about(factor, size / whole)):
            how = "divided" if factor > 1 else "multiplied"
            return f": {how} by the {name}, {number(size)}, instead of the {number(whole)} of the batch"
    return ""


def _instead(case: Case) -> str:
    for words, other in case.others.items():
        if other.shape != case.value.shape or not other.any() or fits(other, case.expected):
            continue
        if fits(case.value, other):
            return f"it is {words}"
    return ""


def _summed(case: Case) -> str:
    """Which shares the sum has, and how often."""
    size = max((float(share.value.abs().max()) for share in case.shares if share.value.numel()), default=0.0)
    shares = [share for share in case.shares if float(share.value.abs().max()) > SURE * size] if size else []
    if len(shares) > 1 and case.value.numel() <= len(shares):
        return counted(case.value, shares, "the share of ")
    if not shares or case.value.numel() == 1:
        return ""
    found = coefficients(case.value, [share.value for share in shares])
    return _of_shares(list(zip(shares, found, strict=True)), case.rank) if found else ""


def _of_shares(pairs: Sequence[tuple[Share, float]], rank: int | None) -> str:
    """`pairs`: shares, and how often the sum has them."""
    shares, found = [share for share, _ in pairs], [times for _, times in pairs]
    if is_about(min(found), max(found)):
        return ""
    missing = [share for share, times in pairs if is_about(times, 0)]
    present = [share for share, times in pairs if is_about(times, 1)]
    twice = [share for share, times in pairs if is_about(times, 2)]
    if missing and len(missing) + len(present) == len(pairs):
        if rank is not None and {share.rank for share in present} == {rank} and len({s.rank for s in shares}) > 1:
            return f"it is the share of rank {rank} alone: the sum over the ranks is missing"
        return f"it lacks the share of {_named(missing, shares)}"
    if twice and len(twice) + len(present) == len(pairs):
        return f"it has the share of {_named(twice, shares)} twice"
    if whose := _means(pairs):
        return f"shares of {whose} are divided by their own count of targets, instead of all by that of the whole batch"
    factors = {round(times, 6) for times in found}
    if len(factors) <= 3 and set(factors) != {1.0}:
        told = [f"{number(factor)} times that of {_named(_those(pairs, factor), shares)}" for factor in sorted(factors)]
        return f"it is made of {', '.join(told)}"
    return ""


def _share_rounded(case: Case) -> str:
    """One rank, or one micro-batch of all ranks, adds its share in a smaller dtype."""
    groups = [[share for share in case.shares if share.rank == rank] for rank in sorted(_ranks(case))]
    groups += [[share for share in case.shares if share.part == part] for part in {s.part for s in case.shares}]
    for group in groups if len(case.shares) > 1 else ():
        own = torch.stack([share.value.double() for share in group]).sum(0)
        for dtype in _EPSILON:
            lost = own.to(dtype).double() - own
            if float(lost.abs().max()) and relative(case.value.double() - case.expected.double(), lost) < ROUNDED:
                return f"the share of {_named(group, case.shares)} was rounded to {_named_dtype(dtype)}"
    return ""


def _those(pairs: Sequence[tuple[Share, float]], factor: float) -> list[Share]:
    return [share for share, times in pairs if round(times, 6) == factor]


def counted(value: Tensor, shares: Sequence[Share], what: str) -> str:
    """Of few numbers, whose coefficients nobody can solve for: some shares are left out, or there twice."""
    if not shares:
        return ""
    matrix = torch.stack([share.value.double().flatten() for share in shares])
    tries = _tries(shares)
    sums = tries @ matrix
    size = torch.linalg.vector_norm(tries.abs() @ matrix.abs(), dim=1)
    off = torch.linalg.vector_norm(sums - value.double().flatten(), dim=1)
    fitting = tries[(off <= SURE * size) & (size > 0)]
    if not len(fitting):
        return ""
    times = min(fitting.tolist(), key=lambda each: sum(abs(one - 1) for one in each))
    lacking = [share for share, one in zip(shares, times, strict=True) if one == 0]
    twice = [share for share, one in zip(shares, times, strict=True) if one == 2]
    said = [f"it lacks {what}{_named(lacking, shares)}"] if lacking else []
    said += [f"it has {what}{_named(twice, shares)} twice"] if twice else []
    return " and ".join(said)


def _tries(shares: Sequence[Share]) -> Tensor:
    """How often each may be there: all ways; of many shares, those in which one, or a rank, or a micro-batch of all
    ranks, is left out, there twice, or alone."""
    count = len(shares)
    if count <= MOST_SHARES:
        return torch.cartesian_prod(*[torch.arange(3.0, dtype=torch.float64)] * count).view(-1, count)
    groups = [{number} for number in range(count)]
    for key in ("rank", "part"):
        for own in {getattr(share, key) for share in shares}:
            groups.append({number for number, share in enumerate(shares) if getattr(share, key) == own})
    ways = [(0.0, 1.0), (2.0, 1.0), (1.0, 0.0)]
    tries = [[inside if n in group else outside for n in range(count)] for group in groups for inside, outside in ways]
    return torch.tensor([[1.0] * count, *tries], dtype=torch.float64)


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


def _means(pairs: Sequence[tuple[Share, float]]) -> str:
    """Whose coefficient times their count of targets is one number for all: ranks, or micro-batches."""
    by_rank: dict[int, float] = {}
    for share, _ in pairs:
        by_rank[share.rank] = by_rank.get(share.rank, 0.0) + share.targets
    counts = {
        "ranks": [by_rank[share.rank] for share, _ in pairs],
        "micro-batches": [share.targets for share, _ in pairs],
    }
    for whose, own in counts.items():
        products = [times * count for (_, times), count in zip(pairs, own, strict=True)]
        if len(set(own)) > 1 and products[0] and all(is_about(product / products[0], 1) for product in products):
            return whose
    return ""


def _ranks(case: Case) -> set[int]:
    return {share.rank for share in case.shares}


def _named(shares: Sequence[Share], everyone: Sequence[Share]) -> str:
    """Whole ranks, where all of their micro-batches are meant."""
    parts = sorted({share.part for share in shares})
    ranks = sorted({share.rank for share in shares})
    text = f"rank{'s' * (len(ranks) > 1)} {listed(ranks)}"
    meant = {(share.rank, share.part) for share in shares}
    if all((share.rank, share.part) in meant for share in everyone if share.rank in ranks):
        return text
    return f"micro-batch{'es' * (len(parts) > 1)} {listed(parts)} of {text}"


def _rows(case: Case) -> str:
    """Rows of a batch that are in other places."""
    for words, batch in case.batches.items():
        if case.value.ndim != 2 or case.value.shape[1:] != batch.shape[1:]:
            continue
        places = [[place for place, other in enumerate(batch) if fits(row, other)] for row in case.value]
        if all(places) and min(map(len, places)) > 1:
            return f"each of its rows is as {listed(places[0])} of {words} are"
        if all(places):
            return f"it is of row{'s' * (len(places) > 1)} {listed([near[0] for near in places])} of {words}"
    return ""


def _elsewhere(case: Case) -> str:
    """A stretch of another tensor, or of the same one; most of it at least."""
    value = case.value.flatten().double()
    if value.numel() < 2 or not float(value.abs().max()):
        return ""
    count, anchor = value.numel(), int(value.abs().argmax())
    for name, tensor in case.pool.items():
        flat = tensor.flatten().double()
        near = (flat - value[anchor]).abs() <= FITS * value[anchor].abs()
        for place in near.nonzero()[:8, 0].tolist():
            first = place - anchor
            low, high = max(first, 0), min(first + count, flat.numel())
            if high - low > max(1, count // 2) and fits(value[low - first : high - first], flat[low:high]):
                at = f"element {first} of {name}" if first >= 0 else f"{-first} elements before {name}"
                return f"it is what belongs at {at}"
    return ""


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


def relative(value: Tensor, expected: Tensor) -> float:
    return distance(value, expected, 0.0)


def fits(value: Tensor, expected: Tensor) -> bool:
    return relative(value, expected) < FITS


def coefficients(value: Tensor, basis: Sequence[Tensor]) -> list[float] | None:
    """Of the sum that the value is; None where it is none of these."""
    if any(each.shape != value.shape for each in basis):
        return None
    matrix = torch.stack([each.double().flatten() for each in basis], 1)
    if not matrix.numel() or not float(matrix.abs().max()):
        return None
    found = torch.linalg.lstsq(matrix, value.double().flatten()[:, None], driver="gelsd").solution[:, 0]
    if relative(matrix @ found, value.double().flatten()) > FITS and float(value.abs().max()):
        return None
    least = FITS * float(torch.linalg.vector_norm(value.double()))
    shares = (matrix * found).norm(dim=0)
    return [float(each) if float(size) > least else 0.0 for each, size in zip(found, shares, strict=True)]


def is_about(factor: float, wanted: float) -> bool:
    return abs(factor - wanted) <= WHOLE * (abs(wanted) or 1.0)


def number(factor: float) -> str:
    """Short; fractions as fractions where they are simple."""
    for below in range(2, 65):
        if is_about(factor * below, round(factor * below)) and not is_about(factor, round(factor)):
            above = round(factor * below)
            return f"{above}/{below}" if above else f"{factor:.6g}"
    return f"{factor:.6g}"
