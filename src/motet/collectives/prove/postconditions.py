"""The postcondition of each collective. The proof checks a Program against its own `final`; this checks `final`.

A sum contains every rank once, and data that only move have one origin on all ranks. An unknown collective has no
postcondition: its Program is held to its `final` alone.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import chain

from motet.collectives.program import Contributors, Program


def missing_postcondition(program: Program) -> str | None:
    """The first requirement of the collective that `final` does not have; None if `final` has all."""
    return next(chain.from_iterable(check(program) for check in _POSTCONDITIONS.get(program.collective, ())), None)


def _final_contents(program: Program) -> tuple[Mapping[int, Contributors], ...]:
    """The chunks that each rank ends with, including its own ones, which `final` may leave out."""
    if program.collective not in ("broadcast", "all-gather", "gather", "barrier"):
        return program.final
    ranks = range(program.ranks)
    keeping = {max(ranks, key=lambda rank: len(program.final[rank]))} if program.collective == "gather" else set(ranks)
    return tuple(
        {**dict.fromkeys(initial, (rank,)), **final} if rank in keeping and not final.keys() >= set(initial) else final
        for rank, (initial, final) in enumerate(zip(program.initial, program.final, strict=True))
    )


def _all_ranks_end_with_all_chunks(program: Program) -> Iterator[str]:
    for rank, held in enumerate(_final_contents(program)):
        yield from (f"rank {rank} need not end with chunk {n}" for n in range(program.chunks) if n not in held)


def _one_rank_ends_with_all_chunks(program: Program) -> Iterator[str]:
    held = max(_final_contents(program), key=len)
    yield from (f"no rank must end with all chunks, such as chunk {n}" for n in range(program.chunks) if n not in held)


def _chunks_are_distributed(program: Program) -> Iterator[str]:
    final_chunks = set().union(*program.final)
    yield from (f"no rank must end with chunk {n}" for n in range(program.chunks) if n not in final_chunks)
    yield from (f"rank {rank} need not end with any chunk" for rank, held in enumerate(program.final) if not held)


def _sums_include_every_rank_once(program: Program) -> Iterator[str]:
    everyone = tuple(range(program.ranks))
    checked_ids: set[int] = set()  # many chunks may share one tuple
    for rank, final in enumerate(program.final):
        for chunk, sources in final.items():
            if id(sources) in checked_ids or sources == everyone or sorted(sources) == list(everyone):
                checked_ids.add(id(sources))
                continue
            where, counts = f"chunk {chunk} of rank {rank}", Counter(sources)
            yield from (f"{where} need not contain what rank {n} contributes" for n in everyone if not counts[n])
            repeated = (n for n in everyone if counts[n] > 1)
            yield from (f"{where} must contain what rank {n} contributes more than once" for n in repeated)


def _each_chunk_has_one_origin(program: Program) -> Iterator[str]:
    origins: dict[int, Contributors] = {}
    for rank, held in enumerate(_final_contents(program)):
        for chunk, sources in held.items():
            if len(sources) != 1:
                yield f"chunk {chunk} of rank {rank} is made of {len(sources)} contributions; it is one rank's alone"
            other = origins.setdefault(chunk, sources)
            if other != sources:
                yield f"chunk {chunk} is rank {other[0]}'s on one rank, and rank {sources[0]}'s on rank {rank}"


def _origins(program: Program) -> list[int]:
    return sorted({sources[0] for held in _final_contents(program) for sources in held.values()})


def _one_root(program: Program) -> Iterator[str]:
    origins = _origins(program)
    if len(origins) > 1:
        yield f"chunks come from ranks {origins[0]} and {origins[1]}, which is not one root"


def _every_rank_contributes(program: Program) -> Iterator[str]:
    missing = sorted(set(range(program.ranks)).difference(_origins(program)))
    yield from (f"nothing of rank {rank} must end anywhere" for rank in missing)


def _tokens_from_all_ranks(program: Program) -> Iterator[str]:
    for rank, held in enumerate(_final_contents(program)):
        missing = set(range(program.ranks)).difference(*held.values())
        yield from (f"rank {rank} need not end with a token of rank {source}" for source in sorted(missing))


def _data_move(program: Program) -> Iterator[str]:
    if all(sources == (rank,) for rank, held in enumerate(program.final) for sources in held.values()):
        yield "nothing must arrive at another rank"


def _all_ranks_exchange(program: Program) -> Iterator[str]:
    for rank, final in enumerate(program.final):
        missing = (src for src in range(program.ranks) if final.get(src * program.ranks + rank) != (src,))
        yield from (f"rank {rank} need not end with what rank {source} has for it" for source in missing)


# A check may assume that those before it have found nothing.
_POSTCONDITIONS: dict[str, tuple[Callable[[Program], Iterator[str]], ...]] = {
    "broadcast": (_all_ranks_end_with_all_chunks, _each_chunk_has_one_origin, _one_root),
    "reduce": (_one_rank_ends_with_all_chunks, _sums_include_every_rank_once),
    "all-reduce": (_all_ranks_end_with_all_chunks, _sums_include_every_rank_once),
    "reduce-scatter": (_chunks_are_distributed, _sums_include_every_rank_once),
    "all-gather": (_all_ranks_end_with_all_chunks, _each_chunk_has_one_origin, _every_rank_contributes),
    "gather": (_one_rank_ends_with_all_chunks, _each_chunk_has_one_origin, _every_rank_contributes),
    "scatter": (_chunks_are_distributed, _each_chunk_has_one_origin, _one_root),
    "all-to-all": (_all_ranks_exchange,),
    "barrier": (_tokens_from_all_ranks,),
    **dict.fromkeys(("send", "copy", "signal"), (_data_move, _each_chunk_has_one_origin)),
}
