"""What each collective promises. The proof holds a Program to its own `final`; this holds `final` to the name.

Sums are of every rank once; what is only moved has one origin, whoever ends with it. A name that is not known promises
nothing, and so a stage of a decomposition, an all-gather inside of hosts, say, bears a name of its own.
"""

from collections.abc import Callable, Iterable, Mapping

from motet.collectives.score import Contributors, Program


def shortfall(program: Program) -> str | None:
    """What the collective promises and `final` does not ask for; None if that is nothing, or the name is unknown."""
    return next(filter(None, (look(program) for look in _PROMISES.get(program.collective, ()))), None)


def _ends(program: Program) -> tuple[Mapping[int, Contributors], ...]:
    """What each rank must end with. That it holds what it held is not always said."""
    if program.collective not in ("broadcast", "all-gather", "gather", "barrier"):
        return program.final
    keeping: Iterable[int] = range(program.ranks)
    if program.collective == "gather":
        keeping = (max(keeping, key=lambda rank: len(program.final[rank])),)
    return tuple(
        {**dict.fromkeys(initial, (rank,)), **final} if rank in keeping and not final.keys() >= set(initial) else final
        for rank, (initial, final) in enumerate(zip(program.initial, program.final, strict=True))
    )


def _everywhere(program: Program) -> str | None:
    for rank, held in enumerate(_ends(program)):
        lacking = _first(chunk for chunk in range(program.chunks) if chunk not in held)
        if lacking is not None:
            return f"rank {rank} need not end with chunk {lacking}"
    return None


def _on_one(program: Program) -> str | None:
    most = max(_ends(program), key=len)
    lacking = _first(chunk for chunk in range(program.chunks) if chunk not in most)
    return None if lacking is None else f"no rank must end with all chunks, such as chunk {lacking}"


def _shared_out(program: Program) -> str | None:
    shared = set().union(*program.final)
    lacking = _first(chunk for chunk in range(program.chunks) if chunk not in shared)
    if lacking is not None:
        return f"no rank must end with chunk {lacking}"
    without = _first(rank for rank, held in enumerate(program.final) if not held)
    return None if without is None else f"rank {without} need not end with a share"


def _sums(program: Program) -> str | None:
    """Every chunk is of all ranks, each once. A tuple that many chunks have is looked at once."""
    everyone = tuple(range(program.ranks))
    seen: set[int] = set()
    for rank, final in enumerate(program.final):
        for chunk, sources in final.items():
            if id(sources) in seen or sources == everyone or sorted(sources) == list(everyone):
                seen.add(id(sources))
                continue
            where = f"chunk {chunk} of rank {rank}"
            missing = _first(source for source in everyone if source not in sources)
            if missing is not None:
                return f"{where} need not contain what rank {missing} contributes"
            again = _first(source for source in everyone if sources.count(source) > 1)
            return f"{where} must contain what rank {again} contributes more than once"
    return None


def _origins(program: Program) -> dict[int, Contributors] | str:
    """Where each chunk comes from, which is one rank and the same for all that end with it; a sentence if not."""
    found: dict[int, Contributors] = {}
    for rank, held in enumerate(_ends(program)):
        for chunk, sources in held.items():
            if len(sources) != 1:
                return f"chunk {chunk} of rank {rank} is made of {len(sources)} contributions; it is one rank's alone"
            other = found.setdefault(chunk, sources)
            if other != sources:
                return f"chunk {chunk} is rank {other[0]}'s on one rank, and rank {sources[0]}'s on rank {rank}"
    return found


def _one_origin(program: Program) -> str | None:
    found = _origins(program)
    return found if isinstance(found, str) else None


def _one_root(program: Program) -> str | None:
    found = _origins(program)
    if isinstance(found, str):
        return found
    roots = sorted(set(found.values()))
    return f"chunks come from ranks {roots[0][0]} and {roots[1][0]}, which is not one root" if len(roots) > 1 else None


def _of_all(program: Program) -> str | None:
    found = _origins(program)
    if isinstance(found, str):
        return found
    origins = {source for sources in found.values() for source in sources}
    silent = _first(rank for rank in range(program.ranks) if rank not in origins)
    return None if silent is None else f"nothing of rank {silent} must end anywhere"


def _tokens(program: Program) -> str | None:
    for rank, held in enumerate(_ends(program)):
        there = {source for sources in held.values() for source in sources}
        lacking = _first(source for source in range(program.ranks) if source not in there)
        if lacking is not None:
            return f"rank {rank} need not end with a token of rank {lacking}"
    return None


def _arrives(program: Program) -> str | None:
    for rank, held in enumerate(program.final):
        if any(sources != (rank,) for sources in held.values()):
            return None
    return "nothing must arrive at another rank"


def _swapped(program: Program) -> str | None:
    for rank, final in enumerate(program.final):
        for source in range(program.ranks):
            if final.get(source * program.ranks + rank) != (source,):
                return f"rank {rank} need not end with what rank {source} has for it"
    return None


def _first(numbers: Iterable[int]) -> int | None:
    return next(iter(numbers), None)


_PROMISES: dict[str, tuple[Callable[[Program], str | None], ...]] = {
    "broadcast": (_everywhere, _one_root),
    "reduce": (_on_one, _sums),
    "all-reduce": (_everywhere, _sums),
    "reduce-scatter": (_shared_out, _sums),
    "all-gather": (_everywhere, _of_all),
    "gather": (_on_one, _of_all),
    "scatter": (_shared_out, _one_root),
    "all-to-all": (_swapped,),
    "barrier": (_tokens,),
    "send": (_arrives, _one_origin),
    "copy": (_arrives, _one_origin),
    "signal": (_arrives, _one_origin),
}
