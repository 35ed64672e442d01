"""Two ranks, and the barrier that all of them meet at."""

from motet.collectives.algorithms.program_builders import all_gather_program, check_root, doubling_rounds, fraction
from motet.collectives.algorithms.recursive_doubling import bruck_steps
from motet.collectives.algorithms.registry import AlphaBetaGammaCost, algorithm, one_message
from motet.collectives.program import ChunkTransfer, Program
from motet.core.errors import InputError


def _single_transfer_program(collective: str, ranks: int, src: int, dst: int) -> Program:
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
        steps=((ChunkTransfer(src, dst, 0, 0, "copy"),),),
    )


@algorithm("send", "direct", cost=lambda n: one_message())
def send(ranks: int, src: int = 0, dst: int = 1) -> Program:
    """One rank sends, another receives."""
    return _single_transfer_program("send", ranks, src, dst)


@algorithm("copy", "direct", cost=lambda n: one_message())
def copy(ranks: int, src: int = 0, dst: int = 1) -> Program:
    """What one rank holds appears on another, which need not ask: a put."""
    return _single_transfer_program("copy", ranks, src, dst)


@algorithm("signal", "direct", cost=lambda n: one_message())
def signal(ranks: int, src: int = 0, dst: int = 1) -> Program:
    """A token without content that another rank waits for."""
    return _single_transfer_program("signal", ranks, src, dst)


@algorithm("barrier", "dissemination", cost=lambda n: AlphaBetaGammaCost(doubling_rounds(n), fraction(n - 1, n)))
def barrier(ranks: int) -> Program:
    """Tokens spread over ever larger distances; who has all of them knows that everybody is there."""
    gathered = all_gather_program("dissemination", ranks, bruck_steps(ranks))
    return Program(
        "barrier", gathered.algorithm, ranks, gathered.sizes, gathered.initial, gathered.final, gathered.steps
    )
