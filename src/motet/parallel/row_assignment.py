"""Which rows of the global batch a rank computes, in which order, and what it then tells the others.

Where gradients are summed by a tree over rows (`Layout.sequences`), a rank computes them one by one. At stages 0 and 1
they are neighbours: it adds what it can by itself, and exchanges the rest once. At stages 2 and 3 each backward is
exchanged at once, so that nobody keeps a whole gradient; there the ranks that share a copy take rows in turn, for then
rows that are computed at the same time are close to each other in the tree.
"""

from typing import NamedTuple

from motet.parallel.layout import Layout
from motet.parallel.reproducible.summation_tree import SummationTreeNode, maximal_subtrees


class MicroBatchRows(NamedTuple):
    """The rows of one micro-batch."""

    rows: range
    # False: they are computed once more, since the others have another row; nothing comes of it.
    contributes_gradients: bool = True


def microbatches_of_rank(layout: Layout, rank: int, batch_sequences: int) -> list[MicroBatchRows]:
    """One for each micro-batch."""
    if layout.reproducible_batch_size is None:
        size = layout.rows_per_microbatch(batch_sequences)
        first = rank * layout.microbatches * size
        return [MicroBatchRows(range(first + i * size, first + (i + 1) * size)) for i in range(layout.microbatches)]
    rows = _reproducible_rows_of_rank(layout, rank, batch_sequences)
    return [
        MicroBatchRows(range(row, row + 1), microbatch < len(rows))
        for microbatch in range(layout.microbatches)
        for row in [rows[min(microbatch, len(rows) - 1)]]
    ]


def contributing_rows_of_rank(layout: Layout, rank: int, batch_sequences: int) -> list[range]:
    """Those that something comes of, one range for each micro-batch."""
    return [share.rows for share in microbatches_of_rank(layout, rank, batch_sequences) if share.contributes_gradients]


def partial_sums_sent_by_rank(layout: Layout, rank: int) -> list[list[SummationTreeNode]]:
    """After the backward of each micro-batch: the sums that a rank tells those that it shares a copy with."""
    assert layout.reproducible_batch_size is not None
    if layout.zero >= 2:
        microbatches = microbatches_of_rank(layout, rank, layout.reproducible_batch_size)
        return [
            [SummationTreeNode(share.rows.start, share.rows.stop)] if share.contributes_gradients else []
            for share in microbatches
        ]
    final_sums = maximal_subtrees(
        _reproducible_rows_of_rank(layout, rank, layout.reproducible_batch_size), layout.reproducible_batch_size
    )
    return [[] for _ in range(layout.microbatches - 1)] + [final_sums]


def partial_sums_sent_by_replica(layout: Layout, replica: int) -> list[SummationTreeNode]:
    """The sums that a replica tells the others."""
    assert layout.reproducible_batch_size is not None
    return maximal_subtrees(
        _even_range(layout.reproducible_batch_size, layout.dp // layout.shards, replica), layout.reproducible_batch_size
    )


def _reproducible_rows_of_rank(layout: Layout, rank: int, count: int) -> range:
    if layout.zero < 2:
        return _even_range(count, layout.dp, rank)
    replica, shard = divmod(rank, layout.shards)
    return _even_range(count, layout.dp // layout.shards, replica)[shard :: layout.shards]


def _even_range(count: int, parts: int, index: int) -> range:
    """Of as even parts as there are: they differ by one at most."""
    return range(index * count // parts, (index + 1) * count // parts)
