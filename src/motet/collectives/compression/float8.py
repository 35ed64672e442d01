"""float8 with a scale per block, rounded to the nearest number of the format."""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from motet.collectives.compression import block_scaling
from motet.collectives.compression.codec_options import FLOAT8_MAX, Float8CodecOptions

_DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def encode(codec: Float8CodecOptions, tensor: Tensor) -> Tensor:
    blocked = block_scaling.to_blocks(tensor, codec.block)
    scales = block_scaling.max_magnitudes(blocked)
    units = block_scaling.divide_by_scales(blocked, scales).view(-1)[: tensor.numel()]
    codes = (units * FLOAT8_MAX[codec.format]).to(_DTYPES[codec.format])
    return block_scaling.pack_message(scales, codes.view(torch.uint8))


def decode(codec: Float8CodecOptions, message: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    scales, codes = block_scaling.unpack_message(message, prod(shape), codec.block)
    units = codes.view(_DTYPES[codec.format]).to(torch.float32) / FLOAT8_MAX[codec.format]
    return block_scaling.multiply_by_scales(units, scales, codec.block, shape, dtype)
