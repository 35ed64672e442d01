"""One bit per element, set if the element is not negative, and the mean magnitude of each block.

Eight elements share a byte, the first one in its lowest bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from motet.collectives.compression.codec_base import BlockwiseCodec

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class SignCodec(BlockwiseCodec):
    """The sign of each element; the scale is the mean magnitude of its block."""

    name = "sign"
    bits = 1
    block: int = 1024

    def encode(self, tensor: "Tensor", seed: int) -> "Tensor":
        import torch
        import torch.nn.functional as F

        from motet.collectives.compression import block_scaling

        blocks = block_scaling.to_blocks(tensor, self.block)
        starts = torch.arange(len(blocks), device=blocks.device) * blocks.shape[1]
        lengths = (tensor.numel() - starts).clamp(max=blocks.shape[1]).view(-1, 1)
        scales = (blocks.abs() / lengths).sum(1, keepdim=True)  # divided first: the sum alone may overflow
        bits = (tensor.reshape(-1) >= 0).to(torch.uint8)
        bits = F.pad(bits, (0, -bits.numel() % 8)).view(-1, 8)
        codes = (bits << torch.arange(8, dtype=torch.uint8, device=bits.device)).sum(1, dtype=torch.uint8)
        return block_scaling.pack_message(block_scaling.finite_or_nan(scales), codes)

    def decode(self, message: "Tensor", shape: Sequence[int], dtype: "torch.dtype", seed: int) -> "Tensor":
        import torch

        from motet.collectives.compression import block_scaling

        scales, packed = block_scaling.unpack_message(message, prod(shape), self.block)
        bits = packed.view(-1, 1) >> torch.arange(8, dtype=torch.uint8, device=packed.device) & 1
        units = bits.view(-1)[: prod(shape)].to(torch.float32) * 2 - 1
        return block_scaling.multiply_by_scales(units, scales, self.block, shape, dtype)
