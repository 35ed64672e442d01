"""Modules whose parameters have no memory, although they are made by code that knows nothing of it."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import nn


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Inside, a parameter moves to the meta device when a module registers it. Buffers keep their values."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if type(param) is nn.Parameter and not param.is_meta:
            param = _meta_twin(param)
        register(module, name, param)

    with patch.object(nn.Module, "register_parameter", register_on_meta):
        yield


def _meta_twin(parameter: nn.Parameter) -> nn.Parameter:
    """The same object for every module that registers the parameter, so that tied parameters stay tied."""
    twin: nn.Parameter | None = getattr(parameter, "_motet_meta_twin", None)
    if twin is None:
        twin = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
        vars(twin).update(vars(parameter))
        vars(parameter)["_motet_meta_twin"] = twin
    return twin
