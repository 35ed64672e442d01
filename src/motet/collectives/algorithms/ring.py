"""Rings: every rank sends only to its right neighbour. The most steps and the least traffic."""

from motet.collectives.algorithms.program_builders import (
    all_gather_program,
    all_reduce_program,
    broadcast_program,
    check_pieces,
    fraction,
)
from motet.collectives.algorithms.registry import AlphaBetaGammaCost, algorithm, one_message
from motet.collectives.compose import concatenate, parallel_steps, reverse
from motet.collectives.program import ChunkTransfer, Program, Step


@algorithm("all-gather", "ring", cost=lambda n: one_message(fraction(1, n)).times(n - 1))
def all_gather_ring(ranks: int) -> Program:
    """Every rank passes on to the right what came from the left, beginning with its own chunk."""
    return _ring_all_gather(ranks, direction=1)


def _ring_all_gather(ranks: int, direction: int) -> Program:
    """In step t every rank sends the chunk that started t places behind it."""
    steps = [
        [_copy_chunk(rank, (rank + direction) % ranks, (rank - direction * step) % ranks) for rank in range(ranks)]
        for step in range(ranks - 1)
    ]
    return all_gather_program("ring", ranks, steps)


def _copy_chunk(src: int, dst: int, chunk: int) -> ChunkTransfer:
    return ChunkTransfer(src, dst, chunk, chunk, "copy")


@algorithm("reduce-scatter", "ring", cost=lambda n: one_message(fraction(1, n), fraction(1, n)).times(n - 1))
def reduce_scatter_ring(ranks: int) -> Program:
    """A chunk travels to the right around to its owner, and every rank on the way adds its own to it."""
    return reverse(_ring_all_gather(ranks, direction=-1), "reduce-scatter")


def ring_all_reduce_cost(ranks: int) -> AlphaBetaGammaCost:
    shard_fraction = fraction(1, ranks)
    return one_message(shard_fraction, shard_fraction).times(ranks - 1) + one_message(shard_fraction).times(ranks - 1)


@algorithm("all-reduce", "ring", cost=ring_all_reduce_cost)
def all_reduce_ring(ranks: int) -> Program:
    """Reduce-scatter around the ring, then all-gather around the ring."""
    return concatenate(reduce_scatter_ring(ranks), all_gather_ring(ranks), "all-reduce", "ring")


def _bidirectional_cost(ranks: int) -> AlphaBetaGammaCost:
    """As the ring, with two messages of half the size in each step. Of two ranks both neighbours are the same one."""
    once = ring_all_reduce_cost(ranks)
    return once if ranks == 2 else once + AlphaBetaGammaCost(once.alpha, fraction(0, 1))


@algorithm("all-reduce", "bidirectional-ring", cost=_bidirectional_cost)
def all_reduce_bidirectional_ring(ranks: int) -> Program:
    """Two rings at once, half of the data in each direction."""
    ring = all_reduce_ring(ranks).steps
    steps = parallel_steps([ring, mirror_ring(ring, ranks)])
    return all_reduce_program("bidirectional-ring", ranks, 2 * ranks, steps, ports=1 if ranks == 2 else 2)


def mirror_ring(ring: tuple[Step, ...], ranks: int) -> tuple[Step, ...]:
    """The ring the other way round, on chunks of its own."""

    def mirror(t: ChunkTransfer) -> ChunkTransfer:
        chunk = ranks + (-t.first) % ranks
        return ChunkTransfer(-t.src % ranks, -t.dst % ranks, chunk, chunk, t.op)

    return tuple(tuple(mirror(t) for t in step) for step in ring)


@algorithm("broadcast", "ring", cost=lambda n: one_message().times(n - 1))
def broadcast_ring(ranks: int, root: int = 0) -> Program:
    """Everything goes from neighbour to neighbour."""
    return _pipelined_chain("ring", ranks, 1, root)


def _pipelined_chain(name: str, ranks: int, pieces: int, root: int) -> Program:
    """Piece p leaves the rank at distance d from the root in step d + p."""
    steps = [
        [
            ChunkTransfer((root + d) % ranks, (root + d + 1) % ranks, step - d, step - d, "copy")
            for d in range(ranks - 1)
            if 0 <= step - d < pieces
        ]
        for step in range(ranks - 2 + pieces)
    ]
    return broadcast_program("broadcast", name, ranks, pieces, root, steps)


def _pieces_cost(ranks: int, pieces: int = 8) -> AlphaBetaGammaCost:
    return one_message(fraction(1, pieces)).times(ranks - 2 + pieces)


@algorithm("broadcast", "pipelined-ring", cost=_pieces_cost)
def broadcast_pipelined_ring(ranks: int, root: int = 0, pieces: int = 8) -> Program:
    """Pieces follow each other from neighbour to neighbour, so that all links are busy at once."""
    check_pieces(pieces, ranks)
    return _pipelined_chain("pipelined-ring", ranks, pieces, root)


def _pieces_reduce_cost(ranks: int, pieces: int = 8) -> AlphaBetaGammaCost:
    return one_message(fraction(1, pieces), fraction(1, pieces)).times(ranks - 2 + pieces)


@algorithm("reduce", "ring", cost=_pieces_reduce_cost)
def reduce_ring(ranks: int, root: int = 0, pieces: int = 8) -> Program:
    """Pieces follow each other towards the root, and every rank on the way adds its own."""
    return reverse(broadcast_pipelined_ring(ranks, root, pieces), "reduce", "ring")
