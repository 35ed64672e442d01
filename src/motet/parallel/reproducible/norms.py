"""Sums and norms of tensors that do not depend on the order of additions, and accurate norms of one tensor."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from motet.collectives.execute.api import all_reduce
from motet.parallel.process.process_group import RankGroup

HIGH_BITS, LOW_BITS = 38, 28  # Bits of a square below 1 that are kept, as two integers
LIMB_BITS, LIMBS = 31, 4  # Sums of these integers are exchanged as limbs
CHUNK_ELEMENTS = {"cpu": 1 << 15}  # Processed together, so that they stay in the cache of a CPU
DEFAULT_CHUNK_ELEMENTS = 1 << 24
BLOCK_ELEMENTS = 4096  # Squares that are added in their dtype; sums of blocks are added in float64


def exact_sum(values: Sequence[float]) -> float:
    """The exact sum, rounded to a float once."""
    return math.fsum(values) if all(map(math.isfinite, values)) else math.nan


def exact_squared_norm(tensors: Sequence[Tensor], group: RankGroup) -> float:
    """The squared norm of the tensors of all ranks; the same bits however the elements are distributed.

    With 2^e above every |x|, s = (x / 2^e)^2 is below 1. The first 66 bits of s become two integers of 38 and 28 bits.
    These are added in int64, at most 2^24 of them, and then as Python's integers, so their order does not matter.

    The bits beyond are below 2^-66 for each of n elements. As 2^e is the smallest such power, the sum of s is at least
    1/4. The relative error is below n 2^-64, plus 2^-53 for rounding a square of float64 (those of float32 are exact).
    For the 2^40 parameters of the largest models that is at most 6e-8.
    """
    largest = max((_max_magnitude(tensor) for tensor in tensors if tensor.numel()), default=0.0)
    global_max = torch.tensor([largest], dtype=torch.float64, device=group.device)
    all_reduce(global_max, group, op="max")
    largest = global_max.item()
    if largest == 0 or not math.isfinite(largest):
        return largest
    exponent = max(math.frexp(largest)[1], -1000)  # so that the scale is a finite float64
    total = _all_reduce_integer(_integer_squares(tensors, exponent), group)
    try:
        return math.ldexp(total / (1 << HIGH_BITS + LOW_BITS), 2 * exponent)  # of integers, rounded once
    except OverflowError:
        return math.inf


def _integer_squares(tensors: Sequence[Tensor], exponent: int) -> int:
    """The sum of (x / 2^e)^2, each truncated to 66 bits and multiplied by 2^66."""
    high, low = [], []
    chunk_numel = CHUNK_ELEMENTS.get(tensors[0].device.type, DEFAULT_CHUNK_ELEMENTS) if tensors else 1
    for chunk in (chunk for tensor in tensors for chunk in tensor.view(-1).split(chunk_numel)):
        scaled = chunk.to(torch.float64).mul(2.0 ** (HIGH_BITS // 2 - exponent)).square_()
        integer_part = scaled.floor()
        high.append(integer_part.sum(dtype=torch.int64))
        low.append(scaled.sub_(integer_part).mul_(2.0**LOW_BITS).floor_().sum(dtype=torch.int64))
    high_sum, low_sum = (sum(torch.stack(sums).tolist()) if sums else 0 for sums in (high, low))
    return (int(high_sum) << LOW_BITS) + int(low_sum)


def _all_reduce_integer(value: int, group: RankGroup) -> int:
    mask = (1 << LIMB_BITS) - 1
    limbs = torch.tensor([value >> LIMB_BITS * i & mask for i in range(LIMBS)], device=group.device)
    all_reduce(limbs, group)
    return sum(int(limb) << LIMB_BITS * i for i, limb in enumerate(limbs.tolist()))


def _max_magnitude(tensor: Tensor) -> float:
    """The largest |x|; infinite for NaN, which a maximum over ranks may drop."""
    low, high = torch.aminmax(tensor)
    magnitude = max(-low.item(), high.item())
    return magnitude if math.isfinite(magnitude) else math.inf


def squared_norm(tensor: Tensor) -> Tensor:
    """The squared norm of one tensor, in float64, on its device; torch's norm of millions of float32 has only three
    correct digits."""
    if tensor.dtype == torch.float64:
        norm = torch.linalg.vector_norm(tensor)
        return torch.pow(norm, torch.full_like(norm, 2.0))  # Rounded as Python does; a square has other bits
    flat = tensor.reshape(-1)
    blocked_numel = flat.numel() // BLOCK_ELEMENTS * BLOCK_ELEMENTS
    pieces = (flat[:blocked_numel].view(-1, BLOCK_ELEMENTS), 1), (flat[blocked_numel:], None)
    norms = [torch.linalg.vector_norm(t, dim=dim, dtype=torch.float32) for t, dim in pieces if t.numel()]
    return sum_on_device([each.double().square().sum() for each in norms], tensor.device)


def sum_on_device(numbers: Sequence[Tensor], device: torch.device) -> Tensor:
    """The sum of numbers in float64, one after another, without a copy to the host."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for number in numbers:
        total = total + number
    return total
