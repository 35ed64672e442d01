"""Programs with one thing changed, which the proof must reject.

A change may be harmless, such as a copy of a chunk that has already arrived. The proof does not decide that: other code
executes the changed Program on random numbers, and must get the right sums.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from motet.collectives.program import ChunkTransfer, Program, Step
from motet.collectives.prove.program_checker import CollectiveProofError, ProgramCase, prove_program


@dataclass(frozen=True)
class MutatedCollectiveProgram:
    description: str
    program: Program


@dataclass(frozen=True)
class MutationCheckResult:
    """`missed` is a fault of the proof: it lets a Program pass that gives wrong sums."""

    mutation: MutatedCollectiveProgram
    outcome: Literal["rejected", "equivalent", "missed"]


def spread_mutations(cases: Sequence[ProgramCase], count: int) -> Iterator[MutationCheckResult]:
    """Check `count` mutations, spread evenly over the cases; fewer where a Program does not allow as many."""
    for index, case in enumerate(cases):
        case_count = count * (index + 1) // len(cases) - count * index // len(cases)
        if case_count:
            yield from map(check_mutation, generate_mutations(case(), case_count))


def generate_mutations(program: Program, count: int, seed: int = 0) -> Iterator[MutatedCollectiveProgram]:
    """`count` different mutations, or as many as there are; the same for the same seed."""
    rng, seen_steps = random.Random(f"{program} {seed}"), {program.steps}
    for _ in range(20 * count if program.steps else 0):
        if len(seen_steps) > count:
            return
        name, mutate = rng.choice(_MUTATIONS)
        i = rng.randrange(len(program.steps))
        if not program.steps[i]:
            continue
        j = rng.randrange(len(program.steps[i]))
        steps = tuple(mutate(program, i, j, rng) or ())
        if steps and steps not in seen_steps:
            seen_steps.add(steps)
            description = f"step {i}: {program.steps[i][j]} {name}{_describe_added_transfer(program.steps, steps)}"
            yield MutatedCollectiveProgram(description, replace(program, steps=steps))


def _describe_added_transfer(before: Sequence[Step], after: Sequence[Step]) -> str:
    """The transfer that a step has gained, so that a reader can make the same change."""
    added = [
        f"; step {number} now has {transfer}"
        for number, (old, new) in enumerate(zip(before, after, strict=True))
        for transfer in (Counter(new) - Counter(old)).elements()
    ]
    return added[0] if len(added) == 1 else ""


def check_mutation(mutation: MutatedCollectiveProgram) -> MutationCheckResult:
    """The proof's verdict and, where it accepts the Program, whether the sums are right."""
    try:
        prove_program(mutation.program)
    except CollectiveProofError:
        return MutationCheckResult(mutation, "rejected")
    return MutationCheckResult(mutation, "equivalent" if computes_correct_sums(mutation.program) else "missed")


def computes_correct_sums(program: Program, seed: int = 1) -> bool:
    """Execute the Program on random integers; a wrong one passes with a probability of about 2^-60."""
    rng = random.Random(seed)
    inputs = [[rng.getrandbits(61) for _ in range(program.chunks)] for _ in range(program.ranks)]
    contents = [{c: inputs[rank][c] for c in chunks} for rank, chunks in enumerate(program.initial)]
    for step in program.steps:
        before = [dict(chunks) for chunks in contents]
        for t in step:
            for chunk in t.chunks:
                if chunk not in before[t.src]:
                    return False
                old = contents[t.dst].get(chunk, 0) if t.op == "reduce" else 0
                contents[t.dst][chunk] = old + before[t.src][chunk]
    return all(
        contents[rank].get(chunk) == sum(inputs[source][chunk] for source in sources)
        for rank, final in enumerate(program.final)
        for chunk, sources in final.items()
    )


# Each mutation makes the steps of a Program anew, with transfer `j` of step `i` changed; None if it cannot.
def _replaced(program: Program, i: int, j: int, *transfers: ChunkTransfer) -> list[Step]:
    changed = (*program.steps[i][:j], *transfers, *program.steps[i][j + 1 :])
    return [*program.steps[:i], changed, *program.steps[i + 1 :]]


def _drop_transfer(program: Program, i: int, j: int, rng: random.Random) -> list[Step]:
    return _replaced(program, i, j)


def _repeat_transfer(program: Program, i: int, j: int, rng: random.Random) -> list[Step]:
    steps, later = list(program.steps), rng.randrange(i, len(program.steps))
    steps[later] = (*steps[later], program.steps[i][j])
    return steps


def _redirect_transfer(program: Program, i: int, j: int, rng: random.Random) -> list[Step]:
    t = program.steps[i][j]
    others = [rank for rank in range(program.ranks) if rank not in (t.src, t.dst)]
    if not others:
        return _replaced(program, i, j, t._replace(src=t.dst, dst=t.src))
    other = rng.choice(others)
    return _replaced(program, i, j, t._replace(src=other) if rng.random() < 0.5 else t._replace(dst=other))


def _move_to_other_step(program: Program, i: int, j: int, rng: random.Random) -> list[Step] | None:
    others = [n for n in range(len(program.steps)) if n != i]
    if not others:
        return None
    target, steps = rng.choice(others), _replaced(program, i, j)
    steps[target] = (*steps[target], program.steps[i][j])
    return steps


def _swap_steps(program: Program, i: int, j: int, rng: random.Random) -> list[Step]:
    steps, other = list(program.steps), rng.randrange(len(program.steps))
    steps[i], steps[other] = steps[other], steps[i]
    return steps


def _shift_chunks(program: Program, i: int, j: int, rng: random.Random) -> list[Step] | None:
    t, offset = program.steps[i][j], rng.choice((-1, 1))
    shifted = t._replace(first=t.first + offset, last=t.last + offset)
    return _replaced(program, i, j, shifted) if shifted.first >= 0 and shifted.last < program.chunks else None


def _flip_operation(program: Program, i: int, j: int, rng: random.Random) -> list[Step]:
    t = program.steps[i][j]
    return _replaced(program, i, j, t._replace(op="copy" if t.op == "reduce" else "reduce"))


_MUTATIONS: tuple[tuple[str, Callable[[Program, int, int, random.Random], list[Step] | None]], ...] = (
    *(("dropped", _drop_transfer), ("repeated", _repeat_transfer), ("redirected", _redirect_transfer)),
    *(("moved to another step", _move_to_other_step), ("in a step that changed places with another", _swap_steps)),
    *(("with the neighbouring chunks", _shift_chunks), ("with the other operation", _flip_operation)),
)
