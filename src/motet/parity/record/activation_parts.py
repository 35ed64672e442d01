"""The part that each rank of a layout has of the output of a module, and of the tensors of its batch."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import takewhile

import torch
from torch import Tensor

from motet.models.layout_invariant_dropout import places_in_spans
from motet.parallel.context_parallel.context_partition import ContextOrder, ContextPartition
from motet.parallel.model_sharding import (
    BOUNDARY_OPERATIONS,
    CONTEXT_DIMENSION,
    LOSS,
    BoundaryComm,
    DimensionSplit,
    ModelSharding,
)
from motet.parallel.parallel_dims import ParallelDims
from motet.parallel.shard_spec import ShardSpec
from motet.parallel.step_plan.plan import StepPlan

WHOLE_MODEL = "whole model"  # The name of the outermost module in records


@dataclass(frozen=True)
class ParallelRegion:
    """Modules that run between communication, where ranks compute different parts of the same rows."""

    opened_by: tuple[str, ...]  # Modules before whose inputs ranks communicate
    closed_by: str  # The module after which they communicate

    @property
    def module(self) -> str:
        """The innermost module around all of it."""
        levels = zip(*(module.split(".") for module in (*self.opened_by, self.closed_by)), strict=False)
        return ".".join(names[0] for names in takewhile(lambda names: len(set(names)) == 1, levels))

    def has(self, name: str, order: Mapping[str, int]) -> bool:
        """Whether an output was computed in the region; `order` has all outputs until then, or until the end."""
        if not order:
            return _is_inside(module_of(name), self.module)
        places = {(module_of(each), call_of(each)): place for each, place in order.items()}
        place, calls = places.get((module_of(name), call_of(name)), len(order)), {call for _, call in places}
        starts = {
            call: min(places.get((m, call), len(order)) for m in self.opened_by or [self.closed_by]) for call in calls
        }
        return any(starts[call] <= place < places.get((self.closed_by, call), place + 1) for call in calls)


@dataclass(frozen=True)
class TokenParts:
    """The tokens of each row that ranks of context parallelism have."""

    dims: ParallelDims
    order: ContextOrder
    row_tokens: int  # Tokens of a whole row

    @property
    def partition(self) -> ContextPartition:
        return ContextPartition(self.row_tokens, self.dims.size(CONTEXT_DIMENSION), self.order)

    def in_rows(self, shape: tuple[int, ...], rank: int, rows: int) -> tuple[list[int], int | None]:
        """The shape in whole rows, from that in the rank's part of each row, and the dimension of the tokens."""
        here = self.partition.length(self._index(rank))
        dim = self._token_dim(shape, here, rows)
        factor = 1 if dim is None or shape[dim] == here else rows
        return [factor * self.partition.tokens if at == dim else size for at, size in enumerate(shape)], dim

    def spans(self, shape: tuple[int, ...], rank: int, rows: int) -> tuple[int, tuple[tuple[int, int], ...]] | None:
        """The dimension of the tokens, and the places of the rank's tokens in it; None without such a dimension."""
        tokens, spans = self.partition.tokens, self.partition.spans(self._index(rank))
        if (dim := self._token_dim(shape, tokens, rows)) is None:
            return None
        starts = range(0, shape[dim], tokens)  # Rows one after another, if they share the dimension
        return dim, tuple((start + first, start + stop) for start in starts for first, stop in spans)

    def _index(self, rank: int) -> int:
        return self.dims.coordinates(rank)[CONTEXT_DIMENSION]

    def _token_dim(self, shape: tuple[int, ...], tokens: int, rows: int) -> int | None:
        """The first dimension of a tensor that has the tokens of all rows one after another; else the second one, or
        the first one that has all tokens of a row, or of all rows."""
        if _has_flat_rows(shape, rows) and shape[0] == rows * tokens:
            return 0
        dims = sorted(range(len(shape)), key=lambda dim: (dim != 1, dim))
        matching = (dim for length in (tokens, rows * tokens) for dim in dims if shape[dim] == length)
        return next(matching, None)


@dataclass(frozen=True)
class ActivationParts:
    """The splits of modules' outputs by a layout; names are those of records."""

    sharding: ModelSharding
    dims: ParallelDims
    # Outputs in the order of computation; without it, all outputs in the module around a region may belong to it.
    order: Mapping[str, int] = field(default_factory=dict)
    tokens: TokenParts | None = None  # None: each rank has whole rows

    def splits(self, name: str) -> tuple[DimensionSplit, ...] | None:
        """The splits of an output of a module; None if they are not known."""
        label, module = name.partition(" (call")[0].removeprefix(WHOLE_MODEL), module_of(name)
        if label != module and (label, "output") in self._entries:
            return self._entries[label, "output"]
        around = [other for other, side in self._entries if side == "input" and _is_inside(module, other)]
        splits = self._entries[max(around, key=len), "input"] if around else ()
        if (module, "output") in self._entries:
            splits = self._entries[module, "output"]
        elif module in self._with_split_logits or any(region.has(name, self.order) for region in self._regions):
            return None
        is_first = label.removeprefix(module) in ("", "[0]") or not label.removeprefix(module)[1].isdigit()
        if not is_first and (splits or any(_is_in(region.module, module) for region in self._regions)):
            return None
        return tuple(split for split in splits if (module, split.over) not in self._gathered)

    def region_of(self, module: str) -> ParallelRegion | None:
        """The region that a module closes, or else the innermost one around it."""
        around = [region for region in self._regions if _is_in(module, region.module)]
        return max(around, key=lambda region: (region.closed_by == module, len(region.module)), default=None)

    def spec(self, name: str, rank: int, shape: tuple[int, ...], *, rows: int) -> ShardSpec | None:
        """The part that a rank has of an output, whose shape in the whole model is given; None if it is not known.
        `rows` are those of the micro-batch."""
        if (splits := self.splits(name)) is None:
            return None
        splits = tuple(_in_tokens(split, shape, rows) for split in splits)
        if any(not -len(shape) <= split.dim < len(shape) for split in splits):
            return None
        return self._part(rank, shape, splits, rows=rows)

    def token_spec(self, rank: int, shape: tuple[int, ...], *, rows: int) -> ShardSpec:
        """The part that a rank has of a tensor of the batch, whose shape in whole rows is given."""
        return self._part(rank, shape, (), rows=rows)

    def _part(self, rank: int, shape: tuple[int, ...], splits: Sequence[DimensionSplit], *, rows: int) -> ShardSpec:
        spans, padding, place = list(ShardSpec.full(shape).spans), [0] * len(shape), self.dims.coordinates(rank)
        along = self.tokens.spans(shape, rank, rows) if self.tokens else None
        if along is not None:
            spans[along[0]] = along[1]
        for split in splits:  # Ranks of tensor parallelism split the part of a row that they all have
            in_part = along is not None and along[0] == split.dim % len(shape)
            runs = rows if _has_flat_rows(shape, rows) and split.dim == 0 else 1  # Each row is split
            length = sum(stop - first for first, stop in spans[split.dim]) // runs
            inner, padding[split.dim] = (replace(split, parts=()) if in_part else split).local_spans(
                length, ranks=self.dims.size(split.over), index=place.get(split.over, 0)
            )
            spans[split.dim] = tuple(
                each
                for start in range(0, runs * length, length or 1)
                for first, stop in inner
                for each in places_in_spans(spans[split.dim], start + first, start + stop)
            )
        return ShardSpec(shape, tuple(spans), tuple(padding) if any(padding) else ())

    def local_spec(self, name: str, rank: int, local_shape: tuple[int, ...], *, rows: int) -> ShardSpec | None:
        """The part by its shape on the rank; None also if the rank should have another shape."""
        shape = list(local_shape)
        for split in (_in_tokens(split, local_shape, rows) for split in self.splits(name) or ()):
            if -len(shape) <= split.dim < len(shape):
                parts = () if self.tokens and split.dim == 1 else split.parts
                shape[split.dim] = sum(parts) or shape[split.dim] * self.dims.size(split.over)
        if self.tokens:
            shape, _ = self.tokens.in_rows(tuple(shape), rank, rows)
        spec = self.spec(name, rank, tuple(shape), rows=rows)
        return spec if spec and spec.local_shape == local_shape else None

    def is_shared(self, name: str) -> bool:
        """Whether several ranks have the same units, so that each has a part of the sum of their gradient."""
        splits = [split for split in self.splits(name) or () if split.parts]
        return any(-(-part // split.unit) < self.dims.size(split.over) for split in splits for part in split.parts)

    def holders(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """How many ranks have each element of the rows that they compute together; it broadcasts to the whole shape."""
        counts = torch.ones([1] * len(shape), dtype=torch.float64)
        for split in self.splits(name) or ():
            along, ranks = torch.zeros(shape[split.dim], dtype=torch.float64), self.dims.size(split.over)
            for index in range(ranks):
                for first, stop in split.local_spans(shape[split.dim], ranks=ranks, index=index)[0]:
                    along[first:stop] += 1
            counts = counts * along.view([-1 if dim == split.dim % len(shape) else 1 for dim in range(len(shape))])
        return counts

    @cached_property
    def _entries(self) -> dict[tuple[str, str], tuple[DimensionSplit, ...]]:
        return {
            (each.module, each.side): tuple(split for split in each.splits if self.dims.size(split.over) > 1)
            for each in self.sharding.activations
        }

    @cached_property
    def _gathered(self) -> set[tuple[str, str]]:
        """Modules whose output is gathered, and over which dimension."""
        comms = self.sharding.boundary_comms
        return {(comm.module, comm.over) for comm in comms if (comm.operation, comm.side) == ("gather", "output")}

    @cached_property
    def _with_split_logits(self) -> set[str]:
        """Heads whose logits ranks never have as a whole, and the model that may return them."""
        comms = [comm for comm in self.sharding.boundary_comms if self.dims.size(comm.over) > 1]
        return {module for comm in comms if comm.argument == LOSS for module in (comm.module, "")}

    @cached_property
    def _regions(self) -> list[ParallelRegion]:
        comms = [comm for comm in self.sharding.boundary_comms if self.dims.size(comm.over) > 1]
        dimensions = dict.fromkeys(comm.over for comm in comms)
        return [region for over in dimensions for region in _parallel_regions(c for c in comms if c.over == over)]


def parts_of_activations(plan: StepPlan, order: Mapping[str, int], *, row_tokens: int) -> ActivationParts:
    """The parts of a plan's ranks; whole rows have `row_tokens` tokens."""
    is_cut = plan.dims.size(CONTEXT_DIMENSION) > 1
    tokens = TokenParts(plan.dims, plan.context.order, row_tokens) if is_cut else None
    return ActivationParts(plan.model_sharding, plan.dims, order, tokens)


def module_of(name: str) -> str:
    """The module whose output has this name in records."""
    return name.partition(" (call")[0].removeprefix(WHOLE_MODEL).partition("[")[0]


def call_of(name: str) -> str:
    """The number of the call of a module in a micro-batch, from the name of its output; empty for the first."""
    return name.partition(" (call")[2]


def _parallel_regions(comms: Iterable[BoundaryComm]) -> Iterator[ParallelRegion]:
    opened: list[str] = []
    for comm in comms:
        befores, after, _ = BOUNDARY_OPERATIONS[comm.operation, comm.side]
        if comm.side == "input" and after not in ("same", "split"):
            opened += [comm.module, *comm.shared_by]
        elif comm.side == "output" and (opened or befores in (("parallel",), ("exchanged",))):
            yield ParallelRegion(tuple(opened), comm.module)
            opened = []


def _in_tokens(split: DimensionSplit, shape: tuple[int, ...], rows: int) -> DimensionSplit:
    """A split of tokens, in the dimension in which a tensor has them: the second one, or the first one of a tensor
    that has the tokens of all rows one after another, such as the input of experts."""
    return replace(split, dim=0) if split.dim == 1 and not split.parts and _has_flat_rows(shape, rows) else split


def _has_flat_rows(shape: tuple[int, ...], rows: int) -> bool:
    return 0 < len(shape) <= 2 and shape[0] > rows > 0 and shape[0] % rows == 0


def cut_part(tensor: Tensor, spec: ShardSpec) -> Tensor:
    """A rank's part of a tensor, without padding."""
    for dim, index in _indices(spec):
        tensor = tensor.index_select(dim, index)
    return tensor


def without_padding(part: Tensor, spec: ShardSpec) -> Tensor:
    """The tensor of a rank without the padding at the ends of its dimensions."""
    for dim, index in _indices(spec):
        part = part.narrow(dim, 0, len(index))
    return part


def put_part(part: Tensor, spec: ShardSpec) -> Tensor:
    """The tensor with a rank's part in its place, and zeros elsewhere."""
    part = without_padding(part, spec)
    for dim, index in _indices(spec):
        shape = [*part.shape[:dim], spec.shape[dim], *part.shape[dim + 1 :]]
        part = part.new_zeros(shape).index_copy_(dim, index, part)
    return part


def _indices(spec: ShardSpec) -> Iterator[tuple[int, Tensor]]:
    """(Dimension, indices of a rank's part) for each dimension that is not whole."""
    for dim, spans in enumerate(spec.spans):
        if spans != ((0, spec.shape[dim]),):
            yield dim, torch.cat([torch.arange(first, stop) for first, stop in spans])


def _is_in(module: str, outer: str) -> bool:
    return module == outer or _is_inside(module, outer)


def _is_inside(module: str, outer: str) -> bool:
    return module != outer and (not outer or module.startswith(f"{outer}."))
