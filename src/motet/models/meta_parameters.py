"""Modules whose parameters have no memory, although they are made by code that knows nothing of it."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Inside, a parameter moves to the meta device when a module registers it. Buffers keep their values.

    Drawing a normal distribution there would run, and import, much of torch's compiler.
    """
    register, draw_normal = nn.Module.register_parameter, Tensor.normal_

    def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if type(param) is nn.Parameter:
            set_values(param, torch.empty_like(param, device="meta"))
        register(module, name, param)

    def normal_unless_on_meta(tensor: Tensor, *args: Any, **named: Any) -> Tensor:
        return tensor if tensor.is_meta else draw_normal(tensor, *args, **named)

    with (
        patch.object(nn.Module, "register_parameter", register_on_meta),
        patch.object(Tensor, "normal_", normal_unless_on_meta),
    ):
        yield


@contextmanager
def no_initial_values() -> Iterator[None]:
    """Inside, torch's layers draw no values, which are drawn elsewhere."""
    names = ("normal_", "uniform_", "kaiming_uniform_", "xavier_uniform_")
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(patch.object(nn.init, name, lambda tensor, *_, **__: tensor))
        yield


def set_values(parameter: nn.Parameter, values: Tensor) -> None:
    """Let a parameter have this memory, wherever it is referred to; it may move to the meta device, or from there."""
    if parameter.is_meta != values.is_meta:
        attributes = vars(parameter)
        torch.utils.swap_tensors(parameter, nn.Parameter(values.new_empty(0), requires_grad=parameter.requires_grad))
        vars(parameter).update(attributes)
    parameter.data, parameter.grad = values, None  # its versions are counted without those of the others
