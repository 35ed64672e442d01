"""The routers of a mixture, found by running its model without memory, whatever the names of its modules.

Experts are a module whose own parameters share their first length E, one of them with three dimensions, and that is
called with a tensor of indices. Its router is the module whose output has that very tensor, and a floating tensor with
E columns. Where another module lies between them, such as a limit, it is the last such module that the same parent
called before.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from motet.core.errors import InputError, check_input
from motet.models.hf.hf_model import open_hf_checkpoint
from motet.models.settings import ModelSettings, UserModuleSettings
from motet.models.spec.stacked_experts import stacked_count
from motet.models.torch_private import own_parameters
from motet.models.trace.model_trace import build_on_meta, explain_failures, run_recorded
from motet.models.trace.record_forward import ForwardRecorder
from motet.models.trace.record_reader import BatchSize
from motet.parallel.proof.module_calls import ModuleCall, Path, record_calls, tensors_by_path

_ROWS, _TOKENS = 3, 14
_NOISE_KEYS = ("jitter", "noise")  # Parts of the names of settings that transformers gives to noise in routers


@dataclass(frozen=True)
class RouterOutput:
    """The tensors of a router's output, by their paths: [..., E], [..., K] and [..., K]."""

    logits: Path
    weights: Path
    chosen: Path


@dataclass(frozen=True)
class RoutedLayer:
    """The experts of one layer and the router that chooses among them, by the names of the modules."""

    experts: str
    router: str
    count: int
    per_token: int
    output: RouterOutput
    indices: Path  # Where the arguments of the experts have the indices
    input_shapes: Mapping[int | str, tuple[int, ...]]  # Tensors that the router gets, by argument
    input_buffers: Mapping[int | str, str]  # Buffers of the model that it gets, by name

    @property
    def name(self) -> str:
        """The module that calls both, or the experts where that is the model."""
        return self.experts.rpartition(".")[0] or self.experts


def experts_by_shape(module: nn.Module) -> dict[str, int]:
    """Modules that may be stacked experts, with their number."""

    def count_of(inner: nn.Module) -> int:
        return stacked_count(tuple(p.shape) for p in own_parameters(inner).values() if p is not None)

    return {name: count for name, inner in module.named_modules() if (count := count_of(inner))}


class _NoiseRecorder(ForwardRecorder):
    """The modules that draw random numbers themselves, by the innermost that runs."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.noisy = set[str]()

    def observe(self, func: Any, call: tuple[tuple[Any, ...], dict[str, Any]], result: Any) -> None:
        """Note a random operator."""
        if torch.Tag.nondeterministic_seeded in func.tags and self._stack:
            self.noisy.add(self._names.get(self._stack[-1], ""))


def find_routed_layers(settings: ModelSettings, dtype: torch.dtype, objective: str) -> list[RoutedLayer]:
    """The routed layers of a model in their order; none if it has no experts. Refuses routers that draw numbers."""
    model = build_on_meta(settings, dtype)
    experts = experts_by_shape(model.module)
    if not experts:
        return []
    tokens = min(_TOKENS, model.context or _TOKENS)
    size, recorder = BatchSize(_ROWS, tokens, tokens if objective == "spans" else 0), _NoiseRecorder(model.module)
    problem = "the routers of the model cannot be found by running it without memory"
    with explain_failures(problem), record_calls(dict(model.module.named_modules()), copies=False) as calls:
        run_recorded(model, size, recorder, objective=objective)
    buffers = {buffer: name for name, buffer in model.module.named_buffers()}
    layers = [
        layer for name in calls if name in experts for layer in _layer_of(name, experts[name], calls, buffers=buffers)
    ]
    for layer in layers:
        _check_no_noise(settings, layer, recorder.noisy, dtype=dtype, objective=objective)
    return layers


def _layer_of(
    experts: str, count: int, calls: Mapping[str, list[ModuleCall]], *, buffers: Mapping[Tensor, str]
) -> Iterator[RoutedLayer]:
    call, parent = calls[experts][0], experts.rpartition(".")[0]
    for path, indices in tensors_by_path(call.arguments):
        if indices.is_floating_point() or indices.is_complex() or not indices.ndim:
            continue
        others = [
            (other.place[1], name, other)
            for name, made in calls.items()
            for other in made
            if name not in (experts, parent) and name.startswith(f"{parent}." if parent else "")
            if 0 <= other.place[1] < call.place[0]
        ]
        for _, name, other in sorted(others, key=lambda each: each[0], reverse=True):
            if (output := _output_paths(other.output, indices, count)) is not None:
                tensors = {key: value for key, value in other.arguments.items() if isinstance(value, Tensor)}
                passed = {key: buffers[value] for key, value in tensors.items() if value in buffers}
                shapes = {key: tuple(value.shape) for key, value in tensors.items() if key not in passed}
                yield RoutedLayer(experts, name, count, indices.shape[-1], output, path, shapes, passed)
                return


def _output_paths(output: Any, indices: Tensor, count: int) -> RouterOutput | None:
    """The paths of a router's tensors. The indices of the experts come first among those of their shape."""
    tensors = list(tensors_by_path(output))
    floating = [(path, tensor) for path, tensor in tensors if tensor.is_floating_point()]
    integers = [(path, t) for path, t in tensors if not t.is_floating_point() and t.shape == indices.shape]
    integers.sort(key=lambda each: each[1] is not indices)
    logits = [
        path for path, tensor in floating if tensor.shape[:-1] == indices.shape[:-1] and tensor.shape[-1] == count
    ]
    weights = [path for path, tensor in floating if tensor.shape == indices.shape and path not in logits[:1]]
    if not (integers and logits and weights):
        return None
    return RouterOutput(logits[0], weights[0], integers[0][0])


def _check_no_noise(
    settings: ModelSettings, layer: RoutedLayer, noisy: set[str], *, dtype: torch.dtype, objective: str
) -> None:
    places = {name for name in noisy if name == layer.name or f"{name}.".startswith(f"{layer.router}.")}
    if not places:
        return
    problem = f"the router {layer.router} draws random numbers in training, which would differ between layouts"
    keys = _noise_settings(settings)
    if keys and isinstance(settings, UserModuleSettings):
        silent = settings.model_copy(update={"arguments": {**settings.arguments, **dict.fromkeys(keys, 0.0)}})
        try:
            find_routed_layers(silent, dtype, objective)
        except InputError:
            keys = []
    remedy = " and ".join(f"model.arguments.{key} = 0" for key in keys)
    raise InputError(f"{problem}; " + (f"set {remedy}" if keys else "no setting turns that off: take another model"))


def _noise_settings(settings: ModelSettings) -> list[str]:
    """The settings of a model of transformers that have the name of a noise and are not zero."""
    if not isinstance(settings, UserModuleSettings) or settings.hf_path is None:
        return []
    config = open_hf_checkpoint(settings.hf_path, settings.arguments).config.to_dict()
    return [key for key, value in config.items() if any(part in key for part in _NOISE_KEYS) and value]


def check_has_layers(layers: list[RoutedLayer], settings: ModelSettings) -> None:
    """Refuse a balance of a model in which no experts are found."""
    model = getattr(settings, "factory", settings.family)
    check_input(
        layers,
        f"[model.balance] balances experts, and motet finds none in {model!r}: stacked parameters of one module that "
        "is called with indices, which another module chooses; leave the section out",
    )
    for layer in layers:
        check_input(
            layer.per_token < layer.count,
            f"[model.balance]: {layer.router} gives each token all {layer.count} experts, which balances nothing; "
            "leave the section out",
        )
