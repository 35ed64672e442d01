"""Parameters that are not trained, in the dtype that a recipe computes in."""

import torch
from torch import nn

from motet.precision.recipe import Recipe


def cast_frozen(module: nn.Module, recipe: Recipe) -> None:
    """Parameters that are not trained go to the compute dtype; buffers stay (a rotary table needs its bits)."""
    compute = getattr(torch, recipe.compute)
    for parameter in module.parameters():
        if not parameter.requires_grad and parameter.is_floating_point():
            parameter.data = parameter.data.to(compute)
