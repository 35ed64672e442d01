"""Which contributions of ranks and micro-batches a sum consists of, and how often it has each."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from motet.parity.compare.align_with_reference import join_numbers
from motet.parity.diagnose.linear_fit import find_rounding_dtype, format_factor, is_about, solve_coefficients

ENUMERATION_TOLERANCE = 1e-11  # Tight, since many combinations are tried on few numbers
MAX_ENUMERATED = 8


class MicroBatchContribution(NamedTuple):
    """The term that one micro-batch of one rank adds to a sum."""

    rank: int
    microbatch: int
    value: Tensor
    target_count: float


Contributions = Sequence[MicroBatchContribution]


def explain_contributions(
    value: Tensor, contributions: Contributions, *, previous: Contributions, rank: int | None
) -> str:
    """Name what is missing, repeated or scaled in the sum that `rank` has, or is of the `previous` step."""
    current, previous = _nonzero(contributions), _nonzero(previous)
    if len(current) > 1 and value.numel() <= len(current):
        return explain_by_enumeration(value, current, "the contribution of ")
    if not current or value.numel() == 1:
        return ""
    if factors := solve_coefficients(value, [c.value for c in current]):
        return _explain_factors(current, factors, rank)
    if previous and (factors := solve_coefficients(value, [c.value for c in [*current, *previous]])):
        return _explain_stale(current, previous, factors)
    return ""


def _nonzero(contributions: Contributions) -> list[MicroBatchContribution]:
    size = max((float(c.value.abs().max()) for c in contributions if c.value.numel()), default=0.0)
    return [c for c in contributions if float(c.value.abs().max()) > ENUMERATION_TOLERANCE * size] if size else []


def _explain_stale(current: Contributions, previous: Contributions, factors: Sequence[float]) -> str:
    if not all(is_about(factor, 0) or is_about(factor, 1) for factor in factors):
        return ""
    missing = _with_factor(current, factors[: len(current)], 0)
    stale = _with_factor(previous, factors[len(current) :], 1)
    text = stale and _format_contributions(stale, previous)
    if text and [c[:2] for c in missing] == [c[:2] for c in stale]:
        return f"the contribution of {text} is that of the step before"
    return f"it has the contribution of {text} of the step before, too" if text and not missing else ""


def _with_factor(contributions: Contributions, factors: Sequence[float], target: float) -> list[MicroBatchContribution]:
    return [c for c, factor in zip(contributions, factors, strict=True) if is_about(factor, target)]


def _explain_factors(contributions: Contributions, factors: Sequence[float], rank: int | None) -> str:
    if is_about(min(factors), max(factors)):
        return ""
    missing, present, repeated = (_with_factor(contributions, factors, target) for target in (0, 1, 2))
    if missing and len(missing) + len(present) == len(contributions):
        if rank is not None and {c.rank for c in present} == {rank} != {c.rank for c in contributions}:
            return f"it is the contribution of rank {rank} alone: the sum over the ranks is missing"
        return f"it leaves out the contribution of {_format_contributions(missing, contributions)}"
    if repeated and len(repeated) + len(present) == len(contributions):
        return f"it has the contribution of {_format_contributions(repeated, contributions)} twice"
    if owner := _local_mean_owner(contributions, factors):
        return f"contributions of {owner} are divided by their own count of targets, instead of all by that of the whole batch"
    rounded = [round(factor, 6) for factor in factors]
    if len(set(rounded)) > 3 or set(rounded) == {1.0}:
        return ""
    terms = []
    for factor in sorted(set(rounded)):
        members = [c for c, its_factor in zip(contributions, rounded, strict=True) if its_factor == factor]
        terms.append(f"{format_factor(factor)} times that of {_format_contributions(members, contributions)}")
    return f"it is made of {', '.join(terms)}"


def _local_mean_owner(contributions: Contributions, factors: Sequence[float]) -> str:
    """Ranks or micro-batches, if factor times target count is the same for all of them."""
    by_rank: dict[int, float] = {}
    for c in contributions:
        by_rank[c.rank] = by_rank.get(c.rank, 0.0) + c.target_count
    counts_by_owner = {
        "ranks": [by_rank[c.rank] for c in contributions],
        "micro-batches": [c.target_count for c in contributions],
    }
    for owner, counts in counts_by_owner.items():
        products = [factor * count for factor, count in zip(factors, counts, strict=True)]
        if len(set(counts)) > 1 and products[0] and all(is_about(p / products[0], 1) for p in products):
            return owner
    return ""


def explain_rounded_contribution(error: Tensor, contributions: Contributions) -> str:
    """One rank, or one micro-batch of all ranks, adds its contribution in a smaller dtype."""
    for group in _groups(contributions) if len(contributions) > 1 else ():
        members = [contributions[index] for index in group]
        if dtype := find_rounding_dtype(error, torch.stack([c.value.double() for c in members]).sum(0)):
            return f"the contribution of {_format_contributions(members, contributions)} was rounded to {dtype}"
    return ""


def _groups(contributions: Contributions) -> list[list[int]]:
    """Indices of the contributions of each rank, then of each micro-batch of all ranks."""
    return [
        [index for index, c in enumerate(contributions) if c[field] == value]
        for field in (0, 1)
        for value in sorted({c[field] for c in contributions})
    ]


def explain_by_enumeration(value: Tensor, contributions: Contributions, noun: str) -> str:
    """Try which contributions are missing or repeated, where a sum has too few numbers to solve for coefficients."""
    if not contributions:
        return ""
    matrix = torch.stack([c.value.double().flatten() for c in contributions])
    multiplicities = _multiplicities(contributions)
    size = torch.linalg.vector_norm(multiplicities.abs() @ matrix.abs(), dim=1)
    error = torch.linalg.vector_norm(multiplicities @ matrix - value.double().flatten(), dim=1)
    fitting = multiplicities[(error <= ENUMERATION_TOLERANCE * size) & (size > 0)].tolist()
    if not fitting:
        return ""
    chosen = min(fitting, key=lambda counts: sum(abs(count - 1) for count in counts))
    missing, repeated = (_with_factor(contributions, chosen, target) for target in (0, 2))
    findings = [f"it leaves out {noun}{_format_contributions(missing, contributions)}"] if missing else []
    findings += [f"it has {noun}{_format_contributions(repeated, contributions)} twice"] if repeated else []
    return " and ".join(findings)


def _multiplicities(contributions: Contributions) -> Tensor:
    """Rows of how often each contribution is there.

    Of many contributions only one, one rank, or one micro-batch of all ranks is missing, repeated or alone.
    """
    count = len(contributions)
    if count <= MAX_ENUMERATED:
        return torch.cartesian_prod(*[torch.arange(3.0, dtype=torch.float64)] * count).view(-1, count)
    rows = [
        [inside if index in group else outside for index in range(count)]
        for group in [*([index] for index in range(count)), *_groups(contributions)]
        for inside, outside in [(0.0, 1.0), (2.0, 1.0), (1.0, 0.0)]
    ]
    return torch.tensor([[1.0] * count, *rows], dtype=torch.float64)


def _format_contributions(contributions: Contributions, all_contributions: Contributions) -> str:
    """Only the ranks are named where all of their micro-batches are meant."""
    microbatches = sorted({c.microbatch for c in contributions})
    ranks = sorted({c.rank for c in contributions})
    text = f"rank{'s' * (len(ranks) > 1)} {join_numbers(ranks)}"
    named = {c[:2] for c in contributions}
    if all(c[:2] in named for c in all_contributions if c.rank in ranks):
        return text
    return f"micro-batch{'es' * (len(microbatches) > 1)} {join_numbers(microbatches)} of {text}"
