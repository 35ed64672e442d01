"""Rings: every rank sends only to its right neighbour, with the most steps and the least traffic."""

from dataclasses import replace
from fractions import Fraction

from motet.collectives.algorithms.rank_arithmetic import check_pieces
from motet.collectives.algorithms.registry import AlphaBetaGammaCost, algorithm, messages, sharded_all_reduce_cost
from motet.collectives.compose import collective_program, concatenate, parallel_steps, reverse
from motet.collectives.program import ChunkTransfer, Program, copy_chunk


@algorithm("all-gather", "ring", cost=lambda n: messages(n - 1, Fraction(1, n)))
def all_gather_ring(ranks: int) -> Program:
    """Every rank forwards the chunk from its left neighbour to the right, and starts with its own."""
    return _ring_all_gather(ranks, direction=1)


def _ring_all_gather(ranks: int, direction: int) -> Program:
    steps = [
        [copy_chunk(rank, (rank + direction) % ranks, (rank - direction * step) % ranks) for rank in range(ranks)]
        for step in range(ranks - 1)
    ]
    return collective_program("all-gather", "ring", ranks, steps=steps)


@algorithm("reduce-scatter", "ring", cost=lambda n: messages(n - 1, Fraction(1, n), reduced=True))
def reduce_scatter_ring(ranks: int) -> Program:
    """A chunk travels to the right around to its owner, and every rank on the way adds its own to it."""
    return reverse(_ring_all_gather(ranks, direction=-1), "reduce-scatter")


@algorithm("all-reduce", "ring", cost=sharded_all_reduce_cost)
def all_reduce_ring(ranks: int) -> Program:
    """Reduce-scatter around the ring, then all-gather around the ring."""
    return concatenate(reduce_scatter_ring(ranks), all_gather_ring(ranks), "all-reduce", "ring")


def _bidirectional_cost(ranks: int) -> AlphaBetaGammaCost:
    """The ring's cost with two messages of half the size per step, unless both neighbours are the same rank."""
    once = sharded_all_reduce_cost(ranks)
    return once if ranks == 2 else replace(once, alpha=2 * once.alpha)


@algorithm("all-reduce", "bidirectional-ring", cost=_bidirectional_cost)
def all_reduce_bidirectional_ring(ranks: int) -> Program:
    """Two simultaneous rings, each with half of the data and its own direction."""
    ring, ports = all_reduce_ring(ranks).steps, 1 if ranks == 2 else 2

    def mirror(t: ChunkTransfer) -> ChunkTransfer:
        chunk = ranks + (-t.first) % ranks
        return ChunkTransfer(-t.src % ranks, -t.dst % ranks, chunk, chunk, t.op)

    steps = parallel_steps([ring, [tuple(map(mirror, step)) for step in ring]])
    return collective_program("all-reduce", "bidirectional-ring", ranks, steps=steps, chunks=2 * ranks, ports=ports)


@algorithm("broadcast", "ring", cost=lambda n: messages(n - 1))
def broadcast_ring(ranks: int, root: int = 0) -> Program:
    """Everything goes from neighbour to neighbour."""
    return _pipelined_chain("ring", ranks, pieces=1, root=root)


def _pipelined_chain(name: str, ranks: int, *, pieces: int, root: int) -> Program:
    """Piece p leaves the rank at distance d from the root in step d + p."""
    steps = [
        [copy_chunk((root + d) % ranks, (root + d + 1) % ranks, n - d) for d in range(ranks - 1) if 0 <= n - d < pieces]
        for n in range(ranks - 2 + pieces)
    ]
    return collective_program("broadcast", name, ranks, steps=steps, chunks=pieces, root=root)


def _pieces_cost(ranks: int, pieces: int = 8) -> AlphaBetaGammaCost:
    return messages(ranks - 2 + pieces, Fraction(1, pieces))


@algorithm("broadcast", "pipelined-ring", cost=_pieces_cost)
def broadcast_pipelined_ring(ranks: int, root: int = 0, pieces: int = 8) -> Program:
    """Pieces follow each other from neighbour to neighbour, so that all links are busy."""
    check_pieces(pieces, ranks)
    return _pipelined_chain("pipelined-ring", ranks, pieces=pieces, root=root)


@algorithm("reduce", "ring", cost=lambda n, pieces=8: _pieces_cost(n, pieces).with_reduction)
def reduce_ring(ranks: int, root: int = 0, pieces: int = 8) -> Program:
    """Pieces follow each other towards the root, and every rank on the way adds its own."""
    return reverse(broadcast_pipelined_ring(ranks, root, pieces), "reduce", "ring")
