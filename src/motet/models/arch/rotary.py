"""Rotary positions: each pair of adjacent components of a head is rotated by an angle that grows with the position.
The pairs are (0, 1), (2, 3), ..., so a rotation is one complex product. Models that pair the two halves of a head, as
transformers' Llama does, have the same rows of their query and key projections in another order."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from motet.models.arch.activations import accumulation_dtype
from motet.models.settings import RopeScalingSettings


@dataclass(frozen=True)
class RotaryEmbedding:
    """The rotation of each pair by position."""

    rotary_dims: int  # Components of a head that are rotated, from the first; even
    theta: float
    scaling: RopeScalingSettings | None = None

    def rotations_at(self, positions: Tensor, dtype: torch.dtype) -> Tensor:
        """[..., T] positions -> [..., T, 1, dims / 2] unit complex numbers, precise enough for activations of `dtype`.
        Called once per forward. Angles are in float64: a float32 angle at position 100,000 is off by 0.004."""
        dims = self.rotary_dims
        frequencies = self.theta ** -(torch.arange(0, dims, 2, dtype=torch.float64, device=positions.device) / dims)
        if self.scaling is not None:
            frequencies = _scale_frequencies(frequencies, self.scaling)
        angles = positions.to(torch.float64).unsqueeze(-1) * frequencies
        rotations = torch.polar(torch.ones_like(angles), angles)
        return rotations.to(torch.promote_types(dtype, torch.float32).to_complex()).unsqueeze(-2)


def apply_rotary(heads: Tensor, rotations: Tensor) -> Tensor:
    """[..., T, heads, head_dim], rotated by the rotations of their positions; further components pass through."""
    dims = 2 * rotations.shape[-1]
    if dims < heads.shape[-1]:
        return torch.cat((apply_rotary(heads[..., :dims], rotations), heads[..., dims:]), -1)
    rotated = torch.view_as_complex(heads.to(accumulation_dtype(heads)).unflatten(-1, (-1, 2))) * rotations
    return torch.view_as_real(rotated).flatten(-2).to(heads.dtype)


def _scale_frequencies(frequencies: Tensor, s: RopeScalingSettings) -> Tensor:
    """Llama 3.1 stretches wavelengths beyond original / low by `factor` and keeps those below original / high."""
    rotations = s.original_context * frequencies / (2 * math.pi)
    span = s.high_frequency_factor - s.low_frequency_factor
    unscaled = ((rotations - s.low_frequency_factor) / span).clamp(0, 1)
    return frequencies * (unscaled + (1 - unscaled) / s.factor)
