"""A Program as one rank carries it out: in each step what it puts out for others, and what it makes of what comes in.

Pure: no tensor is needed to know this. Shared memory has no ports, so steps that do not build on each other are taken
together, and a chunk that goes to several ranks is put out once.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from motet.collectives.score import Operation, Program, Step


class Put(NamedTuple):
    """A chunk is put out in a slot of this rank; every step and chunk has its own."""

    chunk: int
    slot: int
    fresh: bool
    """It is still what the rank began with."""
    readers: tuple[int, ...]


class Arrival(NamedTuple):
    """A chunk comes in from one rank or, in a reduction, from several."""

    chunk: int
    op: Operation
    sources: tuple[tuple[int, int], ...]
    """Rank and slot of each. A rank that also puts this chunk out in this step is among them, in order of rank, so that
    all who add the same parts get the same bits."""
    fresh: bool
    adds_own: bool
    """What the rank has there comes first."""
    completes: bool
    """With this, all contributions are there."""


class Part(NamedTuple):
    """What one rank does in one step."""

    puts: tuple[Put, ...]
    readers: tuple[int, ...]
    sources: tuple[int, ...]
    arrivals: tuple[Arrival, ...]
    posts: tuple[tuple[int, int, int], ...] = ()
    """(rank on another host, slot, chunk), in the order in which they are sent."""
    fetches: tuple[tuple[int, int, int], ...] = ()
    """The same of what comes from other hosts."""


@dataclass(frozen=True)
class Lowered:
    """What one rank does for a Program."""

    parts: tuple[Part, ...]
    slots: int
    """The most slots that any rank needs."""
    kept: tuple[int, ...]
    """Chunks that end as they began."""
    scratch: tuple[int, ...]
    """Chunks that are worked on here and needed elsewhere."""
    widens: bool
    """Some rank passes on a partial sum, which a low precision would round on its way."""


def lower(program: Program, rank: int) -> Lowered:
    steps = together(program.steps)
    slots = [_slots(steps, other) for other in range(program.ranks)]
    complete = _completions(program, steps)
    changed: set[int] = set()
    parts = []
    for number, step in enumerate(steps):
        readers: dict[int, list[int]] = {}
        incoming: dict[int, list[tuple[int, int]]] = {}
        ops: dict[int, Operation] = {}
        for t in step:
            for chunk in t.chunks:
                if t.src == rank:
                    readers.setdefault(chunk, []).append(t.dst)
                if t.dst == rank:
                    incoming.setdefault(chunk, []).append((t.src, slots[t.src][number, chunk]))
                    ops[chunk] = t.op
        puts = [
            Put(chunk, slots[rank][number, chunk], chunk not in changed, tuple(to)) for chunk, to in readers.items()
        ]
        arrivals = []
        for chunk, sources in incoming.items():
            own = slots[rank].get((number, chunk))
            joins = ops[chunk] == "reduce" and own is not None
            among = sorted([*sources, (rank, own)]) if joins and own is not None else sources
            full = (number, rank, chunk) in complete
            arrivals.append(Arrival(chunk, ops[chunk], tuple(among), chunk not in changed, not joins, full))
        changed.update(incoming)
        everyone = sorted({reader for put in puts for reader in put.readers})
        origins = sorted({src for sources in incoming.values() for src, _ in sources})
        parts.append(Part(tuple(puts), tuple(everyone), tuple(origins), tuple(arrivals)))
    final = set(program.final[rank])
    return Lowered(
        tuple(parts),
        max(map(len, slots)),
        kept=tuple(sorted(final - changed)),
        scratch=tuple(sorted(changed - final)),
        widens=_passes_partial_sums(steps),
    )


def on_hosts(lowered: Lowered, local: Mapping[int, int]) -> Lowered:
    """Ranks of this host by their numbers there; other ranks, as sources, by the complement of their rank."""
    return replace(lowered, parts=tuple(_part_on_hosts(part, local) for part in lowered.parts))


def _part_on_hosts(part: Part, local: Mapping[int, int]) -> Part:
    posts = [(reader, put.slot, put.chunk) for put in part.puts for reader in put.readers if reader not in local]
    arrivals = [
        arrival._replace(sources=tuple((local.get(rank, ~rank), slot) for rank, slot in arrival.sources))
        for arrival in part.arrivals
    ]
    fetches = [
        (rank, slot, arrival.chunk) for arrival in part.arrivals for rank, slot in arrival.sources if rank not in local
    ]
    return part._replace(
        readers=tuple(local[reader] for reader in part.readers if reader in local),
        sources=tuple(local[source] for source in part.sources if source in local),
        arrivals=tuple(arrivals),
        posts=tuple(posts),
        fetches=tuple(sorted(fetches)),
    )


def together(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """Steps joined with those before them unless they read, or replace, what changes there."""
    joined: list[list[Step]] = []
    changed: dict[tuple[int, int], Operation] = {}
    for step in steps:
        clash = any(
            (t.src, chunk) in changed or (t.op, changed.get((t.dst, chunk), "reduce")) != ("reduce", "reduce")
            for t in step
            for chunk in t.chunks
            if (t.src, chunk) in changed or (t.dst, chunk) in changed
        )
        if clash or not joined:
            joined.append([])
            changed = {}
        joined[-1].append(step)
        changed.update({(t.dst, chunk): t.op for t in step for chunk in t.chunks})
    return tuple(tuple(t for step in group for t in step) for group in joined)


def _slots(steps: tuple[Step, ...], rank: int) -> dict[tuple[int, int], int]:
    """The slot of each (step, chunk) that a rank puts out."""
    found: dict[tuple[int, int], int] = {}
    for number, step in enumerate(steps):
        for t in step:
            if t.src == rank:
                for chunk in t.chunks:
                    found.setdefault((number, chunk), len(found))
    return found


def _completions(program: Program, steps: tuple[Step, ...]) -> set[tuple[int, int, int]]:
    """(step, rank, chunk) where the last of all contributions is added."""
    promised = {chunk: len(ranks) for held in program.final for chunk, ranks in held.items()}
    counts = {(rank, chunk): 1 for rank, held in enumerate(program.initial) for chunk in held}
    found: set[tuple[int, int, int]] = set()
    for number, step in enumerate(steps):
        before = dict(counts)
        for t in step:
            for chunk in t.chunks:
                already = counts.get((t.dst, chunk), 0) if t.op == "reduce" else 0
                counts[t.dst, chunk] = already + before[t.src, chunk]
                if t.op == "reduce" and counts[t.dst, chunk] == promised[chunk]:
                    found.add((number, t.dst, chunk))
    return found


def _passes_partial_sums(steps: tuple[Step, ...]) -> bool:
    """Whether a chunk is added to in one step and again in a later one, anywhere."""
    added: set[int] = set()
    for step in steps:
        now = {chunk for t in step if t.op == "reduce" for chunk in t.chunks}
        if now & added:
            return True
        added |= now
    return False
