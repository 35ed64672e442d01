"""The layers of a module that have entries of a vocabulary, found by running it: lookups in tables, and the head."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from motet.parallel.model_sharding import TENSOR_DIMENSION, DimensionSplit
from motet.parallel.proof.module_calls import CallObserver
from motet.parallel.proof.nested_tensors import Arguments
from motet.parallel.tensor_parallel.find_regions import output_dim_of_weight

# Options of a lookup that depend on more than the rows of its ids.
_UNSPLIT_OPTIONS = {
    "max_norm": "renormalises rows in every forward",
    "sparse": "has sparse gradients",
    "scale_grad_by_freq": "divides gradients by the frequency of ids",
}


class VocabularyLayer(NamedTuple):
    """A lookup in a table, or the head."""

    name: str
    is_head: bool
    entries: int
    dims: tuple[tuple[str, int], ...]  # Logical names of its split tensors, the weight first, and the dims of entries
    whole_tensors: tuple[str, ...]  # Its other parameters

    @property
    def splits(self) -> dict[str, DimensionSplit]:
        return {name: DimensionSplit(dim, TENSOR_DIMENSION) for name, dim in self.dims}


class _VocabularyObserver(CallObserver):
    """Finds lookups and linear layers among the innermost modules, in the order of their last calls."""

    def __init__(self, module: nn.Module) -> None:
        leaves = {name: part for name, part in module.named_modules() if not any(True for _ in part.children())}
        super().__init__(leaves)
        self.names = {parameter: name for name, parameter in module.named_parameters()}
        self.layers = dict[str, VocabularyLayer]()

    def leave(self, name: str, arguments: Arguments, output: Any) -> Any:
        layer, inputs, names = self.modules[name], [*arguments.values()], self.names
        if not inputs or not isinstance(inputs[0], Tensor) or not isinstance(output, Tensor):
            return output
        # Parameters may be arguments of a layer that has none, as where the head is the table.
        tensors = {
            names[p]: p
            for p in (*layer._parameters.values(), *inputs[1:])
            if isinstance(p, nn.Parameter) and p in names
        }
        weight_name, weight = next(((n, p) for n, p in tensors.items() if p.ndim == 2), ("", None))
        is_head = inputs[0].is_floating_point()
        if weight is None or (is_head and 0 not in arguments):
            return output
        biases = [p for p in tensors.values() if p.ndim == 1]
        if is_head:
            dim = output_dim_of_weight(layer, inputs, weight, biases=biases)
        else:
            dim = _lookup_dim(inputs, output, weight)
        if dim is not None:
            entries = weight.shape[dim]
            dims = [(weight_name, dim), *((n, 0) for n, p in tensors.items() if n != weight_name and len(p) == entries)]
            others = tensors.keys() - dict(dims).keys()
            self.layers.pop(name, None)
            self.layers[name] = VocabularyLayer(name, is_head, entries, tuple(dims), tuple(sorted(others)))
        return output


def find_layers(
    module: nn.Module, forward: Callable[[], Tensor], input_entries: int | None, *, gathers_logits: bool
) -> tuple[list[VocabularyLayer], dict[VocabularyLayer, str]]:
    """The lookups and the head of a forward, and a reason where there is no head."""
    observer = _VocabularyObserver(module)
    with torch.no_grad(), observer.hooked():
        result = forward()
    called = observer.layers
    sizes, tables = {input_entries, *result.shape[2:][-1:]}, _declared_tables(module, observer.names)
    if gathers_logits and sizes <= {None}:  # A loss does not say how many entries its logits have
        *_, last = (None, *(layer.entries for layer in called.values() if layer.is_head))
        sizes |= {layer.entries for layer in called.values() if not layer.is_head and layer.entries == last}
    lookups = [layer for layer in called.values() if not layer.is_head and (layer.entries in sizes or tables)]
    problems = {
        layer: "is not the table that the module names as that of its input"
        for layer in lookups
        if tables and layer.dims[0][0] not in tables and layer.entries in sizes
    }
    lookups = [layer for layer in lookups if not tables or layer.dims[0][0] in tables]
    # What a forward returns may be features of any width, unless it is known to be logits.
    sizes = {input_entries, *(layer.entries for layer in lookups)} if gathers_logits else {*result.shape[2:][-1:]}
    heads = [layer for layer in called.values() if layer.is_head and layer.entries in sizes][-1:]
    problems |= {head: "is called several times in a forward" for head in heads if observer.counts[head.name] > 1}
    if not heads and (sizes - {None} if gathers_logits else result.ndim > 2):  # Classes of rows are few
        unknown_head = VocabularyLayer("", True, 0, (), ())
        problems[unknown_head] = "no layer computes its logits as x W + b, up to element-wise operations"
    return [*lookups, *heads], problems


def _lookup_dim(inputs: Sequence[Any], output: Tensor, weight: Tensor) -> int | None:
    has_shape = output.shape == (*inputs[0].shape, weight.shape[1])
    return 0 if len(inputs) == 1 and has_shape and inputs[0].dtype in (torch.int64, torch.int32) else None


def _declared_tables(module: Any, names: Mapping[nn.Parameter, str]) -> set[str]:
    """The table of the input, where the module names it as those of transformers do."""
    if not hasattr(module, "get_input_embeddings"):
        return set()
    try:
        return {names[module.get_input_embeddings().weight]}
    # transformers raises NotImplementedError for a model without a table; another table may be no parameter.
    except (NotImplementedError, AttributeError, KeyError):
        return set()


def known_problem(module: nn.Module, layer: VocabularyLayer, degree: int) -> str | None:
    if layer.entries < degree:
        return f"{layer.entries} entries cannot be split over {TENSOR_DIMENSION} = {degree}"
    part = module.get_submodule(layer.name)
    return next(
        (f"{option}: it {text}" for option, text in _UNSPLIT_OPTIONS.items() if getattr(part, option, None)), None
    )


def tied_layer(layer: VocabularyLayer, layers: Collection[VocabularyLayer]) -> VocabularyLayer | None:
    """One of some layers that is this one, or has a split tensor in common with it."""
    return next((each for each in layers if each == layer or dict(each.dims).keys() & dict(layer.dims).keys()), None)
