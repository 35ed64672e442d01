"""Activation functions, norms and rotary embeddings.

The activations by name, and act(gate) * up with a custom backward.
Autograd would keep and read again four tensors and add two zero-padded halves. The custom backward keeps the input only
and writes both halves of its gradient in place.

RMS and layer norms whose statistics are in float32 at least.
On a CPU torch runs an RMS norm as many passes; here forward and backward take one each.

Rotary positions: each pair of adjacent components of a head is rotated by an angle that grows with the position.
The pairs are (0, 1), (2, 3), ..., so a complex product rotates all of them. Models that pair the two halves of a head,
as transformers' Llama does, have the same rows of their query and key projections in another order.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from motet.models.kernels.autograd_backward import single_backward
from motet.models.kernels.choice import Implementation, chosen, in_triton, kernel_device
from motet.models.settings import ActivationName, RopeScalingSettings, TransformerSettings
from motet.models.torch_private import runs_forward_alone

_aten = torch.ops.aten

# Name -> the function, and the gradient of its input from the gradient of its output and its input.
ACTIVATIONS: dict[ActivationName, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "silu": (F.silu, _aten.silu_backward),
    "gelu": (F.gelu, _aten.gelu_backward),
    "gelu_tanh": (partial(F.gelu, approximate="tanh"), partial(_aten.gelu_backward, approximate="tanh")),
    "relu": (F.relu, partial(_aten.threshold_backward, threshold=0)),
    "relu_squared": (lambda x: F.relu(x).square(), lambda grad, x: F.relu(x).mul_(grad).mul_(2)),
}


def accumulation_dtype(x: Tensor) -> torch.dtype:
    """The dtype of x, but float32 at least: for statistics, scores and losses."""
    return torch.promote_types(x.dtype, torch.float32)


def apply_activation(x: Tensor, name: ActivationName) -> Tensor:
    return ACTIVATIONS[name][0](x)


def gated_activation(x: Tensor, name: ActivationName) -> Tensor:
    """[..., 2 F] holding gate and up -> act(gate) * up, [..., F]."""
    return _GATED_ACTIVATION[chosen("gated_activation", x)](x, name)


def _plain_gated_activation(x: Tensor, name: ActivationName) -> Tensor:
    gate, up = x.chunk(2, -1)
    return ACTIVATIONS[name][0](gate) * up


class _GatedActivationFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: ActivationName) -> Tensor:
        ctx.save_for_backward(x)
        ctx.name = name
        gate, up = x.chunk(2, -1)
        # A row whose length is not a multiple of the vector width is slow unless rows are contiguous: copy first.
        return ACTIVATIONS[name][0](gate.contiguous()).mul_(up)

    @staticmethod
    @single_backward
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        function, gradient = ACTIVATIONS[ctx.name]
        gate, up = x.chunk(2, -1)
        gate, result = gate.contiguous(), torch.empty_like(x)
        grad_gate, grad_up = result.chunk(2, -1)
        torch.mul(grad, function(gate), out=grad_up)
        grad_gate.copy_(gradient(grad * up, gate))
        return result, None


_GATED_ACTIVATION: dict[Implementation, Callable[[Tensor, ActivationName], Tensor]] = {
    "plain": _plain_gated_activation,
    "cpu": _GatedActivationFunction.apply,
    "triton": in_triton("triton_gate", "gated_activation"),
}


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(variance + eps) * weight + bias."""

    def __init__(self, size: int, eps: float, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size)) if bias else None
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        # With 16-bit weights torch's CPU kernel would also keep the statistics for backward in 16 bits.
        dtype = accumulation_dtype(x) if kernel_device(x) == "cpu" else self.weight.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        return F.layer_norm(x, self.weight.shape, self.weight.to(dtype), bias, self.eps)


def build_norm(s: TransformerSettings, *, bias: bool) -> nn.Module:
    """A norm of the residual stream."""
    return RMSNorm(s.hidden, s.norm_eps) if s.norm == "rms" else LayerNorm(s.hidden, s.norm_eps, bias)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The norm over the last dim."""
    return _RMS_NORM[chosen("rms_norm", x)](x, weight, eps)


def _plain_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.to(accumulation_dtype(x))
    return (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * weight).to(x.dtype)


class _RMSNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        norms = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=accumulation_dtype(x))
        rstd = norms.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, rstd)
        return torch.mul(x, rstd).mul_(weight).to(x.dtype)

    @staticmethod
    @single_backward
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        # A layer norm with mean 0 has this gradient except for one term, which is added back.
        x, weight, rstd = ctx.saved_tensors
        grad, wide_weight = grad.contiguous(), weight.to(rstd.dtype)
        grad_x, grad_weight, _ = torch.ops.aten.native_layer_norm_backward(
            grad, x, weight.shape, torch.zeros_like(rstd), rstd, wide_weight, None, [*ctx.needs_input_grad[:2], False]
        )
        if grad_x is not None:
            mean = (grad.to(wide_weight.dtype) @ wide_weight).unsqueeze(-1).mul_(rstd).div_(weight.numel())
            grad_x.add_(mean.to(grad_x.dtype))
        return grad_x, None if grad_weight is None else grad_weight.to(weight.dtype), None


_RMS_NORM: dict[Implementation, Callable[[Tensor, Tensor, float], Tensor]] = {
    "plain": _plain_rms_norm,
    "cpu": _RMSNormFunction.apply,
    "torch": lambda x, weight, eps: F.rms_norm(x, weight.shape, weight, eps),
    "triton": in_triton("triton_norm", "rms_norm"),
}


def add_norm(x: Tensor, y: Tensor, norm: nn.Module) -> tuple[Tensor, Tensor]:
    """x + y and its norm: one kernel where the table has one, if a call of the norm would run nothing else."""
    is_one_kernel = chosen("add_rms_norm", x) == "triton" and type(norm) is RMSNorm and runs_forward_alone(norm)
    if is_one_kernel and x.dtype == y.dtype and x.shape == y.shape:
        return cast(tuple[Tensor, Tensor], _ADD_RMS_NORM(x, y, norm.weight, eps=norm.eps))
    total = x + y
    del x, y
    return total, norm(total)


_ADD_RMS_NORM = in_triton("triton_norm", "add_rms_norm")


@dataclass(frozen=True)
class RotaryEmbedding:
    """The rotation of each pair by position."""

    rotary_dims: int  # Components of a head that are rotated, from the first; even
    theta: float
    scaling: RopeScalingSettings | None = None

    def rotations_at(self, positions: Tensor, dtype: torch.dtype) -> Tensor:
        """[..., T] positions -> [..., T, 1, dims / 2, 2] cosines and sines, precise enough for activations of `dtype`.
        Called once per forward. Angles are in float64: a float32 angle at position 100,000 is off by 0.004."""
        dims = self.rotary_dims
        frequencies = self.theta ** -(torch.arange(0, dims, 2, dtype=torch.float64, device=positions.device) / dims)
        if self.scaling is not None:
            frequencies = _scale_frequencies(frequencies, self.scaling)
        angles = positions.to(torch.float64).unsqueeze(-1) * frequencies
        rotations = torch.view_as_real(torch.polar(torch.ones_like(angles), angles))
        return rotations.to(torch.promote_types(dtype, torch.float32)).unsqueeze(-3)


def apply_rotary(heads: Tensor, rotations: Tensor) -> Tensor:
    """[..., T, heads, head_dim], rotated by the rotations of their positions; further components pass through."""
    dims, implementation = 2 * rotations.shape[-2], chosen("rotary", heads)
    if dims < heads.shape[-1] and implementation != "triton":
        return torch.cat((apply_rotary(heads[..., :dims], rotations), heads[..., dims:]), -1)
    return _ROTARY[implementation](heads, rotations)


def _plain_rotary(heads: Tensor, rotations: Tensor) -> Tensor:
    cos, sin = rotations.unbind(-1)
    first, second = heads.to(accumulation_dtype(heads)).unflatten(-1, (-1, 2)).unbind(-1)
    rotated = torch.stack((first * cos - second * sin, first * sin + second * cos), -1)
    return rotated.flatten(-2).to(heads.dtype)


def _complex_rotary(heads: Tensor, rotations: Tensor) -> Tensor:
    """The same as one complex product: equal bits in one pass."""
    pairs = heads.to(accumulation_dtype(heads)).unflatten(-1, (-1, 2))
    if pairs.storage_offset() % 2 or any(stride % 2 for stride in pairs.stride()[:-1]):  # A part of odd heads
        pairs = pairs.contiguous()
    rotated = torch.view_as_complex(pairs) * torch.view_as_complex(rotations)
    return torch.view_as_real(rotated).flatten(-2).to(heads.dtype)


_ROTARY: dict[Implementation, Callable[[Tensor, Tensor], Tensor]] = {
    "plain": _plain_rotary,
    "torch": _complex_rotary,
    "triton": in_triton("triton_rotary", "rotary"),
}


def _scale_frequencies(frequencies: Tensor, s: RopeScalingSettings) -> Tensor:
    """Llama 3.1 stretches wavelengths beyond original / low by `factor` and keeps those below original / high."""
    rotations = s.original_context * frequencies / (2 * math.pi)
    span = s.high_frequency_factor - s.low_frequency_factor
    unscaled = ((rotations - s.low_frequency_factor) / span).clamp(0, 1)
    return frequencies * (unscaled + (1 - unscaled) / s.factor)
