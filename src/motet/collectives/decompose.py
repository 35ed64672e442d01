"""A collective as a sequence of smaller ones: what a scheduler needs to cut communication up and hide it behind work.

Three ways: by substitution (an all-reduce is a reduce-scatter and an all-gather, or a reduce and a broadcast), by
groups (inside hosts, across hosts, inside hosts) and by size (several messages, each a part). Every decomposition is a
Program again, proven like any other, and ranked by what it is predicted to cost.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from math import lcm
from typing import Literal

from motet.cluster.cluster import Cluster
from motet.collectives.choose import EQUAL, cheapest, even_hosts
from motet.collectives.compose import grouped, refine, renumber, then
from motet.collectives.cost import WITHOUT_DATA, cost
from motet.collectives.library import algorithms, find
from motet.collectives.library.shapes import equal_hosts
from motet.collectives.score import Program
from motet.core.errors import InputError

Kind = Literal["whole", "substitution", "groups", "size"]


@dataclass(frozen=True)
class Stage:
    """One piece, which may be started on its own once the stages before it are done."""

    name: str
    program: Program
    seconds: float


@dataclass(frozen=True)
class Decomposition:
    """The stages in their order, and the Program that they are together (of one part, where the size is cut)."""

    kind: Kind
    stages: tuple[Stage, ...]
    program: Program

    @property
    def seconds(self) -> float:
        """One stage after another, without anything hidden."""
        return sum(stage.seconds for stage in self.stages)

    @property
    def longest_s(self) -> float:
        """The stage that needs the most to hide behind."""
        return max(stage.seconds for stage in self.stages)

    def __str__(self) -> str:
        names = [stage.name for stage in self.stages]
        return f"{len(names)} x {names[0]}" if self.kind == "size" else ", ".join(names)


SUBSTITUTIONS: dict[str, tuple[tuple[str, str], ...]] = {
    "all-reduce": (("reduce-scatter", "all-gather"), ("reduce", "broadcast")),
    "broadcast": (("scatter", "all-gather"),),
    "reduce": (("reduce-scatter", "gather"),),
    "all-gather": (("gather", "broadcast"),),
    "reduce-scatter": (("reduce", "scatter"),),
}
"""Each collective as two in a row."""


def decompositions(
    collective: str, size: float, cluster: Cluster, *, hosts: int | None = None, parts: Sequence[int] = (2, 4, 8)
) -> tuple[Decomposition, ...]:
    """All that are known, the cheapest first; the whole collective is one of them."""
    best = cheapest(collective, size, cluster)
    whole = Decomposition("whole", (_stage(f"{collective} {best}", best.program, size, cluster),), best.program)
    found = [whole, *_substituted(collective, size, cluster), *_by_groups(collective, size, cluster, hosts)]
    for count in parts if collective not in WITHOUT_DATA else ():
        piece = cheapest(collective, size / count, cluster)
        stage = _stage(f"{collective} {piece} of 1/{count}", piece.program, size / count, cluster)
        found.append(Decomposition("size", (stage,) * count, piece.program))
    return tuple(_ranked(found))


def _ranked(found: Sequence[Decomposition]) -> Iterator[Decomposition]:
    """The cheapest first; of those that differ by no more than rounding the one that comes first, such as the whole."""
    rest = list(found)
    while rest:
        least = min(decomposition.seconds for decomposition in rest) * EQUAL
        first = next(place for place, decomposition in enumerate(rest) if decomposition.seconds <= least)
        yield rest.pop(first)


def _stage(name: str, program: Program, size: float, cluster: Cluster) -> Stage:
    return Stage(name, program, float(cost(program, cluster).seconds(size)))


def _joined(stages: Sequence[Program], collective: str) -> Program:
    """The stages as one Program, on chunks as small as the smallest."""
    chunks = lcm(*(stage.chunks for stage in stages))
    even = [refine(stage, chunks // stage.chunks) for stage in stages]
    name = "+".join(stage.algorithm for stage in stages)
    return reduce(lambda a, b: then(a, b, collective, name), even)


def _substituted(collective: str, size: float, cluster: Cluster) -> list[Decomposition]:
    found = []
    for pair in SUBSTITUTIONS.get(collective, ()):
        chosen = [cheapest(name, size, cluster) for name in pair]
        stages = [
            _stage(f"{name} {choice}", choice.program, size, cluster) for name, choice in zip(pair, chosen, strict=True)
        ]
        joined = _joined([choice.program for choice in chosen], collective)
        found.append(Decomposition("substitution", tuple(stages), joined))
    return found


def _by_groups(collective: str, size: float, cluster: Cluster, hosts: int | None) -> list[Decomposition]:
    """Inside each host, across hosts between ranks with the same local number, and inside again."""
    if collective not in _LEVELS:
        return []
    hosts = hosts or even_hosts(cluster) or (cluster.hosts if cluster.hosts < cluster.ranks else None)
    try:
        count, each = equal_hosts(cluster.ranks, hosts)
    except InputError:  # uneven hosts: nothing to shard evenly
        return []
    if 1 in (count, each):
        return []
    levels = _LEVELS[collective]
    stages: list[Stage] = []
    for level, name in levels:
        best = min(
            (
                # Across hosts each rank has only its share of the data.
                _stage(f"{name} {algorithm} {level} hosts", program, size * program.whole / program.chunks, cluster)
                for algorithm in algorithms(name)
                for program in _level_programs(level, name, algorithm, (count, each))
            ),
            key=lambda stage: stage.seconds,
        )
        stages.append(best)
    joined = _joined([stage.program for stage in stages], collective)
    if collective != "all-reduce":
        # Counted by local number and then host, where chunk i is to be that of rank i.
        joined = renumber(joined, [chunk % count * each + chunk // count for chunk in range(joined.chunks)])
    return [Decomposition("groups", tuple(stages), joined)]


Level = Literal["inside", "across"]
_LEVELS: dict[str, tuple[tuple[Level, str], ...]] = {
    "all-reduce": (("inside", "reduce-scatter"), ("across", "all-reduce"), ("inside", "all-gather")),
    "reduce-scatter": (("inside", "reduce-scatter"), ("across", "reduce-scatter")),
    "all-gather": (("across", "all-gather"), ("inside", "all-gather")),
}


def _level_programs(level: Level, collective: str, algorithm: str, shape: tuple[int, int]) -> list[Program]:
    """The algorithm among the ranks of every host, or of every rail; nothing if it cannot take so many.

    The data are cut into a share for each local number, and each share into what the hosts divide it into.
    """
    count, each = shape
    members = each if level == "inside" else count
    found = find(collective, algorithm)
    if not found.takes(members) or not found.same_bits:
        return []
    small = found.build(members)
    if collective != "all-reduce":
        assert small.chunks == members
    if level == "inside":
        groups: list[range] = [range(host * each, (host + 1) * each) for host in range(count)]
        return [grouped(small, groups, [[local * count for local in range(each)]] * count, count)]
    groups = [range(local, count * each, each) for local in range(each)]
    firsts = [[local * small.chunks + chunk for chunk in range(small.chunks)] for local in range(each)]
    return [grouped(small, groups, firsts, 1)]
