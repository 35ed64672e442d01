"""The activations by name, and act(gate) * up with a custom backward.
Autograd would keep and read again four tensors and add two zero-padded halves. The custom backward keeps the input only
and writes both halves of its gradient in place (measured, 4096 x 688 float32, one thread: 12 ms instead of 19-33)."""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from motet.models.settings import ActivationName

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


def kernel_device(x: Tensor) -> str:
    """The type of device whose kernels x is computed by. A step of shapes, on the meta device, is that of a CPU."""
    return "cpu" if x.is_meta else x.device.type


def apply_activation(x: Tensor, name: ActivationName) -> Tensor:
    return ACTIVATIONS[name][0](x)


def gated_activation(x: Tensor, name: ActivationName) -> Tensor:
    """[..., 2 F] holding gate and up -> act(gate) * up, [..., F]."""
    return cast(Tensor, _GatedActivationFunction.apply(x, name))  # type: ignore[no-untyped-call]  # untyped in torch


class _GatedActivationFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: ActivationName) -> Tensor:
        ctx.save_for_backward(x)
        ctx.name = name
        gate, up = x.chunk(2, -1)
        # A row whose length is no multiple of the vector width is slow unless rows are contiguous: copy first.
        return ACTIVATIONS[name][0](gate.contiguous()).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        function, gradient = ACTIVATIONS[ctx.name]
        gate, up = x.chunk(2, -1)
        gate, result = gate.contiguous(), torch.empty_like(x)
        grad_gate, grad_up = result.chunk(2, -1)
        torch.mul(grad, function(gate), out=grad_up)
        grad_gate.copy_(gradient(grad * up, gate))
        return result, None
