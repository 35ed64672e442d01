"""One rank talks to every other rank, all ranks talk to all, or one to one: the fewest steps, or the simplest code."""

from dataclasses import replace
from fractions import Fraction

from motet.collectives.algorithms.registry import algorithm, messages, sharded_all_reduce_cost
from motet.collectives.compose import check_root, collective_program, concatenate, reverse
from motet.collectives.program import ChunkTransfer, Program, copy_chunk
from motet.core.errors import check_input


def _other_ranks(root: int, ranks: int) -> list[int]:
    return [(root + shift) % ranks for shift in range(1, ranks)]


@algorithm("broadcast", "flat", cost=lambda n: messages(n - 1))
def broadcast_flat(ranks: int, root: int = 0) -> Program:
    """The root sends everything to one rank after another."""
    steps = [[copy_chunk(root, other, 0)] for other in _other_ranks(root, ranks)]
    return collective_program("broadcast", "flat", ranks, steps=steps, chunks=1, root=root)


@algorithm("reduce", "flat", cost=lambda n: messages(n - 1, reduced=True))
def reduce_flat(ranks: int, root: int = 0) -> Program:
    """One rank after another sends everything to the root, which adds it up."""
    return reverse(broadcast_flat(ranks, root), "reduce")


@algorithm("all-reduce", "flat", cost=lambda n: messages(n - 1, reduced=True) + messages(n - 1))
def all_reduce_flat(ranks: int, root: int = 0) -> Program:
    """Reduce to one root, then broadcast from it, rank after rank, as a single parameter server does."""
    return concatenate(reduce_flat(ranks, root), broadcast_flat(ranks, root), "all-reduce", "flat")


@algorithm("all-reduce", "naive", cost=lambda n: messages(n - 1, reduced=True), same_bits=False)
def all_reduce_naive(ranks: int) -> Program:
    """Every rank sends everything to all others in one step. Ranks add in different orders, so bits differ."""
    shifted = [(dst + shift, dst) for shift in range(1, ranks) for dst in range(ranks)]
    step = [ChunkTransfer(src % ranks, dst, 0, 0, "reduce") for src, dst in shifted]
    return collective_program("all-reduce", "naive", ranks, steps=[step], chunks=1, ports=ranks - 1)


@algorithm("all-gather", "direct", cost=lambda n: messages(n - 1, Fraction(1, n)))
def all_gather_direct(ranks: int) -> Program:
    """Every rank sends its chunk to all others in one step."""
    shifted = [(src, src + shift) for shift in range(1, ranks) for src in range(ranks)]
    step = [copy_chunk(src, dst % ranks, src) for src, dst in shifted]
    return collective_program("all-gather", "direct", ranks, steps=[step], ports=ranks - 1)


@algorithm("reduce-scatter", "direct", cost=lambda n: messages(n - 1, Fraction(1, n), reduced=True))
def reduce_scatter_direct(ranks: int) -> Program:
    """Every rank sends chunk i to rank i, all in one step."""
    return reverse(all_gather_direct(ranks), "reduce-scatter")


@algorithm("all-reduce", "direct", cost=sharded_all_reduce_cost)
def all_reduce_direct(ranks: int) -> Program:
    """Rank i adds chunk i of all ranks and sends the sum to all: two steps, the least traffic, many ports."""
    return concatenate(reduce_scatter_direct(ranks), all_gather_direct(ranks), "all-reduce", "direct")


@algorithm("scatter", "flat", cost=lambda n: messages(n - 1, Fraction(1, n)))
def scatter_flat(ranks: int, root: int = 0) -> Program:
    """The root sends each rank its chunk, one after another."""
    steps = [[copy_chunk(root, dst, dst)] for dst in _other_ranks(root, ranks)]
    return collective_program("scatter", "flat", ranks, steps=steps, root=root)


@algorithm("gather", "flat", cost=lambda n: messages(n - 1, Fraction(1, n)))
def gather_flat(ranks: int, root: int = 0) -> Program:
    """One rank after another sends its chunk to the root."""
    return gather_from_scatter(scatter_flat(ranks, root))


def gather_from_scatter(scatter: Program) -> Program:
    """The reversed scatter, with copies in place of sums."""
    root = next(rank for rank, held in enumerate(scatter.initial) if held)
    steps = [[t._replace(op="copy") for t in step] for step in reverse(scatter, "gather").steps]
    return collective_program("gather", scatter.algorithm, scatter.ranks, steps=steps, root=root)


@algorithm("all-to-all", "pairwise", cost=lambda n: messages(n - 1, Fraction(1, n)))
def all_to_all_pairwise(ranks: int) -> Program:
    """Every rank i sends to rank i + t the chunk for it in step t."""
    pairs_of_step = ([(src, (src + shift) % ranks) for src in range(ranks)] for shift in range(1, ranks))
    steps = [[copy_chunk(src, dst, src * ranks + dst) for src, dst in pairs] for pairs in pairs_of_step]
    return collective_program("all-to-all", "pairwise", ranks, steps=steps)


@algorithm("send", "direct", cost=lambda n: messages(1))
def send(ranks: int, src: int = 0, dst: int = 1) -> Program:
    """One rank sends, another receives."""
    check_root(src, ranks, "src")
    check_root(dst, ranks, "dst")
    check_input(src != dst, f"src and dst are both rank {src}: nothing to send")
    initial = tuple((0,) if rank == src else () for rank in range(ranks))
    final = tuple({0: (src,)} if rank in (src, dst) else {} for rank in range(ranks))
    return Program("send", "direct", ranks, (1,), initial, final, ((copy_chunk(src, dst, 0),),))


@algorithm("copy", "direct", cost=lambda n: messages(1))
def copy(ranks: int, src: int = 0, dst: int = 1) -> Program:
    """A put: the data of one rank appear on another without its call."""
    return replace(send(ranks, src, dst), collective="copy")


@algorithm("signal", "direct", cost=lambda n: messages(1))
def signal(ranks: int, src: int = 0, dst: int = 1) -> Program:
    """An empty token that another rank waits for."""
    return replace(send(ranks, src, dst), collective="signal")
