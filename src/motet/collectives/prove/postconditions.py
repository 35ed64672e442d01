"""What each collective promises. The proof holds a Program to its own `final`; this holds `final` to the name.

Sums are of every rank once; what is only moved has one origin, whoever ends with it. A name that is not known promises
nothing, and so a stage of a decomposition, an all-gather inside of hosts, say, bears a name of its own.
"""

from collections.abc import Callable, Iterable, Mapping

from motet.collectives.program import Contributors, Program


def missing_postcondition(program: Program) -> str | None:
    """What the collective promises and `final` does not ask for; None if that is nothing, or the name is unknown."""
    return next(filter(None, (look(program) for look in _POSTCONDITIONS.get(program.collective, ()))), None)


def _final_contents(program: Program) -> tuple[Mapping[int, Contributors], ...]:
    """What each rank must end with. That it holds what it held is not always said."""
    if program.collective not in ("broadcast", "all-gather", "gather", "barrier"):
        return program.final
    keeping_ranks: Iterable[int] = range(program.ranks)
    if program.collective == "gather":
        keeping_ranks = (max(keeping_ranks, key=lambda rank: len(program.final[rank])),)
    return tuple(
        {**dict.fromkeys(initial, (rank,)), **final}
        if rank in keeping_ranks and not final.keys() >= set(initial)
        else final
        for rank, (initial, final) in enumerate(zip(program.initial, program.final, strict=True))
    )


def _check_all_ranks_end_with_all_chunks(program: Program) -> str | None:
    for rank, held in enumerate(_final_contents(program)):
        missing = _first_or_none(chunk for chunk in range(program.chunks) if chunk not in held)
        if missing is not None:
            return f"rank {rank} need not end with chunk {missing}"
    return None


def _check_one_rank_ends_with_all_chunks(program: Program) -> str | None:
    fullest_rank_chunks = max(_final_contents(program), key=len)
    missing = _first_or_none(chunk for chunk in range(program.chunks) if chunk not in fullest_rank_chunks)
    return None if missing is None else f"no rank must end with all chunks, such as chunk {missing}"


def _check_chunks_are_distributed(program: Program) -> str | None:
    final_chunks = set().union(*program.final)
    missing = _first_or_none(chunk for chunk in range(program.chunks) if chunk not in final_chunks)
    if missing is not None:
        return f"no rank must end with chunk {missing}"
    rank_without_chunks = _first_or_none(rank for rank, held in enumerate(program.final) if not held)
    return None if rank_without_chunks is None else f"rank {rank_without_chunks} need not end with a share"


def _check_sums_include_every_rank_once(program: Program) -> str | None:
    """Every chunk is of all ranks, each once. A tuple that many chunks have is looked at once."""
    everyone = tuple(range(program.ranks))
    checked_ids: set[int] = set()
    for rank, final in enumerate(program.final):
        for chunk, sources in final.items():
            if id(sources) in checked_ids or sources == everyone or sorted(sources) == list(everyone):
                checked_ids.add(id(sources))
                continue
            where = f"chunk {chunk} of rank {rank}"
            missing = _first_or_none(source for source in everyone if source not in sources)
            if missing is not None:
                return f"{where} need not contain what rank {missing} contributes"
            repeated = _first_or_none(source for source in everyone if sources.count(source) > 1)
            return f"{where} must contain what rank {repeated} contributes more than once"
    return None


def _chunk_origins(program: Program) -> dict[int, Contributors] | str:
    """Where each chunk comes from, which is one rank and the same for all that end with it; a sentence if not."""
    origins: dict[int, Contributors] = {}
    for rank, held in enumerate(_final_contents(program)):
        for chunk, sources in held.items():
            if len(sources) != 1:
                return f"chunk {chunk} of rank {rank} is made of {len(sources)} contributions; it is one rank's alone"
            other = origins.setdefault(chunk, sources)
            if other != sources:
                return f"chunk {chunk} is rank {other[0]}'s on one rank, and rank {sources[0]}'s on rank {rank}"
    return origins


def _check_one_origin_per_chunk(program: Program) -> str | None:
    chunk_origins = _chunk_origins(program)
    return chunk_origins if isinstance(chunk_origins, str) else None


def _check_one_root(program: Program) -> str | None:
    chunk_origins = _chunk_origins(program)
    if isinstance(chunk_origins, str):
        return chunk_origins
    roots = sorted(set(chunk_origins.values()))
    return f"chunks come from ranks {roots[0][0]} and {roots[1][0]}, which is not one root" if len(roots) > 1 else None


def _check_every_rank_contributes(program: Program) -> str | None:
    chunk_origins = _chunk_origins(program)
    if isinstance(chunk_origins, str):
        return chunk_origins
    origins = {source for sources in chunk_origins.values() for source in sources}
    missing_rank = _first_or_none(rank for rank in range(program.ranks) if rank not in origins)
    return None if missing_rank is None else f"nothing of rank {missing_rank} must end anywhere"


def _check_tokens_from_all_ranks(program: Program) -> str | None:
    for rank, held in enumerate(_final_contents(program)):
        token_ranks = {source for sources in held.values() for source in sources}
        missing = _first_or_none(source for source in range(program.ranks) if source not in token_ranks)
        if missing is not None:
            return f"rank {rank} need not end with a token of rank {missing}"
    return None


def _check_data_moves(program: Program) -> str | None:
    for rank, held in enumerate(program.final):
        if any(sources != (rank,) for sources in held.values()):
            return None
    return "nothing must arrive at another rank"


def _check_all_to_all_exchange(program: Program) -> str | None:
    for rank, final in enumerate(program.final):
        for source in range(program.ranks):
            if final.get(source * program.ranks + rank) != (source,):
                return f"rank {rank} need not end with what rank {source} has for it"
    return None


def _first_or_none(numbers: Iterable[int]) -> int | None:
    return next(iter(numbers), None)


_POSTCONDITIONS: dict[str, tuple[Callable[[Program], str | None], ...]] = {
    "broadcast": (_check_all_ranks_end_with_all_chunks, _check_one_root),
    "reduce": (_check_one_rank_ends_with_all_chunks, _check_sums_include_every_rank_once),
    "all-reduce": (_check_all_ranks_end_with_all_chunks, _check_sums_include_every_rank_once),
    "reduce-scatter": (_check_chunks_are_distributed, _check_sums_include_every_rank_once),
    "all-gather": (_check_all_ranks_end_with_all_chunks, _check_every_rank_contributes),
    "gather": (_check_one_rank_ends_with_all_chunks, _check_every_rank_contributes),
    "scatter": (_check_chunks_are_distributed, _check_one_root),
    "all-to-all": (_check_all_to_all_exchange,),
    "barrier": (_check_tokens_from_all_ranks,),
    "send": (_check_data_moves, _check_one_origin_per_chunk),
    "copy": (_check_data_moves, _check_one_origin_per_chunk),
    "signal": (_check_data_moves, _check_one_origin_per_chunk),
}
