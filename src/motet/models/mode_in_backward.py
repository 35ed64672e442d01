"""Function modes that stay active in backward, where recomputation calls the functions of a module again."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

BACKWARDS: tuple[Any, ...] = (Tensor.backward, torch.autograd.backward)
_Differentiated = Tensor | GradientEdge | Sequence[Tensor | GradientEdge]


def backward_in_mode(
    mode: TorchFunctionMode,
    tensors: _Differentiated,
    grad_tensors: Any = None,
    *,
    inputs: Any = None,
    **more: Any,
) -> None:
    """Backward with the mode, which recomputation needs and PyTorch suspends in overridden functions."""
    grads = more.pop("gradient", grad_tensors)  # The argument's name in `Tensor.backward`
    with mode:  # Functions of edges alone are not overridden
        torch.autograd.backward(_edges(tensors), grads, inputs=None if inputs is None else _edges(inputs), **more)


def _edges(tensors: _Differentiated) -> list[GradientEdge]:
    several = (tensors,) if isinstance(tensors, Tensor | GradientEdge) else tensors
    return [get_gradient_edge(each) if isinstance(each, Tensor) else each for each in several]
