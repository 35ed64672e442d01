"""Linear layers of a module, found by running it, and the regions in which they may be split together."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from motet.models.torch_private import InterceptedFunctions
from motet.parallel.proof.comparison import is_close
from motet.parallel.proof.module_calls import CallObserver
from motet.parallel.proof.nested_tensors import Arguments
from motet.parallel.proof.part_run import Forward


@dataclass(frozen=True)
class LinearLayer:
    """A layer that computes x W + b, with a weight of [in, out] or [out, in]."""

    name: str
    out_dim: int  # Of the weight
    in_width: int
    out_width: int
    has_adapter: bool


@dataclass(frozen=True)
class LayerCall:
    """A call of a linear layer in a forward; calls with the same `source` read the same tensor."""

    layer: str
    source: int
    views: int  # How many entries of `ObservedForward.views` are older


@dataclass
class ObservedForward:
    """The calls of linear layers in a forward, and the shapes to which tensors were reshaped."""

    layers: dict[str, LinearLayer] = field(default_factory=dict)
    calls: list[LayerCall] = field(default_factory=list)
    views: list[torch.Size] = field(default_factory=list)
    called: Counter[str] = field(default_factory=Counter)  # Modules that ran, and how often
    # (module, linear layer in it) -> the argument of the module that the layer reads
    handed_on: dict[tuple[str, str], int | str] = field(default_factory=dict)
    # (running module, module, integer attribute or `config.NAME`, value) for each attribute that was read
    reads: dict[tuple[str, str, str, int], None] = field(default_factory=dict)


@dataclass(frozen=True)
class CandidateRegion:
    """Layers that may be split together: groups that read one tensor each by columns, and the next layer by rows."""

    module: str
    columns: tuple[tuple[str, ...], ...]
    rows: tuple[str, ...]

    @property
    def layers(self) -> tuple[str, ...]:
        """All of its layers."""
        return (*(name for group in self.columns for name in group), *self.rows)


class _LayerObserver(CallObserver):
    """Finds the linear layers among the modules that run, and notes which integers they read."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(dict(module.named_modules()))
        self.observed = ObservedForward(called=self.counts)
        self._sources = dict[int, Tensor]()  # Kept, so that no other tensor gets the number of one
        self._entered = dict[str, Arguments]()  # By modules that are running

    def enter(self, name: str, arguments: Arguments) -> Arguments:
        self._entered[name] = arguments
        return arguments

    def leave(self, name: str, arguments: Arguments, output: Any) -> Any:
        layer, x, layers = self.modules[name], arguments.get(0) if len(arguments) == 1 else None, self.observed.layers
        if isinstance(x, Tensor) and x.is_floating_point() and _may_be_linear(layer):
            if name not in layers and (linear := _as_linear_layer(layer, name, x)):
                layers[name] = linear
            if name in layers:
                self._sources[id(x)] = x
                self.observed.calls.append(LayerCall(name, id(x), len(self.observed.views)))
                for around in self.running[:-1]:
                    for key, value in self._entered.get(around, {}).items():
                        if value is x:
                            self.observed.handed_on.setdefault((around, name), key)
        self._entered.pop(name, None)
        return output

    def read(self, holders: Sequence[tuple[str, str]], name: str, value: object) -> None:
        """Note the value of an attribute that the running module reads."""
        if type(value) is int and value > 1:
            readers = self.running[-1:] or [path for path, _ in holders]
            self.observed.reads.update(
                {(reader, path, prefix + name, value): None for reader in readers for path, prefix in holders}
            )


def observe_forward(module: nn.Module, forward: Forward) -> ObservedForward:
    """Run a forward and find the linear layers in it, and the integer attributes that it reads."""
    observer = _LayerObserver(module)
    names = {part: name for name, part in observer.modules.items()}
    with torch.no_grad(), observer.hooked(), ExitStack() as stack:
        for part, name in names.items():
            stack.enter_context(_reads_observed(part, partial(observer.read, [(name, "")])))
        for config, holders in _plain_objects(names).values():
            stack.enter_context(_reads_observed(config, partial(observer.read, holders)))
        with InterceptedFunctions(partial(_note_reshape, observer.observed.views)):
            forward()
    return observer.observed


def _note_reshape(views: list[torch.Size], function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a function of torch. The shapes to which tensors are reshaped may be those of heads."""
    result = function(*args, **kwargs)
    if getattr(function, "__name__", "") in ("view", "reshape", "unflatten") and isinstance(result, Tensor):
        views.append(result.shape)
    return result


def _plain_objects(names: Mapping[nn.Module, str]) -> dict[int, tuple[Any, list[tuple[str, str]]]]:
    """Objects with attributes that modules refer to, such as a config, and (module, `NAME.`) for each reference."""
    objects = dict[int, tuple[Any, list[tuple[str, str]]]]()
    for part, path in names.items():
        for name, value in vars(part).items():
            is_plain = hasattr(value, "__dict__") and not callable(value) and not isinstance(value, Tensor | ModuleType)
            if is_plain and not name.startswith("_"):
                objects.setdefault(id(value), (value, []))[1].append((path, f"{name}."))
    return objects


@contextmanager
def _reads_observed(holder: Any, read: Callable[[str, object], None]) -> Iterator[None]:
    """Call `read` with each attribute of an object that is read."""
    kind: Any = type(holder)

    def observe(self: Any, name: str) -> object:
        value = kind.__getattribute__(self, name)
        read(name, value)
        return value

    try:
        object.__setattr__(holder, "__class__", type(kind.__name__, (kind,), {"__getattribute__": observe}))
    except TypeError:  # Of a built-in type, such as SimpleNamespace: its reads cannot be seen, and may be any
        for name, value in vars(holder).items():
            read(name, value)
    try:
        yield
    finally:
        if type(holder) is not kind:
            object.__setattr__(holder, "__class__", kind)


def _may_be_linear(layer: nn.Module) -> bool:
    parameters = {name: parameter for name, parameter in layer._parameters.items() if parameter is not None}
    weight, bias = parameters.get("weight"), parameters.get("bias")
    is_small = not any(True for _ in layer.children()) and set(parameters) <= {
        "weight",
        "bias",
        "adapter_a",
        "adapter_b",
    }
    return is_small and weight is not None and weight.dim() == 2 and (bias is None or bias.dim() == 1)


def _as_linear_layer(layer: Any, name: str, x: Tensor) -> LinearLayer | None:
    """The layer, if its forward multiplies its input by its weight."""
    bias = getattr(layer, "bias", None)
    out_dim = output_dim_of_weight(layer, [x], layer.weight, biases=[] if bias is None else [bias])
    if out_dim is None:
        return None
    in_width, out_width = layer.weight.shape[1 - out_dim], layer.weight.shape[out_dim]
    return LinearLayer(name, out_dim, in_width, out_width, has_adapter="adapter_a" in layer._parameters)


def output_dim_of_weight(
    layer: nn.Module, inputs: Sequence[Any], weight: Tensor, *, biases: Sequence[Tensor]
) -> int | None:
    """The dimension of the weight along the output of a layer that computes x W + b; None for another layer."""
    x, output = inputs[0], layer.forward(*inputs)  # Without what hooks, such as adapters, add to it
    for dim, matrix in enumerate((weight.T, weight)):
        if x.shape[-1] == matrix.shape[0] and x.dtype == weight.dtype and is_close(output, sum(biases, x @ matrix)):
            return dim
    return None


def candidate_regions(observed: ObservedForward, module: str, taken: Collection[str]) -> Iterator[CandidateRegion]:
    """Regions of the layers in a module that are not `taken`: a layer by rows, and one to three groups before it.

    The nearest groups come first. A layer is in the group of the layers that read the same tensor.
    """
    groups = _groups(observed, module, taken)
    for count in (1, 2, 3):
        for last in range(count, len(groups)):
            columns = tuple(groups[last - count : last])
            rows = groups[last]
            if len(rows) == 1 and not any(rows[0] in group for group in columns):
                yield CandidateRegion(module, columns, rows)


def _groups(observed: ObservedForward, module: str, taken: Collection[str]) -> list[tuple[str, ...]]:
    calls = [call for call in observed.calls if is_inside(call.layer, module) and call.layer not in taken]
    groups = [tuple(dict.fromkeys(call.layer for call in same)) for _, same in groupby(calls, lambda call: call.source)]
    return list(dict.fromkeys(groups))


def is_inside(name: str, module: str) -> bool:
    """Whether a module or tensor is in a module."""
    return not module or name == module or name.startswith(f"{module}.")


def head_sizes(observed: ObservedForward, region: CandidateRegion) -> list[int]:
    """Likely sizes of a head, of which the row layers read several: last sizes of tensors that were reshaped."""
    inner = observed.layers[region.rows[0]].in_width
    widths = {inner, *(observed.layers[name].out_width for group in region.columns for name in group)}
    at = [index for index, call in enumerate(observed.calls) if call.layer in region.layers]
    counts: Counter[int] = Counter()
    for shape in observed.views[observed.calls[at[0]].views : observed.calls[at[-1]].views]:
        is_width = len(shape) >= 3 and shape[-1] * shape[-2] in widths
        if len(shape) >= 3 and 1 < shape[-1] < inner and inner % shape[-1] == 0:
            counts[shape[-1]] += 100 if is_width else len(shape) > 3
        elif is_width and 1 < shape[-2] < inner and inner % shape[-2] == 0:  # Queries, keys and values of a head
            counts[inner // shape[-2]] += 100
    return [size for size, count in counts.most_common() if count]


def structure(module: nn.Module) -> tuple[object, ...]:
    """A value that is equal for modules that compute the same with other parameters, such as layers of a stack."""
    parts = list[object]()
    for name, part in module.named_modules():
        plain = sorted(
            (key, value)
            for key, value in vars(part).items()
            if isinstance(value, bool | int | float | str)
            and not any(word in key for word in ("layer", "idx", "index", "training"))
        )
        shapes = sorted((key, p.shape) for key, p in part._parameters.items() if p is not None)
        parts.append((name, type(part), tuple(plain), tuple(shapes)))
    return tuple(parts)


def modules_bottom_up(module: nn.Module) -> Sequence[str]:
    """Names of modules, each after the modules inside of it."""
    names = [name for name, _ in module.named_modules()]
    return sorted(names, key=lambda name: -(name.count(".") + 1 if name else 0))
