"""Frozen parameters, and low-rank adapters on linear layers.
An adapter adds two parameters to its linear layer, `<linear>.adapter_a` and `<linear>.adapter_b`; the names and values
of all others stay. B is zero at first, so an adapted model computes what it did before."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from motet.models.hf.peft_weights import AdapterSource
from motet.models.parameter_values import whole_box
from motet.models.settings import AdapterSettings, TrainableParameterSettings, frozen_parameters
from motet.models.torch_private import own_parameters

_PROJECTION, _SCALE = "project_input", "adapter_scale"  # Attributes of a layer with an adapter


def apply_adapters_and_freezing(module: nn.Module, settings: TrainableParameterSettings, source: AdapterSource) -> None:
    """Add adapters with values from `source`, and mark the parameters that are not trained."""
    if settings.adapters is not None:
        add_adapters(module, settings.adapters, source)
    freeze(module, settings.frozen)
    settings.check_trained(any(p.requires_grad for p in module.parameters()), type(module).__name__)


def add_adapters(module: nn.Module, settings: AdapterSettings, source: AdapterSource) -> None:
    """Make every linear layer that a pattern names compute W x + (alpha / rank) B A x; all others are frozen."""
    layers = adaptable_layers(module)
    module.requires_grad_(False)
    source.check_layers(adapted := settings.adapted_layers(layers))
    for name in adapted:
        layer: Any = layers[name]
        in_features, out_features = layer.weight.shape if is_conv1d(layer) else reversed(layer.weight.shape)
        for part, shape in (("adapter_a", (settings.rank, in_features)), ("adapter_b", (out_features, settings.rank))):
            full_name, values = f"{name}.{part}", layer.weight.new_empty(shape)
            if not values.is_meta:
                values.copy_(source.open(full_name, shape)(whole_box(shape)))
            layer.register_parameter(part, nn.Parameter(values))
        setattr(layer, _SCALE, settings.alpha / settings.rank)
        layer.register_forward_hook(_add_low_rank_product)  # One function for all, so that blocks share a graph


def adaptable_layers(module: nn.Module) -> dict[str, nn.Module]:
    """The linear layers of a module, by name."""
    return {name: layer for name, layer in module.named_modules() if _is_linear(layer)}


def freeze(module: nn.Module, patterns: tuple[str, ...]) -> None:
    """Freeze the parameters that a pattern names; either name of a tensor with two names counts."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    for name in frozen_parameters(patterns, parameters):
        parameters[name].requires_grad_(False)


def _is_linear(layer: nn.Module) -> bool:
    # transformers' Conv1D (GPT-2) is a linear layer with a weight of [in, out]. The output projection inside
    # nn.MultiheadAttention is never called as a layer, so an adapter on it would do nothing.
    is_called = not isinstance(layer, nn.modules.linear.NonDynamicallyQuantizableLinear)
    return is_called and (isinstance(layer, nn.Linear) or is_conv1d(layer))


def is_conv1d(layer: nn.Module) -> bool:
    """Whether a layer is the linear layer of GPT-2 in transformers, whose weight is [in, out]."""
    return type(layer).__name__ == "Conv1D" and hasattr(layer, "nf")


def _add_low_rank_product(layer: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    is_compiled = torch.compiler.is_compiling()
    project: Callable[[Tensor, Tensor], Tensor] = F.linear if is_compiled else getattr(layer, _PROJECTION, F.linear)
    scale: float = getattr(layer, _SCALE)
    return output + scale * F.linear(project(inputs[0], layer.adapter_a), layer.adapter_b)


def weights_on_input(layer: nn.Module) -> list[nn.Parameter]:
    """The weights of a linear layer that its input is multiplied with: its weight, and the first of its adapter."""
    parameters = own_parameters(layer)
    weights = parameters.get("weight"), parameters.get("adapter_a")
    return [weight for weight in weights if weight is not None]


def set_input_projection(layer: nn.Module, project: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Let the adapter of a layer multiply the input with the first of its weights by this function."""
    setattr(layer, _PROJECTION, project)
