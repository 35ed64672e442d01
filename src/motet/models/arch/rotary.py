"""Rotary positions: each pair of neighbouring components of a head is turned by an angle that grows with the position.

The pairs are (0, 1), (2, 3), ..., so that turning is one complex product. Models that pair the first half of a head
with the second (transformers' Llama does) have the same rows of their query and key projections in another order.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from motet.models.settings import RopeScalingSettings


@dataclass(frozen=True)
class RotaryEmbedding:
    """How fast each pair turns."""

    rotary_dims: int  # The first so many components of a head are turned; even
    theta: float
    scaling: RopeScalingSettings | None = None

    def rotations_at(self, positions: Tensor, dtype: torch.dtype) -> Tensor:
        """[..., T] positions -> [..., T, 1, dims / 2] unit complex numbers, good for activations of `dtype`.

        Made once per forward. Angles are computed in float64: a float32 angle at position 100,000 is off by 0.004.
        """
        angles = positions.to(torch.float64).unsqueeze(-1) * self._frequencies(positions.device)
        rotations = torch.polar(torch.ones_like(angles), angles)
        return rotations.to(torch.promote_types(dtype, torch.float32).to_complex()).unsqueeze(-2)

    def _frequencies(self, device: torch.device) -> Tensor:
        """[dims / 2] radians per position."""
        exponents = torch.arange(0, self.rotary_dims, 2, dtype=torch.float64, device=device) / self.rotary_dims
        frequencies = self.theta**-exponents
        return frequencies if self.scaling is None else _scale_frequencies(frequencies, self.scaling)


def apply_rotary(heads: Tensor, rotations: Tensor) -> Tensor:
    """[..., T, heads, head_dim], turned by the table of their positions; components beyond it pass through."""
    dims = 2 * rotations.shape[-1]
    if dims < heads.shape[-1]:
        return torch.cat((apply_rotary(heads[..., :dims], rotations), heads[..., dims:]), -1)
    wide = heads.to(torch.promote_types(heads.dtype, torch.float32))
    rotated = torch.view_as_complex(wide.unflatten(-1, (-1, 2))) * rotations
    return torch.view_as_real(rotated).flatten(-2).to(heads.dtype)


def _scale_frequencies(frequencies: Tensor, s: RopeScalingSettings) -> Tensor:
    """Llama 3.1: wavelengths beyond original / low are stretched by `factor`, those below original / high are kept."""
    rotations_per_context = s.original_context * frequencies / (2 * math.pi)
    unscaled_fraction = (rotations_per_context - s.low_frequency_factor) / (
        s.high_frequency_factor - s.low_frequency_factor
    )
    unscaled_fraction = unscaled_fraction.clamp(0, 1)
    return frequencies * (unscaled_fraction + (1 - unscaled_fraction) / s.factor)
