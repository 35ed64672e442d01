"""One bit per element, set if the element is not negative, and the mean magnitude of each block.

Eight elements share a byte, the first one in its lowest bit.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from motet.collectives.compression.codec_base import BlockwiseCodec

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class SignCodec(BlockwiseCodec):
    """The sign of each element; the scale is the mean magnitude of its block."""

    name = "sign"
    bits = 1
    block: int = 1024

    def encode(self, tensor: "Tensor", seed: int) -> "Tensor":
        import torch

        from motet.collectives.compression import block_scaling

        blocks = block_scaling.to_blocks(tensor, self.block)
        starts = torch.arange(len(blocks), device=blocks.device) * blocks.shape[1]
        lengths = (tensor.numel() - starts).clamp(max=blocks.shape[1]).view(-1, 1)
        scales = (blocks.abs() / lengths).sum(1, keepdim=True)  # divided first: the sum alone may overflow
        codes = self.units_to_codes(tensor.reshape(-1), seed)
        return block_scaling.pack_message(block_scaling.finite_or_nan(scales), codes)

    def units_to_codes(self, units: "Tensor", seed: int) -> "Tensor":
        import torch
        import torch.nn.functional as F

        bits = (units >= 0).to(torch.uint8)
        bits = F.pad(bits, (0, -bits.numel() % 8)).view(-1, 8)
        return (bits << torch.arange(8, dtype=torch.uint8, device=bits.device)).sum(1, dtype=torch.uint8)

    def codes_to_units(self, codes: "Tensor", numel: int) -> "Tensor":
        import torch

        bits = codes.view(-1, 1) >> torch.arange(8, dtype=torch.uint8, device=codes.device) & 1
        return bits.view(-1)[:numel].to(torch.float32) * 2 - 1
