"""Accurate norms and sums of tensors, and reductions of gradients by one tree over the rows of the global batch.

The reductions have the same bits in every layout, and replace a reduce-scatter and an all-reduce. Ranks exchange
partial sums of the tree, all to all, and the rank that holds a shard completes its tree. An output is written with the
last micro-batch of a step.

Sums and norms of tensors do not depend on the order of additions.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from motet.collectives.execute.api import all_gather, all_reduce, all_to_all
from motet.collectives.execute.work_queue import CompletedWork, WorkHandle
from motet.core.errors import check_input
from motet.parallel.data_parallel.communication.shard_replica_mesh import ShardReplicaMesh
from motet.parallel.data_parallel.data_sharding import (
    DataParallelSharding,
    microbatches_of_data_rank,
    partial_sums_sent_by_rank,
    partial_sums_sent_by_replica,
)
from motet.parallel.process.process_group import RankGroup
from motet.parallel.reproducible.summation_tree import PartialTreeSums, SummationTreeNode


class WorkWithFinish:
    """A collective in flight, and a function that the waiter calls after it."""

    def __init__(self, work: WorkHandle, finish: Callable[[], None], sent: Tensor | None = None) -> None:
        # The memory of `sent` must not be reused until it is sent.
        self._pending: tuple[WorkHandle, Callable[[], None], Tensor | None] | None = (work, finish, sent)

    def wait(self) -> None:
        if self._pending is not None:
            self._pending[0].wait()
            finish, self._pending = self._pending[1], None
            finish()

    def is_completed(self) -> bool:
        return self._pending is None or self._pending[0].is_completed()


class ReproducibleTreeReducer:
    """The tree reductions of one model."""

    def __init__(self, mesh: ShardReplicaMesh, sharding: DataParallelSharding) -> None:
        assert sharding.reproducible_batch_size is not None
        self._mesh, batch_size = mesh, sharding.reproducible_batch_size
        group_ranks = [mesh.replica_group.rank * sharding.shards + shard for shard in range(sharding.shards)]
        self._microbatch_rows = microbatches_of_data_rank(sharding, group_ranks[mesh.shard_group.rank], batch_size)
        # For each micro-batch: the partial sums that each rank of the shard group sends.
        self._nodes_sent_by_rank = list(
            zip(*(partial_sums_sent_by_rank(sharding, i) for i in group_ranks), strict=True)
        )
        self._nodes_sent_by_replica = [
            partial_sums_sent_by_replica(sharding, i) for i in range(mesh.replica_group.world)
        ]
        self._new_sums: Callable[[], PartialTreeSums[Tensor]] = partial(PartialTreeSums, batch_size, torch.Tensor.add_)
        # Unsharded sums over rows of this rank, and shards of sums over rows of the group.
        self._local_sums: dict[int, PartialTreeSums[Tensor]] = defaultdict(self._new_sums)
        self._shard_sums: dict[int, PartialTreeSums[Tensor]] = defaultdict(self._new_sums)
        self._microbatch, self._last_microbatch, self._is_last = 0, sharding.microbatches - 1, False
        self._reduced_buckets: set[int] = set()

    def begin_backward(self, microbatch: int) -> None:
        self._microbatch, self._is_last = microbatch, microbatch == self._last_microbatch
        self._reduced_buckets.clear()

    def end_backward(self) -> None:
        check_input(
            not self._is_last
            or not any(sums.pending for sums in [*self._local_sums.values(), *self._shard_sums.values()]),
            "run.reproducible = 'layout': a block of the model had a backward for some sequences and not for all, "
            "which layout.zero = 3 cannot add up; use layout.zero = 2",
        )

    def reduce_scatter(self, bucket_id: int, shard: Tensor, unsharded: Tensor) -> WorkHandle:
        """Sum over the shard group. The reducer keeps `unsharded`."""
        check_input(
            bucket_id not in self._reduced_buckets,
            "run.reproducible = 'layout': a block of the model is used twice in one forward, whose gradients "
            "layout.zero = 3 sums separately; use layout.zero = 2",
        )
        self._reduced_buckets.add(bucket_id)
        local_sums, shard_sums = self._local_sums[bucket_id], self._shard_sums[bucket_id]
        microbatch = self._microbatch_rows[self._microbatch]
        if microbatch.contributes_gradients:
            local_sums.add(SummationTreeNode(microbatch.rows.start, microbatch.rows.stop), unsharded)
        nodes_sent = self._nodes_sent_by_rank[self._microbatch]
        if not any(nodes_sent):
            return CompletedWork()

        def finish() -> None:
            if self._is_last and self._mesh.replica_group.world == 1:
                shard.copy_(_pop_total(shard_sums))

        return _exchange_partial_sums(
            local_sums, shard_sums, nodes_sent, group=self._mesh.shard_group, on_arrival=finish, like=unsharded
        )

    def all_reduce(self, bucket_id: int, shard: Tensor) -> WorkHandle:
        """Sum the results of `reduce_scatter` of this bucket over the replicas, into `shard`."""
        replicas, finished = self._mesh.replica_group, self._new_sums()

        def gather() -> None:
            total = _pop_total(finished)
            gathered = total.new_empty(replicas.world * total.numel())
            all_gather(gathered, total, replicas)
            shard.copy_(gathered[: shard.numel()])

        sums, nodes_sent = self._shard_sums[bucket_id], self._nodes_sent_by_replica
        return _exchange_partial_sums(sums, finished, nodes_sent, group=replicas, on_arrival=gather, like=shard)


def _exchange_partial_sums(
    source: PartialTreeSums[Tensor],
    destination: PartialTreeSums[Tensor],
    nodes_sent: Sequence[Sequence[SummationTreeNode]],
    *,
    group: RankGroup,
    on_arrival: Callable[[], None],
    like: Tensor,
) -> WorkHandle:
    """Each rank i sends its partial sums `nodes_sent[i]`, and receives its shard of those of all ranks."""
    sums = source.pop_all()
    assert list(sums) == list(nodes_sent[group.rank]), (list(sums), nodes_sent[group.rank])
    if group.world == 1:
        for node, tensor in sums.items():
            destination.add(node, tensor)
        on_arrival()
        return CompletedWork()
    numel = -(-like.numel() // group.world)
    message = _pack_message(list(sums.values()), numel, group, dtype=like.dtype)
    counts = [len(nodes) for nodes in nodes_sent]
    arrived = torch.empty(sum(counts) * numel, dtype=like.dtype, device=group.device)
    work = all_to_all(arrived, message, group, [[count * numel] * group.world for count in counts], async_op=True)

    def add_arrived() -> None:
        for node, tensor in zip((node for nodes in nodes_sent for node in nodes), arrived.split(numel), strict=True):
            destination.add(node, tensor)
        for node, tensor in destination.pending.items():
            if tensor.untyped_storage().nbytes() > tensor.nbytes:
                destination.pending[node] = tensor.clone()  # a view would keep all of `arrived` alive
        on_arrival()

    return WorkWithFinish(work, add_arrived, message)


def _pack_message(sums: Sequence[Tensor], numel: int, group: RankGroup, *, dtype: torch.dtype) -> Tensor:
    if not sums:
        return torch.empty(0, dtype=dtype, device=group.device)
    padding = numel * group.world - sums[0].numel()
    padded = [F.pad(tensor, (0, padding)) if padding else tensor for tensor in sums]
    if len(padded) == 1:
        return padded[0]
    return torch.stack([tensor.view(group.world, numel) for tensor in padded], dim=1).view(-1)


def _pop_total(sums: PartialTreeSums[Tensor]) -> Tensor:
    """The sum of all rows. It has no negative zero, so adding it to zeros does not change it."""
    ((_, total),) = sums.pop_all().items()
    return total.add_(0.0)


HIGH_BITS, LOW_BITS = 38, 28  # Bits of a square below 1 that are kept, as two integers
LIMB_BITS, LIMBS = 31, 4  # Sums of these integers are exchanged as limbs
CHUNK_ELEMENTS = {"cpu": 1 << 15}  # Processed together, so that they stay in the cache of a CPU
DEFAULT_CHUNK_ELEMENTS = 1 << 24
BLOCK_ELEMENTS = 4096  # Squares that are added in their dtype; sums of blocks are added in float64


def exact_sum(values: Sequence[float]) -> float:
    """The exact sum, rounded to a float once."""
    return math.fsum(values) if all(map(math.isfinite, values)) else math.nan


def exact_squared_norm(tensors: Sequence[Tensor], group: RankGroup) -> float:
    """The squared norm of the tensors of all ranks; the same bits however the elements are distributed.

    With 2^e above every |x|, s = (x / 2^e)^2 is below 1. The first 66 bits of s become two integers of 38 and 28 bits.
    These are added in int64, at most 2^24 of them, and then as Python's integers, so their order does not matter.

    The bits beyond are below 2^-66 for each of n elements. As 2^e is the smallest such power, the sum of s is at least
    1/4. The relative error is below n 2^-64, plus 2^-53 for rounding a square of float64 (those of float32 are exact).
    For the 2^40 parameters of the largest models that is at most 6e-8.
    """
    largest = max((_max_magnitude(tensor) for tensor in tensors if tensor.numel()), default=0.0)
    global_max = torch.tensor([largest], dtype=torch.float64, device=group.device)
    all_reduce(global_max, group, op="max")
    largest = global_max.item()
    if largest == 0 or not math.isfinite(largest):
        return largest
    exponent = max(math.frexp(largest)[1], -1000)  # so that the scale is a finite float64
    total = _all_reduce_integer(_integer_squares(tensors, exponent), group)
    try:
        return math.ldexp(total / (1 << HIGH_BITS + LOW_BITS), 2 * exponent)  # of integers, rounded once
    except OverflowError:
        return math.inf


def _integer_squares(tensors: Sequence[Tensor], exponent: int) -> int:
    """The sum of (x / 2^e)^2, each truncated to 66 bits and multiplied by 2^66."""
    high, low = [], []
    chunk_numel = CHUNK_ELEMENTS.get(tensors[0].device.type, DEFAULT_CHUNK_ELEMENTS) if tensors else 1
    for chunk in (chunk for tensor in tensors for chunk in tensor.view(-1).split(chunk_numel)):
        scaled = chunk.to(torch.float64).mul(2.0 ** (HIGH_BITS // 2 - exponent)).square_()
        integer_part = scaled.floor()
        high.append(integer_part.sum(dtype=torch.int64))
        low.append(scaled.sub_(integer_part).mul_(2.0**LOW_BITS).floor_().sum(dtype=torch.int64))
    high_sum, low_sum = (sum(torch.stack(sums).tolist()) if sums else 0 for sums in (high, low))
    return (int(high_sum) << LOW_BITS) + int(low_sum)


def _all_reduce_integer(value: int, group: RankGroup) -> int:
    mask = (1 << LIMB_BITS) - 1
    limbs = torch.tensor([value >> LIMB_BITS * i & mask for i in range(LIMBS)], device=group.device)
    all_reduce(limbs, group)
    return sum(int(limb) << LIMB_BITS * i for i, limb in enumerate(limbs.tolist()))


def _max_magnitude(tensor: Tensor) -> float:
    """The largest |x|; infinite for NaN, which a maximum over ranks may drop."""
    low, high = torch.aminmax(tensor)
    magnitude = max(-low.item(), high.item())
    return magnitude if math.isfinite(magnitude) else math.inf


def squared_norm(tensor: Tensor) -> Tensor:
    """The squared norm of one tensor, in float64, on its device; torch's norm of millions of float32 has only three
    correct digits."""
    if tensor.dtype == torch.float64:
        norm = torch.linalg.vector_norm(tensor)
        return torch.pow(norm, torch.full_like(norm, 2.0))  # Rounded as Python does; a square has other bits
    flat = tensor.reshape(-1)
    blocked_numel = flat.numel() // BLOCK_ELEMENTS * BLOCK_ELEMENTS
    pieces = (flat[:blocked_numel].view(-1, BLOCK_ELEMENTS), 1), (flat[blocked_numel:], None)
    norms = [torch.linalg.vector_norm(t, dim=dim, dtype=torch.float32) for t, dim in pieces if t.numel()]
    return sum_on_device([each.double().square().sum() for each in norms], tensor.device)


def sum_on_device(numbers: Sequence[Tensor], device: torch.device) -> Tensor:
    """The sum of numbers in float64, one after another, without a copy to the host."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for number in numbers:
        total = total + number
    return total
