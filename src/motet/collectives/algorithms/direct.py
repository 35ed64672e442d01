"""One rank talks to each of the others, or everybody to everybody: the fewest steps, or the simplest, at a price."""

from motet.collectives.algorithms.program_builders import (
    all_gather_program,
    all_reduce_program,
    all_to_all_program,
    broadcast_program,
    fraction,
    scatter_program,
)
from motet.collectives.algorithms.registry import AlphaBetaGammaCost, algorithm, one_message
from motet.collectives.compose import concatenate, reverse
from motet.collectives.program import ChunkTransfer, Program


def _other_ranks(root: int, ranks: int) -> list[int]:
    return [(root + shift) % ranks for shift in range(1, ranks)]


@algorithm("broadcast", "flat", cost=lambda n: one_message().times(n - 1))
def broadcast_flat(ranks: int, root: int = 0) -> Program:
    """The root sends everything to one rank after another."""
    steps = [[ChunkTransfer(root, other, 0, 0, "copy")] for other in _other_ranks(root, ranks)]
    return broadcast_program("broadcast", "flat", ranks, 1, root, steps)


@algorithm("reduce", "flat", cost=lambda n: one_message(1, 1).times(n - 1))
def reduce_flat(ranks: int, root: int = 0) -> Program:
    """One rank after another sends everything to the root, which adds it up."""
    return reverse(broadcast_flat(ranks, root), "reduce")


@algorithm("all-reduce", "flat", cost=lambda n: one_message(1, 1).times(n - 1) + one_message().times(n - 1))
def all_reduce_flat(ranks: int, root: int = 0) -> Program:
    """Through one root: reduce and broadcast one by one, as a single parameter server does."""
    return concatenate(reduce_flat(ranks, root), broadcast_flat(ranks, root), "all-reduce", "flat")


@algorithm("all-reduce", "naive", cost=lambda n: one_message(1, 1).times(n - 1), same_bits=False)
def all_reduce_naive(ranks: int) -> Program:
    """Everybody sends everything to everybody in one step. Ranks add in different orders, so bits differ."""
    step = [
        ChunkTransfer((dst + shift) % ranks, dst, 0, 0, "reduce") for shift in range(1, ranks) for dst in range(ranks)
    ]
    return all_reduce_program("naive", ranks, 1, [step], ports=ranks - 1)


@algorithm("all-gather", "direct", cost=lambda n: one_message(fraction(1, n)).times(n - 1))
def all_gather_direct(ranks: int) -> Program:
    """Everybody sends its chunk to everybody in one step."""
    step = [
        ChunkTransfer(src, (src + shift) % ranks, src, src, "copy") for shift in range(1, ranks) for src in range(ranks)
    ]
    return all_gather_program("direct", ranks, [step], ports=ranks - 1)


@algorithm("reduce-scatter", "direct", cost=lambda n: one_message(fraction(1, n), fraction(1, n)).times(n - 1))
def reduce_scatter_direct(ranks: int) -> Program:
    """Everybody sends chunk i to rank i, all in one step."""
    return reverse(all_gather_direct(ranks), "reduce-scatter")


def _direct_cost(ranks: int) -> AlphaBetaGammaCost:
    shard_fraction = fraction(1, ranks)
    return one_message(shard_fraction, shard_fraction).times(ranks - 1) + one_message(shard_fraction).times(ranks - 1)


@algorithm("all-reduce", "direct", cost=_direct_cost)
def all_reduce_direct(ranks: int) -> Program:
    """Rank i adds up chunk i of everybody and sends the sum to everybody: two steps, the least traffic, many ports."""
    return concatenate(reduce_scatter_direct(ranks), all_gather_direct(ranks), "all-reduce", "direct")


@algorithm("scatter", "flat", cost=lambda n: one_message(fraction(1, n)).times(n - 1))
def scatter_flat(ranks: int, root: int = 0) -> Program:
    """The root sends each rank its chunk, one after another."""
    return scatter_program(
        "flat", ranks, root, [[ChunkTransfer(root, dst, dst, dst, "copy")] for dst in _other_ranks(root, ranks)]
    )


@algorithm("gather", "flat", cost=lambda n: one_message(fraction(1, n)).times(n - 1))
def gather_flat(ranks: int, root: int = 0) -> Program:
    """One rank after another sends its chunk to the root."""
    return gather_from_scatter(scatter_flat(ranks, root))


def gather_from_scatter(scatter: Program) -> Program:
    """A scatter played backwards: chunks come together instead of being dealt out, and nothing is added up."""
    backwards = reverse(scatter, "gather")
    root = next(rank for rank, held in enumerate(scatter.initial) if held)
    final = tuple({c: (c,) for c in range(scatter.ranks)} if rank == root else {} for rank in range(scatter.ranks))
    steps = tuple(tuple(t._replace(op="copy") for t in step) for step in backwards.steps)
    initial = tuple((rank,) for rank in range(scatter.ranks))
    return Program("gather", scatter.algorithm, scatter.ranks, scatter.sizes, initial, final, steps)


@algorithm("all-to-all", "pairwise", cost=lambda n: one_message(fraction(1, n)).times(n - 1))
def all_to_all_pairwise(ranks: int) -> Program:
    """In step t every rank sends to the one t places further what it has for it."""
    steps = [
        [_pairwise_transfer(src, (src + shift) % ranks, ranks) for src in range(ranks)] for shift in range(1, ranks)
    ]
    return all_to_all_program("pairwise", ranks, steps)


def _pairwise_transfer(src: int, dst: int, ranks: int) -> ChunkTransfer:
    return ChunkTransfer(src, dst, src * ranks + dst, src * ranks + dst, "copy")
