"""Hooks that communicate an activation where it enters or leaves modules on this rank.

A module whose code computes with the width of its input, as in `B, T, C = x.size()`, gets a view of it that is as wide
as the rank's results from it, so that a later `y.view(B, T, C)` is right. The layers in it that read the input get
the input itself. Nothing else may read its values.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from motet.collectives.execute.api import needs_compute_cores
from motet.models.adapters import set_input_projection, weights_on_input
from motet.models.layout_invariant_dropout import RowSplit, row_split
from motet.parallel.linear import LinearProducts, LinearSplit, SharedInput, row_product
from motet.parallel.model_sharding import BoundaryComm, BoundaryOperation, InputWidth
from motet.parallel.process.process_group import RankGroup
from motet.parallel.tensor_parallel.boundary_functions import Communication
from motet.parallel.tensor_parallel.graph_communication import communicate_in_graph, numbered_group

_WITHOUT_PIECES: Mapping[BoundaryOperation, BoundaryOperation] = {"scatter": "sum"}  # Others do nothing


@dataclass
class SequenceState:
    """Whether the running forward splits the sequence, which it need not do without gradients."""

    ranks: int
    is_split: bool = True

    def begin(self, length: int) -> None:
        """Begin a stretch of blocks; with gradients, a length that ranks do not divide is refused at its split."""
        self.is_split = torch.is_grad_enabled() or length % self.ranks == 0

    def operation(self, comm: BoundaryComm) -> BoundaryOperation:
        """The operation of a comm in this forward."""
        splits_sequence = comm.dim >= 0 and comm.operation in ("gather", "scatter", "split", "replicate")
        return _WITHOUT_PIECES.get(comm.operation, "copy") if splits_sequence and not self.is_split else comm.operation


@dataclass
class Boundary:
    """A comm on this rank."""

    comm: BoundaryComm
    group: RankGroup
    sequence: SequenceState
    row_split_after: RowSplit | None  # Row split of activations after the comm

    def __post_init__(self) -> None:
        self._group_number, self._numbered = numbered_group(self.group)

    def communicate(self, x: Tensor, *, is_recomputed: bool = False) -> Tensor:
        """Communicate an activation; with `is_recomputed` the backward of a graph does it again."""
        comm = self.comm
        if torch.compiler.is_compiling() and self.group.world > 1:  # With gradients, so ranks split the sequence
            pair, number = (comm.operation, comm.conjugate), self._group_number
            return communicate_in_graph(x, pair, dim=comm.dim, group=number, is_recomputed=is_recomputed)
        if (comm.operation, comm.side) == ("split", "input") and comm.dim >= 0:
            self.sequence.begin(x.shape[comm.dim])
        operation = self.sequence.operation(comm)
        conjugate = comm.conjugate if operation == comm.operation else "copy"  # No conjugate without gradients
        return Communication(operation, conjugate, comm.dim, self.group).apply(x)

    @property
    def tokens_dim(self) -> int | None:
        """The dimension along which layers gather their input or scatter their output; None: ranks have all of it."""
        return self.comm.dim if self.sequence.operation(self.comm) in ("gather", "scatter") else None

    def enter(self) -> None:
        if torch.compiler.is_compiling():  # Without dropout, whose masks follow the split
            return
        is_whole = not self.sequence.is_split and self.comm.operation in ("scatter", "split")
        row_split.set(None if is_whole else self.row_split_after)


def argument_key(
    argument: int | str, module: nn.Module, args: tuple[Any, ...], *, kwargs: Mapping[str, Any]
) -> int | str:
    """The place of an argument in a call: an index of `args`, or a name. Calls may give it by position or by name."""
    if argument in kwargs or (isinstance(argument, int) and argument < len(args)):
        return argument
    names = list(inspect.signature(getattr(module, "replaced_forward", module.forward)).parameters)
    return names[argument] if isinstance(argument, int) else names.index(argument)


class _Reading(NamedTuple):
    """A tensor that was communicated, as long as modules that share it have yet to return."""

    source: Tensor
    local: Tensor  # The source, detached
    communicated: Tensor
    readers: set[nn.Module]  # Modules that have yet to read it
    shared: SharedInput
    trained: Mapping[int, tuple[int, Tensor]]  # By id, the weights of layers with split columns: index, value to use


class InputBoundary:
    """Hooks of modules that read one tensor, which is communicated once, and of the layers in them with split columns.

    Such a layer is one of the modules, or inside of one that hands the tensor to it.
    """

    def __init__(
        self, boundary: Boundary, modules: Sequence[nn.Module], columns: Mapping[nn.Module, LinearSplit]
    ) -> None:
        self._boundary, self._modules, self._columns = boundary, modules, columns
        self._reading: _Reading | None = None
        # While a graph is made: a tensor, the communicated one, and the number of modules that have yet to read it
        self._in_graph: tuple[Tensor | None, Tensor | None, int] | None = None
        # Another module may read the tensor before its first layer, and needs all pieces.
        self._pieces = next(iter(columns.values())).pieces if {*modules} == {*columns} else 1
        self._overlaps = self._pieces > 1 or not needs_compute_cores(boundary.group)
        # Autograd computes products without overlap, unless their input is gathered again in backward.
        self._products = columns if self._overlaps or boundary.comm.operation == "gather" else {}
        self._gathers_again = bool(columns) and boundary.comm.operation == "gather"
        for layer, split in columns.items():
            layer.forward = _SplitForward(layer, partial(self._multiply, split), split.products)
            adapter_split = replace(split, products=replace(split.products, is_transposed=False))
            set_input_projection(layer, partial(self._multiply, adapter_split, bias=None))
        for module in modules:
            module.register_forward_pre_hook(self._before, with_kwargs=True)
            if self._products:
                module.register_forward_hook(self._after)

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.compiler.is_compiling():
            return self._before_in_graph(module, args, kwargs)
        self._boundary.enter()
        reading = self._reading
        if reading is not None and any(each is reading.communicated for each in (*args, *kwargs.values())):
            reading.readers.discard(module)  # A module around it has communicated the tensor
            return args, kwargs
        key = argument_key(self._boundary.comm.argument, module, args, kwargs=kwargs)
        source = args[key] if isinstance(key, int) else kwargs[key]
        if reading is None or reading.source is not source or module not in reading.readers:
            self._reading = reading = self._communicate(source)
        reading.readers.discard(module)
        if not self._products:
            self._after()
        if isinstance(key, int):
            return (*args[:key], reading.communicated, *args[key + 1 :]), kwargs
        return args, {**kwargs, key: reading.communicated}

    def _before_in_graph(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Communicate in a graph, where autograd computes the products, and the compiler decides what overlaps."""
        key = argument_key(self._boundary.comm.argument, module, args, kwargs=kwargs)
        x: Tensor = args[key] if isinstance(key, int) else kwargs[key]
        source, communicated, readers = self._in_graph or (None, None, 0)
        if communicated is None or (x is not source and x is not communicated):
            communicated = self._boundary.communicate(x, is_recomputed=self._gathers_again)
            source, readers = x, len(self._modules)
        self._in_graph = (source, communicated, readers - 1) if readers > 1 else None
        if isinstance(key, int):
            return (*args[:key], communicated, *args[key + 1 :]), kwargs
        return args, {**kwargs, key: communicated}

    def _communicate(self, source: Tensor) -> _Reading:
        boundary = self._boundary
        shared = SharedInput(boundary.group, boundary.tokens_dim, pieces=self._pieces, overlaps=self._overlaps)
        local, readers = source.detach(), {*self._modules}
        if not self._columns:
            return _Reading(source, local, boundary.communicate(source), readers, shared, {})
        # Stage 3 replaces parameters while they are gathered.
        layers = self._products if self._overlaps else ()
        weights = [weight for layer in layers for weight in weights_on_input(layer)]
        trained = [weight for weight in weights if weight.requires_grad]
        communicated, *values = shared.read(source, trained)
        indexed = {id(weight): each for weight, each in zip(trained, enumerate(values), strict=True)}
        return _Reading(source, local, communicated, readers, shared, indexed)

    def _after(self, *_: object) -> None:
        if torch.compiler.is_compiling():
            return
        if self._reading is not None and not self._reading.readers:
            self._reading = None

    def _multiply(self, split: LinearSplit, x: Tensor, weight: Tensor, *, bias: Tensor | None) -> Tensor:
        reading = self._reading
        if reading is None or x is not reading.communicated:  # A tensor computed from it
            return split.products.multiply(x, weight, bias)
        index, value = reading.trained.get(id(weight), (None, weight))
        return reading.shared.multiply(split, x, value, bias=bias, index=index, local=reading.local)


class _SplitForward:
    """The forward of a layer with split columns; no function of one block, so that blocks share a graph."""

    def __init__(self, layer: Any, multiply: Callable[..., Tensor], products: LinearProducts) -> None:
        self._layer, self._multiply, self._products = layer, multiply, products

    def __call__(self, x: Tensor) -> Tensor:
        weight, bias = self._layer.weight, getattr(self._layer, "bias", None)
        if torch.compiler.is_compiling():
            return self._products.multiply(x, weight, bias)
        return self._multiply(x, weight, bias=bias)


class OutputBoundary:
    """Hooks of a module whose output is communicated."""

    def __init__(self, boundary: Boundary, module: nn.Module, row: LinearSplit | None) -> None:
        self._boundary, self._module = boundary, module
        # Tensors that hooks add to the output of a layer, such as an adapter's, are summed too, so the sum comes later.
        names = {name for name, _ in module.named_parameters()}
        self._is_reduced_in_forward = row is not None and names <= {"weight", "bias"}
        self._left_out = float(boundary.group.rank > 0)  # A factor, so that graphs have the same nodes on all ranks
        if row is not None:
            dims, reduces = {None, boundary.comm.dim}, self._is_reduced_in_forward
            self._rows = {dim: replace(row, dim=dim, reduces=reduces) for dim in dims}
            module.forward = self._multiply
        if not self._is_reduced_in_forward:
            module.register_forward_hook(self._after)

    def _multiply(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return self._multiply_in_graph(x)
        if self._is_reduced_in_forward:
            self._boundary.enter()
        return row_product(self._rows[self._boundary.tokens_dim], self._module, x)

    def _multiply_in_graph(self, x: Tensor) -> Tensor:
        layer: Any = self._module
        bias: Tensor | None = getattr(layer, "bias", None)
        if bias is not None:  # The first rank adds it, and each has its gradient; the graph is the same on all
            bias = bias - bias.detach() * self._left_out
        output = self._rows[None].products.multiply(x, layer.weight, bias)
        return self._boundary.communicate(output) if self._is_reduced_in_forward else output

    def _after(self, _: nn.Module, args: object, output: Any) -> Any:
        self._boundary.enter()
        if isinstance(output, Tensor):
            return self._boundary.communicate(output)
        key = self._boundary.comm.argument
        communicated = self._boundary.communicate(output[key])
        if isinstance(output, tuple) and isinstance(key, int):
            return (*output[:key], communicated, *output[key + 1 :])
        output[key] = communicated
        return output


@contextmanager
def local_input_widths(module: nn.Module, widths: Sequence[InputWidth]) -> Iterator[None]:
    """Inside, inner modules see the widths of one rank."""
    with ExitStack() as stack:
        for remove in show_input_widths(module, widths):
            stack.callback(remove)
        yield


def show_input_widths(module: nn.Module, widths: Sequence[InputWidth]) -> list[Callable[[], None]]:
    """Let inner modules see the widths of one rank, after other hooks changed inputs. Returns functions to end it."""
    return [remove for width in widths for remove in _ShownInput(module, width).removers]


class _ShownInput:
    """The hooks of one module, and of the layers that read its input."""

    def __init__(self, module: nn.Module, width: InputWidth) -> None:
        self._width = width
        self._input: Tensor | None = None
        self._shown: Tensor | None = None
        holder = module.get_submodule(width.module)
        readers = [module.get_submodule(name) for name in width.readers]
        handles = [
            holder.register_forward_pre_hook(self._show, with_kwargs=True),
            holder.register_forward_hook(self._forget, always_call=True),
            *(reader.register_forward_pre_hook(self._give, with_kwargs=True, prepend=True) for reader in readers),
        ]
        self.removers = [handle.remove for handle in handles]

    def _show(self, holder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        key = argument_key(self._width.argument, holder, args, kwargs=kwargs)
        x: Tensor = args[key] if isinstance(key, int) else kwargs[key]
        self._input, self._shown = x, x.narrow(-1, 0, x.shape[-1] // self._width.ranks)
        if isinstance(key, int):
            return (*args[:key], self._shown, *args[key + 1 :]), kwargs
        return args, {**kwargs, key: self._shown}

    def _give(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return tuple(map(self._original, args)), {key: self._original(value) for key, value in kwargs.items()}

    def _original(self, value: Any) -> Any:
        return value if value is None or value is not self._shown else self._input

    def _forget(self, *_: object) -> None:
        self._input = self._shown = None
