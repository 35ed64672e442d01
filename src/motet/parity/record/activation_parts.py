"""The part of each activation that a rank has: the ModelSharding says it, and nothing is guessed from shapes."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile

import torch
from torch import Tensor

from motet.parallel.model_sharding import BOUNDARY_OPERATIONS, LOSS, BoundaryComm, DimensionSplit, ModelSharding
from motet.parallel.parallel_dims import ParallelDims
from motet.parallel.shard_spec import ShardSpec

WHOLE_MODEL = "whole model"  # The name of the outermost module in records


@dataclass(frozen=True)
class ParallelRegion:
    """Modules that run between communication, where ranks compute different parts of the same rows."""

    opened_by: tuple[str, ...]  # Modules before whose inputs ranks communicate
    closed_by: str  # The module after which they do

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
class ActivationParts:
    """How a layout splits what modules return; names are those of records."""

    sharding: ModelSharding
    dims: ParallelDims
    # Outputs in the order in which they are computed; without it, all in the module around a region may belong to it.
    order: Mapping[str, int] = field(default_factory=dict)

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

    def spec(self, name: str, rank: int, shape: tuple[int, ...]) -> ShardSpec | None:
        """The part that a rank has of an output, whose shape in the whole model is given; None if it is not known."""
        splits = self.splits(name)
        if splits is None or any(not -len(shape) <= split.dim < len(shape) for split in splits):
            return None
        spans, padding, place = list(ShardSpec.full(shape).spans), [0] * len(shape), self.dims.coordinates(rank)
        for split in splits:
            spans[split.dim], padding[split.dim] = split.local_spans(
                shape[split.dim], ranks=self.dims.size(split.over), index=place.get(split.over, 0)
            )
        return ShardSpec(shape, tuple(spans), tuple(padding) if any(padding) else ())

    def local_spec(self, name: str, rank: int, local_shape: tuple[int, ...]) -> ShardSpec | None:
        """The same by the shape on the rank; None, too, if the rank should have another shape."""
        shape = list(local_shape)
        for split in self.splits(name) or ():
            if -len(shape) <= split.dim < len(shape):
                shape[split.dim] = sum(split.parts) or shape[split.dim] * self.dims.size(split.over)
        spec = self.spec(name, rank, tuple(shape))
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
