"""float8 with a scale per block, rounded to the nearest number of the format."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Literal

from motet.collectives.compression.codec_base import BlockwiseCodec

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# Name of torch's dtype, and the largest finite number of the format.
_FORMATS = {"e4m3": ("float8_e4m3fn", 448.0), "e5m2": ("float8_e5m2", 57344.0)}


@dataclass(frozen=True)
class Float8Codec(BlockwiseCodec):
    """Scaled so that the largest magnitude of a block becomes the largest finite number of the format."""

    name = "float8"
    bits = 8
    format: Literal["e4m3", "e5m2"] = "e4m3"

    def encode(self, tensor: "Tensor", seed: int) -> "Tensor":
        import torch

        from motet.collectives.compression import block_scaling

        float8_dtype, largest = _FORMATS[self.format]
        units, scales = block_scaling.scale_to_units(tensor, self.block)
        codes = (units * largest).to(getattr(torch, float8_dtype))
        return block_scaling.pack_message(scales, codes.view(torch.uint8))

    def decode(self, message: "Tensor", shape: Sequence[int], dtype: "torch.dtype", seed: int) -> "Tensor":
        import torch

        from motet.collectives.compression import block_scaling

        float8_dtype, largest = _FORMATS[self.format]
        scales, codes = block_scaling.unpack_message(message, prod(shape), self.block)
        units = codes.view(getattr(torch, float8_dtype)).to(torch.float32) / largest
        return block_scaling.multiply_by_scales(units, scales, self.block, shape, dtype)
