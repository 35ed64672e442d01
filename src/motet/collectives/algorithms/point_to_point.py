"""Messages between two ranks, and the barrier of all ranks."""

from motet.collectives.algorithms.bruck import bruck_steps
from motet.collectives.algorithms.program_builders import collective_program
from motet.collectives.algorithms.rank_grouping import check_root
from motet.collectives.algorithms.registry import algorithm, doubling_cost, messages
from motet.collectives.program import Program, copy_chunk
from motet.core.errors import InputError


def _single_transfer_program(collective: str, ranks: int, *, src: int, dst: int) -> Program:
    check_root(src, ranks, "src")
    check_root(dst, ranks, "dst")
    if src == dst:
        raise InputError(f"src and dst are both rank {src}: nothing to send")
    return Program(
        collective,
        "direct",
        ranks,
        sizes=(1,),
        initial=tuple((0,) if rank == src else () for rank in range(ranks)),
        final=tuple({0: (src,)} if rank in (src, dst) else {} for rank in range(ranks)),
        steps=((copy_chunk(src, dst, 0),),),
    )


@algorithm("send", "direct", cost=lambda n: messages(1))
def send(ranks: int, src: int = 0, dst: int = 1) -> Program:
    """One rank sends, another receives."""
    return _single_transfer_program("send", ranks, src=src, dst=dst)


@algorithm("copy", "direct", cost=lambda n: messages(1))
def copy(ranks: int, src: int = 0, dst: int = 1) -> Program:
    """A put: the data of one rank appear on another without its call."""
    return _single_transfer_program("copy", ranks, src=src, dst=dst)


@algorithm("signal", "direct", cost=lambda n: messages(1))
def signal(ranks: int, src: int = 0, dst: int = 1) -> Program:
    """An empty token that another rank waits for."""
    return _single_transfer_program("signal", ranks, src=src, dst=dst)


@algorithm("barrier", "dissemination", cost=doubling_cost)
def barrier(ranks: int) -> Program:
    """Tokens spread over ever larger distances; a rank with all tokens knows that every rank has arrived."""
    return collective_program("barrier", "dissemination", ranks, steps=bruck_steps(ranks))
