"""Which shares of ranks and micro-batches a sum has, and how often."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from motet.parity.compare.align_with_reference import join_numbers
from motet.parity.diagnose.linear_fit import find_rounding_dtype, format_factor, is_about, solve_coefficients

ENUMERATION_TOLERANCE = 1e-11  # How far from an equation rounding may be, where many are tried on few numbers
MAX_ENUMERATED = 8


class MicroBatchContribution(NamedTuple):
    """What one micro-batch of one rank adds to a sum."""

    rank: int
    microbatch: int
    value: Tensor
    target_count: float


def explain_contributions(
    value: Tensor,
    contributions: Sequence[MicroBatchContribution],
    previous: Sequence[MicroBatchContribution],
    rank: int | None,
) -> str:
    """Which shares the sum of a rank has, and how often; some may be those of the step before."""
    nonzero, previous = _nonzero_contributions(contributions), _nonzero_contributions(previous)
    if len(nonzero) > 1 and value.numel() <= len(nonzero):
        return explain_by_enumeration(value, nonzero, "the share of ")
    if not nonzero or value.numel() == 1:
        return ""
    if factors := solve_coefficients(value, [share.value for share in nonzero]):
        return _explain_factors(list(zip(nonzero, factors, strict=True)), rank)
    if previous and (factors := solve_coefficients(value, [share.value for share in [*nonzero, *previous]])):
        return _explain_stale(
            list(zip(nonzero, factors, strict=False)), list(zip(previous, factors[len(nonzero) :], strict=True))
        )
    return ""


def _nonzero_contributions(contributions: Sequence[MicroBatchContribution]) -> list[MicroBatchContribution]:
    """Those that are not nothing."""
    size = max((float(share.value.abs().max()) for share in contributions if share.value.numel()), default=0.0)
    return (
        [share for share in contributions if float(share.value.abs().max()) > ENUMERATION_TOLERANCE * size]
        if size
        else []
    )


def _explain_stale(
    current: Sequence[tuple[MicroBatchContribution, float]], previous: Sequence[tuple[MicroBatchContribution, float]]
) -> str:
    missing = [share for share, times in current if is_about(times, 0)]
    extra = [share for share, times in previous if is_about(times, 1)]
    other_factors = [times for _, times in [*current, *previous] if not is_about(times, 0) and not is_about(times, 1)]
    if other_factors or not extra:
        return ""
    extra_text = _format_contributions(extra, [share for share, _ in previous])
    if [(share.rank, share.microbatch) for share in missing] == [(share.rank, share.microbatch) for share in extra]:
        return f"the share of {extra_text} is that of the step before"
    return f"it has the share of {extra_text} of the step before, too" if not missing else ""


def _explain_factors(contribution_factors: Sequence[tuple[MicroBatchContribution, float]], rank: int | None) -> str:
    """`pairs`: shares, and how often the sum has them."""
    contributions, factor_values = (
        [share for share, _ in contribution_factors],
        [times for _, times in contribution_factors],
    )
    if is_about(min(factor_values), max(factor_values)):
        return ""
    missing = [share for share, times in contribution_factors if is_about(times, 0)]
    present = [share for share, times in contribution_factors if is_about(times, 1)]
    repeated = [share for share, times in contribution_factors if is_about(times, 2)]
    if missing and len(missing) + len(present) == len(contribution_factors):
        if (
            rank is not None
            and {share.rank for share in present} == {rank}
            and len({s.rank for s in contributions}) > 1
        ):
            return f"it is the share of rank {rank} alone: the sum over the ranks is missing"
        return f"it lacks the share of {_format_contributions(missing, contributions)}"
    if repeated and len(repeated) + len(present) == len(contribution_factors):
        return f"it has the share of {_format_contributions(repeated, contributions)} twice"
    if local_mean_owner := _find_local_mean(contribution_factors):
        return f"shares of {local_mean_owner} are divided by their own count of targets, instead of all by that of the whole batch"
    distinct_factors = {round(times, 6) for times in factor_values}
    if len(distinct_factors) <= 3 and set(distinct_factors) != {1.0}:
        terms = [
            f"{format_factor(factor)} times that of {_format_contributions(_with_factor(contribution_factors, factor), contributions)}"
            for factor in sorted(distinct_factors)
        ]
        return f"it is made of {', '.join(terms)}"
    return ""


def explain_rounded_contribution(error: Tensor, contributions: Sequence[MicroBatchContribution]) -> str:
    """One rank, or one micro-batch of all ranks, adds its share in a smaller dtype."""
    groups = [
        [share for share in contributions if share.rank == rank] for rank in sorted({s.rank for s in contributions})
    ]
    groups += [
        [share for share in contributions if share.microbatch == part]
        for part in sorted({s.microbatch for s in contributions})
    ]
    for group in groups if len(contributions) > 1 else ():
        if dtype := find_rounding_dtype(error, torch.stack([share.value.double() for share in group]).sum(0)):
            return f"the share of {_format_contributions(group, contributions)} was rounded to {dtype}"
    return ""


def _with_factor(
    contribution_factors: Sequence[tuple[MicroBatchContribution, float]], factor: float
) -> list[MicroBatchContribution]:
    return [share for share, times in contribution_factors if round(times, 6) == factor]


def explain_by_enumeration(value: Tensor, contributions: Sequence[MicroBatchContribution], noun: str) -> str:
    """Of few numbers, whose coefficients nobody can solve for: some shares are left out, or there twice."""
    if not contributions:
        return ""
    matrix = torch.stack([share.value.double().flatten() for share in contributions])
    multiplicities = _multiplicities(contributions)
    sums = multiplicities @ matrix
    size = torch.linalg.vector_norm(multiplicities.abs() @ matrix.abs(), dim=1)
    error = torch.linalg.vector_norm(sums - value.double().flatten(), dim=1)
    fitting_multiplicities = multiplicities[(error <= ENUMERATION_TOLERANCE * size) & (size > 0)]
    if not len(fitting_multiplicities):
        return ""
    chosen = min(fitting_multiplicities.tolist(), key=lambda each: sum(abs(one - 1) for one in each))
    missing = [share for share, one in zip(contributions, chosen, strict=True) if one == 0]
    repeated = [share for share, one in zip(contributions, chosen, strict=True) if one == 2]
    findings = [f"it lacks {noun}{_format_contributions(missing, contributions)}"] if missing else []
    findings += [f"it has {noun}{_format_contributions(repeated, contributions)} twice"] if repeated else []
    return " and ".join(findings)


def _multiplicities(contributions: Sequence[MicroBatchContribution]) -> Tensor:
    """How often each may be there: all ways; of many shares, those in which one, or a rank, or a micro-batch of all
    ranks, is left out, there twice, or alone."""
    count = len(contributions)
    if count <= MAX_ENUMERATED:
        return torch.cartesian_prod(*[torch.arange(3.0, dtype=torch.float64)] * count).view(-1, count)
    groups = [{number} for number in range(count)]
    for key in ("rank", "microbatch"):
        for group_value in {getattr(share, key) for share in contributions}:
            groups.append({number for number, share in enumerate(contributions) if getattr(share, key) == group_value})
    inside_outside = [(0.0, 1.0), (2.0, 1.0), (1.0, 0.0)]
    rows = [
        [inside if n in group else outside for n in range(count)]
        for group in groups
        for inside, outside in inside_outside
    ]
    return torch.tensor([[1.0] * count, *rows], dtype=torch.float64)


def _find_local_mean(contribution_factors: Sequence[tuple[MicroBatchContribution, float]]) -> str:
    """Whose coefficient times their count of targets is one number for all: ranks, or micro-batches."""
    by_rank: dict[int, float] = {}
    for share, _ in contribution_factors:
        by_rank[share.rank] = by_rank.get(share.rank, 0.0) + share.target_count
    counts_by_owner = {
        "ranks": [by_rank[share.rank] for share, _ in contribution_factors],
        "micro-batches": [share.target_count for share, _ in contribution_factors],
    }
    for owner, target_counts in counts_by_owner.items():
        products = [times * count for (_, times), count in zip(contribution_factors, target_counts, strict=True)]
        if (
            len(set(target_counts)) > 1
            and products[0]
            and all(is_about(product / products[0], 1) for product in products)
        ):
            return owner
    return ""


def _format_contributions(
    contributions: Sequence[MicroBatchContribution], all_contributions: Sequence[MicroBatchContribution]
) -> str:
    """Whole ranks, where all of their micro-batches are meant."""
    microbatches = sorted({share.microbatch for share in contributions})
    ranks = sorted({share.rank for share in contributions})
    text = f"rank{'s' * (len(ranks) > 1)} {join_numbers(ranks)}"
    named_pairs = {(share.rank, share.microbatch) for share in contributions}
    if all((share.rank, share.microbatch) in named_pairs for share in all_contributions if share.rank in ranks):
        return text
    return f"micro-batch{'es' * (len(microbatches) > 1)} {join_numbers(microbatches)} of {text}"
