"""One bit per element, set where it is not negative, and the mean magnitude of each block.

Eight elements share a byte, the first one in its lowest bit.
"""

from collections.abc import Sequence
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from motet.collectives.compression import block_scaling
from motet.collectives.compression.codec_options import SignCodecOptions


def encode(codec: SignCodecOptions, tensor: Tensor) -> Tensor:
    blocked = block_scaling.to_blocks(tensor, codec.block)
    starts = torch.arange(len(blocked), device=blocked.device) * blocked.shape[1]
    lengths = (tensor.numel() - starts).clamp(max=blocked.shape[1]).view(-1, 1)
    scales = (blocked.abs() / lengths).sum(1, keepdim=True)  # divided first: the sum alone may overflow
    bits = (tensor.reshape(-1) >= 0).to(torch.uint8)
    bits = F.pad(bits, (0, -bits.numel() % 8)).view(-1, 8)
    return block_scaling.pack_message(
        block_scaling.finite_or_nan(scales), (bits << _shifts(bits)).sum(1, dtype=torch.uint8)
    )


def decode(codec: SignCodecOptions, message: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    scales, packed = block_scaling.unpack_message(message, prod(shape), codec.block)
    bits = packed.view(-1, 1) >> _shifts(packed) & 1
    units = bits.view(-1)[: prod(shape)].to(torch.float32) * 2 - 1
    return block_scaling.multiply_by_scales(units, scales, codec.block, shape, dtype)


def _shifts(like: Tensor) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=like.device)
