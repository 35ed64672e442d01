"""Large tensors made short: sums of their elements with pseudo-random signs, which differ where the tensors do.

It is linear, so what holds of sums of tensors holds of what they are folded to, and norms stay about what they are.
"""

from functools import lru_cache

import torch
from torch import Tensor

PARAMETER, PARAMETER_WIDTH = 2**18, 4096
"""A part of a parameter of more elements than the first becomes one of the second."""
ROW, ROW_WIDTH = 2048, 512
"""The same for what belongs to one index of the first dimension of an activation."""


def folded_part(values: Tensor, start: int) -> Tensor:
    """`values` stand at `start` in the whole. Those of parts of a whole add up to that of the whole."""
    return values if values.numel() <= PARAMETER else _fold(values.view(1, -1), start, PARAMETER_WIDTH)[0]


def folded_rows(tensor: Tensor) -> Tensor:
    """Each index of the first dimension by itself."""
    if tensor.ndim < 2 or tensor.shape[0] == 0 or tensor[0].numel() <= ROW:
        return tensor
    return _fold(tensor.reshape(tensor.shape[0], -1), 0, ROW_WIDTH)


def _fold(rows: Tensor, start: int, width: int) -> Tensor:
    count = rows.shape[1]
    signs = _signs(start, count)
    before, after = start % width, -(start + count) % width
    signed = torch.nn.functional.pad(rows.double() * signs, (before, after))
    return signed.view(rows.shape[0], -1, width).sum(1)


@lru_cache(maxsize=16)
def _signs(start: int, count: int) -> Tensor:
    return (1 - 2 * (_mixed(torch.arange(start, start + count)) & 1)).to(torch.int8)


def _mixed(places: Tensor) -> Tensor:
    """Bits that look random (the finaliser of SplitMix64, with arithmetic shifts)."""
    mixed = places * -7046029254386353131
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        mixed = (mixed ^ (mixed >> shift)) * factor
    return (mixed ^ (mixed >> 31)) >> 17
