"""One bit per element, set where it is not negative, and the mean magnitude of each block.

Eight elements share a byte, the first one in its lowest bit.
"""

from collections.abc import Sequence
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from motet.collectives.codecs import blocks
from motet.collectives.compress import Sign


def encode(codec: Sign, tensor: Tensor) -> Tensor:
    cut = blocks.cut(tensor, codec.block)
    starts = torch.arange(len(cut), device=cut.device) * cut.shape[1]
    lengths = (tensor.numel() - starts).clamp(max=cut.shape[1]).view(-1, 1)
    scales = (cut.abs() / lengths).sum(1, keepdim=True)  # divided first: the sum alone may overflow
    bits = (tensor.reshape(-1) >= 0).to(torch.uint8)
    bits = F.pad(bits, (0, -bits.numel() % 8)).view(-1, 8)
    return blocks.join(blocks.finite_or_nan(scales), (bits << _shifts(bits)).sum(1, dtype=torch.uint8))


def decode(codec: Sign, message: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    scales, packed = blocks.split(message, prod(shape), codec.block)
    bits = packed.view(-1, 1) >> _shifts(packed) & 1
    units = bits.view(-1)[: prod(shape)].to(torch.float32) * 2 - 1
    return blocks.scaled(units, scales, codec.block, shape, dtype)


def _shifts(like: Tensor) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=like.device)
