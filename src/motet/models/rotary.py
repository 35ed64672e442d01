"""Rotary positions: each pair of neighbouring components of a head is turned by an angle that grows with the position.

The pairs are (0, 1), (2, 3), ..., so that turning is one complex product. Models that pair the first half of a head
with the second (transformers' Llama does) have the same rows of their query and key projections in another order.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from motet.models.settings import RopeScaling


@dataclass(frozen=True)
class Rotary:
    """How fast each pair turns."""

    dims: int
    """The first so many components of a head are turned; even."""
    theta: float
    scaling: RopeScaling | None = None

    def table(self, positions: Tensor, dtype: torch.dtype) -> Tensor:
        """[..., T] positions -> [..., T, 1, dims / 2] unit complex numbers, good for activations of `dtype`.

        Made once per forward. Angles are computed in float64: a float32 angle at position 100,000 is off by 0.004.
        """
        angles = positions.to(torch.float64).unsqueeze(-1) * self._frequencies(positions.device)
        turns = torch.polar(torch.ones_like(angles), angles)
        return turns.to(torch.promote_types(dtype, torch.float32).to_complex()).unsqueeze(-2)

    def _frequencies(self, device: torch.device) -> Tensor:
        """[dims / 2] radians per position."""
        exponents = torch.arange(0, self.dims, 2, dtype=torch.float64, device=device) / self.dims
        frequencies = self.theta**-exponents
        return frequencies if self.scaling is None else _stretch(frequencies, self.scaling)


def rotate(heads: Tensor, table: Tensor) -> Tensor:
    """[..., T, heads, head_dim], turned by the table of their positions; components beyond it pass through."""
    dims = 2 * table.shape[-1]
    if dims < heads.shape[-1]:
        return torch.cat((rotate(heads[..., :dims], table), heads[..., dims:]), -1)
    wide = heads.to(torch.promote_types(heads.dtype, torch.float32))
    turned = torch.view_as_complex(wide.unflatten(-1, (-1, 2))) * table
    return torch.view_as_real(turned).flatten(-2).to(heads.dtype)


def _stretch(frequencies: Tensor, s: RopeScaling) -> Tensor:
    """Llama 3.1: wavelengths beyond original / low are stretched by `factor`, those below original / high are kept."""
    turns = s.original_context * frequencies / (2 * math.pi)
    kept = (turns - s.low_frequency_factor) / (s.high_frequency_factor - s.low_frequency_factor)
    kept = kept.clamp(0, 1)
    return frequencies * (kept + (1 - kept) / s.factor)
