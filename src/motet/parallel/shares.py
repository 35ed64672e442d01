"""Which rows of the global batch a rank computes, in which order, and what it then tells the others.

Where gradients are summed by a tree over rows (`Layout.sequences`), a rank computes them one by one. At stages 0 and 1
they are neighbours: it adds what it can by itself, and exchanges the rest once. At stages 2 and 3 each backward is
exchanged at once, so that nobody keeps a whole gradient; there the ranks that share a copy take rows in turn, for then
rows that are computed at the same time are close to each other in the tree.
"""

from typing import NamedTuple

from motet.parallel.layout import Layout
from motet.parallel.tree import Node, largest_within


class Share(NamedTuple):
    """The rows of one micro-batch."""

    rows: range
    counts: bool = True
    """False: they are computed once more, since the others have another row; nothing comes of it."""


def shares_of_rank(layout: Layout, rank: int, batch_sequences: int) -> list[Share]:
    """One for each micro-batch."""
    if layout.sequences is None:
        size = layout.rows_per_microbatch(batch_sequences)
        first = rank * layout.microbatches * size
        return [Share(range(first + i * size, first + (i + 1) * size)) for i in range(layout.microbatches)]
    rows = _rows_of_rank(layout, rank, batch_sequences)
    return [
        Share(range(row, row + 1), part < len(rows))
        for part in range(layout.microbatches)
        for row in [rows[min(part, len(rows) - 1)]]
    ]


def rows_of_rank(layout: Layout, rank: int, batch_sequences: int) -> list[range]:
    """Those that something comes of, one range for each micro-batch."""
    return [share.rows for share in shares_of_rank(layout, rank, batch_sequences) if share.counts]


def told_by_rank(layout: Layout, rank: int) -> list[list[Node]]:
    """After the backward of each micro-batch: the sums that a rank tells those that it shares a copy with."""
    assert layout.sequences is not None
    if layout.zero >= 2:
        shares = shares_of_rank(layout, rank, layout.sequences)
        return [[Node(share.rows.start, share.rows.stop)] if share.counts else [] for share in shares]
    at_the_end = largest_within(_rows_of_rank(layout, rank, layout.sequences), layout.sequences)
    return [[] for _ in range(layout.microbatches - 1)] + [at_the_end]


def told_by_replica(layout: Layout, replica: int) -> list[Node]:
    """The sums that a replica tells the others."""
    assert layout.sequences is not None
    return largest_within(_cut(layout.sequences, layout.dp // layout.shards, replica), layout.sequences)


def _rows_of_rank(layout: Layout, rank: int, count: int) -> range:
    if layout.zero < 2:
        return _cut(count, layout.dp, rank)
    replica, shard = divmod(rank, layout.shards)
    return _cut(count, layout.dp // layout.shards, replica)[shard :: layout.shards]


def _cut(count: int, parts: int, number: int) -> range:
    """Of as even parts as there are: they differ by one at most."""
    return range(number * count // parts, (number + 1) * count // parts)
