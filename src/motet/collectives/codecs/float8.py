"""float8 with a scale per block, rounded to the nearest number of the format."""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from motet.collectives.codecs import blocks
from motet.collectives.compress import FLOAT8_LARGEST, Float8

_DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def encode(codec: Float8, tensor: Tensor) -> Tensor:
    cut = blocks.cut(tensor, codec.block)
    scales = blocks.largest(cut)
    units = blocks.ratios(cut, scales).view(-1)[: tensor.numel()]
    codes = (units * FLOAT8_LARGEST[codec.format]).to(_DTYPES[codec.format])
    return blocks.join(scales, codes.view(torch.uint8))


def decode(codec: Float8, message: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    scales, codes = blocks.split(message, prod(shape), codec.block)
    units = codes.view(_DTYPES[codec.format]).to(torch.float32) / FLOAT8_LARGEST[codec.format]
    return blocks.scaled(units, scales, codec.block, shape, dtype)
