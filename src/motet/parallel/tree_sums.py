"""Sums of gradients by one tree over the rows of the global batch: the same bits in every layout.

They stand in for a reduce-scatter and an all-reduce. What ranks tell each other are sums of the tree, all to all; who
keeps a shard finishes the tree for it. An output is written with the last micro-batch of a step.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from motet.collectives.execute.api import all_gather, all_to_all
from motet.collectives.execute.work_queue import CompletedWork, WorkHandle
from motet.core.errors import InputError
from motet.parallel.group import Group
from motet.parallel.layout import Layout
from motet.parallel.mesh import Mesh
from motet.parallel.shares import shares_of_rank, told_by_rank, told_by_replica
from motet.parallel.tree import Forest, Node


class TreeSums:
    """Those of one model."""

    def __init__(self, mesh: Mesh, layout: Layout) -> None:
        assert layout.sequences is not None
        self._mesh = mesh
        self._layout = layout
        self._count = layout.sequences
        mates = [mesh.replicas.rank * layout.shards + shard for shard in range(layout.shards)]
        self._shares = shares_of_rank(layout, mates[mesh.shards.rank], self._count)
        self._told = list(zip(*(told_by_rank(layout, mate) for mate in mates), strict=True))
        """For each micro-batch: the sums that each rank gives."""
        self._told_by_replicas = [told_by_replica(layout, replica) for replica in range(mesh.replicas.world)]
        self._own: dict[int, Forest[Tensor]] = {}
        """Of this rank's rows, of whole buckets."""
        self._shards: dict[int, Forest[Tensor]] = {}
        """Of the rows of the ranks that share a copy, of this rank's shards."""
        self._part = 0
        self._seen: set[int] = set()

    def begin_backward(self, part: int) -> None:
        """Of a micro-batch."""
        self._part = part
        self._seen.clear()

    def end_backward(self) -> None:
        if self._is_last and any(forest.waiting for forest in [*self._own.values(), *self._shards.values()]):
            raise InputError(
                "run.reproducible = 'layout': a block of the model had a backward for some sequences and not for all, "
                "which layout.zero = 3 cannot add up; use layout.zero = 2"
            )

    def reduce_scatter(self, number: int, shard: Tensor, whole: Tensor) -> WorkHandle:
        """Over the ranks that share a copy; `whole` is ours from now on."""
        if number in self._seen:
            raise InputError(
                "run.reproducible = 'layout': a block of the model is used twice in one forward, whose gradients "
                "layout.zero = 3 sums apart; use layout.zero = 2"
            )
        self._seen.add(number)
        own, mine = self._forest(self._own, number), self._forest(self._shards, number)
        share = self._shares[self._part]
        if share.counts:
            own.feed(Node(share.rows.start, share.rows.stop), whole)
        told = self._told[self._part]
        if not any(told):
            return CompletedWork()
        shape = (whole.numel(), whole.dtype)
        return _exchange(own, mine, told, self._mesh.shards, lambda: self._finish(mine, shard), shape)

    def all_reduce(self, number: int, shard: Tensor) -> WorkHandle:
        """Over the replicas, of what `reduce_scatter` of this number has; `shard` is where the sum goes."""
        replicas, mine = self._mesh.replicas, self._forest(self._shards, number)
        finished = Forest[Tensor](self._count, torch.Tensor.add_)

        def gather() -> None:
            part = _root(finished)
            whole = part.new_empty(replicas.world * part.numel())
            all_gather(whole, part, replicas)
            shard.copy_(whole[: shard.numel()])

        return _exchange(mine, finished, self._told_by_replicas, replicas, gather, (shard.numel(), shard.dtype))

    def _finish(self, mine: Forest[Tensor], shard: Tensor) -> None:
        if self._is_last and self._mesh.replicas.world == 1:
            shard.copy_(_root(mine))

    def _forest(self, forests: dict[int, Forest[Tensor]], number: int) -> Forest[Tensor]:
        return forests.setdefault(number, Forest(self._count, torch.Tensor.add_))

    @property
    def _is_last(self) -> bool:
        return self._part == self._layout.microbatches - 1


class _Exchange:
    """All to all, underway."""

    def __init__(self, work: WorkHandle, finish: Callable[[], None], message: Tensor) -> None:
        self._work: WorkHandle | None = work
        self._finish = finish
        self._message: Tensor | None = message
        """Nobody may use its memory until it is sent."""

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = self._message = None
            self._finish()

    def is_completed(self) -> bool:
        return self._work is None or self._work.is_completed()


def _exchange(
    given: Forest[Tensor],
    taken: Forest[Tensor],
    told: Sequence[Sequence[Node]],
    group: Group,
    then: Callable[[], None],
    shape: tuple[int, torch.dtype],
) -> WorkHandle:
    """Rank i of the group gives the sums `told[i]`, and takes its part of everybody's."""
    numel, dtype = shape
    sums = given.take()
    assert list(sums) == list(told[group.rank]), (list(sums), told[group.rank])
    if group.world == 1:
        for node, tensor in sums.items():
            taken.feed(node, tensor)
        then()
        return CompletedWork()
    part = -(-numel // group.world)
    message = _message(list(sums.values()), part, group, dtype)
    counts = [len(nodes) for nodes in told]
    arrived = torch.empty(sum(counts) * part, dtype=dtype, device=group.device)
    sizes = [[count * part] * group.world for count in counts]
    work = all_to_all(arrived, message, group, sizes, async_op=True)

    def feed() -> None:
        nodes = [node for of_rank in told for node in of_rank]
        for node, tensor in zip(nodes, arrived.split(part), strict=True):
            taken.feed(node, tensor)
        for node, tensor in taken.waiting.items():
            if tensor.untyped_storage().nbytes() > tensor.nbytes:
                taken.waiting[node] = tensor.clone()  # or it would keep all that arrived with it
        then()

    return _Exchange(work, feed, message)


def _message(sums: Sequence[Tensor], part: int, group: Group, dtype: torch.dtype) -> Tensor:
    """What goes to each rank, one after another: its part of every sum."""
    if not sums:
        return torch.empty(0, dtype=dtype, device=group.device)
    lacking = part * group.world - sums[0].numel()
    whole = [F.pad(tensor, (0, lacking)) if lacking else tensor for tensor in sums]
    if len(whole) == 1:
        return whole[0]
    return torch.stack([tensor.view(group.world, part) for tensor in whole], dim=1).view(-1)


def _root(forest: Forest[Tensor]) -> Tensor:
    """The sum of all rows. It has no negative zero, so adding it to zeros does not change it."""
    ((_, total),) = forest.take().items()
    return total.add_(0.0)
