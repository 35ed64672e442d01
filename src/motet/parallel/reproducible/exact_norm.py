"""Sums that have the same bits whoever adds which part, and in whatever order."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from motet.collectives.execute.api import all_reduce
from motet.parallel.process.process_group import RankGroup

HIGH_BITS, LOW_BITS = 38, 28  # What is looked at of a square that is scaled to be below 1, in two whole numbers
LIMB_BITS, LIMBS = 31, 4  # As what sums of these are exchanged
CHUNK_ELEMENTS = {"cpu": 1 << 15}  # What is worked on at once, so that it stays in the cache of a CPU
DEFAULT_CHUNK_ELEMENTS = 1 << 24


def exact_sum(values: Sequence[float]) -> float:
    """Rounded once."""
    return math.fsum(values) if all(map(math.isfinite, values)) else math.nan


def exact_squared_norm(tensors: Sequence[Tensor], group: RankGroup) -> float:
    """Over the tensors of all ranks of the group; each gives elements of its own, or none.

    With 2^e above every |x|, s = (x / 2^e)^2 is below 1. Its first 66 bits after the point are cut into two whole
    numbers, of 38 and 28 bits, which are added in int64, 2^24 of them at the most, and then as Python's whole numbers.
    Order and place do not matter to those.

    What is cut off is below 2^-66 for each of n elements. Since 2^e is the smallest, the sum of s is 1/4 at least: the
    relative error of the result is below n 2^-64, beside 2^-53 for rounding a square of float64 (those of float32 are
    exact there). For the 2^40 parameters of the largest models that is 6e-8 at the worst.
    """
    largest = max((_max_magnitude(tensor) for tensor in tensors if tensor.numel()), default=0.0)
    global_max = torch.tensor([largest], dtype=torch.float64, device=group.device)
    all_reduce(global_max, group, op="max")
    largest = global_max.item()
    if largest == 0 or not math.isfinite(largest):
        return largest
    exponent = max(math.frexp(largest)[1], -1000)  # so that what is scaled by is a float64, too
    total = _all_reduce_integer(_integer_squares(tensors, exponent), group)
    try:
        return math.ldexp(total / (1 << HIGH_BITS + LOW_BITS), 2 * exponent)  # of whole numbers, rounded once
    except OverflowError:
        return math.inf


def _integer_squares(tensors: Sequence[Tensor], exponent: int) -> int:
    """The sum of (x / 2^e)^2 over these, each cut off after so many bits, times 2^bits."""
    high, low = [], []
    chunk_numel = CHUNK_ELEMENTS.get(tensors[0].device.type, DEFAULT_CHUNK_ELEMENTS) if tensors else 1
    for chunk in (piece for tensor in tensors for piece in tensor.view(-1).split(chunk_numel)):
        scaled = chunk.to(torch.float64).mul(2.0 ** (HIGH_BITS // 2 - exponent)).square_()
        integer_part = scaled.floor()
        high.append(integer_part.sum(dtype=torch.int64))
        low.append(scaled.sub_(integer_part).mul_(2.0**LOW_BITS).floor_().sum(dtype=torch.int64))
    if not high:
        return 0
    sums: list[list[int]] = [torch.stack(high).tolist(), torch.stack(low).tolist()]
    return (sum(sums[0]) << LOW_BITS) + sum(sums[1])


def _all_reduce_integer(value: int, group: RankGroup) -> int:
    """The sum of whole numbers, cut into limbs that fit."""
    mask = (1 << LIMB_BITS) - 1
    limbs = torch.tensor([value >> LIMB_BITS * place & mask for place in range(LIMBS)], device=group.device)
    all_reduce(limbs, group)
    summed: list[int] = limbs.tolist()
    return sum(limb << LIMB_BITS * place for place, limb in enumerate(summed))


def _max_magnitude(tensor: Tensor) -> float:
    """Infinite for what is not a number: maxima may lose it."""
    low, high = torch.aminmax(tensor)
    magnitude = max(-low.item(), high.item())
    return magnitude if math.isfinite(magnitude) else math.inf
