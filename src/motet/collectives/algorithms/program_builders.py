"""The Program of a collective from its steps: where chunks start, and where they must end."""

from collections.abc import Mapping, Sequence

from motet.collectives.algorithms.rank_grouping import check_root
from motet.collectives.program import ChunkTransfer, Contributors, Program


def collective_program(
    collective: str,
    algorithm: str,
    ranks: int,
    *,
    steps: Sequence[Sequence[ChunkTransfer]],
    chunks: int | None = None,
    root: int = 0,
    ports: int = 1,
) -> Program:
    """The Program with these steps. Broadcast and all-reduce may cut the message into any number of chunks."""
    check_root(root, ranks)
    every_rank = range(ranks)
    count = ranks if chunks is None else chunks
    everything = tuple(range(count))
    initial: tuple[tuple[int, ...], ...]
    final: tuple[Mapping[int, Contributors], ...]
    match collective:
        case "broadcast":
            initial = tuple(everything if rank == root else () for rank in every_rank)
            final = (dict.fromkeys(everything, (root,)),) * ranks
        case "scatter":
            initial = tuple(everything if rank == root else () for rank in every_rank)
            final = tuple({rank: (root,)} for rank in every_rank)
        case "gather":
            initial = tuple((rank,) for rank in every_rank)
            final = tuple({rank: (rank,) for rank in every_rank} if rank == root else {} for rank in every_rank)
        case "all-gather" | "barrier":
            initial = tuple((rank,) for rank in every_rank)
            final = ({rank: (rank,) for rank in every_rank},) * ranks
        case "all-reduce":
            initial = (everything,) * ranks
            final = (dict.fromkeys(everything, tuple(every_rank)),) * ranks
        case "all-to-all":
            count = ranks**2
            initial = tuple(tuple(range(rank * ranks, (rank + 1) * ranks)) for rank in every_rank)
            final = tuple({source * ranks + rank: (source,) for source in every_rank} for rank in every_rank)
        case _:
            raise AssertionError(collective)
    frozen_steps = tuple(tuple(step) for step in steps)
    return Program(collective, algorithm, ranks, (1,) * count, initial, final, frozen_steps, ports)
