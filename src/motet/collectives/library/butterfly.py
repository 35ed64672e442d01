"""Butterflies: ranks exchange with the one whose number differs in one bit; and Bruck's variants for any count.

Where ranks must be a power of two, those beyond it first give what they have to a partner and are served at the end.
"""

from motet.collectives.compose import reverse, then
from motet.collectives.library.registry import Terms, algorithm, message
from motet.collectives.library.shapes import exchange, part, power_below, reduction, rounds, swap
from motet.collectives.score import Program, Transfer, sending


def _doubling_cost(ranks: int) -> Terms:
    whole = message(1, 1).times(power_below(ranks).bit_length() - 1)
    return whole if power_below(ranks) == ranks else message(1, 1) + whole + message()


@algorithm("all-reduce", "recursive-doubling", cost=_doubling_cost)
def all_reduce_recursive_doubling(ranks: int) -> Program:
    """Partners at ever larger distances exchange everything and both add it up."""
    power = power_below(ranks)
    steps = [
        [Transfer(rank, rank ^ bit, 0, 0, "reduce") for rank in range(power)]
        for bit in (1 << n for n in range(power.bit_length() - 1))
    ]
    return reduction("recursive-doubling", ranks, 1, _folded(steps, ranks, power, 1))


def _folded(steps: list[list[Transfer]], ranks: int, power: int, chunks: int) -> list[list[Transfer]]:
    """An all-reduce of the first ranks, with the rest added before and told the result after."""
    if ranks == power:
        return steps
    rest = range(power, ranks)
    give = [Transfer(rank, rank - power, 0, chunks - 1, "reduce") for rank in rest]
    get = [Transfer(rank - power, rank, 0, chunks - 1, "copy") for rank in rest]
    return [give, *steps, get]


def _halving_cost(ranks: int) -> Terms:
    power = power_below(ranks)
    bits = power.bit_length() - 1
    inner = Terms(2 * bits, part(2 * (power - 1), power), part(power - 1, power))
    return inner if power == ranks else message(1, 1) + inner + message()


@algorithm("all-reduce", "halving-doubling", cost=_halving_cost)
def all_reduce_halving_doubling(ranks: int) -> Program:
    """Rabenseifner's: partners split what they still have in halves and swap them, then play it backwards."""
    power = power_below(ranks)
    doubling = all_gather_recursive_doubling(power)
    inner = then(reverse(doubling, "reduce-scatter"), doubling, "all-reduce", "halving-doubling")
    steps = _folded([list(step) for step in inner.steps], ranks, power, power)
    return reduction("halving-doubling", ranks, power, steps)


def _gather_doubling_cost(ranks: int) -> Terms:
    """The first block of 2^k ranks also carries for the partners that it has, and sends the most."""
    power = power_below(ranks)
    rest, bits = ranks - power, power.bit_length() - 1
    blocks = sum((1 << bit) + min(1 << bit, rest) for bit in range(bits))
    if not rest:
        return Terms(bits, part(blocks, ranks))
    return Terms(bits + 2, part(1 + blocks + ranks - 1, ranks))


@algorithm("all-gather", "recursive-doubling", cost=_gather_doubling_cost)
def all_gather_recursive_doubling(ranks: int) -> Program:
    """Partners at ever larger distances exchange all that they have."""
    power = power_below(ranks)

    def block(rank: int, bit: int) -> list[int]:
        first = rank & ~(bit - 1)
        own = range(first, first + bit)
        return [*own, *(chunk + power for chunk in own if chunk + power < ranks)]

    steps = [
        [transfer for rank in range(power) for transfer in sending(rank, rank ^ bit, block(rank, bit))]
        for bit in (1 << n for n in range(power.bit_length() - 1))
    ]
    if power < ranks:
        rest = range(power, ranks)
        give = [Transfer(rank, rank - power, rank, rank, "copy") for rank in rest]
        get = [t for rank in rest for t in sending(rank - power, rank, set(range(ranks)) - {rank})]
        steps = [give, *steps, get]
    return exchange("recursive-doubling", ranks, steps)


@algorithm("reduce-scatter", "recursive-halving", cost=lambda n: _gather_doubling_cost(n).adding)
def reduce_scatter_recursive_halving(ranks: int) -> Program:
    """Partners at ever smaller distances send each other the half that the other is to own."""
    return reverse(all_gather_recursive_doubling(ranks), "reduce-scatter", "recursive-halving")


def _bruck_cost(ranks: int) -> Terms:
    return Terms(rounds(ranks), part(ranks - 1, ranks))


def bruck_steps(ranks: int) -> list[list[Transfer]]:
    """In each step every rank sends what it has, at most what is lacking, to the one as many places back."""
    steps = []
    for reach in (1 << bit for bit in range(rounds(ranks))):
        count = min(reach, ranks - reach)
        steps.append(
            [
                transfer
                for rank in range(ranks)
                for transfer in sending(rank, (rank - reach) % ranks, [(rank + n) % ranks for n in range(count)])
            ]
        )
    return steps


@algorithm("all-gather", "bruck", cost=_bruck_cost)
def all_gather_bruck(ranks: int) -> Program:
    """Every rank sends all it has over ever larger distances, in as few steps as possible for any number of ranks."""
    return exchange("bruck", ranks, bruck_steps(ranks))


@algorithm("reduce-scatter", "bruck", cost=lambda n: _bruck_cost(n).adding)
def reduce_scatter_bruck(ranks: int) -> Program:
    """Bruck's all-gather backwards."""
    return reverse(all_gather_bruck(ranks), "reduce-scatter")


def _bruck_all_to_all_cost(ranks: int) -> Terms:
    """In step k travels what has a way to go whose bit k is set."""
    hops = sum(way.bit_count() for way in range(ranks))
    return Terms(rounds(ranks), part(hops, ranks))


@algorithm("all-to-all", "bruck", cost=_bruck_all_to_all_cost)
def all_to_all_bruck(ranks: int) -> Program:
    """What has d places to go travels over the powers of two that d is the sum of."""
    steps = []
    for bit in (1 << n for n in range(rounds(ranks))):
        ways = [way for way in range(1, ranks) if way & bit]
        parts = [
            sending(rank, (rank + bit) % ranks, [_underway(rank - (way & (bit - 1)), way, ranks) for way in ways])
            for rank in range(ranks)
        ]
        steps.append([transfer for part_of_rank in parts for transfer in part_of_rank])
    return swap("bruck", ranks, steps)


def _underway(source: int, way: int, ranks: int) -> int:
    return source % ranks * ranks + (source + way) % ranks
