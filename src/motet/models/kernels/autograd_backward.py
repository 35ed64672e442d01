"""Backwards of autograd functions that are computed without a graph, and so cannot be differentiated again."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.autograd.function import once_differentiable


def single_backward(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Torch's `once_differentiable`, without its cost where a backward is not itself differentiated. Without either, a
    second derivative would miss the terms that kernels hide from autograd."""
    checked = once_differentiable(backward)

    @wraps(backward)
    def run(ctx: Any, *gradients: Any) -> Any:
        return (checked if torch.is_grad_enabled() else backward)(ctx, *gradients)

    return run
