"""act(gate) * up in Triton, for a tensor that holds gate and up, in one pass forward and one backward."""

from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from motet.models.kernels.autograd_backward import single_backward
from motet.models.settings import ActivationName

_WIDTH = 1024  # Columns of a row that a program computes; assumed


@triton.jit
def activate(x, name: tl.constexpr):
    """act(x)."""
    if name == "silu":
        return x / (1 + tl.exp(-x))
    if name == "gelu":
        return 0.5 * x * (1 + tl.erf(x * 0.70710678118654752440))
    if name == "gelu_tanh":  # (1 + tanh(u)) / 2 is the sigmoid of 2 u
        return x / (1 + tl.exp(-1.59576912160573071176 * (x + 0.044715 * x * x * x)))
    rectified = tl.where(x <= 0, 0.0, x)
    return rectified if name == "relu" else rectified * rectified


@triton.jit
def activation_slope(x, name: tl.constexpr):
    """The derivative of act at x."""
    if name == "silu":
        share = 1 / (1 + tl.exp(-x))
        return share * (1 + x * (1 - share))
    if name == "gelu":
        density = 0.39894228040143267794 * tl.exp(-0.5 * x * x)
        return 0.5 * (1 + tl.erf(x * 0.70710678118654752440)) + x * density
    if name == "gelu_tanh":
        share = 1 / (1 + tl.exp(-1.59576912160573071176 * (x + 0.044715 * x * x * x)))
        return share + x * share * (1 - share) * 1.59576912160573071176 * (1 + 0.134145 * x * x)
    return tl.where(x <= 0, 0.0, 1.0 if name == "relu" else 2 * x)


@triton.jit
def gate_forward(x, out, size, name: tl.constexpr, wide: tl.constexpr, width: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * width + tl.arange(0, width)
    gate = tl.load(x + row * 2 * size + column, mask=column < size, other=0.0).to(wide)
    up = tl.load(x + row * 2 * size + size + column, mask=column < size, other=0.0).to(wide)
    result = activate(gate, name) * up
    tl.store(out + row * size + column, result.to(out.dtype.element_ty), mask=column < size)


@triton.jit
def gate_backward(grad, x, grad_x, size, name: tl.constexpr, wide: tl.constexpr, width: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * width + tl.arange(0, width)
    inside = column < size
    at = row * 2 * size + column
    slope = tl.load(grad + row * size + column, mask=inside, other=0.0).to(wide)
    gate, up = tl.load(x + at, mask=inside, other=0.0).to(wide), tl.load(x + at + size, mask=inside, other=0.0).to(wide)
    grad_gate, grad_up = slope * up * activation_slope(gate, name), slope * activate(gate, name)
    tl.store(grad_x + at, grad_gate.to(grad_x.dtype.element_ty), mask=inside)
    tl.store(grad_x + at + size, grad_up.to(grad_x.dtype.element_ty), mask=inside)


def _launch(kernel: Any, x: Tensor, *tensors: Tensor, name: ActivationName) -> None:
    """Start a kernel whose last tensors but one is x [..., 2 F]."""
    size = x.shape[-1] // 2
    rows = x.numel() // max(1, 2 * size)
    if rows * size:
        width = min(_WIDTH, triton.next_power_of_2(size))
        wide = tl.float64 if x.dtype == torch.float64 else tl.float32
        kernel[rows, triton.cdiv(size, width)](*tensors, size, name=name, wide=wide, width=width)


class _TritonGate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: ActivationName) -> Tensor:
        ctx.name, x = name, x.contiguous()
        ctx.save_for_backward(x)
        out = x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
        _launch(gate_forward, x, x, out, name=name)
        return out

    @staticmethod
    @single_backward
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        grad_x = torch.empty_like(x)
        _launch(gate_backward, x, grad.contiguous(), x, grad_x, name=ctx.name)
        return grad_x, None


def gated_activation(x: Tensor, name: ActivationName) -> Tensor:
    """[..., 2 F] holding gate and up -> act(gate) * up, [..., F]."""
    return cast(Tensor, _TritonGate.apply(x, name))  # type: ignore[no-untyped-call]  # untyped in torch
