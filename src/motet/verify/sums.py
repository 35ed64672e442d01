"""Which shares of ranks and micro-batches a sum has, and how often."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from motet.verify.equations import coefficients, is_about, lost_bits, number
from motet.verify.parts import listed

SURE = 1e-11
"""How far from an equation rounding may be, where many are tried on few numbers."""
MOST_SHARES = 8


class Share(NamedTuple):
    """What one micro-batch of one rank adds to a sum."""

    rank: int
    part: int
    value: Tensor
    targets: float


def of_shares(value: Tensor, given: Sequence[Share], older: Sequence[Share], rank: int | None) -> str:
    """Which shares the sum of a rank has, and how often; some may be those of the step before."""
    shares, older = _some(given), _some(older)
    if len(shares) > 1 and value.numel() <= len(shares):
        return counted(value, shares, "the share of ")
    if not shares or value.numel() == 1:
        return ""
    if found := coefficients(value, [share.value for share in shares]):
        return _of_times(list(zip(shares, found, strict=True)), rank)
    if older and (found := coefficients(value, [share.value for share in [*shares, *older]])):
        return _of_older(list(zip(shares, found, strict=False)), list(zip(older, found[len(shares) :], strict=True)))
    return ""


def _some(shares: Sequence[Share]) -> list[Share]:
    """Those that are not nothing."""
    size = max((float(share.value.abs().max()) for share in shares if share.value.numel()), default=0.0)
    return [share for share in shares if float(share.value.abs().max()) > SURE * size] if size else []


def _of_older(now: Sequence[tuple[Share, float]], before: Sequence[tuple[Share, float]]) -> str:
    missing = [share for share, times in now if is_about(times, 0)]
    extra = [share for share, times in before if is_about(times, 1)]
    others = [times for _, times in [*now, *before] if not is_about(times, 0) and not is_about(times, 1)]
    if others or not extra:
        return ""
    text = _named(extra, [share for share, _ in before])
    if [(share.rank, share.part) for share in missing] == [(share.rank, share.part) for share in extra]:
        return f"the share of {text} is that of the step before"
    return f"it has the share of {text} of the step before, too" if not missing else ""


def _of_times(pairs: Sequence[tuple[Share, float]], rank: int | None) -> str:
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


def of_a_rounded_share(off: Tensor, shares: Sequence[Share]) -> str:
    """One rank, or one micro-batch of all ranks, adds its share in a smaller dtype."""
    groups = [[share for share in shares if share.rank == rank] for rank in sorted({s.rank for s in shares})]
    groups += [[share for share in shares if share.part == part] for part in sorted({s.part for s in shares})]
    for group in groups if len(shares) > 1 else ():
        if dtype := lost_bits(off, torch.stack([share.value.double() for share in group]).sum(0)):
            return f"the share of {_named(group, shares)} was rounded to {dtype}"
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


def _named(shares: Sequence[Share], everyone: Sequence[Share]) -> str:
    """Whole ranks, where all of their micro-batches are meant."""
    parts = sorted({share.part for share in shares})
    ranks = sorted({share.rank for share in shares})
    text = f"rank{'s' * (len(ranks) > 1)} {listed(ranks)}"
    meant = {(share.rank, share.part) for share in shares}
    if all((share.rank, share.part) in meant for share in everyone if share.rank in ranks):
        return text
    return f"micro-batch{'es' * (len(parts) > 1)} {listed(parts)} of {text}"
