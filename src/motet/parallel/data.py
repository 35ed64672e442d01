"""Data parallelism on flat buckets: gradients are summed over the ranks, and updated parameters given to all.

With shards, each rank gets the sum of its shard, updates it, and gathers what the others have updated; a group of ranks
that shares a copy is then one replica. Without, every rank is a replica of its own: gradients are all-reduced.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from motet.collectives.execute import Call, Ranks, all_gather, all_reduce, broadcast, reduce_scatter
from motet.collectives.lane import Work
from motet.core import trace
from motet.core.dtypes import DTYPE_BYTES
from motet.parallel.buckets import cut_buckets
from motet.parallel.communication import CommunicationSettings
from motet.parallel.flat import FlatWeights
from motet.parallel.layout import Layout
from motet.parallel.mesh import Mesh
from motet.parallel.placement import Portions
from motet.parallel.spread import Piece
from motet.precision.recipe import Recipe

MIB = 2**20


def spread_flat(
    parameters: Mapping[str, tuple[int, nn.Parameter]],
    recipe: Recipe,
    mesh: Mesh,
    layout: Layout,
    settings: CommunicationSettings,
) -> "FlatSpread":
    """Put parameters on flat tensors, cut as the layout says. `parameters`: name -> (optimizer group, parameter)."""
    width = DTYPE_BYTES[recipe.reduce]
    buckets = cut_buckets(
        {name: (group, parameter.numel()) for name, (group, parameter) in parameters.items()},
        layout.shards,
        int(settings.bucket_mib * MIB / width),
        int(settings.first_bucket_mib * MIB / width),
    )
    keep = layout.zero < 2
    weights = FlatWeights({name: p for name, (_, p) in parameters.items()}, buckets, mesh.shards.rank, recipe, keep)
    return FlatSpread(weights, mesh, settings, keep)


@dataclass
class _Sum:
    """Of one bucket, underway."""

    number: int
    shard: Tensor
    """Where the sum of this rank's shard arrives."""
    work: Work | None = None
    scattered: bool = False
    """The shard is there; what is underway then is its sum over the replicas."""


@dataclass
class FlatSpread:
    """Stages 0 to 2, and the communication of a step.

    Every rank sends the buckets in one order, whatever its own backward was.
    """

    weights: FlatWeights
    mesh: Mesh
    settings: CommunicationSettings
    keep_gradients: bool
    """Whole gradients are summed over the micro-batches, and sent once a step; else shards are, each time."""
    _underway: list[_Sum] = field(default_factory=list)
    _complete: set[int] = field(default_factory=set)
    _next: int = 0
    _first: bool = True
    _last: bool = True
    _steps: int = 0

    def __post_init__(self) -> None:
        self.weights.gradients.on_complete = self._completed

    def begin_step(self) -> None:
        self._steps += 1
        self.weights.gradients.begin()

    def begin_backward(self, first: bool, last: bool) -> None:
        """Of a micro-batch, which is the first or last of the step."""
        self._first, self._last, self._next = first, last, 0
        self._complete.clear()
        self.weights.gradients.begin_backward()

    def end_backward(self) -> None:
        """Send what is left, and see that all of it has arrived."""
        if not self._sends:
            return
        with trace.span("communicate"):
            while self._next < len(self.weights.buckets):
                self._send()
            for underway in self._underway:
                self._go_on(underway)
            for underway in self._underway:
                if underway.work is not None:
                    underway.work.wait()
            self._underway.clear()

    @property
    def portions(self) -> Portions:
        return Portions(buckets=self.weights.buckets)

    @property
    def groups(self) -> Sequence[int]:
        return [part.group for part in self.weights.parts]

    @property
    def masters(self) -> Sequence[Tensor]:
        return [part.master for part in self.weights.parts]

    @property
    def counts(self) -> bool:
        return self.mesh.replicas.rank == 0

    def gradients(self) -> Sequence[Tensor]:
        return [self.weights.gradients.kept(part.place) for part in self.weights.parts]

    def pieces(self, tensors: Sequence[Tensor]) -> dict[str, Piece]:
        return self.weights.pieces(tensors)

    def publish(self) -> None:
        """Cast what this rank has updated, and gather what the others have."""
        self.weights.publish()
        shards = self.mesh.shards
        if shards.world == 1:
            return
        with trace.span("gather"):
            compute, works = self.weights.compute, []
            for bucket in self.weights.buckets:
                own, whole = compute[bucket.shard(shards.rank)], compute[bucket.start : bucket.stop]
                works.append(all_gather(whole, own, shards, **self._call(self.settings.all_gather)))
            for work in works:
                work.wait()

    def _call(self, algorithm: str) -> Call:
        """That all ranks do the same is checked in the first step; every other is like it."""
        return {
            "async_op": True,
            "algorithm": None if algorithm == "backend" else algorithm,
            "check": self._steps <= 1,
        }

    @property
    def _sends(self) -> bool:
        return self._last or not self.keep_gradients

    def _completed(self, number: int) -> None:
        """Called from backward, when it has all gradients of a bucket."""
        self._complete.add(number)
        if self._sends and self.settings.overlap == "backward":
            while self._next in self._complete:
                self._send()

    def _send(self) -> None:
        """Start to sum the next bucket."""
        number, gradients, shards = self._next, self.weights.gradients, self.mesh.shards
        self._next += 1
        gradients.fill(number)
        whole, shard = gradients.bucket(number), gradients.shard(number)
        underway = _Sum(number, shard if self.keep_gradients or self._first else torch.empty_like(shard))
        self._underway.append(underway)
        if shards.world > 1:
            underway.work = reduce_scatter(underway.shard, whole, shards, **self._call(self.settings.reduce_scatter))
        elif not self.keep_gradients:
            underway.shard.copy_(whole)
        for before in self._underway[:-1]:  # never by what happens to be done: the order is the same on every rank
            self._go_on(before)
        if underway.work is None:
            self._go_on(underway)

    def _go_on(self, underway: _Sum) -> None:
        """Once the shard is there: add it to those of earlier micro-batches, and sum it over the replicas."""
        if underway.scattered:
            return
        if underway.work is not None:
            underway.work.wait()
            underway.work = None
        underway.scattered = True
        gradients = self.weights.gradients
        shard = gradients.shard(underway.number)
        if not self.keep_gradients:
            gradients.release(underway.number)
            if not self._first:
                shard.add_(underway.shard)
        if self._last and self.mesh.replicas.world > 1:
            underway.work = all_reduce(shard, self.mesh.replicas, **self._call(self.settings.all_reduce))


def saved_buffers(module: nn.Module) -> dict[str, Tensor]:
    """The buffers that belong to the state of a module: running statistics, say, but no tables that it can remake."""
    return {
        f"{prefix}.{name}".lstrip("."): buffer
        for prefix, inner in module.named_modules()
        for name, buffer in inner._buffers.items()  # a state_dict would say it too, but costs more than a step may
        if buffer is not None and name not in inner._non_persistent_buffers_set
    }


def agree_on_buffers(module: nn.Module, ranks: Ranks) -> None:
    """Buffers become the first rank's: there is one of each, in every step, evaluation and checkpoint."""
    for buffer in saved_buffers(module).values():
        broadcast(buffer.detach(), ranks)


def agree_on_values(module: nn.Module, ranks: Ranks) -> None:
    """Everyone starts from the first rank's values, whatever a module was initialised from."""
    for parameter in module.parameters():
        broadcast(parameter.data, ranks)
    agree_on_buffers(module, ranks)
