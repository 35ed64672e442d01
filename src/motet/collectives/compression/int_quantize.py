"""int8 and int4: the number of the level that is nearest, or of one of its two neighbours at random without bias.

A code is 0 to 2n, with n = 2**(bits - 1) - 1; code n is zero, codes 0 and 2n are the largest magnitude of the block.
Two codes of int4 share a byte, the first one in its low half.
"""

from collections.abc import Sequence
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from motet.collectives.compression import block_scaling
from motet.collectives.compression.codec_options import IntegerCodecOptions, quantile_levels


def encode(codec: IntegerCodecOptions, tensor: Tensor, seed: int) -> Tensor:
    blocked = block_scaling.to_blocks(tensor, codec.block)
    scales = block_scaling.max_magnitudes(blocked)
    units = block_scaling.divide_by_scales(blocked, scales).view(-1)[: tensor.numel()]
    max_level = _max_level(codec)
    level_positions = _level_positions(units, codec) if codec.levels == "quantile" else units * max_level
    if codec.rounding == "stochastic":
        generator = torch.Generator(tensor.device).manual_seed(seed)
        level_positions = (
            level_positions + torch.rand(level_positions.shape, generator=generator, device=tensor.device)
        ).floor_()
    codes = level_positions.round().clamp_(-max_level, max_level).add_(max_level).to(torch.uint8)
    return block_scaling.pack_message(scales, codes if codec.bits == 8 else _pack_int4(codes))


def decode(codec: IntegerCodecOptions, message: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    scales, codes = block_scaling.unpack_message(message, prod(shape), codec.block)
    if codec.bits == 4:
        codes = torch.stack([codes & 15, codes >> 4], 1).view(-1)[: prod(shape)]
    if codec.levels == "quantile":
        units = _level_values(codec, message.device).index_select(0, codes.int())
    else:
        units = (codes.to(torch.float32) - _max_level(codec)) / _max_level(codec)
    return block_scaling.multiply_by_scales(units, scales, codec.block, shape, dtype)


def _max_level(codec: IntegerCodecOptions) -> int:
    return (1 << codec.bits - 1) - 1


def _level_values(codec: IntegerCodecOptions, device: torch.device) -> Tensor:
    return torch.tensor(quantile_levels(codec.bits), dtype=torch.float32, device=device)


def _level_positions(units: Tensor, codec: IntegerCodecOptions) -> Tensor:
    """Where each number stands among the levels: 1.25 is a quarter of the way from level 1 to level 2 above zero."""
    levels = _level_values(codec, units.device)
    below = torch.bucketize(units, levels[1:-1], right=True)
    lower, upper = levels[below], levels[below + 1]
    return (units - lower) / (upper - lower) + (below - _max_level(codec))


def _pack_int4(codes: Tensor) -> Tensor:
    pairs = F.pad(codes, (0, codes.numel() % 2)).view(-1, 2)
    return pairs[:, 0] | pairs[:, 1] << 4
