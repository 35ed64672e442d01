"""Programs made of Programs: backwards, one after another, side by side, among some ranks, cut in two.

These carry the identities of the craft: a reduction is a distribution played backwards, an all-reduce is a
reduce-scatter followed by an all-gather, or a reduce followed by a broadcast.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest

from motet.collectives.ledger import contributors, play, start
from motet.collectives.score import Contributors, Program, Step, Transfer, sending


def everywhere(program: Program) -> Contributors:
    return tuple(range(program.ranks))


def reverse(program: Program, collective: str, algorithm: str | None = None) -> Program:
    """A distribution played backwards, with sums in the place of copies.

    Broadcast becomes reduce, all-gather reduce-scatter, scatter gather. It needs what every sensible distribution does:
    no rank is sent a chunk that it has.
    """
    _no_chunk_twice(program)
    steps = tuple(
        tuple([Transfer(dst, src, first, last, "reduce") for src, dst, first, last, _ in reversed(step)])
        for step in reversed(program.steps)
    )
    contributors: dict[int, list[int]] = {}
    for rank, held in enumerate(program.final):
        for chunk in held:
            contributors.setdefault(chunk, []).append(rank)
    return Program(
        collective,
        algorithm or program.algorithm,
        program.ranks,
        program.sizes,
        initial=tuple(tuple(held) for held in program.final),
        final=tuple({chunk: tuple(contributors[chunk]) for chunk in held} for held in program.initial),
        steps=steps,
        ports=program.ports,
    )


def _no_chunk_twice(program: Program) -> None:
    there = [set(held) for held in program.initial]
    for step in program.steps:
        for _, dst, first, last, _ in step:
            chunks = range(first, last + 1)
            if not there[dst].isdisjoint(chunks):
                again = min(there[dst].intersection(chunks))
                raise ValueError(f"{program} cannot be reversed: rank {dst} is sent chunk {again}, which it has")
            there[dst].update(chunks)


def then(first: Program, second: Program, collective: str, algorithm: str) -> Program:
    """One after the other; the second starts from what the first has made."""
    if first.ranks != second.ranks or first.sizes != second.sizes:
        raise ValueError(f"{first} and {second} do not have the same ranks and chunks")
    for rank, held in enumerate(second.initial):
        lacking = sorted(set(held) - set(first.final[rank]))
        if lacking:
            raise ValueError(f"{second} starts with chunk {lacking[0]} on rank {rank}, where {first} leaves none")
    merged: dict[tuple[int, Contributors], Contributors] = {}

    def through(chunk: int, sources: Contributors) -> Contributors:
        if (chunk, sources) not in merged:
            total: Counter[int] = Counter()
            for source in sources:
                total.update(first.final[source][chunk])
            merged[chunk, sources] = tuple(sorted(total.elements()))
        return merged[chunk, sources]

    final = tuple({chunk: through(chunk, sources) for chunk, sources in held.items()} for held in second.final)
    return replace(
        first,
        collective=collective,
        algorithm=algorithm,
        final=final,
        steps=first.steps + second.steps,
        ports=max(first.ports, second.ports),
    )


def side_by_side(programs: Sequence[Sequence[Step]]) -> tuple[Step, ...]:
    """The steps of several parts that run at the same time: their first steps together, then their second ones, ..."""
    together = zip_longest(*programs, fillvalue=())
    return tuple(tuple(transfer for step in steps for transfer in step) for steps in together)


def among(program: Program, members: Sequence[int], chunks: Sequence[int], width: int = 1) -> tuple[Step, ...]:
    """The steps of a Program among some ranks of a larger one.

    Rank i of the Program is `members[i]`, and its chunk c is the `width` chunks from `chunks[c]` on.
    """
    moved: list[Step] = []
    for step in program.steps:
        transfers: list[Transfer] = []
        for t in step:
            for chunk in t.chunks:
                first, last = chunks[chunk], chunks[chunk] + width - 1
                before = transfers[-1] if transfers else None
                src, dst = members[t.src], members[t.dst]
                if chunk > t.first and before is not None and before.last + 1 == first:
                    transfers[-1] = before._replace(last=last)
                else:
                    transfers.append(Transfer(src, dst, first, last, t.op))
        moved.append(tuple(transfers))
    return tuple(moved)


def cut(program: Program, at: int, collectives: tuple[str, str]) -> tuple[Program, Program]:
    """The first `at` steps and the rest as two Programs, which `then` joins again."""
    live = _live(program, at)
    sources = _played(program.initial, program.steps[:at])
    middle = tuple({chunk: sources[rank][chunk] for chunk in chunks} for rank, chunks in enumerate(live))
    rest = _played(live, program.steps[at:])
    final = tuple({chunk: rest[rank][chunk] for chunk in held} for rank, held in enumerate(program.final))
    before, after = collectives
    return (
        replace(program, collective=before, final=middle, steps=program.steps[:at]),
        replace(program, collective=after, initial=live, final=final, steps=program.steps[at:]),
    )


def _live(program: Program, at: int) -> tuple[tuple[int, ...], ...]:
    """What each rank holds before step `at` that is read later or belongs to the end."""
    needed = [set(held) for held in program.final]
    for step in reversed(program.steps[at:]):
        for t in step:
            if t.op == "copy":
                needed[t.dst].difference_update(t.chunks)
        for t in step:
            needed[t.src].update(t.chunks)
    return tuple(tuple(sorted(chunks)) for chunks in needed)


def _played(initial: Sequence[Sequence[int]], steps: Sequence[Step]) -> list[dict[int, Contributors]]:
    held = start(initial)
    for step in steps:
        play(held, step)
    return [{chunk: contributors(count) for chunk, count in sorted(chunks.items())} for chunks in held]


def grouped(program: Program, groups: Sequence[Sequence[int]], chunks: Sequence[Sequence[int]], width: int) -> Program:
    """The same small Program in several groups at once, as one Program of all the ranks in them.

    In group g rank i of the small one is `groups[g][i]`, and its chunk c the `width` chunks from `chunks[g][c]` on.
    That is less than the collective of all ranks, and is called so.
    """
    ranks = sum(map(len, groups))
    initial: list[tuple[int, ...]] = [()] * ranks
    final: list[dict[int, Contributors]] = [{} for _ in range(ranks)]
    for members, firsts in zip(groups, chunks, strict=True):
        for local, rank in enumerate(members):
            initial[rank] = tuple(
                first + n for c in program.initial[local] for first in [firsts[c]] for n in range(width)
            )
            for c, sources in program.final[local].items():
                made_of = tuple(members[source] for source in sources)
                final[rank].update({firsts[c] + n: made_of for n in range(width)})
    total = 1 + max(first for firsts in chunks for first in firsts) + width - 1
    parts = [among(program, members, firsts, width) for members, firsts in zip(groups, chunks, strict=True)]
    return replace(
        program,
        collective=f"{program.collective} in groups",
        ranks=ranks,
        sizes=(1,) * total,
        initial=tuple(initial),
        final=tuple(final),
        steps=side_by_side(parts),
    )


def refine(program: Program, factor: int) -> Program:
    """The same with every chunk cut into so many."""
    if factor == 1:
        return program

    def cut_up(chunks: Sequence[int]) -> list[int]:
        return [chunk * factor + n for chunk in chunks for n in range(factor)]

    return replace(
        program,
        sizes=tuple(size for size in program.sizes for _ in range(factor)),
        initial=tuple(tuple(cut_up(chunks)) for chunks in program.initial),
        final=tuple({part: held[c] for c in held for part in cut_up([c])} for held in program.final),
        steps=tuple(
            tuple(t._replace(first=t.first * factor, last=t.last * factor + factor - 1) for t in step)
            for step in program.steps
        ),
    )


def renumber(program: Program, order: Sequence[int]) -> Program:
    """The same with chunk c called `order[c]`."""
    sizes = [0] * program.chunks
    for chunk, size in enumerate(program.sizes):
        sizes[order[chunk]] = size
    return replace(
        program,
        sizes=tuple(sizes),
        initial=tuple(tuple(sorted(order[chunk] for chunk in held)) for held in program.initial),
        final=tuple({order[chunk]: sources for chunk, sources in held.items()} for held in program.final),
        steps=tuple(
            tuple(part for t in step for part in sending(t.src, t.dst, [order[chunk] for chunk in t.chunks], t.op))
            for step in program.steps
        ),
    )
