"""Butterflies: ranks exchange with the one whose number differs in one bit; and Bruck's variants for any count.

Where ranks must be a power of two, those beyond it first give what they have to a partner and are served at the end.
"""

from motet.collectives.algorithms.program_builders import (
    all_gather_program,
    all_reduce_program,
    all_to_all_program,
    doubling_rounds,
    floor_power_of_two,
    fraction,
)
from motet.collectives.algorithms.registry import AlphaBetaGammaCost, algorithm, one_message
from motet.collectives.compose import concatenate, reverse
from motet.collectives.program import ChunkTransfer, Program, transfers_for


def _doubling_cost(ranks: int) -> AlphaBetaGammaCost:
    doubling = one_message(1, 1).times(floor_power_of_two(ranks).bit_length() - 1)
    return doubling if floor_power_of_two(ranks) == ranks else one_message(1, 1) + doubling + one_message()


@algorithm("all-reduce", "recursive-doubling", cost=_doubling_cost)
def all_reduce_recursive_doubling(ranks: int) -> Program:
    """Partners at ever larger distances exchange everything and both add it up."""
    power = floor_power_of_two(ranks)
    steps = [
        [ChunkTransfer(rank, rank ^ bit, 0, 0, "reduce") for rank in range(power)]
        for bit in (1 << n for n in range(power.bit_length() - 1))
    ]
    return all_reduce_program("recursive-doubling", ranks, 1, _with_extra_ranks(steps, ranks, power, 1))


def _with_extra_ranks(
    steps: list[list[ChunkTransfer]], ranks: int, power: int, chunks: int
) -> list[list[ChunkTransfer]]:
    """An all-reduce of the first ranks, with the rest added before and told the result after."""
    if ranks == power:
        return steps
    extra_ranks = range(power, ranks)
    give = [ChunkTransfer(rank, rank - power, 0, chunks - 1, "reduce") for rank in extra_ranks]
    get = [ChunkTransfer(rank - power, rank, 0, chunks - 1, "copy") for rank in extra_ranks]
    return [give, *steps, get]


def _halving_cost(ranks: int) -> AlphaBetaGammaCost:
    power = floor_power_of_two(ranks)
    bits = power.bit_length() - 1
    inner = AlphaBetaGammaCost(2 * bits, fraction(2 * (power - 1), power), fraction(power - 1, power))
    return inner if power == ranks else one_message(1, 1) + inner + one_message()


@algorithm("all-reduce", "halving-doubling", cost=_halving_cost)
def all_reduce_halving_doubling(ranks: int) -> Program:
    """Rabenseifner's: partners split what they still have in halves and swap them, then play it backwards."""
    power = floor_power_of_two(ranks)
    doubling = all_gather_recursive_doubling(power)
    inner = concatenate(reverse(doubling, "reduce-scatter"), doubling, "all-reduce", "halving-doubling")
    steps = _with_extra_ranks([list(step) for step in inner.steps], ranks, power, power)
    return all_reduce_program("halving-doubling", ranks, power, steps)


def _gather_doubling_cost(ranks: int) -> AlphaBetaGammaCost:
    """The first block of 2^k ranks also carries for the partners that it has, and sends the most."""
    power = floor_power_of_two(ranks)
    extra_ranks, bits = ranks - power, power.bit_length() - 1
    blocks = sum((1 << bit) + min(1 << bit, extra_ranks) for bit in range(bits))
    if not extra_ranks:
        return AlphaBetaGammaCost(bits, fraction(blocks, ranks))
    return AlphaBetaGammaCost(bits + 2, fraction(1 + blocks + ranks - 1, ranks))


@algorithm("all-gather", "recursive-doubling", cost=_gather_doubling_cost)
def all_gather_recursive_doubling(ranks: int) -> Program:
    """Partners at ever larger distances exchange all that they have."""
    power = floor_power_of_two(ranks)

    def block(rank: int, bit: int) -> list[int]:
        first = rank & ~(bit - 1)
        block_ranks = range(first, first + bit)
        return [*block_ranks, *(chunk + power for chunk in block_ranks if chunk + power < ranks)]

    steps = [
        [transfer for rank in range(power) for transfer in transfers_for(rank, rank ^ bit, block(rank, bit))]
        for bit in (1 << n for n in range(power.bit_length() - 1))
    ]
    if power < ranks:
        extra_ranks = range(power, ranks)
        give = [ChunkTransfer(rank, rank - power, rank, rank, "copy") for rank in extra_ranks]
        get = [t for rank in extra_ranks for t in transfers_for(rank - power, rank, set(range(ranks)) - {rank})]
        steps = [give, *steps, get]
    return all_gather_program("recursive-doubling", ranks, steps)


@algorithm("reduce-scatter", "recursive-halving", cost=lambda n: _gather_doubling_cost(n).with_reduction)
def reduce_scatter_recursive_halving(ranks: int) -> Program:
    """Partners at ever smaller distances send each other the half that the other is to own."""
    return reverse(all_gather_recursive_doubling(ranks), "reduce-scatter", "recursive-halving")


def _bruck_cost(ranks: int) -> AlphaBetaGammaCost:
    return AlphaBetaGammaCost(doubling_rounds(ranks), fraction(ranks - 1, ranks))


def bruck_steps(ranks: int) -> list[list[ChunkTransfer]]:
    """In each step every rank sends what it has, at most what is lacking, to the one as many places back."""
    steps = []
    for distance in (1 << bit for bit in range(doubling_rounds(ranks))):
        count = min(distance, ranks - distance)
        steps.append(
            [
                transfer
                for rank in range(ranks)
                for transfer in transfers_for(
                    rank, (rank - distance) % ranks, [(rank + n) % ranks for n in range(count)]
                )
            ]
        )
    return steps


@algorithm("all-gather", "bruck", cost=_bruck_cost)
def all_gather_bruck(ranks: int) -> Program:
    """Every rank sends all it has over ever larger distances, in as few steps as possible for any number of ranks."""
    return all_gather_program("bruck", ranks, bruck_steps(ranks))


@algorithm("reduce-scatter", "bruck", cost=lambda n: _bruck_cost(n).with_reduction)
def reduce_scatter_bruck(ranks: int) -> Program:
    """Bruck's all-gather backwards."""
    return reverse(all_gather_bruck(ranks), "reduce-scatter")


def _bruck_all_to_all_cost(ranks: int) -> AlphaBetaGammaCost:
    """In step k travels what has a way to go whose bit k is set."""
    hops = sum(way.bit_count() for way in range(ranks))
    return AlphaBetaGammaCost(doubling_rounds(ranks), fraction(hops, ranks))


@algorithm("all-to-all", "bruck", cost=_bruck_all_to_all_cost)
def all_to_all_bruck(ranks: int) -> Program:
    """What has d places to go travels over the powers of two that d is the sum of."""
    steps = []
    for bit in (1 << n for n in range(doubling_rounds(ranks))):
        distances = [way for way in range(1, ranks) if way & bit]
        transfers_of_ranks = [
            transfers_for(
                rank,
                (rank + bit) % ranks,
                [_chunk_in_transit(rank - (way & (bit - 1)), way, ranks) for way in distances],
            )
            for rank in range(ranks)
        ]
        steps.append([transfer for part_of_rank in transfers_of_ranks for transfer in part_of_rank])
    return all_to_all_program("bruck", ranks, steps)


def _chunk_in_transit(source: int, distance: int, ranks: int) -> int:
    return source % ranks * ranks + (source + distance) % ranks
