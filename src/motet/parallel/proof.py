"""The proof that a layout trains every element as it should, from its plan alone: nothing is run.

Each portion's course is played on multisets of contributors, so that a share that is missing is seen as well as one
that counts twice. Ranks that do the same are looked at once, and elements as intervals: a thousand parameters on a
thousand ranks take some hundredths of a second. What is wrong is a mistake of motet, told by element and rank.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

from motet.collectives.algorithms import build
from motet.collectives.program import Program
from motet.collectives.prove.program_checker import UnprovenCollectiveError, prove_program
from motet.parallel.communication import AUTO, BACKEND, CommunicationSettings, joined
from motet.parallel.course import Cut, Plan, Portion, held
from motet.parallel.layout import Layout
from motet.parallel.play import FaultError, Has, Once, Played, play


class UnprovenLayoutError(AssertionError):
    """A plan that would not train the model that it is given."""


@dataclass(frozen=True)
class Proof:
    """What is known of a plan that is right."""

    ranks: int
    copies: int
    """In each of which every element is updated once."""
    parameters: int
    elements: int
    portions: int
    rows: int
    """Of the global batch, each read once."""
    microbatches: int


def prove_plan(plan: Plan) -> Proof:
    """Play a step; raise at the first thing that is wrong."""
    _rows(plan)
    _sends(plan)
    _members(plan)
    _meetings(plan)
    played: dict[int, Played] = {}
    seen: set[tuple[int, ...]] = set()
    for portion in plan.portions:
        course = id(portion.course)  # of what the plan holds: to compare the sets of a thousand ranks takes longer
        try:
            if course not in played:
                played[course] = play(portion.course, plan.ranks)
        except FaultError as fault:
            raise UnprovenLayoutError(str(fault).format(_shard(_showing(plan, portion, fault), fault.number))) from None
        for number, once in enumerate(played[course].once.values()):
            key = course, number, id(portion.cut), portion.length
            if key not in seen:
                _covered(portion, once)
                seen.add(key)
    update = next(move for move in plan.portions[0].course if move.verb == "update")
    elements = sum(map(prod, plan.shapes.values()))
    sizes = plan.ranks, len(update.sets), len(plan.shapes), elements, len(plan.portions)
    return Proof(*sizes, plan.batch_sequences, plan.microbatches)


def prove_held(plan: Plan, rank: int, kept: Mapping[str, tuple[int, int]], counts: bool) -> None:
    """That a rank does as its plan says. `kept`: (first, stop) of what it updates; `counts`: in the norm."""
    said, done = held(plan, rank), {name: part for name, part in kept.items() if part[0] < part[1]}
    for name in {**said, **done}:
        if said.get(name) != done.get(name):
            first, stop = done.get(name, (0, 0))
            does = _span("element", first, stop) if first < stop else "nothing"
            first, stop = said.get(name, (0, 0))
            should = _span("element", first, stop) if first < stop else "nothing"
            raise UnprovenLayoutError(f"rank {rank} updates {does} of {name}, where its plan says {should}")
    norm = next(move for move in plan.portions[0].course if move.verb == "norm")
    if counts != any(rank in ranks for ranks in norm.sets):
        raise UnprovenLayoutError(
            f"rank {rank} {'counts' if counts else 'does not count'} in the norm, unlike its plan"
        )


MOST_PLAYED = 64
"""Ranks of a Program that is proven here: a tenth of a second for a ring of so many, which grows as their cube."""


def prove_programs(layout: Layout, settings: CommunicationSettings) -> tuple[Program, ...]:
    """Those that are named for the sums and gathers of a layout, proven for the ranks that do them together."""
    together = joined(settings, layout)
    wanted: set[tuple[str, str, int, int | None]] = set()
    if layout.owners:
        for root in range(layout.owners.count):
            wanted.add(("reduce", layout.owners.reduce, layout.dp, root))
            wanted.add(("broadcast", layout.owners.broadcast, layout.dp, root))
    else:
        gathers = [together.shares, together.near]
        groups = {"reduce-scatter": [together.shares], "all-reduce": [together.replicas], "all-gather": gathers}
        for collective, all_sets in groups.items():
            name = settings.algorithm(collective)
            sizes = {len(sets[0]) for sets in all_sets if sets and name not in (AUTO, BACKEND)}
            wanted |= {(collective, name, ranks, None) for ranks in sizes}
    played = [
        build(collective, name, ranks, **({} if root is None else {"root": root}))
        for collective, name, ranks, root in sorted(wanted, key=str)
        if 1 < ranks <= MOST_PLAYED
    ]
    for one in played:
        try:
            prove_program(one)
        except UnprovenCollectiveError as error:
            raise UnprovenLayoutError(f"element 0 of every parameter: {error}") from None
    return tuple(played)


# --- what is read and sent -------------------------------------------------------------------------


def _rows(plan: Plan) -> None:
    """Each row of the global batch is read once."""
    read = sorted(
        (part.start, part.stop, rank, number)
        for rank, parts in enumerate(plan.rows)
        for number, part in enumerate(parts)
        if part
    )
    at, before = 0, ""
    for start, stop, rank, number in read:
        reader = f"rank {rank} in micro-batch {number}"
        if start > at:
            raise UnprovenLayoutError(f"nobody reads {_span('row', at, start)} of the global batch")
        if start < at:
            twice = _span("row", start, min(at, stop))
            raise UnprovenLayoutError(f"{before} and {reader} both read {twice} of the global batch")
        at, before = stop, reader
    if at < plan.batch_sequences:
        raise UnprovenLayoutError(f"nobody reads {_span('row', at, plan.batch_sequences)} of the global batch")
    if at > plan.batch_sequences:
        raise UnprovenLayoutError(f"{before} reads up to row {at - 1} of a global batch of {plan.batch_sequences} rows")


def _sends(plan: Plan) -> None:
    """The gradients of each micro-batch travel once."""
    times = Counter(number for sent in plan.sends for number in sent)
    for number in range(plan.microbatches):
        if times[number] != 1:
            how = f"are summed {times[number]} times" if times[number] else "are in no sum"
            raise UnprovenLayoutError(
                f"element 0 of {next(iter(plan.shapes))}: gradients of micro-batch {number} {how}"
            )


def _members(plan: Plan) -> None:
    """Each parameter has one place, which nothing else has."""
    places: dict[str, str] = {}
    ends = {"rows": 0, "bucket": 0}
    for portion in sorted(plan.portions, key=lambda portion: portion.start):
        at, before = max(ends[portion.kind], portion.start), "what stands before it"
        for member in sorted(portion.members, key=lambda member: member.start):
            other = places.setdefault(member.name, portion.name)
            if other != portion.name or member.name == before:
                raise UnprovenLayoutError(f"element 0 of {member.name} stands in {other} and again in {portion.name}")
            whole = prod(plan.shapes[member.name])
            if member.numel != whole:
                lost = _span("element", min(member.numel, whole), max(member.numel, whole))
                raise UnprovenLayoutError(f"{lost} of {member.name}: {portion.name} has {member.numel} of {whole}")
            if member.numel and member.start < at:
                raise UnprovenLayoutError(f"element 0 of {member.name} stands in {portion.name} where {before} does")
            if member.stop > portion.start + portion.length:
                beyond = _span("element", max(0, portion.start + portion.length - member.start), member.numel)
                raise UnprovenLayoutError(f"{beyond} of {member.name}: beyond the end of {portion.name}")
            at, before = max(at, member.stop), member.name
        ends[portion.kind] = portion.start + portion.length
    for name, shape in plan.shapes.items():
        if name not in places:
            raise UnprovenLayoutError(f"nobody updates {_span('element', 0, prod(shape))} of {name}")


def _meetings(plan: Plan) -> None:
    """Replicas that train apart tell each other about the same shards."""
    for ranks in plan.meetings:
        other = next((rank for rank in ranks if (rank - ranks[0]) % plan.ranks), None)
        if other is not None:
            name = next(iter(plan.shapes))
            raise UnprovenLayoutError(f"element 0 of {name}: ranks {ranks[0]} and {other} meet, with unlike shards")


# --- elements --------------------------------------------------------------------------------------


def _covered(portion: Portion, once: Once) -> None:
    """Each element of a portion is of one of these ranks."""
    at, last = 0, -1
    for first, stop, rank in sorted(_intervals(portion.cut, portion.length, once.has)):
        if first > at:
            raise UnprovenLayoutError(once.lacking.format(_where(portion, at, first)))
        if first < at:
            twice = once.twice.format(_where(portion, first, min(at, stop)))
            raise UnprovenLayoutError(f"{twice}: ranks {last} and {rank}")
        at, last = stop, rank
    if at < portion.length:
        raise UnprovenLayoutError(once.lacking.format(_where(portion, at, portion.length)))
    if at > portion.length:
        raise UnprovenLayoutError(f"rank {last} has {at - portion.length} elements beyond the end of {portion.name}")


def _intervals(cut: Cut, length: int, has: Iterable[Has]) -> Iterator[tuple[int, int, int]]:
    for number, rank in has:
        first, stop = (0, length) if number is None else cut[number] if number < len(cut) else (0, 0)
        if first < stop:
            yield first, stop, rank


def _showing(plan: Plan, portion: Portion, fault: FaultError) -> Portion:
    """One of this course that has elements in the shard."""
    number = fault.number
    alike = (other for other in plan.portions if other.course == portion.course)
    if number is None:
        return portion
    return next((p for p in alike if number < len(p.cut) and p.cut[number][0] < p.cut[number][1]), portion)


def _shard(portion: Portion, number: int | None) -> str:
    whole = number is None or number >= len(portion.cut)
    return _where(portion, *((0, portion.length) if whole or number is None else portion.cut[number]))


def _where(portion: Portion, first: int, stop: int) -> str:
    """Elements of the first parameter that has some there."""
    for member in sorted(portion.members, key=lambda member: member.start):
        start, end = max(member.start, portion.start + first), min(member.stop, portion.start + stop)
        if start < end:
            return f"{_span('element', start - member.start, end - member.start)} of {member.name}"
    return f"{_span('element', first, stop)} of {portion.name}, which are padding,"


def _span(what: str, first: int, stop: int) -> str:
    return f"{what} {first}" if stop - first < 2 else f"{what}s {first} to {stop - 1}"
