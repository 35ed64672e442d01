"""Binomial trees: the number of ranks that hold data doubles in every step."""

from collections.abc import Sequence
from fractions import Fraction

from motet.collectives.algorithms.direct import gather_from_scatter
from motet.collectives.algorithms.rank_arithmetic import doubling_rounds
from motet.collectives.algorithms.registry import algorithm, doubling_cost, messages
from motet.collectives.algorithms.ring import all_gather_ring
from motet.collectives.compose import collective_program, concatenate, reverse
from motet.collectives.program import ChunkTransfer, Program, copy_chunk, transfers_for


@algorithm("broadcast", "tree", cost=lambda n: messages(doubling_rounds(n)))
def broadcast_tree(ranks: int, root: int = 0) -> Program:
    """Every rank with the data sends all of it to a rank without in each step."""
    steps = [
        [copy_chunk((root + r) % ranks, (root + r + reach) % ranks, 0) for r in range(0, ranks - reach, 2 * reach)]
        for reach in _send_distances(ranks)
    ]
    return collective_program("broadcast", "tree", ranks, steps=steps, chunks=1, root=root)


def _send_distances(ranks: int) -> list[int]:
    return [1 << bit for bit in reversed(range(doubling_rounds(ranks)))]


@algorithm("reduce", "tree", cost=lambda n: messages(doubling_rounds(n), reduced=True))
def reduce_tree(ranks: int, root: int = 0) -> Program:
    """Half of the remaining ranks send their sums to the other half in each step, which adds them."""
    return reverse(broadcast_tree(ranks, root), "reduce")


@algorithm(
    "all-reduce", "tree", cost=lambda n: messages(doubling_rounds(n), reduced=True) + messages(doubling_rounds(n))
)
def all_reduce_tree(ranks: int, root: int = 0) -> Program:
    """Reduce to the root of a binomial tree, then broadcast from it."""
    return concatenate(reduce_tree(ranks, root), broadcast_tree(ranks, root), "all-reduce", "tree")


def _scatter_steps(ranks: int, root: int) -> list[list[ChunkTransfer]]:
    """Steps in which a rank forwards the half of its subtree's chunks that the other half of the subtree needs."""
    steps: list[list[ChunkTransfer]] = []
    for reach in _send_distances(ranks):
        steps.append([])
        for rank in range(0, ranks - reach, 2 * reach):
            chunks = [(root + chunk) % ranks for chunk in range(rank + reach, min(rank + 2 * reach, ranks))]
            steps[-1] += transfers_for((root + rank) % ranks, (root + rank + reach) % ranks, chunks)
    return steps


@algorithm("scatter", "tree", cost=doubling_cost)
def scatter_tree(ranks: int, root: int = 0) -> Program:
    """The root sends half of the chunks to one rank, and both continue in the same way."""
    return collective_program("scatter", "tree", ranks, steps=_scatter_steps(ranks, root), root=root)


@algorithm("gather", "tree", cost=doubling_cost)
def gather_tree(ranks: int, root: int = 0) -> Program:
    """Chunks come together in ever larger bundles."""
    return gather_from_scatter(scatter_tree(ranks, root))


@algorithm("broadcast", "scatter-all-gather", cost=lambda n: doubling_cost(n) + messages(n - 1, Fraction(1, n)))
def broadcast_scatter_all_gather(ranks: int, root: int = 0) -> Program:
    """Scatter over a tree, then all-gather around a ring: the root sends everything once, not once per level."""
    steps: list[Sequence[ChunkTransfer]] = [*_scatter_steps(ranks, root), *all_gather_ring(ranks).steps]
    return collective_program("broadcast", "scatter-all-gather", ranks, steps=steps, root=root)
