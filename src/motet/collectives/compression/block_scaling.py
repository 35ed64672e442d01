"""What the blockwise codecs share: blocks in float32, their scales, and the layout of a message.

A message holds the scales of all blocks as float32, then the codes of all elements. A block with a non-finite number
gets the scale NaN, so that all of it arrives as NaN. A float64 beyond float32's range counts as non-finite.
"""

from collections.abc import Sequence
from math import ceil, prod

import torch
import torch.nn.functional as F
from torch import Tensor

from motet.collectives.compression.byte_messages import read_numbers
from motet.collectives.compression.codec_options import SCALE_BYTES


def to_blocks(tensor: Tensor, block: int) -> Tensor:
    """[blocks, elements of a block] in float32, the last one filled up with zeros."""
    flat = tensor.reshape(-1).to(torch.float32)
    block = min(block, max(flat.numel(), 1))
    return F.pad(flat, (0, -flat.numel() % block)).view(-1, block)


def max_magnitudes(blocks: Tensor) -> Tensor:
    """The largest magnitude of each block, [blocks, 1]."""
    return finite_or_nan(blocks.abs().amax(1, keepdim=True))


def finite_or_nan(scales: Tensor) -> Tensor:
    return torch.where(scales.isfinite(), scales, torch.nan)


def divide_by_scales(blocks: Tensor, scales: Tensor) -> Tensor:
    """Blocks divided by their scales; 0 where the scale is 0 or NaN."""
    return torch.where(scales > 0, blocks / scales, 0)


def pack_message(scales: Tensor, codes: Tensor) -> Tensor:
    """The message; `codes` are bytes."""
    return torch.cat([scales.reshape(-1).view(torch.uint8), codes])


def unpack_message(message: Tensor, numel: int, block: int) -> tuple[Tensor, Tensor]:
    """(scales [blocks, 1], codes)"""
    end = ceil(numel / block) * SCALE_BYTES
    return read_numbers(message, 0, end, torch.float32).view(-1, 1), message[end:]


def multiply_by_scales(units: Tensor, scales: Tensor, block: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """What was divided by scales, times them."""
    return (to_blocks(units, block) * scales).view(-1)[: prod(shape)].view(tuple(shape)).to(dtype)
