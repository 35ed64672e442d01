"""The activations by name, and act(gate) * up with a backward of its own.

Autograd would keep and re-read four tensors and add two zero-padded halves; here the input alone is kept and both
halves of its gradient are written in place (measured, 4096 x 688 on one thread: 12 ms instead of 19-33 in float32).
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from motet.models.settings import ActivationName

_aten = torch.ops.aten


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _gelu_tanh_backward(grad: Tensor, x: Tensor) -> Tensor:
    result: Tensor = _aten.gelu_backward(grad, x, approximate="tanh")
    return result


def _relu_backward(grad: Tensor, x: Tensor) -> Tensor:
    result: Tensor = _aten.threshold_backward(grad, x, 0)
    return result


def _relu_squared(x: Tensor) -> Tensor:
    return F.relu(x).square()


def _relu_squared_backward(grad: Tensor, x: Tensor) -> Tensor:
    return F.relu(x).mul_(grad).mul_(2)


_Backward = Callable[[Tensor, Tensor], Tensor]
# Name -> the function, and the gradient of its input from that of its output and its input.
ACTIVATIONS: dict[ActivationName, tuple[Callable[[Tensor], Tensor], _Backward]] = {
    "silu": (F.silu, _aten.silu_backward),
    "gelu": (F.gelu, _aten.gelu_backward),
    "gelu_tanh": (_gelu_tanh, _gelu_tanh_backward),
    "relu": (F.relu, _relu_backward),
    "relu_squared": (_relu_squared, _relu_squared_backward),
}


def apply_activation(x: Tensor, name: ActivationName) -> Tensor:
    return ACTIVATIONS[name][0](x)


def gated_activation(x: Tensor, name: ActivationName) -> Tensor:
    """[..., 2 F] holding gate and up -> act(gate) * up, [..., F]."""
    y: Tensor = _GatedActivationFunction.apply(x, name)  # type: ignore[no-untyped-call]  # torch's
    return y


class _GatedActivationFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: ActivationName) -> Tensor:
        ctx.save_for_backward(x)
        ctx.name = name
        gate, up = x.chunk(2, -1)
        # A row whose length is no multiple of the vector width is slow unless rows lie end to end: copy first.
        return ACTIVATIONS[name][0](gate.contiguous()).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        function, gradient = ACTIVATIONS[ctx.name]
        gate, up = x.chunk(2, -1)
        gate = gate.contiguous()
        result = torch.empty_like(x)
        grad_gate, grad_up = result.chunk(2, -1)
        torch.mul(grad, function(gate), out=grad_up)
        grad_gate.copy_(gradient(grad * up, gate))
        return result, None
