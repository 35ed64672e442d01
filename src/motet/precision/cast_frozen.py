"""Frozen parameters in the compute dtype of a recipe."""

import torch
from torch import nn

from motet.core.errors import check_input
from motet.precision.recipe import PrecisionRecipe
from motet.precision.torch_private import NormBase


def cast_frozen_parameters(module: nn.Module, recipe: PrecisionRecipe) -> None:
    """Cast frozen parameters and the running statistics of norms to the compute dtype.
    Other buffers keep their dtype, since a rotary table needs its bits."""
    compute = getattr(torch, recipe.compute)
    for name, norm in module.named_modules():
        if isinstance(norm, NormBase) and norm.running_mean is not None:
            check_input(
                compute.itemsize >= 4,
                f"{type(norm).__name__} {name!r} keeps running statistics, which need more than the "
                f"{recipe.compute} of the weights that it computes with; use precision fp32, or a norm without "
                "statistics",
            )
            for key in ("running_mean", "running_var"):
                norm.register_buffer(key, norm.get_buffer(key).to(compute))
    for parameter in module.parameters():
        if not parameter.requires_grad and parameter.is_floating_point():
            parameter.data = parameter.data.to(compute)
