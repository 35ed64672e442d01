"""The shards of ranks that add the same gradients, and the rows of a global batch that each of them reads.

Where gradients are summed by a tree over rows (`reproducible_batch_size`), a rank computes rows one by one. At stages 0
and 1 its rows are neighbours: it adds neighbours locally, and exchanges the rest once a step. At stages 2 and 3
partial sums are exchanged after each backward, so that no rank keeps an unsharded gradient. There the ranks of a
shard group take rows in turn, so that rows computed at the same time are close in the tree.
"""

from dataclasses import dataclass, replace
from math import gcd
from typing import NamedTuple

from motet.collectives.cost.alpha_beta import RankGroups
from motet.core.batch import Batch
from motet.memory.policy_choice import Place
from motet.parallel.context_parallel.context_partition import ContextSplit, Spans
from motet.parallel.reproducible.summation_tree import SummationTreeNode, maximal_subtrees


@dataclass(frozen=True)
class BucketOwners:
    """The first `count` ranks hold and update complete buckets of parameters."""

    count: int
    bucket_mib: float
    reduce_algorithm: str  # Reduces the gradients of a bucket to its owner
    broadcast_algorithm: str  # Broadcasts the updated parameters from the owner


@dataclass(frozen=True)
class DataParallelSharding:
    """The shards, replicas and micro-batches of ranks that add the same gradients, numbered from 0."""

    ranks: int
    microbatches: int
    zero: int = 0
    shards: int = 1  # Ranks of a shard group
    reshard_after_forward: bool = True
    secondary_shards: int | None = None  # Ranks of a secondary shard group, where these are fewer than `shards`
    min_shard_numel: int = 0
    bucket_owners: BucketOwners | None = None
    # Rows of the global batch, if gradients are summed by one tree over them. Each row is a micro-batch; a rank may
    # have one row fewer than there are micro-batches.
    reproducible_batch_size: int | None = None
    parameters: Place = "device"  # The place of rows of stage 3; elsewhere a single rank has rows, too
    reduces_once: bool = False  # Stages 2 and 3 reduce the gradients of all micro-batches together
    ranks_of_row: int = 1  # Neighbouring ranks that compute parts of the same rows (context parallelism)

    @property
    def sums_gradients(self) -> bool:
        """Whether ranks add up unsharded gradients of several micro-batches; a tree over rows reduces each of them."""
        return self.reduces_once and self.microbatches > 1 and self.reproducible_batch_size is None

    @property
    def shard_groups(self) -> RankGroups:
        """Neighbouring ranks that hold one copy of the sharded state."""
        return _consecutive_groups(self.ranks, self.shards)

    @property
    def replica_groups(self) -> RankGroups:
        """Ranks that hold the same shard."""
        return tuple(tuple(range(first, self.ranks, self.shards)) for first in range(self.shards))

    @property
    def secondary_shard_groups(self) -> RankGroups:
        """Neighbouring ranks that hold one secondary copy; empty without such a copy."""
        return _consecutive_groups(self.ranks, self.secondary_shards) if self.secondary_shards else ()

    @property
    def secondary_replica_groups(self) -> RankGroups:
        """Ranks of a shard group that hold the same secondary shard."""
        size = self.secondary_shards or 0
        return tuple(ranks[position::size] for ranks in self.shard_groups for position in range(size))

    def shard_of_rank(self, rank: int) -> int:
        """The index of the shard that a rank holds."""
        return rank % self.shards

    def rows_per_microbatch(self, batch_sequences: int) -> int:
        readers = self.ranks // self.ranks_of_row
        return 1 if self.reproducible_batch_size else batch_sequences // (readers * self.microbatches)

    def for_ranks(self, ranks: int) -> "DataParallelSharding":
        """The sharding of tensors whose gradients another number of ranks adds: more ranks have more replicas, and
        fewer of them shard groups that are as long as possible."""
        shards = gcd(self.shards, ranks)
        resized = replace(self, ranks=ranks, shards=shards, secondary_shards=None)
        return resized.with_secondary_shards(gcd(self.secondary_shards, shards)) if self.secondary_shards else resized

    def with_secondary_shards(self, shards: int) -> "DataParallelSharding":
        """The same with secondary copies on this many neighbouring ranks. A whole shard group needs no such copy, and
        a single rank keeps the gathered parameters."""
        if shards == self.shards:
            return self
        return replace(self, reshard_after_forward=False) if shards == 1 else replace(self, secondary_shards=shards)


def _consecutive_groups(ranks: int, length: int) -> RankGroups:
    return tuple(tuple(range(first, min(first + length, ranks))) for first in range(0, ranks, length))


class RowPart(NamedTuple):
    """The part of each row that a rank of context parallelism computes."""

    context: ContextSplit
    rank: int  # Its index among the ranks that share each row

    def spans(self, tokens: int) -> Spans:
        """(First, stop) of the places of the part, in rows of a number of tokens."""
        return self.context.partition(tokens).spans(self.rank)


class MicroBatchRows(NamedTuple):
    """The rows of one micro-batch, and the tokens of each row, that a rank reads."""

    rows: range
    contributes_gradients: bool = True  # False: recomputed and discarded, while other ranks have another row
    part: RowPart | None = None  # None means whole rows

    def select(self, batch: Batch) -> Batch:
        """Cut a batch of these rows to the tokens that the rank computes."""
        return batch if self.part is None else batch.at_places(self.part.spans(batch.tokens.shape[1]))


def microbatches_of_data_rank(sharding: DataParallelSharding, rank: int, batch_sequences: int) -> list[MicroBatchRows]:
    """The rows of a rank, by micro-batch."""
    if sharding.reproducible_batch_size is None:
        size = sharding.rows_per_microbatch(batch_sequences)
        first = rank * sharding.microbatches * size
        return [MicroBatchRows(range(first + i * size, first + (i + 1) * size)) for i in range(sharding.microbatches)]
    rows = _reproducible_rows_of_rank(sharding, rank, batch_sequences)
    filled = [*rows, *[rows[-1]] * (sharding.microbatches - len(rows))]
    return [MicroBatchRows(range(row, row + 1), i < len(rows)) for i, row in enumerate(filled)]


def partial_sums_sent_by_rank(sharding: DataParallelSharding, rank: int) -> list[list[SummationTreeNode]]:
    """The partial sums that a rank sends to its shard group, by micro-batch."""
    count = sharding.reproducible_batch_size
    assert count is not None
    if sharding.zero >= 2:
        microbatches = microbatches_of_data_rank(sharding, rank, count)
        return [[SummationTreeNode(m.rows.start, m.rows.stop)] * m.contributes_gradients for m in microbatches]
    final_sums = maximal_subtrees(_reproducible_rows_of_rank(sharding, rank, count), count)
    return [[] for _ in range(sharding.microbatches - 1)] + [final_sums]


def partial_sums_sent_by_replica(sharding: DataParallelSharding, replica: int) -> list[SummationTreeNode]:
    """The partial sums that a replica sends to the others."""
    count = sharding.reproducible_batch_size
    assert count is not None
    return maximal_subtrees(_even_range(count, sharding.ranks // sharding.shards, replica), count)


def _reproducible_rows_of_rank(sharding: DataParallelSharding, rank: int, count: int) -> range:
    if sharding.zero < 2:
        return _even_range(count, sharding.ranks, rank)
    replica, shard = divmod(rank, sharding.shards)
    return _even_range(count, sharding.ranks // sharding.shards, replica)[shard :: sharding.shards]


def _even_range(count: int, parts: int, index: int) -> range:
    return range(index * count // parts, (index + 1) * count // parts)
