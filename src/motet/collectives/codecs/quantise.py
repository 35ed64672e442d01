"""int8 and int4: the number of the level that is nearest, or of one of its two neighbours at random without bias.

A code is 0 to 2n, with n = 2**(bits - 1) - 1; code n is zero, codes 0 and 2n are the largest magnitude of the block.
Two codes of int4 share a byte, the first one in its low half.
"""

from collections.abc import Sequence
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from motet.collectives.codecs import blocks
from motet.collectives.compress import Integers, quantile_levels


def encode(codec: Integers, tensor: Tensor, seed: int) -> Tensor:
    cut = blocks.cut(tensor, codec.block)
    scales = blocks.largest(cut)
    units = blocks.ratios(cut, scales).view(-1)[: tensor.numel()]
    half = _half(codec)
    places = _places(units, codec) if codec.levels == "quantile" else units * half
    if codec.rounding == "stochastic":
        generator = torch.Generator(tensor.device).manual_seed(seed)
        places = (places + torch.rand(places.shape, generator=generator, device=tensor.device)).floor_()
    codes = places.round().clamp_(-half, half).add_(half).to(torch.uint8)
    return blocks.join(scales, codes if codec.bits == 8 else _pack(codes))


def decode(codec: Integers, message: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    scales, codes = blocks.split(message, prod(shape), codec.block)
    if codec.bits == 4:
        codes = torch.stack([codes & 15, codes >> 4], 1).view(-1)[: prod(shape)]
    if codec.levels == "quantile":
        units = _levels(codec, message.device).index_select(0, codes.int())
    else:
        units = (codes.to(torch.float32) - _half(codec)) / _half(codec)
    return blocks.scaled(units, scales, codec.block, shape, dtype)


def _half(codec: Integers) -> int:
    return (1 << codec.bits - 1) - 1


def _levels(codec: Integers, device: torch.device) -> Tensor:
    return torch.tensor(quantile_levels(codec.bits), dtype=torch.float32, device=device)


def _places(units: Tensor, codec: Integers) -> Tensor:
    """Where each number stands among the levels: 1.25 is a quarter of the way from level 1 to level 2 above zero."""
    levels = _levels(codec, units.device)
    below = torch.bucketize(units, levels[1:-1], right=True)
    lower, upper = levels[below], levels[below + 1]
    return (units - lower) / (upper - lower) + (below - _half(codec))


def _pack(codes: Tensor) -> Tensor:
    pairs = F.pad(codes, (0, codes.numel() % 2)).view(-1, 2)
    return pairs[:, 0] | pairs[:, 1] << 4
