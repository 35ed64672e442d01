"""The course of a portion, played on multisets of contributors: each rank has a shard of it or all, and sums of some.

What is wrong is a `FaultError`, which does not know yet what elements the portion has.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from motet.collectives.cost.alpha_beta import RankGroups
from motet.parallel.course import Course, Move, Verb

Has = tuple[int | None, int]
"""The number of the shard that a rank has, None being all of it; and the rank."""


class FaultError(Exception):
    """What is wrong with a course, whatever the portion. `{}` in the text stands for what of it is concerned."""

    def __init__(self, number: int | None, text: str) -> None:
        self.number = number
        super().__init__(text)


@dataclass(frozen=True)
class Once:
    """Some ranks that together have each element once; what is wrong otherwise."""

    verb: Verb
    has: tuple[Has, ...]
    lacking: str
    twice: str


@dataclass
class Played:
    """All ranks, as they stand."""

    number: list[int | None]
    content: list[int]
    """What each has of the sums, as a number; those below the number of ranks are their own gradients."""
    multisets: list[Counter[int]]
    numbers: dict[tuple[int, ...], int] = field(default_factory=dict)
    updated: bool = False
    once: dict[tuple[int | None, ...], Once] = field(default_factory=dict)
    """By the shards that they have: ranks that have the same are asked once, for their update if there is one."""

    def add(self, contents: Iterable[int]) -> int:
        key = tuple(sorted(contents))
        if key not in self.numbers:
            total: Counter[int] = Counter()
            for content in key:
                total.update(self.multisets[content])
            self.numbers[key] = len(self.multisets)
            self.multisets.append(total)
        return self.numbers[key]

    def demand(self, verb: Verb, ranks: Sequence[int], lacking: str, twice: str) -> None:
        """That these ranks have each element once."""
        key = tuple(self.number[rank] for rank in ranks)
        if key not in self.once or self.once[key].verb != verb == "update":
            self.once[key] = Once(verb, tuple(zip(key, ranks, strict=True)), lacking, twice)


def play(course: Course, ranks: int) -> Played:
    at = Played([None] * ranks, list(range(ranks)), [Counter([rank]) for rank in range(ranks)])
    for place, move in enumerate(course):
        _MOVES[move.verb](at, move, course[:place])
    stale = next((rank for rank, number in enumerate(at.number) if number is not None), None)
    if stale is not None:
        raise FaultError(None, f"rank {stale} is not given {{}} as updated, but has its shard {at.number[stale]} alone")
    if not at.updated:
        raise FaultError(None, "nobody updates {}")
    return at


def _scatter(at: Played, move: Move, before: Course) -> None:
    for ranks, total in _sums(at, move.sets):
        for place, rank in enumerate(ranks):
            if at.number[rank] is not None:
                raise FaultError(at.number[rank], f"rank {rank} has a shard alone where all of {{}} is to be summed")
            at.number[rank], at.content[rank] = place, total


def _sum(at: Played, move: Move, before: Course) -> None:
    for ranks, total in _sums(at, move.sets):
        for rank in ranks:
            if at.number[rank] != at.number[ranks[0]]:
                text = f"rank {ranks[0]} adds {{}} to another shard, which rank {rank} has"
                raise FaultError(at.number[ranks[0]], text)
            at.content[rank] = total


def _sums(at: Played, sets: RankGroups) -> list[tuple[tuple[int, ...], int]]:
    """(ranks, what they have together)"""
    return [(ranks, at.add([at.content[rank] for rank in ranks])) for ranks in sets]


def _norm(at: Played, move: Move, before: Course) -> None:
    ranks = [rank for ranks in move.sets for rank in ranks]
    _whole_sums(at, ranks)
    at.demand("norm", ranks, "the norm leaves {} out", "the norm counts {} twice")


def _update(at: Played, move: Move, before: Course) -> None:
    if at.updated:
        raise FaultError(None, "a step updates {} twice")
    _each_once(at, move.sets, "updates {}")
    _whole_sums(at, range(len(at.number)))
    for ranks in move.sets:
        copy = f"of the copy of {named(ranks)}"
        at.demand("update", ranks, f"nobody {copy} updates {{}}", f"two {copy} update {{}}")
    at.updated = True


def _gather(at: Played, move: Move, before: Course) -> None:
    """Of what was updated, or of sums that everybody is to update with."""
    _each_once(at, move.sets, "is given {}")
    if not at.updated:
        _whole_sums(at, range(len(at.number)))
    for ranks in move.sets:
        for place, rank in enumerate(ranks):
            if at.number[rank] != place:
                text = f"rank {ranks[0]} is given shard {at.number[rank]} of rank {rank} in the place of {{}}"
                raise FaultError(place, text)
        at.demand("gather", ranks, f"{named(ranks)} are not given {{}}", f"{named(ranks)} are given {{}} twice")
        for rank in ranks:
            at.number[rank] = None


def _keep(at: Played, move: Move, before: Course) -> None:
    _each_once(at, move.sets, "has a part of a second copy of {}")
    home = {rank: ranks for earlier in before if earlier.verb == "gather" for ranks in earlier.sets for rank in ranks}
    for ranks in move.sets:
        stranger = next((rank for rank in ranks if home[rank] != home[ranks[0]]), None)
        if stranger is not None:
            raise FaultError(None, f"ranks {ranks[0]} and {stranger} share a second copy of {{}}, but not a first")


def _levels(at: Played, move: Move, before: Course) -> None:
    """Over those that share a second copy, then over these: each rank gets the sum of all, of its own shard."""
    found = {earlier.verb: earlier.sets for earlier in before}
    near = {rank: (ranks, place) for ranks in found["keep"] for place, rank in enumerate(ranks)}
    home = {rank: (ranks, place) for ranks in found["gather"] for place, rank in enumerate(ranks)}
    _each_once(at, move.sets, "sums {} in two levels")
    for ranks in move.sets:
        everyone, number = home[ranks[0]]
        _complete(ranks[0], number, Counter(other for rank in ranks for other in near[rank][0]), everyone)
        for place, rank in enumerate(ranks):
            others, among = near[rank]
            if place * len(others) + among != home[rank][1]:
                raise FaultError(home[rank][1], f"rank {rank} gets another shard than {{}} of a sum in two levels")


_MOVES = {
    "scatter": _scatter,
    "sum": _sum,
    "norm": _norm,
    "update": _update,
    "gather": _gather,
    "keep": _keep,
    "levels": _levels,
}


def _each_once(at: Played, sets: RankGroups, does: str) -> None:
    times = Counter(rank for ranks in sets for rank in ranks)
    for rank, number in enumerate(at.number):
        if times[rank] != 1:
            raise FaultError(number, f"rank {rank} {does} {times[rank]} times, not once")


def _whole_sums(at: Played, ranks: Iterable[int]) -> None:
    """What these have is the sum of what all ranks give, each once."""
    good: set[int] = set()
    everyone = range(len(at.number))
    for rank in ranks:
        if at.content[rank] not in good:
            _complete(rank, at.number[rank], at.multisets[at.content[rank]], everyone)
            good.add(at.content[rank])


def _complete(rank: int, number: int | None, content: Counter[int], everyone: Sequence[int]) -> None:
    if len(content) == len(everyone) and all(content[one] == 1 for one in everyone):
        return
    missing = [one for one in everyone if not content[one]]
    often = [one for one, times in sorted(content.items()) if times > 1]
    text = f"lacks the share of {named(missing)}" if missing else f"has the share of {named(often)} more than once"
    raise FaultError(number, f"the sum of {{}} on rank {rank} {text}")


def named(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    shown = ", ".join(map(str, ranks[:8]))
    return f"ranks {shown} and {len(ranks) - 8} more" if len(ranks) > 8 else f"ranks {shown}"
