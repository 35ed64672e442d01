"""Blocks in float32, their scales, and the layout of the messages of blockwise codecs.

A message holds the scales of all blocks as float32, then the codes of all elements. A block with a non-finite number
gets the scale NaN, so that all of it arrives as NaN. A float64 beyond float32's range counts as non-finite.
"""

from collections.abc import Sequence
from math import ceil, prod

import torch
import torch.nn.functional as F
from torch import Tensor


def to_blocks(tensor: Tensor, block: int) -> Tensor:
    """[blocks, elements of a block] in float32; zeros fill up the last block."""
    flat = tensor.reshape(-1).to(torch.float32)
    block = min(block, max(flat.numel(), 1))
    return F.pad(flat, (0, -flat.numel() % block)).view(-1, block)


def finite_or_nan(scales: Tensor) -> Tensor:
    return torch.where(scales.isfinite(), scales, torch.nan)


def scale_to_units(tensor: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """(flat elements over their block's largest magnitude, or 0 if that is 0 or NaN; these magnitudes [blocks, 1])."""
    blocks = to_blocks(tensor, block)
    scales = finite_or_nan(blocks.abs().amax(1, keepdim=True))
    return torch.where(scales > 0, blocks / scales, 0).view(-1)[: tensor.numel()], scales


def pack_message(scales: Tensor, codes: Tensor) -> Tensor:
    """The message; `codes` are bytes."""
    return torch.cat([scales.reshape(-1).view(torch.uint8), codes])


def unpack_message(message: Tensor, numel: int, block: int) -> tuple[Tensor, Tensor]:
    """(scales [blocks, 1], codes) of a message."""
    end = ceil(numel / block) * torch.float32.itemsize
    return read_numbers(message, 0, end, torch.float32).view(-1, 1), message[end:]


def multiply_by_scales(units: Tensor, scales: Tensor, block: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The tensor of `units`, each multiplied by the scale of its block."""
    return (to_blocks(units, block) * scales).view(-1)[: prod(shape)].view(tuple(shape)).to(dtype)


def read_numbers(message: Tensor, start: int, stop: int, dtype: torch.dtype) -> Tensor:
    """A copy of some bytes as numbers, since a view must start at a multiple of the element's size."""
    return message[start:stop].clone().view(dtype)
