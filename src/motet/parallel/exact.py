"""Sums that have the same bits whoever adds which part, and in whatever order."""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from motet.collectives.execute import all_reduce
from motet.parallel.group import Group

LIMB_BITS = 22
LIMBS = 3
PIECE_ELEMENTS = 1 << 16
"""What is worked on at once, so that it stays in the cache of a CPU."""


def exact_sum(parts: Sequence[float]) -> float:
    """Rounded once."""
    return math.fsum(parts) if all(map(math.isfinite, parts)) else math.nan


def sum_of_squares(tensors: Sequence[Tensor], group: Group) -> float:
    """Over the tensors of all ranks of the group; each gives elements of its own, or none.

    With 2^e above every |x|, s = (x / 2^e)^2 is below 1. Its first 66 bits after the point are cut into three whole
    numbers of 22 bits. Up to 2^41 of those can be added in int64, where order and place do not matter.

    What is cut off is below 2^-66 for each of n elements. Since 2^e is the smallest, the sum of s is 1/4 at least: the
    relative error of the result is below n 2^-64, beside 2^-53 for rounding a square of float64 (those of float32 are
    exact there). For the 2^40 parameters of the largest models that is 6e-8 at the worst.
    """
    largest = max((_largest(tensor) for tensor in tensors if tensor.numel()), default=0.0)
    agreed = torch.tensor([largest], dtype=torch.float64, device=group.device)
    all_reduce(agreed, group, op="max")
    largest = agreed.item()
    if largest == 0 or not math.isfinite(largest):
        return largest
    exponent = max(math.frexp(largest)[1], -1000)  # so that 2^-exponent is a float64, too
    sums = torch.zeros(LIMBS, dtype=torch.int64, device=group.device)
    for piece in _pieces(tensors):
        _add_limbs(sums, piece.to(torch.float64).mul(2.0**-exponent).square_())
    all_reduce(sums, group)
    total = sum(limb << LIMB_BITS * (LIMBS - 1 - place) for place, limb in enumerate(sums.tolist()))
    try:
        return math.ldexp(total / (1 << LIMB_BITS * LIMBS), 2 * exponent)  # of whole numbers, rounded once
    except OverflowError:
        return math.inf


def _largest(tensor: Tensor) -> float:
    """Infinite for what is not a number: maxima may lose it."""
    low, high = torch.aminmax(tensor)
    found = max(-low.item(), high.item())
    return found if math.isfinite(found) else math.inf


def _pieces(tensors: Iterable[Tensor]) -> Iterable[Tensor]:
    return (piece for tensor in tensors for piece in tensor.view(-1).split(PIECE_ELEMENTS))


def _add_limbs(sums: Tensor, below_one: Tensor) -> None:
    rest = below_one
    for place in range(LIMBS):
        rest.mul_(2.0**LIMB_BITS)
        whole = rest.floor()
        rest.sub_(whole)
        sums[place] += whole.to(torch.int64).sum()
