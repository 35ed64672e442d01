"""Data parallelism on flat buckets: gradients are summed over the ranks, and updated parameters given to all.

With shards, each rank gets the sum of its shard, updates it, and gathers what the others have updated; a group of ranks
that shares a copy is then one replica. Without, every rank is a replica of its own: gradients are all-reduced.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from motet.collectives.execute.api import RankGroupLike, broadcast
from motet.collectives.execute.work_queue import WorkHandle
from motet.core import trace
from motet.core.errors import InputError
from motet.parallel.carry import Carry
from motet.parallel.communication import CommunicationSettings, compression, defers
from motet.parallel.flat import FlatWeights, Gradients
from motet.parallel.layout import Layout
from motet.parallel.matrices import sums_of_buckets
from motet.parallel.mesh import Mesh
from motet.parallel.placement import PLACEMENTS, Portions, buckets_of
from motet.parallel.spread import Piece
from motet.parallel.uses import Uses
from motet.precision.recipe import Recipe


def spread_flat(
    parameters: Mapping[str, tuple[int, nn.Parameter]],
    recipe: Recipe,
    mesh: Mesh,
    layout: Layout,
    settings: CommunicationSettings,
) -> "FlatSpread":
    """Put parameters on flat tensors, cut as the layout says. `parameters`: name -> (optimizer group, parameter)."""
    deferred = defers(settings, layout)
    sizes = {name: (group, parameter.numel()) for name, (group, parameter) in parameters.items()}
    buckets = buckets_of(sizes, layout, recipe, settings)
    keep = not PLACEMENTS[layout.zero].gradients and layout.sequences is None
    named = {name: p for name, (_, p) in parameters.items()}
    apart = compression(settings, layout).parameters is not None
    device = mesh.shards.device
    gradients = Gradients(buckets, mesh.shards.rank, getattr(torch, recipe.reduce), device, keep)
    held = [slice(b.start, b.stop) if deferred else b.shard(mesh.shards.rank) for b in buckets]
    weights = FlatWeights(named, buckets, held, recipe, gradients, apart)
    shapes = {name: tuple(p.shape) for name, p in named.items()}
    shards = range(mesh.shards.world if settings.compress_gradients else 0)
    parts = [sums_of_buckets(buckets, shard, shapes, recipe.reduce) for shard in shards]
    carry = Carry(mesh, layout, settings, sums_of_buckets(buckets, None, shapes, recipe.reduce), parts)
    numbers: dict[Tensor, int] = {
        named[member.name]: number for number, bucket in enumerate(buckets) for member in bucket.members
    }
    return FlatSpread(weights, mesh, carry, settings.overlap != "none", keep, deferred, numbers)


@dataclass
class _Sum:
    """Of one bucket, underway."""

    number: int
    shard: Tensor
    """Where the sum of this rank's shard arrives."""
    work: WorkHandle | None = None
    scattered: bool = False
    """The shard is there; what is underway then is its sum over the replicas."""


@dataclass
class FlatSpread:
    """Stages 0 to 2, and the communication of a step.

    Every rank sends the buckets in one order, whatever its own backward was.
    """

    weights: FlatWeights
    mesh: Mesh
    carry: Carry
    overlap: bool
    """Buckets are sent during backward."""
    keep_gradients: bool
    """Whole gradients are summed over the micro-batches, and sent once a step; else shards are, each time."""
    deferred: bool
    """Shards of the sums are gathered, not of what is updated; every rank updates all of a bucket when it has it."""
    numbers: Mapping[Tensor, int]
    """The bucket of each parameter."""
    refresh: Callable[[], None] = lambda: None
    """Brings what others have updated, where it is others that do."""
    _underway: list[_Sum] = field(default_factory=list)
    _complete: set[int] = field(default_factory=set)
    _next: int = 0
    _first: bool = True
    _last: bool = True
    _uses: Uses | None = None
    _order: tuple[int, ...] = ()
    """In which buckets are gathered beside the next forward, once that is known."""
    _arriving: dict[int, WorkHandle] = field(default_factory=dict)
    _optimizer: Callable[[Sequence[int]], None] | None = None
    """What is still to be done with gradients that arrive."""

    def __post_init__(self) -> None:
        self.weights.gradients.on_complete = self._completed

    def run_ahead(self, module: nn.Module) -> None:
        """After the first forward modules wait for what they use, while the rest arrives beside them."""
        self._uses = Uses(module, self.numbers, self._need)

    def begin_step(self) -> None:
        self.weights.refuse_moved()
        if self._uses:
            self._uses.begin()
        self.carry.begin_step()
        self.weights.gradients.begin()

    def begin_backward(self, first: bool, last: bool) -> None:
        """Of a micro-batch, which is the first or last of the step."""
        self.settle()
        if self._uses:
            self._uses.end()
        self._first, self._last, self._next = first, last, 0
        self._complete.clear()
        self.carry.begin_backward(first)
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
        self.carry.end_backward()

    @property
    def portions(self) -> Portions:
        shapes = {name: tuple(piece.shape) for name, piece in self.pieces(self.masters).items()}
        return Portions(self.weights.buckets, shapes=shapes)

    @property
    def groups(self) -> Sequence[int]:
        return [part.group for part in self.weights.parts]

    @property
    def masters(self) -> Sequence[Tensor]:
        return [part.master for part in self.weights.parts]

    @property
    def counts(self) -> bool:
        return self.mesh.counts

    @property
    def arrives_late(self) -> bool:
        return self.deferred

    def gradients(self) -> Sequence[Tensor]:
        return [self.weights.gradients.kept(part.place) for part in self.weights.parts]

    def pieces(self, tensors: Sequence[Tensor]) -> dict[str, Piece]:
        return self.weights.pieces(tensors)

    def carried(self) -> dict[str, Piece | Tensor]:
        return self.carry.state()

    def reduced(self) -> Sequence[Tensor]:
        if not self.deferred:
            return self.gradients()
        return [self.weights.gradients.shard(number) for number in range(len(self.weights.buckets))]

    def update(self, optimizer: Callable[[Sequence[int]], None]) -> None:
        self.settle()
        if not self.deferred:
            optimizer(range(len(self.weights.parts)))
            self.publish()
            return
        self._optimizer = optimizer
        self._gather([self.weights.gradients.bucket(number) for number in range(len(self.weights.buckets))])

    def publish(self) -> None:
        """Cast what this rank has updated, and gather what the others have."""
        self.settle()
        self.weights.publish()
        if self.mesh.shards.world > 1 and not self.deferred:
            self._gather([self.weights.compute[b.start : b.stop] for b in self.weights.buckets])

    def adopt(self) -> None:
        if self._arriving:
            raise InputError(
                'adopt: with communication.overlap = "forward" some values were still arriving, and may have replaced '
                "what you assigned; call engine.settle() before you change any"
            )
        self.weights.adopt()

    def settle(self) -> None:
        self.refresh()
        if self._uses:
            self._uses.leave()
        for number in list(self._arriving):
            self._need(number)

    def _gather(self, buckets: Sequence[Tensor]) -> None:
        shards = self.mesh.shards
        for number in self._by_need() or range(len(buckets)):
            whole, owner = buckets[number], self.weights.buckets[number].owner
            if owner is not None:
                self._arriving[number] = self.carry.broadcast(whole, owner)
                continue
            own = whole.view(shards.world, -1)[shards.rank]
            self._arriving[number] = self.carry.all_gather(number, whole, own)
        if not self._order:
            self.settle()

    def _by_need(self) -> tuple[int, ...]:
        """As the first rank's forward needed them."""
        if not self._order and self._uses and self._uses.order:
            order = torch.tensor(self._uses.order, device=self.mesh.shards.device)
            broadcast(order, self.mesh.shards)
            self._order = tuple(order.tolist())
        return self._order

    def _need(self, number: int) -> None:
        """Until a bucket has arrived and is what the model is to compute with."""
        work = self._arriving.pop(number, None)
        if work is None:
            return
        with trace.span("gather"):
            work.wait()
        if self._optimizer is not None:
            here = [i for i, part in enumerate(self.weights.parts) if part.bucket == number]
            self._optimizer(here)
            self.weights.publish([self.weights.parts[i] for i in here])
        if self._order:  # whoever has used it already is told by autograd
            self.weights.arrived(number)

    @property
    def _sends(self) -> bool:
        return self._last or not self.keep_gradients

    @property
    def _adds_shards(self) -> bool:
        """Those of this micro-batch to those before it; a tree does so by itself."""
        return not (self.keep_gradients or self._first or self.carry.by_tree)

    def _completed(self, number: int) -> None:
        """Called from backward, when it has all gradients of a bucket."""
        self._complete.add(number)
        if self._sends and self.overlap:
            while self._next in self._complete:
                self._send()

    def _send(self) -> None:
        """Start to sum the next bucket."""
        number, gradients, shards = self._next, self.weights.gradients, self.mesh.shards
        self._next += 1
        gradients.fill(number)
        whole, shard = gradients.bucket(number), gradients.shard(number)
        underway = _Sum(number, torch.empty_like(shard) if self._adds_shards else shard)
        self._underway.append(underway)
        owner = self.weights.buckets[number].owner
        if owner is not None:
            underway.work = self.carry.reduce(whole, owner)  # the shard is all of it, or nothing
        elif shards.world > 1 or self.carry.by_tree:
            underway.work = self.carry.reduce_scatter(number, underway.shard, whole)
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
            if self._adds_shards:
                shard.add_(underway.shard)
                underway.shard = shard  # and what came is freed
        if self._last and self.mesh.replicas.world > 1:
            underway.work = self.carry.all_reduce(underway.number, shard)


def saved_buffers(module: nn.Module) -> dict[str, Tensor]:
    """The buffers that belong to the state of a module: running statistics, say, but no tables that it can remake."""
    return {
        f"{prefix}.{name}".lstrip("."): buffer
        for prefix, inner in module.named_modules()
        for name, buffer in inner._buffers.items()  # a state_dict would say it too, but costs more than a step may
        if buffer is not None and name not in inner._non_persistent_buffers_set
    }


def agree_on_buffers(module: nn.Module, ranks: RankGroupLike) -> None:
    """Buffers become the first rank's: there is one of each, in every step, evaluation and checkpoint."""
    for buffer in saved_buffers(module).values():
        if not buffer.is_contiguous():
            buffer.data = buffer.data.contiguous()
        broadcast(buffer.detach(), ranks)


def agree_on_values(module: nn.Module, ranks: RankGroupLike) -> None:
    """Everyone starts from the first rank's values, whatever a module was initialised from."""
    for parameter in module.parameters():
        parameter.data = parameter.data.contiguous()
        broadcast(parameter.data, ranks)
    agree_on_buffers(module, ranks)
