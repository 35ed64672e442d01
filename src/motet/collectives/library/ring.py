"""Rings: every rank sends only to its right neighbour. The most steps and the least traffic."""

from motet.collectives.compose import reverse, side_by_side, then
from motet.collectives.library.registry import Terms, algorithm, message
from motet.collectives.library.shapes import check_pieces, distribution, exchange, part, reduction
from motet.collectives.score import Program, Step, Transfer


@algorithm("all-gather", "ring", cost=lambda n: message(part(1, n)).times(n - 1))
def all_gather_ring(ranks: int) -> Program:
    """Every rank passes on to the right what came from the left, beginning with its own chunk."""
    return _around(ranks, to=1)


def _around(ranks: int, to: int) -> Program:
    """In step t every rank sends the chunk that started t places behind it."""
    steps = [
        [_one(rank, (rank + to) % ranks, (rank - to * step) % ranks) for rank in range(ranks)]
        for step in range(ranks - 1)
    ]
    return exchange("ring", ranks, steps)


def _one(src: int, dst: int, chunk: int) -> Transfer:
    return Transfer(src, dst, chunk, chunk, "copy")


@algorithm("reduce-scatter", "ring", cost=lambda n: message(part(1, n), part(1, n)).times(n - 1))
def reduce_scatter_ring(ranks: int) -> Program:
    """A chunk travels to the right around to its owner, and every rank on the way adds its own to it."""
    return reverse(_around(ranks, to=-1), "reduce-scatter")


def ring_cost(ranks: int) -> Terms:
    share = part(1, ranks)
    return message(share, share).times(ranks - 1) + message(share).times(ranks - 1)


@algorithm("all-reduce", "ring", cost=ring_cost)
def all_reduce_ring(ranks: int) -> Program:
    """Reduce-scatter around the ring, then all-gather around the ring."""
    return then(reduce_scatter_ring(ranks), all_gather_ring(ranks), "all-reduce", "ring")


def _bidirectional_cost(ranks: int) -> Terms:
    """As the ring, with two messages of half the size in each step. Of two ranks both neighbours are the same one."""
    once = ring_cost(ranks)
    return once if ranks == 2 else once + Terms(once.alpha, part(0, 1))


@algorithm("all-reduce", "bidirectional-ring", cost=_bidirectional_cost)
def all_reduce_bidirectional_ring(ranks: int) -> Program:
    """Two rings at once, half of the data in each direction."""
    ring = all_reduce_ring(ranks).steps
    steps = side_by_side([ring, mirrored(ring, ranks)])
    return reduction("bidirectional-ring", ranks, 2 * ranks, steps, ports=1 if ranks == 2 else 2)


def mirrored(ring: tuple[Step, ...], ranks: int) -> tuple[Step, ...]:
    """The ring the other way round, on chunks of its own."""

    def mirror(t: Transfer) -> Transfer:
        chunk = ranks + (-t.first) % ranks
        return Transfer(-t.src % ranks, -t.dst % ranks, chunk, chunk, t.op)

    return tuple(tuple(mirror(t) for t in step) for step in ring)


@algorithm("broadcast", "ring", cost=lambda n: message().times(n - 1))
def broadcast_ring(ranks: int, root: int = 0) -> Program:
    """Everything goes from neighbour to neighbour."""
    return _chain("ring", ranks, 1, root)


def _chain(name: str, ranks: int, pieces: int, root: int) -> Program:
    """Piece p leaves the rank at distance d from the root in step d + p."""
    steps = [
        [
            Transfer((root + d) % ranks, (root + d + 1) % ranks, step - d, step - d, "copy")
            for d in range(ranks - 1)
            if 0 <= step - d < pieces
        ]
        for step in range(ranks - 2 + pieces)
    ]
    return distribution("broadcast", name, ranks, pieces, root, steps)


def _pieces_cost(ranks: int, pieces: int = 8) -> Terms:
    return message(part(1, pieces)).times(ranks - 2 + pieces)


@algorithm("broadcast", "pipelined-ring", cost=_pieces_cost)
def broadcast_pipelined_ring(ranks: int, root: int = 0, pieces: int = 8) -> Program:
    """Pieces follow each other from neighbour to neighbour, so that all links are busy at once."""
    check_pieces(pieces, ranks)
    return _chain("pipelined-ring", ranks, pieces, root)


def _pieces_reduce_cost(ranks: int, pieces: int = 8) -> Terms:
    return message(part(1, pieces), part(1, pieces)).times(ranks - 2 + pieces)


@algorithm("reduce", "ring", cost=_pieces_reduce_cost)
def reduce_ring(ranks: int, root: int = 0, pieces: int = 8) -> Program:
    """Pieces follow each other towards the root, and every rank on the way adds its own."""
    return reverse(broadcast_pipelined_ring(ranks, root, pieces), "reduce", "ring")
