"""Binomial trees: the ranks that have something double in every step."""

from motet.collectives.algorithms.direct import gather_from_scatter
from motet.collectives.algorithms.program_builders import (
    broadcast_program,
    check_root,
    doubling_rounds,
    fraction,
    scatter_program,
)
from motet.collectives.algorithms.registry import AlphaBetaGammaCost, algorithm, one_message
from motet.collectives.algorithms.ring import all_gather_ring
from motet.collectives.compose import concatenate, reverse
from motet.collectives.program import ChunkTransfer, Program, Step, transfers_for


@algorithm("broadcast", "tree", cost=lambda n: one_message().times(doubling_rounds(n)))
def broadcast_tree(ranks: int, root: int = 0) -> Program:
    """In each step every rank that has the data sends all of it to one that has not."""
    steps = [
        [
            ChunkTransfer((root + rank) % ranks, (root + rank + reach) % ranks, 0, 0, "copy")
            for rank in range(0, ranks - reach, 2 * reach)
        ]
        for reach in _send_distances(ranks)
    ]
    return broadcast_program("broadcast", "tree", ranks, 1, root, steps)


def _send_distances(ranks: int) -> list[int]:
    """The distances over which a binomial tree sends, the longest first."""
    return [1 << bit for bit in reversed(range(doubling_rounds(ranks)))]


@algorithm("reduce", "tree", cost=lambda n: one_message(1, 1).times(doubling_rounds(n)))
def reduce_tree(ranks: int, root: int = 0) -> Program:
    """In each step half of the ranks that are left send all they have to the other half, which adds it."""
    return reverse(broadcast_tree(ranks, root), "reduce")


@algorithm(
    "all-reduce",
    "tree",
    cost=lambda n: one_message(1, 1).times(doubling_rounds(n)) + one_message().times(doubling_rounds(n)),
)
def all_reduce_tree(ranks: int, root: int = 0) -> Program:
    """Reduce to the root of a binomial tree, then broadcast from it."""
    return concatenate(reduce_tree(ranks, root), broadcast_tree(ranks, root), "all-reduce", "tree")


def _scatter_steps(ranks: int, root: int) -> list[list[ChunkTransfer]]:
    """Every rank keeps the chunks of its subtree and sends on half of them in each step."""
    return [
        [
            transfer
            for rank in range(0, ranks - reach, 2 * reach)
            for transfer in transfers_for(
                (root + rank) % ranks,
                (root + rank + reach) % ranks,
                [(root + chunk) % ranks for chunk in range(rank + reach, min(rank + 2 * reach, ranks))],
            )
        ]
        for reach in _send_distances(ranks)
    ]


def tree_scatter_cost(ranks: int) -> AlphaBetaGammaCost:
    """One step per doubling. The root sends all chunks but its own, and always the most."""
    return AlphaBetaGammaCost(doubling_rounds(ranks), fraction(ranks - 1, ranks))


@algorithm("scatter", "tree", cost=tree_scatter_cost)
def scatter_tree(ranks: int, root: int = 0) -> Program:
    """The root sends half of the chunks to one rank, and both go on in the same way."""
    return scatter_program("tree", ranks, root, _scatter_steps(ranks, root))


@algorithm("gather", "tree", cost=tree_scatter_cost)
def gather_tree(ranks: int, root: int = 0) -> Program:
    """Chunks come together in ever larger bundles."""
    return gather_from_scatter(scatter_tree(ranks, root))


@algorithm(
    "broadcast", "scatter-all-gather", cost=lambda n: tree_scatter_cost(n) + one_message(fraction(1, n)).times(n - 1)
)
def broadcast_scatter_all_gather(ranks: int, root: int = 0) -> Program:
    """Scatter over a tree, then all-gather around a ring: the root sends everything once, not once per level."""
    check_root(root, ranks)
    steps: list[Step] = [tuple(step) for step in _scatter_steps(ranks, root)]
    return broadcast_program(
        "broadcast", "scatter-all-gather", ranks, ranks, root, [*steps, *all_gather_ring(ranks).steps]
    )
