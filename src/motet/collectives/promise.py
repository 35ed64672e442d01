"""What each collective promises. The proof holds a Program to its own `final`; this holds `final` to the name.

It is asked of Programs that come from outside, under the name of a collective that is known. A stage of a
decomposition, which is an all-gather inside of hosts, say, promises less by design.
"""

from motet.collectives.score import Program


def shortfall(program: Program) -> str | None:
    """What the collective promises and `final` does not ask for; None if that is nothing, or the name is unknown."""
    match program.collective:
        case "all-reduce":
            return _everywhere(program) or _from_all(program)
        case "all-gather" | "broadcast" | "barrier":
            return _everywhere(program)
        case "reduce":
            return _on_one(program) or _from_all(program)
        case "gather":
            return _on_one(program)
        case "reduce-scatter":
            return _somewhere(program) or _from_all(program)
        case "scatter":
            return _somewhere(program)
        case "all-to-all":
            return _swapped(program)
    return None


def _ends(program: Program) -> list[set[int]]:
    """What each rank must end with; that it holds what it held is not always said."""
    keeps = program.collective in ("broadcast", "all-gather", "gather", "barrier")
    return [
        set(final) | (set(initial) if keeps else set())
        for initial, final in zip(program.initial, program.final, strict=True)
    ]


def _everywhere(program: Program) -> str | None:
    for rank, held in enumerate(_ends(program)):
        for chunk in range(program.chunks):
            if chunk not in held:
                return f"rank {rank} need not end with chunk {chunk}"
    return None


def _on_one(program: Program) -> str | None:
    most = max(_ends(program), key=len)
    lacking = sorted(set(range(program.chunks)) - most)
    return f"no rank must end with all chunks, such as chunk {lacking[0]}" if lacking else None


def _somewhere(program: Program) -> str | None:
    lacking = sorted(set(range(program.chunks)).difference(*_ends(program)))
    return f"no rank must end with chunk {lacking[0]}" if lacking else None


def _from_all(program: Program) -> str | None:
    for rank, final in enumerate(program.final):
        for chunk, sources in final.items():
            missing = sorted(set(range(program.ranks)).difference(sources))
            if missing:
                return f"chunk {chunk} of rank {rank} need not contain what rank {missing[0]} contributes"
    return None


def _swapped(program: Program) -> str | None:
    for rank, final in enumerate(program.final):
        for source in range(program.ranks):
            if final.get(source * program.ranks + rank) != (source,):
                return f"rank {rank} need not end with what rank {source} has for it"
    return None
