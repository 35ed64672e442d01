"""float8 with a scale per block, rounded to the nearest number of the format."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from motet.collectives.compression.codec_base import BlockwiseCodec

if TYPE_CHECKING:
    from torch import Tensor

# Name of torch's dtype, and the largest finite number of the format.
_FORMATS = {"e4m3": ("float8_e4m3fn", 448.0), "e5m2": ("float8_e5m2", 57344.0)}


@dataclass(frozen=True)
class Float8Codec(BlockwiseCodec):
    """Scaled so that the largest magnitude of a block becomes the largest finite number of the format."""

    name = "float8"
    bits = 8
    format: Literal["e4m3", "e5m2"] = "e4m3"

    def units_to_codes(self, units: "Tensor", seed: int) -> "Tensor":
        import torch

        float8_dtype, largest = _FORMATS[self.format]
        return (units * largest).to(getattr(torch, float8_dtype)).view(torch.uint8)

    def codes_to_units(self, codes: "Tensor", numel: int) -> "Tensor":
        import torch

        float8_dtype, largest = _FORMATS[self.format]
        return codes.view(getattr(torch, float8_dtype)).to(torch.float32) / largest
