"""The codecs of a fixed number of bits per element, with a scale per block: int8, int4, sign and float8.

Integers: each element becomes the nearest level, or unbiased one of the two next to it at random. A code is 0 to 2n,
with n = 2**(bits - 1) - 1; code n is zero, codes 0 and 2n are the largest magnitude of the block. Two codes of int4
share a byte, the first one in its low half.
"""

from dataclasses import dataclass
from functools import cache
from statistics import NormalDist
from typing import Literal

from motet.collectives.compression import lazy_torch as torch
from motet.collectives.compression.codec_base import BlockwiseCodec, finite_or_nan


@dataclass(frozen=True)
class IntegerCodec(BlockwiseCodec):
    """Each element becomes the index of a level between minus and plus the largest magnitude of its block."""

    rounding: Literal["nearest", "stochastic"] = "nearest"
    levels: Literal["uniform", "quantile"] = "uniform"

    @property
    def _max_level(self) -> int:
        return (1 << self.bits - 1) - 1

    def units_to_codes(self, units: "torch.Tensor", seed: int) -> "torch.Tensor":
        positions = self._level_positions(units) if self.levels == "quantile" else units * self._max_level
        if self.rounding == "stochastic":
            generator = torch.Generator(units.device).manual_seed(seed)
            positions = (positions + torch.rand(positions.shape, generator=generator, device=units.device)).floor_()
        codes = positions.round().clamp_(-self._max_level, self._max_level).add_(self._max_level).to(torch.uint8)
        if self.bits == 8:
            return codes
        pairs = torch.nn.functional.pad(codes, (0, codes.numel() % 2)).view(-1, 2)
        return pairs[:, 0] | pairs[:, 1] << 4

    def codes_to_units(self, codes: "torch.Tensor", numel: int) -> "torch.Tensor":
        if self.bits == 4:
            codes = torch.stack([codes & 15, codes >> 4], 1).view(-1)[:numel]
        if self.levels == "quantile":
            return self._level_values(codes.device).index_select(0, codes.int())
        return (codes.to(torch.float32) - self._max_level) / self._max_level

    def _level_values(self, device: "torch.device") -> "torch.Tensor":
        return torch.tensor(quantile_levels(self.bits), dtype=torch.float32, device=device)

    def _level_positions(self, units: "torch.Tensor") -> "torch.Tensor":
        """Positions between the levels: 1.25 is a quarter of the way from level 1 to level 2 above zero."""
        levels = self._level_values(units.device)
        below = torch.bucketize(units, levels[1:-1], right=True)
        lower, upper = levels[below], levels[below + 1]
        return (units - lower) / (upper - lower) + (below - self._max_level)


@dataclass(frozen=True)
class Int8Codec(IntegerCodec):
    """Eight bits per element."""

    name = "int8"
    bits = 8


@dataclass(frozen=True)
class Int4Codec(IntegerCodec):
    """Four bits per element."""

    name = "int4"
    bits = 4
    block: int = 64


@cache
def quantile_levels(bits: int) -> tuple[float, ...]:
    """Levels that normally distributed numbers use equally often: odd in number, symmetric, from -1 over 0 to 1.

    They are the medians of 2**bits - 1 equally likely parts of the normal distribution.
    """
    half = 2 ** (bits - 1) - 1
    upper = [NormalDist().inv_cdf(0.5 + i / (2 * half + 1)) for i in range(1, half + 1)]
    upper = [level / upper[-1] for level in upper]
    return (*(-level for level in reversed(upper)), 0.0, *upper)


@dataclass(frozen=True)
class SignCodec(BlockwiseCodec):
    """The sign of each element; the scale is the mean magnitude of its block."""

    name = "sign"
    bits = 1
    block: int = 1024

    def scale_to_units(self, tensor: "torch.Tensor") -> "tuple[torch.Tensor, torch.Tensor]":
        blocks = self.to_blocks(tensor)
        starts = torch.arange(len(blocks), device=blocks.device) * blocks.shape[1]
        lengths = (tensor.numel() - starts).clamp(max=blocks.shape[1]).view(-1, 1)
        scales = (blocks.abs() / lengths).sum(1, keepdim=True)  # divided first: the sum alone may overflow
        return tensor.reshape(-1), finite_or_nan(scales)

    def units_to_codes(self, units: "torch.Tensor", seed: int) -> "torch.Tensor":
        bits = (units >= 0).to(torch.uint8)
        bits = torch.nn.functional.pad(bits, (0, -bits.numel() % 8)).view(-1, 8)
        return (bits << torch.arange(8, dtype=torch.uint8, device=bits.device)).sum(1, dtype=torch.uint8)

    def codes_to_units(self, codes: "torch.Tensor", numel: int) -> "torch.Tensor":
        bits = codes.view(-1, 1) >> torch.arange(8, dtype=torch.uint8, device=codes.device) & 1
        return bits.view(-1)[:numel].to(torch.float32) * 2 - 1


# Name of torch's dtype, and the largest finite number of the format.
_FORMATS = {"e4m3": ("float8_e4m3fn", 448.0), "e5m2": ("float8_e5m2", 57344.0)}


@dataclass(frozen=True)
class Float8Codec(BlockwiseCodec):
    """Scaled so that the largest magnitude of a block becomes the largest finite number of the format."""

    name = "float8"
    bits = 8
    format: Literal["e4m3", "e5m2"] = "e4m3"

    def units_to_codes(self, units: "torch.Tensor", seed: int) -> "torch.Tensor":
        name, largest = _FORMATS[self.format]
        return (units * largest).to(getattr(torch, name)).view(torch.uint8)

    def codes_to_units(self, codes: "torch.Tensor", numel: int) -> "torch.Tensor":
        name, largest = _FORMATS[self.format]
        return codes.view(getattr(torch, name)).to(torch.float32) / largest
