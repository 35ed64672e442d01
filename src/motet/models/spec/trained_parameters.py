"""The blocks of a model with low-rank adapters and frozen parameters, as models/adapters.py makes its module.

A frozen weight has no gradient, so a forward does not keep the input of its product. Gradients go back to the first
parameter that is trained: nothing before it has a backward.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple, TypeVar

from motet.models.settings import TrainableParameterSettings, frozen_parameters
from motet.models.spec.layer_specs import (
    STREAM,
    WHOLE,
    AttentionSpec,
    BlockSpec,
    LayerSpec,
    MatmulSpec,
    ParameterSpec,
    SavedActivation,
    SavedAttentionMatrix,
)

_ADAPTER = ".adapter_a", ".adapter_b"
_STACKED = ".experts.up", ".experts.down"  # Weights of experts, which have the name of their layer
# Layer -> the tensor that the activation before it saves, unless the activation's result is enough
_ACTIVATION_BEFORE = {"ffn.down": "ffn.inner", "head": "pooler.output"}
_ACTIVATION_BEFORE |= {"ffn.experts.down": "ffn.experts.inner", "ffn.shared.down": "ffn.shared.inner"}
_Saved = SavedActivation | SavedAttentionMatrix
_Part = TypeVar("_Part", bound=ParameterSpec | MatmulSpec | AttentionSpec | SavedActivation | SavedAttentionMatrix)


def with_trained_parameters(
    blocks: tuple[BlockSpec, ...], settings: TrainableParameterSettings
) -> tuple[BlockSpec, ...]:
    """The blocks with adapters and with frozen parameters; equal repetitions stay together."""
    if settings.trains_all:
        return blocks
    parts = [_Repetition(block, index) for block in blocks for index in range(block.repeat)]
    adapters = settings.adapters
    layers = [part.full_name(name) for part in parts for name in _linear_layers(part.block)]
    adapted = frozenset(adapters.adapted_layers(layers) if adapters else ())
    rank, names = adapters.rank if adapters else 0, list[str]()
    with_adapters = dict[tuple[int, tuple[str, ...]], BlockSpec]()
    for number, part in enumerate(parts):
        chosen = tuple(name for name in _linear_layers(part.block) if part.full_name(name) in adapted)
        key = id(part.block), chosen
        if key not in with_adapters:
            with_adapters[key] = _with_adapters(part.block, chosen, rank)
        parts[number] = replace(part, block=with_adapters[key])
        names += map(parts[number].full_name, parts[number].parameters)
    frozen = {*frozen_parameters(settings.frozen, names)}
    frozen |= {name for name in names if adapters and not name.endswith(_ADAPTER)}
    settings.check_trained(len(frozen) < len(names), "the model")
    return _keep_positions(tuple(_runs(parts, frozen)))


@dataclass(frozen=True)
class _Repetition:
    """One of the equal blocks of a run."""

    block: BlockSpec
    index: int

    @property
    def parameters(self) -> list[str]:
        return [parameter.name for parameter in self.block.layer.parameters]

    def full_name(self, name: str) -> str:
        """The name in the model."""
        return self.block.prefix.format(i=self.block.first_index + self.index) + name


class _Gradients(NamedTuple):
    """The frozen parameters of a block, and whether its input has a gradient."""

    frozen: tuple[str, ...]
    has_trained_before: bool


def _runs(parts: Sequence[_Repetition], frozen: Collection[str]) -> Iterator[BlockSpec]:
    """A block for each run of equal repetitions; blocks that differ have different names."""
    chosen, has_trained = list[tuple[_Repetition, _Gradients]](), False
    for part in parts:
        frozen_names = tuple(name for name in part.parameters if part.full_name(name) in frozen)
        chosen.append((part, _Gradients(frozen_names, has_trained)))
        has_trained |= len(frozen_names) < len(part.parameters)
    kinds, same = dict[tuple[int, _Gradients], BlockSpec](), Counter[str]()
    for key, run in groupby(chosen, lambda each: (id(each[0].block), each[1])):
        repetitions = [part for part, _ in run]
        first = repetitions[0]
        if key not in kinds:
            made = _TrainedBlock(first.block, key[1], frozen).made()
            same[made.name] += 1
            number = f" {same[made.name]}" * (same[made.name] > 1)
            kinds[key] = replace(made, name=made.name + number)
        start = first.block.first_index + first.index
        yield replace(kinds[key], repeat=len(repetitions), first_index=start if "{i}" in first.block.prefix else 0)


def _keep_positions(blocks: tuple[BlockSpec, ...]) -> tuple[BlockSpec, ...]:
    """Rotations and masks lie outside of the blocks, which keep them if the attention of any has a backward."""
    operations = (operation for block in blocks for operation in block.layer.operations)
    is_kept = any(each.input_gradient for each in operations if isinstance(each, AttentionSpec))

    def changed(layer: LayerSpec) -> LayerSpec:
        saved = (replace(each, is_kept=is_kept) if is_read_by_blocks(each) else each for each in layer.saved)
        return replace(layer, saved=tuple(saved))

    return tuple(each if each.input else replace(each, layer=changed(each.layer)) for each in blocks)


def is_read_by_blocks(tensor: _Saved) -> bool:
    """Whether all blocks read a tensor, such as a mask or rotations."""
    is_of_positions = isinstance(tensor, SavedActivation) and (tensor.per, tensor.dtype) == ("position", "wide")
    return isinstance(tensor, SavedAttentionMatrix) or is_of_positions


def _layer_of(part: ParameterSpec | MatmulSpec | AttentionSpec | _Saved) -> str:
    """The layer that has a parameter, a product or a saved tensor."""
    name = part.parameter if isinstance(part, MatmulSpec) else part.name
    is_stacked = isinstance(part, MatmulSpec | ParameterSpec) and name.endswith(_STACKED)
    return name if is_stacked else name.rpartition(".")[0]


def _linear_layers(block: BlockSpec) -> list[str]:
    """The linear layers, without a head that is fused with its loss."""
    products = [each for each in block.layer.operations if isinstance(each, MatmulSpec)]
    products = products[: -1 if block.has_fused_head else None]
    return [_layer_of(each) for each in products if each.parameter.endswith(".weight") and each.takes_adapter]


def _with_adapters(block: BlockSpec, layers: Collection[str], rank: int) -> BlockSpec:
    """A block with adapters. As in the layer, ranks split outputs of the second product or inputs of the first."""
    layer = block.layer
    for product in (each for each in block.layer.operations if isinstance(each, MatmulSpec)):
        if (name := _layer_of(product)) not in layers:
            continue
        unsplit, is_row = STREAM if product.split == STREAM else WHOLE, product.sums_outputs
        first, second = (name + end for end in _ADAPTER)
        split = WHOLE if product.split == STREAM else product.split
        parameters = (
            ParameterSpec(first, (rank, product.in_features), split=split if is_row else WHOLE, split_dim=1),
            ParameterSpec(second, (product.out_features, rank), split=WHOLE if is_row else split),
        )
        splits = (product.split, unsplit) if is_row else (unsplit, product.split)
        products = (
            replace(product, parameter=first, out_features=rank, split=splits[0]),
            replace(product, parameter=second, in_features=rank, split=splits[1], sums_outputs=False),
        )
        between = SavedActivation(
            f"{second}.input", rank, product.per, split=unsplit, kernel="product", is_product=True
        )
        layer = LayerSpec(
            _insert(layer.parameters, name, parameters),
            _insert(layer.operations, name, products),
            _insert(layer.saved, name, (between,)),
        )
    return replace(block, layer=layer)


def _insert(parts: tuple[_Part, ...], layer: str, more: tuple[_Part, ...]) -> tuple[_Part, ...]:
    """The parts with more of them behind those of a layer."""
    stop = max((index for index, each in enumerate(parts) if _layer_of(each) == layer), default=len(parts) - 1) + 1
    return (*parts[:stop], *more, *parts[stop:])


class _TrainedBlock:
    """A block with some frozen parameters."""

    def __init__(self, block: BlockSpec, gradients: _Gradients, frozen: Collection[str]) -> None:
        self._block, self._gradients, self._all_frozen = block, gradients, frozen
        self._parameters = tuple(
            replace(each, gradient="none") if each.name in gradients.frozen else each for each in block.layer.parameters
        )
        self._layers = [_layer_of(each) for each in self._parameters]
        self._operations = tuple(map(self._with_gradients, block.layer.operations))

    def made(self) -> BlockSpec:
        """The block, whose name says whether it is frozen or the first that is trained."""
        saved, stop = list[_Saved](), 0
        for tensor in self._block.layer.saved:
            stop = self._stop(_layer_of(tensor), stop)
            saved.append(replace(tensor, is_kept=self._is_kept(tensor, stop)))
        is_trained = any(each.is_trained for each in self._parameters)
        word = "frozen " if not is_trained else "" if self._gradients.has_trained_before else "first "
        name = word * ("{i}" in self._block.prefix) + self._block.name
        return replace(self._block, name=name, layer=LayerSpec(self._parameters, self._operations, tuple(saved)))

    def _start(self, layer: str) -> int:
        """The index of the first parameter of a layer; the end if the block has no parameter of it."""
        return self._layers.index(layer) if layer in self._layers else len(self._layers)

    def _stop(self, layer: str, default: int) -> int:
        return max((index + 1 for index, name in enumerate(self._layers) if name == layer), default=default)

    def _has_gradient(self, stop: int) -> bool:
        """Whether anything before the parameter of an index is trained."""
        return self._gradients.has_trained_before or any(each.is_trained for each in self._parameters[:stop])

    def _is_trained(self, name: str) -> bool:
        flags = [each.is_trained for each in self._parameters if each.name == name]
        return flags[0] if flags else name not in self._all_frozen  # Another block may hold a tied table

    def _with_gradients(self, operation: MatmulSpec | AttentionSpec) -> MatmulSpec | AttentionSpec:
        if isinstance(operation, AttentionSpec):
            return replace(operation, input_gradient=self._has_gradient(self._start(f"{operation.name}.output")))
        before = self._has_gradient(self._start(_layer_of(operation)))
        if operation.parameter.endswith(_ADAPTER[1]):
            before = before or self._is_trained(operation.parameter.replace(_ADAPTER[1], _ADAPTER[0]))
        return replace(operation, input_gradient=before, weight_gradient=self._is_trained(operation.parameter))

    def _is_kept(self, tensor: _Saved, stop: int) -> bool:
        """Whether a gradient needs a tensor; `stop` is the index behind the parameters of its layer."""
        layer, _, part = tensor.name.rpartition(".")
        attention = [each for each in self._operations if isinstance(each, AttentionSpec)]
        if any(layer == each.name or tensor.name in each.reads for each in attention if each.input_gradient):
            return True
        if any(layer == each.name for each in attention):
            return False
        products = [each for each in self._operations if isinstance(each, MatmulSpec)]
        if layer.endswith(_ADAPTER[1]):
            return self._is_trained(layer)
        readers = [each for each in products if _layer_of(each) == layer and not each.parameter.endswith(_ADAPTER[1])]
        if layer == "head.input":
            return products[-1].input_gradient
        if layer in ("head.weight", "head.bias"):
            return products[-1].weight_gradient if layer == "head.weight" else self._is_trained(layer)
        if part != "input" or getattr(tensor, "kernel", "") == "norm":
            return self._has_gradient(stop)
        if not readers:  # The indices of a table, or the input of experts
            start = self._start(layer)
            return any(each.is_trained for each in self._parameters[start:stop]) or tensor.dtype != "int64"
        return any(each.weight_gradient for each in (*readers, *self._readers(readers[-1]))) or self._is_result(layer)

    def _readers(self, product: MatmulSpec) -> Iterator[MatmulSpec]:
        """The later products that read the same input, if it has no other name."""
        saved = (each for each in self._block.layer.saved if not isinstance(each, SavedActivation) or each.elements)
        names = {tensor.name for tensor in saved}
        at = self._operations.index(product)
        later = () if product.parameter.endswith(_STACKED) else self._operations[at + 1 :]
        for other in later:
            same = isinstance(other, MatmulSpec) and (other.in_features, other.per) == (
                product.in_features,
                product.per,
            )
            if isinstance(other, MatmulSpec) and same and f"{_layer_of(other)}.input" not in names:
                yield other

    def _is_result(self, layer: str) -> bool:
        """Whether the activation before a layer reads its result in backward, since it keeps nothing else."""
        is_other_kept = any(tensor.name == _ACTIVATION_BEFORE.get(layer) for tensor in self._block.layer.saved)
        return layer in _ACTIVATION_BEFORE and not is_other_kept and self._has_gradient(self._start(layer))
