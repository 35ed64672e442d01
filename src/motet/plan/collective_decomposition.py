"""A collective as a sequence of smaller ones, which a scheduler can overlap with computation.

The kinds are substitution (an all-reduce is a reduce-scatter and an all-gather, or a reduce and a broadcast), groups
(inside hosts, across hosts, inside hosts) and size (several smaller messages). Every decomposition is a Program again,
proven like any other, and ranked by its predicted cost.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from math import lcm
from typing import Literal

from motet.cluster.cluster import Cluster
from motet.collectives.algorithms import algorithm_names, find_algorithm
from motet.collectives.algorithms.rank_arithmetic import hosts_and_ranks_per_host
from motet.collectives.compose import concatenate, renumber_chunks, replicate_in_groups, subdivide_chunks
from motet.collectives.cost.alpha_beta import COLLECTIVES_WITHOUT_DATA, estimate_cost
from motet.collectives.cost.cheapest_algorithm import TIE_RATIO, cheapest, even_host_groups
from motet.collectives.program import Program
from motet.core.errors import InputError

DecompositionKind = Literal["undivided", "substitution", "groups", "size"]


@dataclass(frozen=True)
class CollectiveDecompositionStage:
    """A stage, which may start as soon as the stages before it have finished."""

    name: str
    program: Program
    seconds: float


@dataclass(frozen=True)
class CollectiveDecomposition:
    """The stages in their order, and the Program of all stages; for kind `size` that of one part."""

    kind: DecompositionKind
    stages: tuple[CollectiveDecompositionStage, ...]
    program: Program

    @property
    def seconds(self) -> float:
        """The time of all stages in turn, without overlap."""
        return sum(stage.seconds for stage in self.stages)

    @property
    def longest_s(self) -> float:
        """The time of the longest stage, which needs the longest overlapping computation."""
        return max(stage.seconds for stage in self.stages)

    def __str__(self) -> str:
        names = [stage.name for stage in self.stages]
        return f"{len(names)} x {names[0]}" if self.kind == "size" else ", ".join(names)


# Pairs of collectives that together do the same as one.
SUBSTITUTIONS: dict[str, tuple[tuple[str, str], ...]] = {
    "all-reduce": (("reduce-scatter", "all-gather"), ("reduce", "broadcast")),
    "broadcast": (("scatter", "all-gather"),),
    "reduce": (("reduce-scatter", "gather"),),
    "all-gather": (("gather", "broadcast"),),
    "reduce-scatter": (("reduce", "scatter"),),
}


def decompositions(
    collective: str, size: float, cluster: Cluster, *, hosts: int | None = None, parts: Sequence[int] = (2, 4, 8)
) -> tuple[CollectiveDecomposition, ...]:
    """All known decompositions, the cheapest first; the undivided collective is one of them."""
    best = cheapest(collective, size, cluster)
    undivided = _make_stage(f"{collective} {best}", best.program, size, cluster)
    candidates = [
        CollectiveDecomposition("undivided", (undivided,), best.program),
        *_decompose_by_substitution(collective, size, cluster),
        *_decompose_by_hosts(collective, size, cluster, hosts),
    ]
    for count in parts if collective not in COLLECTIVES_WITHOUT_DATA else ():
        best = cheapest(collective, size / count, cluster)
        stage = _make_stage(f"{collective} {best} of 1/{count}", best.program, size / count, cluster)
        candidates.append(CollectiveDecomposition("size", (stage,) * count, best.program))
    return tuple(_order_by_cost(candidates))


def _order_by_cost(candidates: Sequence[CollectiveDecomposition]) -> Iterator[CollectiveDecomposition]:
    """The cheapest first; decompositions that differ by rounding only keep their order."""
    remaining = list(candidates)
    while remaining:
        tie_limit = min(decomposition.seconds for decomposition in remaining) * TIE_RATIO
        first = next(index for index, decomposition in enumerate(remaining) if decomposition.seconds <= tie_limit)
        yield remaining.pop(first)


def _make_stage(name: str, program: Program, size: float, cluster: Cluster) -> CollectiveDecompositionStage:
    return CollectiveDecompositionStage(name, program, float(estimate_cost(program, cluster).seconds(size)))


def _concatenate_stages(stages: Sequence[Program], collective: str) -> Program:
    chunks = lcm(*(stage.chunks for stage in stages))
    refined = [subdivide_chunks(stage, chunks // stage.chunks) for stage in stages]
    name = "+".join(stage.algorithm for stage in stages)
    return reduce(lambda a, b: concatenate(a, b, collective, name), refined)


def _decompose_by_substitution(collective: str, size: float, cluster: Cluster) -> list[CollectiveDecomposition]:
    candidates = []
    for pair in SUBSTITUTIONS.get(collective, ()):
        chosen = {name: cheapest(name, size, cluster) for name in pair}
        stages = tuple(_make_stage(f"{name} {best}", best.program, size, cluster) for name, best in chosen.items())
        combined = _concatenate_stages([best.program for best in chosen.values()], collective)
        candidates.append(CollectiveDecomposition("substitution", stages, combined))
    return candidates


def _decompose_by_hosts(
    collective: str, size: float, cluster: Cluster, hosts: int | None
) -> list[CollectiveDecomposition]:
    if collective not in _HOST_LEVELS:
        return []
    hosts = hosts or even_host_groups(cluster) or (cluster.hosts if cluster.hosts < cluster.ranks else None)
    try:
        host_count, ranks_per_host = hosts_and_ranks_per_host(cluster.ranks, hosts)
    except InputError:  # uneven hosts: nothing to shard evenly
        return []
    if 1 in (host_count, ranks_per_host):
        return []
    stages: list[CollectiveDecompositionStage] = []
    for level, name in _HOST_LEVELS[collective]:
        candidates = [
            # Across hosts each rank has only its shard of the data.
            _make_stage(f"{name} {algorithm} {level} hosts", p, size * p.message_size_units / p.chunks, cluster)
            for algorithm in algorithm_names(name)
            for p in _host_level_programs(level, name, algorithm, (host_count, ranks_per_host))
        ]
        stages.append(min(candidates, key=lambda stage: stage.seconds))
    combined = _concatenate_stages([stage.program for stage in stages], collective)
    if collective != "all-reduce":
        # Chunks are counted by local rank and then host; chunk i must be that of rank i.
        indices = [chunk % host_count * ranks_per_host + chunk // host_count for chunk in range(combined.chunks)]
        combined = renumber_chunks(combined, indices)
    return [CollectiveDecomposition("groups", tuple(stages), combined)]


HostLevel = Literal["inside", "across"]
_HOST_LEVELS: dict[str, tuple[tuple[HostLevel, str], ...]] = {
    "all-reduce": (("inside", "reduce-scatter"), ("across", "all-reduce"), ("inside", "all-gather")),
    "reduce-scatter": (("inside", "reduce-scatter"), ("across", "reduce-scatter")),
    "all-gather": (("across", "all-gather"), ("inside", "all-gather")),
}


def _host_level_programs(level: HostLevel, collective: str, algorithm: str, shape: tuple[int, int]) -> list[Program]:
    """The algorithm among the ranks of every host, or of every rail; empty if it does not support their number.

    The data are cut into a shard for each local rank, and each shard into a part for each host.
    """
    host_count, ranks_per_host = shape
    members = ranks_per_host if level == "inside" else host_count
    definition = find_algorithm(collective, algorithm)
    if not definition.supports(members) or not definition.same_bits:
        return []
    group_program = definition.build(members)
    assert collective == "all-reduce" or group_program.chunks == members
    if level == "inside":
        width, groups = host_count, [range(n * ranks_per_host, (n + 1) * ranks_per_host) for n in range(host_count)]
        first_chunks = [range(0, ranks_per_host * host_count, host_count)] * host_count
    else:
        width, groups = 1, [range(n, host_count * ranks_per_host, ranks_per_host) for n in range(ranks_per_host)]
        first_chunks = [range(n * group_program.chunks, (n + 1) * group_program.chunks) for n in range(ranks_per_host)]
    return [replicate_in_groups(group_program, groups, chunks=first_chunks, width=width)]
