"""Initial values of parameters, of which a rank reads only its shards.

Modules whose parameters have no memory, made by unchanged code.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any, Protocol
from unittest.mock import patch

import torch
from torch import Tensor, nn

from motet.models.settings import TransformerSettings
from motet.models.weight_init import TensorBox, WeightInitRule, init_rule_for, standard_normal_box

BoxReader = Callable[[TensorBox], Tensor]
Shape = tuple[int, ...]


class ParameterValues(Protocol):
    """The initial values of all parameters of a module."""

    fingerprint: str  # A fingerprint of the files that ranks read, the same on all ranks

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


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """A context in which a parameter moves to the meta device when a module registers it. Buffers keep their values.

    Drawing a normal distribution there would run, and import, much of torch's compiler.
    """
    register, draw_normal = nn.Module.register_parameter, Tensor.normal_

    def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if type(param) is nn.Parameter:
            set_values(param, torch.empty_like(param, device="meta"))
        register(module, name, param)

    def normal_unless_on_meta(tensor: Tensor, *args: Any, **named: Any) -> Tensor:
        return tensor if tensor.is_meta else draw_normal(tensor, *args, **named)

    def initialize_on_meta(initialize: Callable[..., None]) -> Callable[..., None]:
        """A layer makes its parameters before it registers them, and some limits count memory that nobody writes."""

        @wraps(initialize)
        def run(layer: nn.Module, *args: Any, **named: Any) -> None:
            with torch.device("meta"):
                initialize(layer, *args, **named)

        return run

    with (
        patch.object(nn.Embedding, "__init__", initialize_on_meta(nn.Embedding.__init__)),
        patch.object(nn.Linear, "__init__", initialize_on_meta(nn.Linear.__init__)),
        patch.object(nn.Module, "register_parameter", register_on_meta),
        patch.object(Tensor, "normal_", normal_unless_on_meta),
    ):
        yield


_SKIPPED_DRAWS = {
    name: getattr(nn.init, name) for name in ("normal_", "uniform_", "kaiming_uniform_", "xavier_uniform_")
}
_skipping_lock, _skipping = threading.Lock(), 0


@contextmanager
def no_initial_values() -> Iterator[None]:
    """A context in which torch's layers draw no values. Several threads may be in it at the same time."""
    _skip_draws(1)
    try:
        yield
    finally:
        _skip_draws(-1)


def _skip_draws(change: int) -> None:
    global _skipping
    with _skipping_lock:
        _skipping += change
        for name, draw in _SKIPPED_DRAWS.items():
            setattr(nn.init, name, (lambda tensor, *_, **__: tensor) if _skipping else draw)


def set_values(parameter: nn.Parameter, values: Tensor) -> None:
    """Let a parameter have this memory, wherever it is referred to; it may move to the meta device, or from there."""
    if parameter.is_meta != values.is_meta:
        attributes = vars(parameter)
        torch.utils.swap_tensors(parameter, nn.Parameter(values.new_empty(0), requires_grad=parameter.requires_grad))
        vars(parameter).update(attributes)
    parameter.data, parameter.grad = values, None  # its versions are counted without those of the others
