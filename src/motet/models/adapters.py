"""Frozen parameters, and low-rank adapters on linear layers.
An adapter adds two parameters to its linear layer, `<linear>.adapter_a` and `<linear>.adapter_b`; the names and values
of all others stay. B is zero at first, so an adapted model computes what it did before."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from motet.models.parameter_values import draw_values, whole_box
from motet.models.settings import AdapterSettings, TrainableParameterSettings, frozen_parameters
from motet.models.torch_private import own_parameters
from motet.models.weight_init import adapter_init_rule

_PROJECTION = "project_input"  # Attribute of a layer with an adapter


def apply_adapters_and_freezing(module: nn.Module, settings: TrainableParameterSettings, seed: int) -> None:
    """Add adapters, and mark the parameters that are not trained."""
    if settings.adapters is not None:
        add_adapters(module, settings.adapters, seed)
    freeze(module, settings.frozen)
    settings.check_trained(any(p.requires_grad for p in module.parameters()), type(module).__name__)


def add_adapters(module: nn.Module, settings: AdapterSettings, seed: int) -> None:
    """Make every linear layer that a pattern names compute W x + (alpha / rank) B A x; all others are frozen."""
    layers = {name: layer for name, layer in module.named_modules() if _is_linear(layer)}
    module.requires_grad_(False)
    for name in settings.adapted_layers(layers):
        layer: Any = layers[name]
        in_features, out_features = layer.weight.shape if _is_conv1d(layer) else reversed(layer.weight.shape)
        for part, shape in (("adapter_a", (settings.rank, in_features)), ("adapter_b", (out_features, settings.rank))):
            full_name, values = f"{name}.{part}", layer.weight.new_empty(shape)
            if not values.is_meta and (rule := adapter_init_rule(full_name, shape)):
                values.copy_(draw_values(seed, full_name, shape, rule=rule, box=whole_box(shape)))
            layer.register_parameter(part, nn.Parameter(values))
        layer.register_forward_hook(partial(_add_low_rank_product, scale=settings.alpha / settings.rank))


def freeze(module: nn.Module, patterns: tuple[str, ...]) -> None:
    """Freeze the parameters that a pattern names; either name of a tensor with two names counts."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    for name in frozen_parameters(patterns, parameters):
        parameters[name].requires_grad_(False)


def _is_linear(layer: nn.Module) -> bool:
    # transformers' Conv1D (GPT-2) is a linear layer with a weight of [in, out]. The output projection inside
    # nn.MultiheadAttention is never called as a layer, so an adapter on it would do nothing.
    is_called = not isinstance(layer, nn.modules.linear.NonDynamicallyQuantizableLinear)
    return is_called and (isinstance(layer, nn.Linear) or _is_conv1d(layer))


def _is_conv1d(layer: nn.Module) -> bool:
    return type(layer).__name__ == "Conv1D" and hasattr(layer, "nf")


def _add_low_rank_product(layer: Any, inputs: tuple[Tensor, ...], output: Tensor, *, scale: float) -> Tensor:
    project = getattr(layer, _PROJECTION, F.linear)
    return output + scale * F.linear(project(inputs[0], layer.adapter_a), layer.adapter_b)


def weights_on_input(layer: nn.Module) -> list[nn.Parameter]:
    """The weights of a linear layer that its input is multiplied with: its weight, and the first of its adapter."""
    parameters = own_parameters(layer)
    weights = parameters.get("weight"), parameters.get("adapter_a")
    return [weight for weight in weights if weight is not None]


def set_input_projection(layer: nn.Module, project: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Let the adapter of a layer multiply the input with the first of its weights by this function."""
    setattr(layer, _PROJECTION, project)
