"""Makes a module that was written for one device compute this rank's part: hooks on its instances, local attributes.

The parameters get their local shapes and values elsewhere, by the same `ModelSharding`.

The part of an activation's row that a rank has where dropout draws its mask, from the shape of the row there.
"""

import copy
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from motet.core.errors import InputError
from motet.models.arch.loss import set_vocabulary_shard
from motet.models.dropout_mask import Spans
from motet.models.layout_invariant_dropout import RowSplit, row_split
from motet.models.user_module import find_blocks
from motet.parallel.data_parallel.communication.shard_replica_mesh import join_subgroup
from motet.parallel.linear import LinearProducts, LinearSplit
from motet.parallel.model_sharding import (
    BOUNDARY_OPERATIONS,
    LOSS,
    BoundaryComm,
    DimensionSplit,
    ModelSharding,
    TensorInfo,
)
from motet.parallel.parallel_dims import ParallelDims
from motet.parallel.process.process_group import RankGroup
from motet.parallel.shard_spec import ShardSpec
from motet.parallel.tensor_parallel.boundary_hooks import (
    Boundary,
    InputBoundary,
    OutputBoundary,
    SequenceState,
    show_input_widths,
)
from motet.parallel.tensor_parallel.vocabulary.rank_vocabulary import RankVocabularyShard, shard_embedding


def split_by_units(width: int, spans: Sequence[tuple[int, int]], padding: int) -> RowSplit:
    """The split inside of a region whose last layer reads `width` elements, of which this rank has these
    spans and padding: of inner activations [T, width], or of the heads of attention probabilities [heads, T, S]."""
    local = padding + sum(stop - first for first, stop in spans)

    def split(shape: tuple[int, ...]) -> tuple[tuple[int, ...], Spans]:
        is_inner = shape[-1] == local and (len(shape) == 2 or (len(shape) == 3 and shape[0] == 1))
        dim = len(shape) - 1 if is_inner else 1 if len(shape) == 4 and shape[0] == 1 else 0
        units, is_unclear = shape[dim], not local or len(shape) < 2 or (not is_inner and len(shape) not in (3, 4))
        bounds = [bound * units for local_span in spans for bound in (*local_span, width)]
        if is_unclear or any(bound % local for bound in bounds):
            raise InputError(
                f"dropout on a tensor with rows of shape {list(shape)}, between layers that ranks split: no dimension "
                f"clearly holds this rank's {local} of {width} elements; set the dropout to 0"
            )
        here = [(first * units // local, stop * units // local) for first, stop in spans]
        filler = [(0, padding * units // local)] if padding else []  # The mask of zeros does not matter
        return _replace_dim(shape, dim, width * units // local, spans=[*here, *filler])

    return split


def split_by_tokens(ranks: int, index: int) -> RowSplit:
    """The split of the residual stream over the sequence: each rank has equally many tokens."""

    def split(shape: tuple[int, ...]) -> tuple[tuple[int, ...], Spans]:
        dim = 1 if len(shape) > 2 and shape[0] == 1 else 0
        tokens = shape[dim]
        return _replace_dim(shape, dim, ranks * tokens, spans=[(index * tokens, (index + 1) * tokens)])

    return split


def _replace_dim(
    shape: tuple[int, ...], dim: int, length: int, *, spans: list[tuple[int, int]]
) -> tuple[tuple[int, ...], Spans]:
    all_spans = [[(0, local)] for local in shape]
    all_spans[dim] = spans
    return (*shape[:dim], length, *shape[dim + 1 :]), all_spans


def shard_module(
    module: nn.Module,
    sharding: ModelSharding,
    dims: ParallelDims,
    *,
    group: RankGroup,
    products: LinearProducts,
    pieces: int = 1,
    held: Container[str] | None = None,
) -> Sequence[SequenceState]:
    """Let a module communicate at the borders of its split regions, in `pieces`. Every rank of the group calls this.

    Layers do not communicate if the rank holds none of their parameters; `held` has the names of held parameters,
    or is None if it holds all. Returns states that say whether a running forward splits the sequence.
    """
    split_over = sorted({comm.over for comm in sharding.boundary_comms if dims.size(comm.over) > 1})
    groups = {over: join_subgroup(group, dims.groups(over)) for over in split_over}
    set_attributes(module, sharding.attributes if groups else ())
    names, states = {parameter: name for name, parameter in module.named_parameters()}, list[SequenceState]()
    for over, tensor_group in groups.items():
        assert tensor_group is not None  # Each rank has an index in every dimension
        comms = [comm for comm in sharding.boundary_comms if comm.over == over]
        for comm in tuple(comms):
            owned = [names[parameter] for parameter in module.get_submodule(comm.module).parameters()]
            if comm.argument != LOSS and owned and held is not None and not any(name in held for name in owned):
                comms.remove(comm)
        split = LinearSplit(tensor_group, products, pieces)
        installer = _BoundaryInstaller(module, sharding, comms, split=split)
        installer.install_hooks()
        states.append(installer.sequence)
    show_input_widths(module, sharding.input_widths if groups else ())
    return states


def set_attributes(module: nn.Module, attributes: Sequence[tuple[str, str, int]]) -> None:
    """Set attributes of inner modules. `config.NAME` is set on a copy of the config, which modules with the same config
    and the same values share."""
    by_module: dict[str, list[tuple[str, int]]] = {}
    for name, attribute, value in attributes:
        by_module.setdefault(name, []).append((attribute, value))
    copies: dict[object, tuple[Any, Any]] = {}  # With the originals, so that no other object gets the id of one
    for name, values in by_module.items():
        inner = module.get_submodule(name)
        for owner in {attribute.rpartition(".")[0] for attribute, _ in values} - {""}:
            original = getattr(inner, owner)
            _, local = copies.setdefault((id(original), *values), (original, copy.copy(original)))
            setattr(inner, owner, local)
        for attribute, value in values:
            owner, _, last = attribute.rpartition(".")
            setattr(getattr(inner, owner) if owner else inner, last, value)


def computes_linear(layer: nn.Module, is_transposed: bool) -> bool:
    """Whether a layer computes x @ weight.T + bias, or x @ weight + bias if it is transposed: found out by running it
    with other parameters."""
    named = {name: p for name, p in layer.named_parameters() if name in ("weight", "bias")}
    if named.keys() - {"bias"} != {"weight"} or named["weight"].ndim != 2 or any(True for _ in layer.children()):
        return False
    if type(layer).forward is nn.Linear.forward:
        return not is_transposed
    rows = named["weight"].shape[0 if is_transposed else 1]
    shapes = {name: torch.empty(p.shape, dtype=torch.float64, device="meta") for name, p in named.items()}
    if _output_with(layer, shapes, torch.empty(2, rows, dtype=torch.float64, device="meta")) is None:
        return False  # A table, say, whose values would take much memory
    values, x = {name: _distinct_values(p.shape) for name, p in named.items()}, _distinct_values((2, rows)) + 1
    output, weight = _output_with(layer, values, x), values["weight"] if is_transposed else values["weight"].T
    expected = x @ weight + values.get("bias", 0.0)
    return output is not None and output.shape == expected.shape and torch.allclose(output, expected)


def _output_with(layer: nn.Module, parameters: Mapping[str, Tensor], x: Tensor) -> Tensor | None:
    """The output of a layer with other parameters, or None if it cannot compute one from x."""
    stand_in = copy.copy(layer)
    stand_in._parameters = {n: parameters.get(n) for n in layer._parameters}  # type: ignore[misc]  # a mere tensor will do
    try:
        with torch.no_grad():
            output = stand_in.forward(x)
    except (RuntimeError, TypeError, ValueError, IndexError):
        return None
    return output if isinstance(output, Tensor) else None


def _distinct_values(shape: Sequence[int]) -> Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float64, device="cpu").mul(0.7).sin().view(*shape)


class _BoundaryInstaller:
    """Installs the comms over one dimension, in which the group has the ranks with this rank's other coordinates."""

    def __init__(
        self, module: nn.Module, sharding: ModelSharding, comms: Sequence[BoundaryComm], *, split: LinearSplit
    ) -> None:
        """`split` is that of a layer with a weight of [out, in]."""
        self._module, self._sharding, self._comms = module, sharding, comms
        self._split, self._group = split, split.group
        self._names = {parameter: name for name, parameter in module.named_parameters()}
        self.sequence = SequenceState(split.group.world)

    def install_hooks(self) -> None:
        for block, split_there in self._row_splits_of_blocks():
            block.register_forward_pre_hook(lambda *_, split=split_there: row_split.set(split) and None)
        summed = {c.module for c in self._comms if c.operation in ("sum", "scatter") and c.argument != LOSS}
        rows = {self._module.get_submodule(name) for name in summed}
        for index, comm in enumerate(self._comms):
            modules = [self._module.get_submodule(name) for name in (comm.module, *comm.shared_by)]
            boundary = Boundary(comm, self._group, self.sequence, self._row_split_after(index))
            if comm.side == "input":
                layers = [layer for module in modules for layer in module.modules() if layer not in rows]
                inner = {layer for module in modules for layer in module.modules() if layer is not module}
                InputBoundary(boundary, [m for m in modules if m not in inner], self._linear_splits(layers, comm))
            else:
                self._install_output(boundary, modules[0])

    def _install_output(self, boundary: Boundary, module: nn.Module) -> None:
        comm = boundary.comm
        if comm.argument == LOSS:
            set_vocabulary_shard(self._module, RankVocabularyShard.from_spec(*self._head_spec(), group=self._group))
            return
        linear = self._linear_splits([module], comm)
        if comm.operation == "sum" and not linear and self._is_table(module):
            ((start, stop),) = self._spec(self._names[cast(Any, module).weight]).spans[0]
            shard_embedding(module, range(start, stop))
        OutputBoundary(boundary, module, linear.get(module))
        if (comm.operation, comm.dim) == ("gather", -1):
            spec, dim = self._head_spec()
            module.register_forward_hook(lambda _, __, logits, end=spec.shape[dim]: logits[..., :end])

    def _linear_splits(self, layers: Sequence[nn.Module], comm: BoundaryComm) -> dict[nn.Module, LinearSplit]:
        """The linear layers with split weights, among layers before or after which ranks communicate."""
        if comm.operation not in ("copy", "gather", "sum", "scatter"):
            return {}
        splits = {layer: split for layer in layers if (split := self._weight_split(layer)) is not None}
        is_transposed = {layer: (split.dim == 0) == (comm.side == "output") for layer, split in splits.items()}
        return {
            layer: replace(self._split, products=replace(self._split.products, is_transposed=flag))
            for layer, flag in is_transposed.items()
            if computes_linear(layer, flag)
        }

    def _is_table(self, layer: nn.Module) -> bool:
        """Whether ranks split the rows of a weight from which a layer that is not linear looks up vectors."""
        split = self._weight_split(layer)
        return split is not None and split.dim == 0

    def _head_spec(self) -> tuple[ShardSpec, int]:
        """The shard of the head's weight, and the dimension of the entries."""
        name = self._sharding.head_tensors[0]
        return self._spec(name), self._sharding.rule(name).splits[0].dim

    def _spec(self, name: str) -> ShardSpec:
        tensor = TensorInfo(name, tuple(self._module.get_parameter(name).shape), "", "trained")
        dims = ParallelDims(((self._comms[0].over, self._group.world),))
        spec = replace(self._sharding, stages=()).spec(tensor, dims.coordinates(self._group.rank), dims)
        assert spec is not None  # Without stages every rank holds a shard
        return spec

    def _weight_split(self, layer: nn.Module) -> DimensionSplit | None:
        weight = dict(layer.named_parameters(recurse=False)).get("weight")
        splits = self._sharding.rule(self._names[weight]).splits if weight is not None else ()
        return next((split for split in splits if split.over == self._comms[0].over), None)

    def _row_split_after(self, index: int) -> RowSplit | None:
        """The part of a row that a rank has after a comm; None: all of it."""
        comm = self._comms[index]
        after, ranks = BOUNDARY_OPERATIONS[comm.operation, comm.side][1], self._group.world
        if after != "parallel":
            return split_by_tokens(ranks, self._group.rank) if after == "split" else None
        last = next((each for each in self._comms[index:] if each.side == "output"), comm)
        layer: Any = self._module.get_submodule(last.module)
        split = self._weight_split(layer)
        if split is None:
            return split_by_units(0, [], 0)
        width = layer.weight.shape[split.dim]
        spans, padding = split.local_spans(width, ranks=ranks, index=self._group.rank)
        return split_by_units(width, spans, padding)

    def _row_splits_of_blocks(self) -> Iterator[tuple[nn.Module, RowSplit | None]]:
        """Each block, from which recomputation may start, and the part of a row that a rank has there."""
        starts = {comm.module for comm in self._comms if (comm.operation, comm.side) == ("split", "input")}
        stops = {comm.module for comm in self._comms if (comm.operation, comm.side) == ("gather", "output")}
        names, split, is_split = (
            {m: n for n, m in self._module.named_modules()},
            split_by_tokens(self._group.world, self._group.rank),
            False,
        )
        for block in find_blocks(self._module):
            yield block, split if is_split else None
            is_split = (is_split or names[block] in starts) and names[block] not in stops
