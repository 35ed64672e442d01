"""Programs made of steps, or of Programs: reversed, in sequence, in parallel, among some ranks.

A reduction is a reversed distribution; an all-reduce a reduce-scatter and an all-gather, or a reduce and a broadcast.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import chain, zip_longest

from motet.collectives.program import ChunkTransfer, Contributors, Program, Step
from motet.core.errors import check_input


def check_root(root: int, ranks: int, name: str = "root") -> None:
    check_input(0 <= root < ranks, f"{name} {root}: give 0 to {ranks - 1}, one of the {ranks} ranks")


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
    initial: tuple[tuple[int, ...], ...] = tuple((rank,) for rank in every_rank)
    final: tuple[Mapping[int, Contributors], ...]
    if collective in ("broadcast", "scatter"):
        initial = tuple(everything if rank == root else () for rank in every_rank)
    match collective:
        case "broadcast":
            final = (dict.fromkeys(everything, (root,)),) * ranks
        case "scatter":
            final = tuple({rank: (root,)} for rank in every_rank)
        case "gather":
            final = tuple({rank: (rank,) for rank in every_rank} if rank == root else {} for rank in every_rank)
        case "all-gather" | "barrier":
            final = ({rank: (rank,) for rank in every_rank},) * ranks
        case "all-reduce":
            initial, final = (everything,) * ranks, (dict.fromkeys(everything, tuple(every_rank)),) * ranks
        case "all-to-all":
            count = ranks**2
            initial = tuple(tuple(range(rank * ranks, (rank + 1) * ranks)) for rank in every_rank)
            final = tuple({source * ranks + rank: (source,) for source in every_rank} for rank in every_rank)
        case _:
            raise AssertionError(collective)
    frozen_steps = tuple(tuple(step) for step in steps)
    return Program(collective, algorithm, ranks, (1,) * count, initial, final, frozen_steps, ports)


def reverse(program: Program, collective: str, algorithm: str | None = None) -> Program:
    """A distribution backwards, with sums in place of copies. No rank may receive a chunk that it holds."""
    _check_no_chunk_received_twice(program)
    contributors: dict[int, list[int]] = {}
    for rank, held in enumerate(program.final):
        for chunk in held:
            contributors.setdefault(chunk, []).append(rank)
    return replace(
        program,
        collective=collective,
        algorithm=algorithm or program.algorithm,
        initial=tuple(tuple(held) for held in program.final),
        final=tuple({chunk: tuple(contributors[chunk]) for chunk in held} for held in program.initial),
        steps=reverse_steps(program.steps),
    )


def reverse_steps(steps: Sequence[Step]) -> tuple[Step, ...]:
    """Steps backwards, with the transfers turned round and added."""
    return tuple(
        tuple(ChunkTransfer(dst, src, first, last, "reduce") for src, dst, first, last, _ in reversed(step))
        for step in reversed(steps)
    )


def _check_no_chunk_received_twice(program: Program) -> None:
    held_chunks = [set(held) for held in program.initial]
    for step in program.steps:
        for _, dst, first, last, _ in step:
            chunks = range(first, last + 1)
            if not held_chunks[dst].isdisjoint(chunks):
                repeated = min(held_chunks[dst].intersection(chunks))
                raise ValueError(f"{program} cannot be reversed: rank {dst} is sent chunk {repeated}, which it has")
            held_chunks[dst].update(chunks)


def concatenate(first: Program, second: Program, collective: str, algorithm: str) -> Program:
    """The second Program after the first, whose results it starts from."""
    if first.ranks != second.ranks or first.sizes != second.sizes:
        raise ValueError(f"{first} and {second} do not have the same ranks and chunks")
    for rank, held in enumerate(second.initial):
        missing = sorted(set(held) - set(first.final[rank]))
        if missing:
            raise ValueError(f"{second} starts with chunk {missing[0]} on rank {rank}, where {first} leaves none")

    @cache
    def trace_sources(chunk: int, sources: Contributors) -> Contributors:
        return tuple(sorted(chain.from_iterable(first.final[source][chunk] for source in sources)))

    return replace(
        first,
        collective=collective,
        algorithm=algorithm,
        final=tuple({chunk: trace_sources(chunk, sources) for chunk, sources in held.items()} for held in second.final),
        steps=first.steps + second.steps,
        ports=max(first.ports, second.ports),
    )


def parallel_steps(step_lists: Sequence[Sequence[Step]]) -> tuple[Step, ...]:
    """The steps of several simultaneous parts: their first steps together, then their second steps, ..."""
    return tuple(tuple(chain.from_iterable(steps)) for steps in zip_longest(*step_lists, fillvalue=()))


def steps_on_ranks(
    program: Program, members: Sequence[int], chunks: Sequence[int], *, width: int = 1
) -> tuple[Step, ...]:
    """The steps among some ranks of a larger Program: `members[i]` for i, `width` chunks from `chunks[c]` on for c."""
    mapped_steps: list[Step] = []
    for step in program.steps:
        transfers: list[ChunkTransfer] = []
        for t in step:
            for chunk in t.chunks:
                first, last = chunks[chunk], chunks[chunk] + width - 1
                if chunk > t.first and transfers[-1].last + 1 == first:
                    transfers[-1] = transfers[-1]._replace(last=last)
                else:
                    transfers.append(ChunkTransfer(members[t.src], members[t.dst], first, last, t.op))
        mapped_steps.append(tuple(transfers))
    return tuple(mapped_steps)
