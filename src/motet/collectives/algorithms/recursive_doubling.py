"""Butterflies: in each step a rank exchanges with the rank whose number differs in one bit.

If the number of ranks is not a power of two, extra ranks first send their data to a partner and get the result last.
"""

from fractions import Fraction

from motet.collectives.algorithms.rank_arithmetic import floor_power_of_two
from motet.collectives.algorithms.registry import AlphaBetaGammaCost, algorithm, messages
from motet.collectives.compose import collective_program, concatenate, reverse
from motet.collectives.program import ChunkTransfer, Program, Step, copy_chunk, transfers_for


def _powers_of_two_below(power: int) -> list[int]:
    return [1 << bit for bit in range(power.bit_length() - 1)]


def _with_extra_ranks(inner: AlphaBetaGammaCost, ranks: int) -> AlphaBetaGammaCost:
    return inner if floor_power_of_two(ranks) == ranks else messages(1, reduced=True) + inner + messages(1)


def _doubling_cost(ranks: int) -> AlphaBetaGammaCost:
    return _with_extra_ranks(messages(floor_power_of_two(ranks).bit_length() - 1, reduced=True), ranks)


@algorithm("all-reduce", "recursive-doubling", cost=_doubling_cost)
def all_reduce_recursive_doubling(ranks: int) -> Program:
    """Partners at ever larger distances exchange everything and both add it."""
    power = floor_power_of_two(ranks)
    bits = _powers_of_two_below(power)
    steps = tuple(tuple(ChunkTransfer(rank, rank ^ bit, 0, 0, "reduce") for rank in range(power)) for bit in bits)
    return _all_reduce_with_extra_ranks("recursive-doubling", ranks, steps, chunks=1)


def _all_reduce_with_extra_ranks(name: str, ranks: int, steps: tuple[Step, ...], *, chunks: int) -> Program:
    power = floor_power_of_two(ranks)
    if ranks > power:
        give = tuple(ChunkTransfer(rank, rank - power, 0, chunks - 1, "reduce") for rank in range(power, ranks))
        get = tuple(ChunkTransfer(rank - power, rank, 0, chunks - 1, "copy") for rank in range(power, ranks))
        steps = (give, *steps, get)
    return collective_program("all-reduce", name, ranks, steps=steps, chunks=chunks)


def _halving_cost(ranks: int) -> AlphaBetaGammaCost:
    power = floor_power_of_two(ranks)
    gamma = Fraction(power - 1, power)
    return _with_extra_ranks(AlphaBetaGammaCost(2 * (power.bit_length() - 1), 2 * gamma, gamma), ranks)


@algorithm("all-reduce", "halving-doubling", cost=_halving_cost)
def all_reduce_halving_doubling(ranks: int) -> Program:
    """Rabenseifner's algorithm: partners swap halves of their remaining data, then the same backwards."""
    power = floor_power_of_two(ranks)
    doubling = all_gather_recursive_doubling(power)
    inner = concatenate(reverse(doubling, "reduce-scatter"), doubling, "all-reduce", "halving-doubling")
    return _all_reduce_with_extra_ranks("halving-doubling", ranks, inner.steps, chunks=power)


def _gather_doubling_cost(ranks: int) -> AlphaBetaGammaCost:
    """The first block of 2^k ranks also sends the chunks of its extra partners, and so the most."""
    power = floor_power_of_two(ranks)
    extra_ranks, bits = ranks - power, power.bit_length() - 1
    blocks = sum(bit + min(bit, extra_ranks) for bit in _powers_of_two_below(power))
    if not extra_ranks:
        return AlphaBetaGammaCost(bits, Fraction(blocks, ranks))
    return AlphaBetaGammaCost(bits + 2, Fraction(1 + blocks + ranks - 1, ranks))


@algorithm("all-gather", "recursive-doubling", cost=_gather_doubling_cost)
def all_gather_recursive_doubling(ranks: int) -> Program:
    """Partners at ever larger distances exchange all their chunks."""
    power = floor_power_of_two(ranks)

    def block(rank: int, bit: int) -> list[int]:
        first = rank & ~(bit - 1)
        block_ranks = range(first, first + bit)
        return [*block_ranks, *(chunk + power for chunk in block_ranks if chunk + power < ranks)]

    steps = [
        [transfer for rank in range(power) for transfer in transfers_for(rank, rank ^ bit, block(rank, bit))]
        for bit in _powers_of_two_below(power)
    ]
    if power < ranks:
        extra_ranks = range(power, ranks)
        give = [copy_chunk(rank, rank - power, rank) for rank in extra_ranks]
        get = [t for rank in extra_ranks for t in transfers_for(rank - power, rank, set(range(ranks)) - {rank})]
        steps = [give, *steps, get]
    return collective_program("all-gather", "recursive-doubling", ranks, steps=steps)


@algorithm("reduce-scatter", "recursive-halving", cost=lambda n: _gather_doubling_cost(n).with_reduction)
def reduce_scatter_recursive_halving(ranks: int) -> Program:
    """Partners at ever smaller distances send each other the half that the partner will own."""
    return reverse(all_gather_recursive_doubling(ranks), "reduce-scatter", "recursive-halving")
