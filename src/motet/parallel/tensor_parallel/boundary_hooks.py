"""Hooks that communicate an activation where it enters or leaves modules on this rank."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from motet.models.layout_invariant_dropout import row_split
from motet.parallel.linear import ColumnProduct, LinearSplit, SharedInput, row_product
from motet.parallel.model_sharding import BoundaryComm, BoundaryOperation
from motet.parallel.process.process_group import RankGroup
from motet.parallel.tensor_parallel.boundary_functions import Communication
from motet.parallel.tensor_parallel.dropout_split import RowSplit


@dataclass
class SequenceState:
    """Whether the running forward splits the sequence, which it need not do without gradients."""

    dims: frozenset[int]  # Along which some comm splits it
    is_split: bool = True

    def begin(self, length: int, ranks: int) -> None:
        """Begin a stretch of blocks; with gradients, a length that cannot be split is refused when it is."""
        self.is_split = torch.is_grad_enabled() or length % ranks == 0

    def operation(self, comm: BoundaryComm) -> BoundaryOperation:
        """The operation of a comm in this forward."""
        if self.is_split or comm.dim not in self.dims:
            return comm.operation
        return "sum" if comm.operation == "scatter" else "copy"


@dataclass
class Boundary:
    """A comm on this rank."""

    comm: BoundaryComm
    group: RankGroup
    sequence: SequenceState
    row_split_after: RowSplit | None  # Of activations after the comm

    def communicate(self, x: Tensor) -> Tensor:
        comm = self.comm
        if comm.operation == "split" and comm.side == "input":
            self.sequence.begin(x.shape[comm.dim], self.group.world)
        operation = self.sequence.operation(comm)
        conjugate = comm.conjugate if operation == comm.operation else "copy"  # Without gradients there is none
        return Communication(operation, conjugate, comm.dim, self.group).apply(x)

    @property
    def tokens_dim(self) -> int | None:
        """The dimension along which layers gather their input or scatter their output; None: ranks have all of it."""
        return self.comm.dim if self.sequence.operation(self.comm) in ("gather", "scatter") else None

    def enter(self) -> None:
        row_split.set(self.row_split_after)


class _Reading(NamedTuple):
    """A tensor that was communicated, while some of the modules that share it have yet to read it."""

    source: Tensor
    communicated: Tensor
    shared: SharedInput | None
    weights: Mapping[nn.Module, tuple[int, Tensor]]  # Of layers with split columns: index and value
    readers: set[nn.Module]


class InputBoundary:
    """Hooks of the modules that read one tensor, which is communicated once."""

    def __init__(
        self, boundary: Boundary, modules: Sequence[nn.Module], columns: Mapping[nn.Module, LinearSplit]
    ) -> None:
        self._boundary, self._modules, self._columns = boundary, modules, columns
        self._reading: _Reading | None = None
        for module in modules:
            module.register_forward_pre_hook(self._before, with_kwargs=True)
        for layer in columns:
            layer.forward = partial(self._multiply, layer)

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._boundary.enter()
        key = self._boundary.comm.argument
        if key not in kwargs and not (isinstance(key, int) and key < len(args)):
            # An argument that is given by position in some calls, and by name in others.
            names = list(inspect.signature(module.forward).parameters)
            key = names[key] if isinstance(key, int) else names.index(key)
        source = args[key] if isinstance(key, int) else kwargs[key]
        reading = self._reading
        if reading is None or reading.source is not source or module not in reading.readers:
            self._reading = reading = self._communicate(source)
        reading.readers.discard(module)
        if not reading.readers and not self._columns:
            self._reading = None
        if isinstance(key, int):
            return (*args[:key], reading.communicated, *args[key + 1 :]), kwargs
        return args, {**kwargs, key: reading.communicated}

    def _communicate(self, source: Tensor) -> _Reading:
        if not self._columns:
            return _Reading(source, self._boundary.communicate(source), None, {}, set(self._modules))
        shared = SharedInput(self._boundary.group, self._boundary.tokens_dim)
        columns: list[Any] = [*self._columns]
        trained = [layer for layer in columns if layer.weight.requires_grad]
        x, *weights = shared.read(source, [layer.weight for layer in trained])
        indexed = {layer: (index, weights[index]) for index, layer in enumerate(trained)}
        return _Reading(source, x, shared, indexed, set(self._modules))

    def _multiply(self, layer: Any, x: Tensor) -> Tensor:
        reading = self._reading
        assert reading is not None and reading.shared is not None
        index, weight = reading.weights.get(layer, (None, layer.weight))
        if not reading.readers:
            self._reading = None
        product = ColumnProduct(self._columns[layer], reading.shared, index)
        return product.multiply(x, weight, getattr(layer, "bias", None), local_input=reading.source)


class OutputBoundary:
    """Hooks of a module whose output is communicated."""

    def __init__(self, boundary: Boundary, module: nn.Module, row: LinearSplit | None) -> None:
        self._boundary, self._row, self._module = boundary, row, module
        # What a hook adds to the output of a layer, such as an adapter, is summed too, and so later.
        self._is_reduced_in_forward = row is not None and {n for n, _ in module.named_parameters()} <= {
            "weight",
            "bias",
        }
        if row is not None:
            module.forward = self._multiply
        module.register_forward_hook(self._after)

    def _multiply(self, x: Tensor) -> Tensor:
        layer, reduces = cast(Any, self._module), self._is_reduced_in_forward
        assert self._row is not None
        row = replace(self._row, dim=self._boundary.tokens_dim, reduces=reduces)
        return row_product(row, layer, x)

    def _after(self, _: nn.Module, args: object, output: Any) -> Any:
        self._boundary.enter()
        if self._is_reduced_in_forward:
            return output
        if isinstance(output, Tensor):
            return self._boundary.communicate(output)
        key = self._boundary.comm.argument
        communicated = self._boundary.communicate(output[key])
        if isinstance(output, tuple) and isinstance(key, int):
            return (*output[:key], communicated, *output[key + 1 :])
        output[key] = communicated
        return output
