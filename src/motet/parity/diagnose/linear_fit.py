"""Equations between tensors that hold up to rounding or do not, and which contributions a sum consists of."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from motet.core.dtypes import dtype_name
from motet.parity.compare.planned_records import format_numbered
from motet.parity.compare.tensor_differences import relative_distance

FIT_TOLERANCE = 1e-9  # Rounding is below it, other mistakes are above
COEFFICIENT_TOLERANCE = 1e-7  # How far a coefficient may be from a number that has a meaning
TARGET_TOKENS = "target tokens"
DTYPE_EPSILON = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
ROUNDING_MATCH = 1e-3  # Some elements may have been rounded the other way
ENUMERATION_TOLERANCE = 1e-11  # Tight, since many combinations are tried on few numbers
MAX_ENUMERATED = 8


def as_numbers(tensor: Tensor) -> Tensor:
    """A mask as numbers; other tensors unchanged."""
    return tensor.double() if tensor.dtype == torch.bool else tensor


def is_equal_up_to_rounding(value: Tensor, expected: Tensor) -> bool:
    return relative_distance(value, expected) < FIT_TOLERANCE


def solve_coefficients(value: Tensor, basis: Sequence[Tensor]) -> list[float] | None:
    """The coefficients with which the basis sums to the value; None where no such sum exists."""
    if any(each.shape != value.shape for each in basis):
        return None
    matrix, flat = torch.stack([each.double().flatten() for each in basis], 1), value.double().flatten()
    if not matrix.numel() or not float(matrix.abs().max()):
        return None
    solution = torch.linalg.lstsq(matrix, flat[:, None], driver="gelsd").solution[:, 0]
    if relative_distance(matrix @ solution, flat) > FIT_TOLERANCE and float(value.abs().max()):
        return None
    is_present = (matrix * solution).norm(dim=0) > FIT_TOLERANCE * float(torch.linalg.vector_norm(flat))
    return torch.where(is_present, solution, 0.0).tolist()


def is_about(factor: float, target: float) -> bool:
    return abs(factor - target) <= COEFFICIENT_TOLERANCE * (abs(target) or 1.0)


def format_factor(factor: float) -> str:
    """At most eight digits; a simple fraction is written as one."""
    for denominator in range(2, 65):
        numerator = round(factor * denominator)
        if numerator and is_about(factor * denominator, numerator) and not is_about(factor, round(factor)):
            return f"{numerator}/{denominator}"
    return f"{factor:.8g}"


def factor_meaning(factor: float, known_factors: Mapping[str, float]) -> str:
    """The known quantities by which something was multiplied or divided, as the end of a sentence."""
    for operation, number in (("multiplied", factor), ("divided", 1 / factor if factor else 0.0)):
        sizes = {n: s if operation == "multiplied" else 1 / s for n, s in known_factors.items() if s not in (0, 1)}
        if names := [name for name, size in sizes.items() if is_about(factor, size)]:
            return f": {operation} by {' = '.join([format_factor(number), *names])}"
    if is_about(factor, 2) or is_about(factor, 0.5):
        return ": counted twice" if factor > 1 else ": halved"
    batch_count = known_factors.get(TARGET_TOKENS, 0.0)
    for name, size in known_factors.items():
        is_count = name.startswith(TARGET_TOKENS) and size not in (0, batch_count)
        if is_count and (is_about(factor, batch_count / size) or is_about(factor, size / batch_count)):
            operation = "divided" if factor > 1 else "multiplied"
            instead = f"instead of the {format_factor(batch_count)} of the batch"
            return f": {operation} by the {name}, {format_factor(size)}, {instead}"
    return ""


def find_rounding_dtype(error: Tensor, exact: Tensor) -> str:
    """The dtype whose rounding of `exact` makes this error; empty if none does."""
    for dtype in DTYPE_EPSILON:
        rounding_error = exact.to(dtype).double() - exact.double()
        is_lossy = exact.dtype != dtype and bool(rounding_error.any())
        if is_lossy and relative_distance(error, rounding_error) < ROUNDING_MATCH:
            return dtype_name(dtype)
    return ""


class MicroBatchContribution(NamedTuple):
    """The term that one micro-batch of one rank adds to a sum."""

    rank: int
    microbatch: int
    value: Tensor
    target_count: float


Contributions = Sequence[MicroBatchContribution]


def explain_contributions(value: Tensor, contributions: Contributions, rank: int | None) -> str:
    """Name what is missing, repeated or scaled in the sum that `rank` has."""
    present = _nonzero(contributions)
    if len(present) > 1 and value.numel() <= len(present):
        return explain_by_enumeration(value, present, "the contribution of ")
    if not present or value.numel() == 1:
        return ""
    factors = solve_coefficients(value, [c.value for c in present])
    return _explain_factors(present, factors, rank) if factors else ""


def _nonzero(contributions: Contributions) -> list[MicroBatchContribution]:
    size = max((float(c.value.abs().max()) for c in contributions if c.value.numel()), default=0.0)
    return [c for c in contributions if float(c.value.abs().max()) > ENUMERATION_TOLERANCE * size] if size else []


def _with_factor(contributions: Contributions, factors: Sequence[float], target: float) -> list[MicroBatchContribution]:
    return [c for c, factor in zip(contributions, factors, strict=False) if is_about(factor, target)]


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
        divisor = "their own count of targets, instead of all by that of the whole batch"
        return f"contributions of {owner} are divided by {divisor}"
    distinct = sorted({round(factor, 6) for factor in factors})
    if len(distinct) > 3 or distinct == [1.0]:
        return ""
    groups = [[c for c, own in zip(contributions, factors, strict=True) if round(own, 6) == f] for f in distinct]
    named = zip(distinct, (_format_contributions(group, contributions) for group in groups), strict=True)
    return f"it is made of {', '.join(f'{format_factor(factor)} times that of {names}' for factor, names in named)}"


def _local_mean_owner(contributions: Contributions, factors: Sequence[float]) -> str:
    """Ranks or micro-batches, if factor times target count is the same for all of them."""
    counts_by_owner = {
        "ranks": [sum(other.target_count for other in contributions if other.rank == c.rank) for c in contributions],
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
    ranks, microbatches = sorted({c.rank for c in contributions}), sorted({c.microbatch for c in contributions})
    text, named = format_numbered("rank", ranks), {c[:2] for c in contributions}
    has_all = all(c[:2] in named for c in all_contributions if c.rank in ranks)
    return text if has_all else f"{format_numbered('micro-batch', microbatches)} of {text}"
