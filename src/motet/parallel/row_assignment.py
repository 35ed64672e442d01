"""Assignment of the rows of the global batch to ranks, and the partial sums that each rank sends after them.

Where gradients are summed by a tree over rows (`Layout.reproducible_batch_size`), a rank computes rows one by one. At
stages 0 and 1 its rows are neighbours: it adds what it can locally, and exchanges the rest once a step. At stages 2 and
3 partial sums are exchanged after each backward, so that no rank keeps an unsharded gradient. There the ranks of a
shard group take rows in turn, so that rows computed at the same time are close in the tree.
"""

from typing import NamedTuple

from motet.parallel.layout import Layout
from motet.parallel.reproducible.summation_tree import SummationTreeNode, maximal_subtrees


class MicroBatchRows(NamedTuple):
    """The rows of one micro-batch."""

    rows: range
    contributes_gradients: bool = True  # False: recomputed and discarded, while other ranks have another row


def microbatches_of_rank(layout: Layout, rank: int, batch_sequences: int) -> list[MicroBatchRows]:
    """The rows of a rank, by micro-batch."""
    if layout.reproducible_batch_size is None:
        size = layout.rows_per_microbatch(batch_sequences)
        first = rank * layout.microbatches * size
        return [MicroBatchRows(range(first + i * size, first + (i + 1) * size)) for i in range(layout.microbatches)]
    rows = _reproducible_rows_of_rank(layout, rank, batch_sequences)
    last = len(rows) - 1
    return [
        MicroBatchRows(range(rows[min(i, last)], rows[min(i, last)] + 1), i <= last) for i in range(layout.microbatches)
    ]


def contributing_rows_of_rank(layout: Layout, rank: int, batch_sequences: int) -> list[range]:
    """The rows of a rank whose gradients count, by micro-batch."""
    microbatches = microbatches_of_rank(layout, rank, batch_sequences)
    return [microbatch.rows for microbatch in microbatches if microbatch.contributes_gradients]


def partial_sums_sent_by_rank(layout: Layout, rank: int) -> list[list[SummationTreeNode]]:
    """The partial sums that a rank sends to its shard group, by micro-batch."""
    count = layout.reproducible_batch_size
    assert count is not None
    if layout.zero >= 2:
        return [
            [SummationTreeNode(microbatch.rows.start, microbatch.rows.stop)] * microbatch.contributes_gradients
            for microbatch in microbatches_of_rank(layout, rank, count)
        ]
    final_sums = maximal_subtrees(_reproducible_rows_of_rank(layout, rank, count), count)
    return [[] for _ in range(layout.microbatches - 1)] + [final_sums]


def partial_sums_sent_by_replica(layout: Layout, replica: int) -> list[SummationTreeNode]:
    """The partial sums that a replica sends to the others."""
    count = layout.reproducible_batch_size
    assert count is not None
    return maximal_subtrees(_even_range(count, layout.dp // layout.shards, replica), count)


def _reproducible_rows_of_rank(layout: Layout, rank: int, count: int) -> range:
    if layout.zero < 2:
        return _even_range(count, layout.dp, rank)
    replica, shard = divmod(rank, layout.shards)
    return _even_range(count, layout.dp // layout.shards, replica)[shard :: layout.shards]


def _even_range(count: int, parts: int, index: int) -> range:
    """One of `parts` ranges whose lengths differ by one at most."""
    return range(index * count // parts, (index + 1) * count // parts)
