"""Initial values of parameters, of which a rank reads only what it holds."""

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from motet.models.settings import TransformerSettings
from motet.models.weight_init import TensorBox, WeightInitRule, adapter_init_rule, init_rule_for, standard_normal_box

BoxReader = Callable[[TensorBox], Tensor]
Shape = tuple[int, ...]


class ParameterValues(Protocol):
    """The initial values of all parameters of a module."""

    fingerprint: str  # The same on all ranks, of files that they read

    def open(self, name: str) -> BoxReader:
        """A function that reads boxes of a parameter. All ranks open all parameters, in the same order."""
        ...


class DrawnValues:
    """Values of motet's modules: each name has a rule. They are drawn in float32."""

    fingerprint = ""

    def __init__(self, settings: TransformerSettings, seed: int, shapes: Mapping[str, Shape]) -> None:
        self._settings, self._seed, self._shapes = settings, seed, shapes

    def open(self, name: str) -> BoxReader:
        rule = init_rule_for(self._settings, name)
        return lambda box: draw_values(self._seed, name, self._shapes[name], rule=rule, box=box)


class AdapterValues:
    """Values of a module with adapters, from those of the module without them."""

    def __init__(self, others: ParameterValues, seed: int, shapes: Mapping[str, Shape]) -> None:
        self._others, self._seed, self._shapes, self.fingerprint = others, seed, shapes, others.fingerprint

    def open(self, name: str) -> BoxReader:
        shape = self._shapes[name]
        rule = adapter_init_rule(name, shape)
        if rule is None:
            return self._others.open(name)
        return lambda box: draw_values(self._seed, name, shape, rule=rule, box=box)


def parameter_shapes(module: nn.Module) -> dict[str, Shape]:
    """The shape of each parameter by name."""
    return {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}


def draw_values(seed: int, name: str, shape: Shape, *, rule: WeightInitRule, box: TensorBox) -> Tensor:
    """A box of the values of a parameter of this shape, in float32."""
    if rule.std == 0:
        return torch.full(box[1], rule.value)
    return torch.from_numpy(standard_normal_box(seed, name, shape, box=box)).mul_(rule.std).div_(rule.divisor)


def whole_box(shape: Shape) -> TensorBox:
    """The box of a complete tensor."""
    return (0,) * len(shape), tuple(shape)
