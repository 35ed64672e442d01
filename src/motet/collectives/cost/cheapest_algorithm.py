"""Which algorithm is the cheapest on a cluster, for a message of this size, and at which sizes the answer changes."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, pairwise
from math import exp2, gcd, log2

from motet.cluster.cluster import Cluster
from motet.cluster.topology import TorusNetwork
from motet.collectives.algorithms import Algorithm, algorithm_names, find_algorithm
from motet.collectives.cost.alpha_beta import COLLECTIVES_WITHOUT_DATA, CollectiveCost, RankGroups, estimate_cost
from motet.collectives.program import Program
from motet.core.errors import InputError

PIECE_COUNTS = (1, 2, 4, 8, 16, 32, 64)  # The numbers of pieces that are tried where an algorithm can have any


TIE_RATIO = 1 + 1e-9  # Times whose ratio is no more than this differ by rounding only


@dataclass(frozen=True)
class CostedAlgorithm:
    """An algorithm with its options settled, as a Program, and what it costs here."""

    algorithm: str
    options: tuple[tuple[str, object], ...]
    program: Program
    cost: CollectiveCost

    def __str__(self) -> str:
        return " ".join([self.algorithm, *(f"{name}={_format_option(value)}" for name, value in self.options)])


def _format_option(value: object) -> str:
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)


@lru_cache(maxsize=64)
def costed_algorithms(
    collective: str, cluster: Cluster, names: tuple[str, ...] | None = None, rank_groups: RankGroups | None = None
) -> tuple[CostedAlgorithm, ...]:
    """Every algorithm that takes so many ranks; hosts and dimensions are those of the cluster.

    Unless they are asked for by name, those are left out after which ranks would hold different bits: replicas that
    differ drift apart. `sets`: those of the cluster's ranks that do it at once; all of them as one if not given.
    """
    ranks = len(rank_groups[0]) if rank_groups else cluster.ranks
    if ranks < 2:
        raise InputError(f"cluster {cluster.name} has {ranks} rank; a collective needs at least 2")
    eligible = [find_algorithm(collective, name) for name in names or algorithm_names(collective)]
    if names:
        for algorithm in eligible:
            algorithm.check_ranks(ranks)
    else:
        eligible = [algorithm for algorithm in eligible if algorithm.supports(ranks) and algorithm.same_bits]
        torus_dims = () if rank_groups else _torus_dims(cluster)
        eligible = [
            algorithm
            for algorithm in eligible
            if len(algorithm.axes) < 2 or _needs_any_dims_algorithm(eligible, torus_dims)
        ]
    return tuple(
        CostedAlgorithm(algorithm.name, options, program, estimate_cost(program, cluster, rank_groups))
        for algorithm in eligible
        for options in _tuned_options(algorithm, cluster, rank_groups)
        for program in [algorithm.build(ranks, **dict(options))]
    )


def _tuned_options(
    algorithm: Algorithm, cluster: Cluster, rank_groups: RankGroups | None
) -> list[tuple[tuple[str, object], ...]]:
    """The options worth trying."""
    if "pieces" in algorithm.options:
        return [(("pieces", pieces),) for pieces in PIECE_COUNTS]
    hosts = even_host_groups(cluster, rank_groups)
    if "hosts" in algorithm.options and hosts:
        return [(("hosts", hosts),)]
    dims = () if rank_groups else _torus_dims(cluster)
    return [(("dims", dims),)] if len(dims) in algorithm.axes else [()]


def _torus_dims(cluster: Cluster) -> tuple[int, ...]:
    """The dimensions of a cluster that is one whole grid, without those of length 1; none otherwise."""
    network = cluster.network
    if not isinstance(network, TorusNetwork) or network.ranks != cluster.ranks:
        return ()
    return tuple(length for length in network.dims if length > 1)


def _needs_any_dims_algorithm(eligible: Sequence[Algorithm], torus_dims: tuple[int, ...]) -> bool:
    """Whether a grid of so many dimensions is only for the algorithm that takes any number of them. One is a ring."""
    axes = len(torus_dims)
    return axes > 1 and sum(axes in algorithm.axes for algorithm in eligible) == 1


def even_host_groups(cluster: Cluster, rank_groups: RankGroups | None = None) -> int | None:
    """Into how many groups of one size the ranks of a set fall, none of which is on two hosts; None on one host, or if
    each is alone.

    These are the hosts where all are full. Of 8 and 4 ranks on two hosts there are three groups, since two of 6 would
    have ranks of both hosts in one.
    """
    rank_groups = rank_groups or (tuple(range(cluster.ranks)),)
    host_run_lengths = [
        len(list(stay))
        for one in rank_groups
        for _, stay in groupby(one, lambda rank: rank // cluster.devices_per_host)
    ]
    ranks = len(rank_groups[0])
    groups = ranks // gcd(*host_run_lengths)
    return groups if 1 < groups < ranks else None


def cheapest(
    collective: str,
    size: float,
    cluster: Cluster,
    names: tuple[str, ...] | None = None,
    rank_groups: RankGroups | None = None,
) -> CostedAlgorithm:
    """What `auto` picks for a message of so many bytes."""
    if size <= 0 and collective not in COLLECTIVES_WITHOUT_DATA:
        raise InputError(f"a message of {size} bytes: give more than 0")
    return _cheapest_of(costed_algorithms(collective, cluster, names, rank_groups), size)


def _cheapest_of(choices: Sequence[CostedAlgorithm], size: float) -> CostedAlgorithm:
    """Of those that differ by no more than rounding the one with the fewest messages."""
    seconds = [float(candidate.cost.seconds(size)) for candidate in choices]
    tie_limit = min(seconds) * TIE_RATIO
    ties = [candidate for candidate, time_s in zip(choices, seconds, strict=True) if time_s <= tie_limit]
    return min(ties, key=lambda candidate: candidate.program.message_count)


@dataclass(frozen=True)
class CheapestAlgorithmRange:
    """An algorithm is the cheapest from one size to another, in bytes."""

    candidate: CostedAlgorithm
    smallest: float
    largest: float


def cheapest_algorithm_ranges(
    collective: str,
    cluster: Cluster,
    sizes: tuple[float, float] = (1024, 2**30),
    names: tuple[str, ...] | None = None,
) -> tuple[CheapestAlgorithmRange, ...]:
    """The cheapest algorithm at every size, from small to large; between two of them lies a crossover.

    Found on a grid of six sizes per doubling and then to within a ten-thousandth by halving; what reigns for less than
    a step of the grid may not be seen.
    """
    choices = costed_algorithms(collective, cluster, names)
    low, high = log2(sizes[0]), log2(sizes[1])
    if not low < high:
        raise InputError(f"sizes {sizes[0]:.0f} to {sizes[1]:.0f}: the second must be larger than the first")
    cells = max(2, round(_GRID_CELLS_PER_DOUBLING * (high - low)))
    grid = [low + (high - low) * n / cells for n in range(cells + 1)]
    changes = [change for left, right in pairwise(grid) for change in _crossovers_between(choices, left, right)]
    starts = [(sizes[0], _cheapest_of(choices, sizes[0])), *changes]
    ends = [size for size, _ in changes] + [sizes[1]]
    return tuple(
        CheapestAlgorithmRange(candidate, start, end) for (start, candidate), end in zip(starts, ends, strict=True)
    )


_GRID_CELLS_PER_DOUBLING = 6


def _crossovers_between(
    choices: Sequence[CostedAlgorithm], left: float, right: float
) -> list[tuple[float, CostedAlgorithm]]:
    """Where between two sizes (as logarithms) another algorithm becomes the cheapest, and which."""
    cheapest_at_right = _cheapest_of(choices, exp2(right))
    if _cheapest_of(choices, exp2(left)) is cheapest_at_right:
        return []
    if right - left < 1e-4:
        return [(exp2(right), cheapest_at_right)]
    middle = (left + right) / 2
    return _crossovers_between(choices, left, middle) + _crossovers_between(choices, middle, right)
