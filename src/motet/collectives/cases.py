"""Which Programs the library can make: every algorithm at every number of ranks, on every shape of hosts and grid."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from motet.collectives.corrupt import Judgement, corruptions, judge
from motet.collectives.library import Algorithm, algorithms, collectives, find, program
from motet.collectives.score import Program

Case = partial[Program]
"""A Program that is made when it is called for, since all at once would fill gigabytes. Its options are `keywords`."""


def case(algorithm: Algorithm, ranks: int, options: dict[str, object]) -> Case:
    return partial(program, algorithm.collective, algorithm.name, ranks, **options)


def every_case(counts: Sequence[int]) -> list[Case]:
    """All algorithms at those numbers of ranks that they take, with all shapes that these can have."""
    found = [find(collective, name) for collective in collectives() for name in algorithms(collective)]
    return [
        case(algorithm, ranks, options)
        for algorithm in found
        for ranks in counts
        if algorithm.takes(ranks)
        for options in shapes(algorithm, ranks)
    ]


def shapes(algorithm: Algorithm, ranks: int) -> list[dict[str, object]]:
    """Options worth a proof of their own: what is chosen by default, the last root, all hosts and all grids."""
    found: list[dict[str, object]] = [{}]
    if "root" in algorithm.options:
        found.append({"root": ranks - 1})
    if "pieces" in algorithm.options:
        found += [{"pieces": 1}, {"pieces": 3}]
    if "hosts" in algorithm.options:
        found += [{"hosts": hosts} for hosts in range(2, ranks) if ranks % hosts == 0]
    # A free number of dimensions is one ring by default, and 2, 3 and 5 have algorithms of their own.
    axes = algorithm.axes if len(algorithm.axes) == 1 else [n for n in algorithm.axes if n in (4, 6)]
    found += [{"dims": dims} for count in axes for dims in _grids(ranks, count, 2)]
    return found


def _grids(ranks: int, axes: int, least: int) -> Iterator[tuple[int, ...]]:
    """Lengths, none less than the one before, whose product is the number of ranks."""
    if axes == 1:
        if ranks >= least:
            yield (ranks,)
        return
    for length in range(least, ranks + 1):
        if ranks % length == 0:
            yield from ((length, *rest) for rest in _grids(ranks // length, axes - 1, length))


@dataclass(frozen=True)
class Planted:
    """What became of one corruption."""

    program: str
    options: dict[str, object]
    what: str
    verdict: Literal["rejected", "equivalent", "missed"]
    reason: str


def plant(cases: Sequence[Case], count: int, seed: int = 0) -> Iterator[Planted]:
    """Corrupt and judge so many times, spread evenly over the cases; fewer where they cannot be changed so often."""
    for place, made in enumerate(cases):
        share = count * (place + 1) // len(cases) - count * place // len(cases)
        if share:
            whole = made()
            for corruption in corruptions(whole, share, seed):
                found: Judgement = judge(corruption)
                yield Planted(str(whole), made.keywords, corruption.what, found.verdict, found.reason)
