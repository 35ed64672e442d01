"""Binomial trees: the ranks that have something double in every step."""

from motet.collectives.compose import reverse, then
from motet.collectives.library.flat import collected
from motet.collectives.library.registry import Terms, algorithm, message
from motet.collectives.library.ring import all_gather_ring
from motet.collectives.library.shapes import check_root, dealing, distribution, part, rounds
from motet.collectives.score import Program, Step, Transfer, sending


@algorithm("broadcast", "tree", cost=lambda n: message().times(rounds(n)))
def broadcast_tree(ranks: int, root: int = 0) -> Program:
    """In each step every rank that has the data sends all of it to one that has not."""
    steps = [
        [
            Transfer((root + rank) % ranks, (root + rank + reach) % ranks, 0, 0, "copy")
            for rank in range(0, ranks - reach, 2 * reach)
        ]
        for reach in _reaches(ranks)
    ]
    return distribution("broadcast", "tree", ranks, 1, root, steps)


def _reaches(ranks: int) -> list[int]:
    """The distances over which a binomial tree sends, the longest first."""
    return [1 << bit for bit in reversed(range(rounds(ranks)))]


@algorithm("reduce", "tree", cost=lambda n: message(1, 1).times(rounds(n)))
def reduce_tree(ranks: int, root: int = 0) -> Program:
    """In each step half of the ranks that are left send all they have to the other half, which adds it."""
    return reverse(broadcast_tree(ranks, root), "reduce")


@algorithm("all-reduce", "tree", cost=lambda n: message(1, 1).times(rounds(n)) + message().times(rounds(n)))
def all_reduce_tree(ranks: int, root: int = 0) -> Program:
    """Reduce to the root of a binomial tree, then broadcast from it."""
    return then(reduce_tree(ranks, root), broadcast_tree(ranks, root), "all-reduce", "tree")


def _dealt(ranks: int, root: int) -> list[list[Transfer]]:
    """Every rank keeps the chunks of its subtree and sends on half of them in each step."""
    return [
        [
            transfer
            for rank in range(0, ranks - reach, 2 * reach)
            for transfer in sending(
                (root + rank) % ranks,
                (root + rank + reach) % ranks,
                [(root + chunk) % ranks for chunk in range(rank + reach, min(rank + 2 * reach, ranks))],
            )
        ]
        for reach in _reaches(ranks)
    ]


def dealt_cost(ranks: int) -> Terms:
    """One step per doubling. The root sends all chunks but its own, and always the most."""
    return Terms(rounds(ranks), part(ranks - 1, ranks))


@algorithm("scatter", "tree", cost=dealt_cost)
def scatter_tree(ranks: int, root: int = 0) -> Program:
    """The root sends half of the chunks to one rank, and both go on in the same way."""
    return dealing("tree", ranks, root, _dealt(ranks, root))


@algorithm("gather", "tree", cost=dealt_cost)
def gather_tree(ranks: int, root: int = 0) -> Program:
    """Chunks come together in ever larger bundles."""
    return collected(scatter_tree(ranks, root))


@algorithm("broadcast", "scatter-all-gather", cost=lambda n: dealt_cost(n) + message(part(1, n)).times(n - 1))
def broadcast_scatter_all_gather(ranks: int, root: int = 0) -> Program:
    """Scatter over a tree, then all-gather around a ring: the root sends everything once, not once per level."""
    check_root(root, ranks)
    steps: list[Step] = [tuple(step) for step in _dealt(ranks, root)]
    return distribution("broadcast", "scatter-all-gather", ranks, ranks, root, [*steps, *all_gather_ring(ranks).steps])
