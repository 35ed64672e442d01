"""Planted faults: Programs with one thing changed, which the proof must reject.

A change may happen to do no harm, as a copy of what is already there. That is not left to the proof to say: the changed
Program is played on random numbers, by other code than the proof's, and must give the right sums.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from motet.collectives.prove import UnprovenError, prove
from motet.collectives.score import Program, Step, Transfer

Verdict = Literal["rejected", "equivalent", "missed"]


@dataclass(frozen=True)
class Corruption:
    """A Program with one thing changed, and what."""

    what: str
    step: int
    program: Program


@dataclass(frozen=True)
class Judgement:
    """`missed` is a fault of the proof: it lets a Program pass that gives wrong sums."""

    corruption: Corruption
    verdict: Verdict
    reason: str


def corruptions(program: Program, count: int, seed: int = 0) -> Iterator[Corruption]:
    """So many different ones, or as many as are found; the same for the same seed."""
    draw = random.Random(f"{program} {seed}")
    seen = {program.steps}
    for _ in range(20 * count if program.steps else 0):
        if len(seen) > count:
            return
        name, change = draw.choice(_CHANGES)
        number = draw.randrange(len(program.steps))
        place = draw.randrange(len(program.steps[number])) if program.steps[number] else None
        steps = None if place is None else change(program, number, place, draw)
        if steps is not None and steps not in seen:
            seen.add(steps)
            assert place is not None
            transfer = program.steps[number][place]
            what = f"step {number}: {transfer} {name}{_instead(program.steps, steps)}"
            yield Corruption(what, number, replace(program, steps=steps))


def _instead(before: Sequence[Step], after: Sequence[Step]) -> str:
    """What one step has that it had not, so that who reads it can make the same change."""
    added = [
        f"; step {number} now has {transfer}"
        for number, (old, new) in enumerate(zip(before, after, strict=True))
        for transfer in (Counter(new) - Counter(old)).elements()
    ]
    return added[0] if len(added) == 1 else ""


def judge(corruption: Corruption) -> Judgement:
    """What the proof says of it and, if that is nothing, whether it is right."""
    try:
        prove(corruption.program)
    except UnprovenError as error:
        return Judgement(corruption, "rejected", str(error))
    if gives_right_sums(corruption.program):
        return Judgement(corruption, "equivalent", "every rank ends with the right sums")
    return Judgement(corruption, "missed", "it is proven, and gives wrong sums")


def gives_right_sums(program: Program, seed: int = 1) -> bool:
    """Play it once on random whole numbers; that a wrong one passes has odds of about one to 2^60."""
    draw = random.Random(seed)
    given = [[draw.getrandbits(61) for _ in range(program.chunks)] for _ in range(program.ranks)]
    held = [{c: given[rank][c] for c in chunks} for rank, chunks in enumerate(program.initial)]
    for step in program.steps:
        before = [dict(chunks) for chunks in held]
        for t in step:
            for chunk in t.chunks:
                if chunk not in before[t.src]:
                    return False
                old = held[t.dst].get(chunk, 0) if t.op == "reduce" else 0
                held[t.dst][chunk] = old + before[t.src][chunk]
    return all(
        held[rank].get(chunk) == sum(given[source][chunk] for source in sources)
        for rank, final in enumerate(program.final)
        for chunk, sources in final.items()
    )


def _with_step(program: Program, number: int, step: list[Transfer]) -> tuple[Step, ...]:
    return (*program.steps[:number], tuple(step), *program.steps[number + 1 :])


def _dropped(program: Program, number: int, place: int, draw: random.Random) -> tuple[Step, ...]:
    step = list(program.steps[number])
    del step[place]
    return _with_step(program, number, step)


def _repeated(program: Program, number: int, place: int, draw: random.Random) -> tuple[Step, ...]:
    """Once more, in the same step or a later one."""
    later = draw.randrange(number, len(program.steps))
    return _with_step(program, later, [*program.steps[later], program.steps[number][place]])


def _redirected(program: Program, number: int, place: int, draw: random.Random) -> tuple[Step, ...] | None:
    """To another rank, or from another one."""
    step = list(program.steps[number])
    t = step[place]
    others = [rank for rank in range(program.ranks) if rank not in (t.src, t.dst)]
    if not others:
        step[place] = t._replace(src=t.dst, dst=t.src)
    else:
        other = draw.choice(others)
        step[place] = t._replace(src=other) if draw.random() < 0.5 else t._replace(dst=other)
    return _with_step(program, number, step)


def _reordered(program: Program, number: int, place: int, draw: random.Random) -> tuple[Step, ...] | None:
    """Into another step."""
    others = [n for n in range(len(program.steps)) if n != number]
    if not others:
        return None
    target = draw.choice(others)
    steps = list(_dropped(program, number, place, draw))
    steps[target] = (*steps[target], program.steps[number][place])
    return tuple(steps)


def _swapped(program: Program, number: int, place: int, draw: random.Random) -> tuple[Step, ...] | None:
    """Two steps in each other's place."""
    other = draw.randrange(len(program.steps))
    steps = list(program.steps)
    steps[number], steps[other] = steps[other], steps[number]
    return tuple(steps)


def _shifted(program: Program, number: int, place: int, draw: random.Random) -> tuple[Step, ...] | None:
    """The same with the chunks beside it."""
    step = list(program.steps[number])
    t = step[place]
    move = draw.choice((-1, 1))
    if t.first + move < 0 or t.last + move >= program.chunks:
        return None
    step[place] = t._replace(first=t.first + move, last=t.last + move)
    return _with_step(program, number, step)


def _turned(program: Program, number: int, place: int, draw: random.Random) -> tuple[Step, ...]:
    """Adding where it should replace, or the other way round."""
    step = list(program.steps[number])
    step[place] = step[place]._replace(op="copy" if step[place].op == "reduce" else "reduce")
    return _with_step(program, number, step)


_Change = Callable[[Program, int, int, random.Random], tuple[Step, ...] | None]
_CHANGES: tuple[tuple[str, _Change], ...] = (
    ("dropped", _dropped),
    ("repeated", _repeated),
    ("redirected", _redirected),
    ("moved to another step", _reordered),
    ("in a step that changed places with another", _swapped),
    ("with the chunks beside it", _shifted),
    ("with the other operation", _turned),
)
