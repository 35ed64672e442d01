"""Bruck's algorithms: as few steps as recursive doubling needs, for any number of ranks."""

from fractions import Fraction

from motet.collectives.algorithms.rank_arithmetic import doubling_rounds
from motet.collectives.algorithms.registry import AlphaBetaGammaCost, algorithm, doubling_cost
from motet.collectives.compose import collective_program, reverse
from motet.collectives.program import ChunkTransfer, Program, transfers_for


def bruck_steps(ranks: int) -> list[list[ChunkTransfer]]:
    """Every rank sends its first d chunks, at most the missing ones, d ranks back in the step of distance d."""
    steps = []
    for distance in (1 << bit for bit in range(doubling_rounds(ranks))):
        step: list[ChunkTransfer] = []
        for rank in range(ranks):
            chunks = [(rank + n) % ranks for n in range(min(distance, ranks - distance))]
            step += transfers_for(rank, (rank - distance) % ranks, chunks)
        steps.append(step)
    return steps


@algorithm("all-gather", "bruck", cost=doubling_cost)
def all_gather_bruck(ranks: int) -> Program:
    """Every rank sends all its chunks over ever larger distances, in the fewest steps for any number of ranks."""
    return collective_program("all-gather", "bruck", ranks, steps=bruck_steps(ranks))


@algorithm("reduce-scatter", "bruck", cost=lambda n: doubling_cost(n).with_reduction)
def reduce_scatter_bruck(ranks: int) -> Program:
    """Bruck's all-gather backwards."""
    return reverse(all_gather_bruck(ranks), "reduce-scatter")


def _all_to_all_cost(ranks: int) -> AlphaBetaGammaCost:
    """Step k moves the chunks whose distance has bit k set."""
    hops = sum(distance.bit_count() for distance in range(ranks))
    return AlphaBetaGammaCost(doubling_rounds(ranks), Fraction(hops, ranks))


@algorithm("all-to-all", "bruck", cost=_all_to_all_cost)
def all_to_all_bruck(ranks: int) -> Program:
    """A chunk for the rank at distance d travels over the powers of two whose sum is d."""

    def chunk_in_transit(source: int, distance: int) -> int:
        return source % ranks * ranks + (source + distance) % ranks

    steps = []
    for bit in (1 << n for n in range(doubling_rounds(ranks))):
        distances = [distance for distance in range(1, ranks) if distance & bit]
        step: list[ChunkTransfer] = []
        for rank in range(ranks):
            chunks = [chunk_in_transit(rank - (distance & (bit - 1)), distance) for distance in distances]
            step += transfers_for(rank, (rank + bit) % ranks, chunks)
        steps.append(step)
    return collective_program("all-to-all", "bruck", ranks, steps=steps)


@algorithm("barrier", "dissemination", cost=doubling_cost)
def barrier(ranks: int) -> Program:
    """Tokens spread over ever larger distances; a rank with all tokens knows that every rank has arrived."""
    return collective_program("barrier", "dissemination", ranks, steps=bruck_steps(ranks))
