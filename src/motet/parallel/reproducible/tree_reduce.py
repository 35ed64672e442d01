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
from motet.parallel.data_parallel.communication.shard_replica_mesh import ShardReplicaMesh
from motet.parallel.layout import Layout
from motet.parallel.process.process_group import RankGroup
from motet.parallel.reproducible.summation_tree import PartialTreeSums, SummationTreeNode
from motet.parallel.row_assignment import microbatches_of_rank, partial_sums_sent_by_rank, partial_sums_sent_by_replica


class ReproducibleTreeReducer:
    """Those of one model."""

    def __init__(self, mesh: ShardReplicaMesh, layout: Layout) -> None:
        assert layout.reproducible_batch_size is not None
        self._mesh = mesh
        self._layout = layout
        self._batch_size = layout.reproducible_batch_size
        shard_group_ranks = [mesh.replica_group.rank * layout.shards + shard for shard in range(layout.shards)]
        self._microbatch_rows = microbatches_of_rank(layout, shard_group_ranks[mesh.shard_group.rank], self._batch_size)
        # For each micro-batch: the sums that each rank gives.
        self._nodes_sent_by_rank = list(
            zip(*(partial_sums_sent_by_rank(layout, mate) for mate in shard_group_ranks), strict=True)
        )
        self._nodes_sent_by_replica = [
            partial_sums_sent_by_replica(layout, replica) for replica in range(mesh.replica_group.world)
        ]
        self._local_sums: dict[int, PartialTreeSums[Tensor]] = {}  # Of this rank's rows, of whole buckets
        # Of the rows of the ranks that share a copy, of this rank's shards.
        self._shard_sums: dict[int, PartialTreeSums[Tensor]] = {}
        self._microbatch = 0
        self._reduced_buckets: set[int] = set()

    def begin_backward(self, microbatch: int) -> None:
        """Of a micro-batch."""
        self._microbatch = microbatch
        self._reduced_buckets.clear()

    def end_backward(self) -> None:
        if self._is_last and any(sums.pending for sums in [*self._local_sums.values(), *self._shard_sums.values()]):
            raise InputError(
                "run.reproducible = 'layout': a block of the model had a backward for some sequences and not for all, "
                "which layout.zero = 3 cannot add up; use layout.zero = 2"
            )

    def reduce_scatter(self, bucket_id: int, shard: Tensor, unsharded: Tensor) -> WorkHandle:
        """Over the ranks that share a copy; `whole` is ours from now on."""
        if bucket_id in self._reduced_buckets:
            raise InputError(
                "run.reproducible = 'layout': a block of the model is used twice in one forward, whose gradients "
                "layout.zero = 3 sums apart; use layout.zero = 2"
            )
        self._reduced_buckets.add(bucket_id)
        local_sums, shard_sums = (
            self._sums_of_bucket(self._local_sums, bucket_id),
            self._sums_of_bucket(self._shard_sums, bucket_id),
        )
        microbatch_rows = self._microbatch_rows[self._microbatch]
        if microbatch_rows.contributes_gradients:
            local_sums.add(SummationTreeNode(microbatch_rows.rows.start, microbatch_rows.rows.stop), unsharded)
        nodes_sent = self._nodes_sent_by_rank[self._microbatch]
        if not any(nodes_sent):
            return CompletedWork()
        shape = (unsharded.numel(), unsharded.dtype)
        return _exchange_partial_sums(
            local_sums, shard_sums, nodes_sent, self._mesh.shard_group, lambda: self._finish(shard_sums, shard), shape
        )

    def all_reduce(self, bucket_id: int, shard: Tensor) -> WorkHandle:
        """Over the replicas, of what `reduce_scatter` of this number has; `shard` is where the sum goes."""
        replicas, shard_sums = self._mesh.replica_group, self._sums_of_bucket(self._shard_sums, bucket_id)
        finished = PartialTreeSums[Tensor](self._batch_size, torch.Tensor.add_)

        def gather() -> None:
            total_shard = _pop_total(finished)
            gathered = total_shard.new_empty(replicas.world * total_shard.numel())
            all_gather(gathered, total_shard, replicas)
            shard.copy_(gathered[: shard.numel()])

        return _exchange_partial_sums(
            shard_sums, finished, self._nodes_sent_by_replica, replicas, gather, (shard.numel(), shard.dtype)
        )

    def _finish(self, shard_sums: PartialTreeSums[Tensor], shard: Tensor) -> None:
        if self._is_last and self._mesh.replica_group.world == 1:
            shard.copy_(_pop_total(shard_sums))

    def _sums_of_bucket(
        self, sums_by_bucket: dict[int, PartialTreeSums[Tensor]], bucket_id: int
    ) -> PartialTreeSums[Tensor]:
        return sums_by_bucket.setdefault(bucket_id, PartialTreeSums(self._batch_size, torch.Tensor.add_))

    @property
    def _is_last(self) -> bool:
        return self._microbatch == self._layout.microbatches - 1


class _PendingPartialSumExchange:
    """All to all, underway."""

    def __init__(self, work: WorkHandle, finish: Callable[[], None], message: Tensor) -> None:
        self._work: WorkHandle | None = work
        self._finish = finish
        self._message: Tensor | None = message  # Nobody may use its memory until it is sent

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = self._message = None
            self._finish()

    def is_completed(self) -> bool:
        return self._work is None or self._work.is_completed()


def _exchange_partial_sums(
    source: PartialTreeSums[Tensor],
    destination: PartialTreeSums[Tensor],
    nodes_sent: Sequence[Sequence[SummationTreeNode]],
    group: RankGroup,
    on_arrival: Callable[[], None],
    shape: tuple[int, torch.dtype],
) -> WorkHandle:
    """Rank i of the group gives the sums `told[i]`, and takes its part of everybody's."""
    numel, dtype = shape
    sums = source.pop_all()
    assert list(sums) == list(nodes_sent[group.rank]), (list(sums), nodes_sent[group.rank])
    if group.world == 1:
        for node, tensor in sums.items():
            destination.add(node, tensor)
        on_arrival()
        return CompletedWork()
    part_numel = -(-numel // group.world)
    message = _pack_message(list(sums.values()), part_numel, group, dtype)
    counts = [len(nodes) for nodes in nodes_sent]
    arrived = torch.empty(sum(counts) * part_numel, dtype=dtype, device=group.device)
    sizes = [[count * part_numel] * group.world for count in counts]
    work = all_to_all(arrived, message, group, sizes, async_op=True)

    def add_arrived() -> None:
        nodes = [node for of_rank in nodes_sent for node in of_rank]
        for node, tensor in zip(nodes, arrived.split(part_numel), strict=True):
            destination.add(node, tensor)
        for node, tensor in destination.pending.items():
            if tensor.untyped_storage().nbytes() > tensor.nbytes:
                destination.pending[node] = tensor.clone()  # or it would keep all that arrived with it
        on_arrival()

    return _PendingPartialSumExchange(work, add_arrived, message)


def _pack_message(sums: Sequence[Tensor], part_numel: int, group: RankGroup, dtype: torch.dtype) -> Tensor:
    """What goes to each rank, one after another: its part of every sum."""
    if not sums:
        return torch.empty(0, dtype=dtype, device=group.device)
    padding = part_numel * group.world - sums[0].numel()
    padded = [F.pad(tensor, (0, padding)) if padding else tensor for tensor in sums]
    if len(padded) == 1:
        return padded[0]
    return torch.stack([tensor.view(group.world, part_numel) for tensor in padded], dim=1).view(-1)


def _pop_total(sums: PartialTreeSums[Tensor]) -> Tensor:
    """The sum of all rows. It has no negative zero, so adding it to zeros does not change it."""
    ((_, total),) = sums.pop_all().items()
    return total.add_(0.0)
