"""The cheapest algorithm on a cluster for a message size, the sizes at which it changes, and time over message size.

The steps of a Program follow one another, as motet executes them, or are pipelined; or a vendor library executes the
collective with its own algorithms, which have closed forms and no Program.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, pairwise
from math import exp2, gcd, log2
from typing import TYPE_CHECKING, Literal

from motet.cluster.cluster import Cluster, TorusNetwork
from motet.cluster.cluster_settings import Number
from motet.collectives.algorithms.rank_arithmetic import format_dims
from motet.collectives.algorithms.registry import Algorithm, algorithm_names, find_algorithm
from motet.collectives.cost.alpha_beta import COLLECTIVES_WITHOUT_DATA, CollectiveCost, RankGroups, estimate_cost
from motet.collectives.cost.cluster_fabric import VendorCosts, fabric_of
from motet.collectives.cost.group_shapes import GroupPlacement
from motet.collectives.program import Program
from motet.core.errors import check_input

if TYPE_CHECKING:
    from motet.collectives.cost.pipelined_cost import PipelinedCost

Options = tuple[tuple[str, object], ...]
Names = tuple[str, ...] | None  # Names of algorithms; None: all that leave the same bits on all ranks
Execution = Literal["steps", "pipelined", "library"]

PIECE_COUNTS = (1, 2, 4, 8, 16, 32, 64)  # Counts to try for algorithms with pieces
TIE_RATIO = 1 + 1e-9  # Times with a smaller ratio differ by rounding only
_GRID_CELLS_PER_DOUBLING = 6


@dataclass(frozen=True)
class LibraryCost:
    """The cost of one algorithm of a vendor library."""

    costs: VendorCosts
    collective: str
    placement: GroupPlacement
    algorithm: str

    def seconds(self, size: Number) -> float:
        return self.costs.time(self.collective, float(size), self.placement, algorithms=(self.algorithm,)).seconds


@dataclass(frozen=True)
class CostedAlgorithm:
    """An algorithm with fixed options, as a Program, and its cost on a cluster."""

    algorithm: str
    options: Options
    program: Program | None  # None for an algorithm of a vendor library
    cost: "CollectiveCost | PipelinedCost | LibraryCost"

    def seconds(self, size: float) -> float:
        return float(self.cost.seconds(size))

    def __str__(self) -> str:
        texts = ((name, format_dims(value) if isinstance(value, tuple) else value) for name, value in self.options)
        return " ".join([self.algorithm, *(f"{name}={text}" for name, text in texts)])


@lru_cache(maxsize=64)
def costed_algorithms(
    collective: str,
    cluster: Cluster,
    names: Names = None,
    rank_groups: RankGroups | None = None,
    *,
    execution: Execution = "steps",
) -> tuple[CostedAlgorithm, ...]:
    """Every algorithm that supports the number of ranks, with the hosts and dimensions of the cluster.

    Algorithms that leave different bits on different ranks are excluded unless `names` has them: replicas would drift.
    `rank_groups` execute the collective simultaneously; by default all ranks are one group.
    """
    ranks = len(rank_groups[0]) if rank_groups else cluster.ranks
    check_input(ranks >= 2, f"cluster {cluster.name} has {ranks} rank; a collective needs at least 2")
    if execution == "library":
        assert rank_groups is None
        return _library_algorithms(collective, cluster, names)
    torus_dims = () if rank_groups else _torus_dims(cluster)
    eligible = [find_algorithm(collective, name) for name in names or algorithm_names(collective)]
    if names:
        for algorithm in eligible:
            algorithm.check_ranks(ranks)
    else:
        eligible = [algorithm for algorithm in eligible if algorithm.supports(ranks) and algorithm.same_bits]
        axes = len(torus_dims)
        # An algorithm with any number of dimensions is for grids without a specific algorithm; one dimension is a ring.
        uses_any_dims = axes > 1 and sum(axes in algorithm.axes for algorithm in eligible) == 1
        eligible = [algorithm for algorithm in eligible if len(algorithm.axes) < 2 or uses_any_dims]
    hosts = even_host_groups(cluster, rank_groups)
    is_pipelined = execution == "pipelined"
    estimate = _pipelined_estimate() if is_pipelined else estimate_cost
    return tuple(
        CostedAlgorithm(algorithm.name, options, program, estimate(program, cluster, rank_groups))
        for algorithm in eligible
        for options in _tuned_options(algorithm, hosts, torus_dims, is_pipelined=is_pipelined)
        for program in [algorithm.build(ranks, **dict(options))]
    )


def _pipelined_estimate() -> "Callable[[Program, Cluster, RankGroups | None], PipelinedCost]":
    from motet.collectives.cost.pipelined_cost import estimate_pipelined_cost  # It needs numpy

    return estimate_pipelined_cost


def _library_algorithms(collective: str, cluster: Cluster, names: Names) -> tuple[CostedAlgorithm, ...]:
    costs = VendorCosts(fabric_of(cluster))
    placement = GroupPlacement(cluster.ranks, min(cluster.ranks, cluster.devices_per_host))
    possible = [shape.algorithm for shape in costs.shapes(collective, placement)]
    unknown = [name for name in names or () if name not in possible]
    text = f"the library does not run {collective} with {', '.join(unknown)} on cluster {cluster.name}"
    check_input(not unknown, f"{text}; give {', '.join(possible)}")
    return tuple(
        CostedAlgorithm(name, (), None, LibraryCost(costs, collective, placement, name)) for name in names or possible
    )


def _tuned_options(
    algorithm: Algorithm, hosts: int | None, torus_dims: tuple[int, ...], *, is_pipelined: bool
) -> list[Options]:
    if "pieces" in algorithm.options and is_pipelined:
        return [(("pieces", 1),)]  # The pipeline itself cuts the message
    if "pieces" in algorithm.options:
        return [(("pieces", pieces),) for pieces in PIECE_COUNTS]
    if "hosts" in algorithm.options and hosts:
        return [(("hosts", hosts),)]
    return [(("dims", torus_dims),)] if len(torus_dims) in algorithm.axes else [()]


def _torus_dims(cluster: Cluster) -> tuple[int, ...]:
    network = cluster.network
    if not isinstance(network, TorusNetwork) or network.ranks != cluster.ranks:
        return ()
    return tuple(length for length in network.dims if length > 1)


def even_host_groups(cluster: Cluster, rank_groups: RankGroups | None = None) -> int | None:
    """The number of equal parts of a rank group, none on two hosts; None for one part or one rank per part.

    The parts are the hosts if all are full. 8 and 4 ranks on two hosts are three parts, since a part of 6 would have
    ranks of both hosts.
    """
    rank_groups = rank_groups or (tuple(range(cluster.ranks)),)
    per_host = cluster.devices_per_host
    host_runs = (run for group in rank_groups for _, run in groupby(group, lambda rank: rank // per_host))
    ranks = len(rank_groups[0])
    groups = ranks // gcd(*(len(list(run)) for run in host_runs))
    return groups if 1 < groups < ranks else None


def cheapest(
    collective: str,
    size: float,
    cluster: Cluster,
    names: Names = None,
    rank_groups: RankGroups | None = None,
    *,
    execution: Execution = "steps",
) -> CostedAlgorithm:
    """The algorithm that `auto` selects for a message of `size` bytes."""
    check_input(size > 0 or collective in COLLECTIVES_WITHOUT_DATA, f"a message of {size} bytes: give more than 0")
    return _cheapest_of(costed_algorithms(collective, cluster, names, rank_groups, execution=execution), size)


def _cheapest_of(choices: Sequence[CostedAlgorithm], size: float) -> CostedAlgorithm:
    """The cheapest one; of several that differ by rounding only, the one with the fewest messages."""
    seconds = [candidate.seconds(size) for candidate in choices]
    tie_limit = min(seconds) * TIE_RATIO
    ties = [candidate for candidate, time_s in zip(choices, seconds, strict=True) if time_s <= tie_limit]
    return min(ties, key=lambda candidate: candidate.program.message_count if candidate.program else 0)


def _changes_between(
    choices: Sequence[CostedAlgorithm], left: float, right: float
) -> list[tuple[float, CostedAlgorithm]]:
    after = _cheapest_of(choices, exp2(right))
    if _cheapest_of(choices, exp2(left)) is after:
        return []
    if right - left < 1e-4:
        return [(exp2(right), after)]
    middle = (left + right) / 2
    return _changes_between(choices, left, middle) + _changes_between(choices, middle, right)


@dataclass(frozen=True)
class AlgorithmTimeCurve:
    """The predicted time of an algorithm at each size, with the best options for that size."""

    algorithm: str
    seconds: tuple[float, ...]
    best_candidates: tuple[CostedAlgorithm, ...]


@dataclass(frozen=True)
class AlgorithmCrossover:
    """The size from which another algorithm is the cheapest."""

    size: float
    before: str
    after: str


def time_curves(
    collective: str,
    cluster: Cluster,
    sizes: Sequence[float],
    names: Names = None,
    *,
    execution: Execution = "steps",
) -> list[AlgorithmTimeCurve]:
    """The curves of all algorithms that support the number of ranks, or of `names`."""
    by_name: dict[str, list[CostedAlgorithm]] = {}
    for candidate in costed_algorithms(collective, cluster, names, execution=execution):
        by_name.setdefault(candidate.algorithm, []).append(candidate)
    curves = []
    for name, variants in by_name.items():
        best = [min(variants, key=lambda candidate: candidate.seconds(size)) for size in sizes]
        curves.append(AlgorithmTimeCurve(name, tuple(map(CostedAlgorithm.seconds, best, sizes)), tuple(best)))
    return curves


def crossovers(
    collective: str,
    cluster: Cluster,
    smallest: float,
    largest: float,
    names: Names = None,
    *,
    execution: Execution = "steps",
) -> list[AlgorithmCrossover]:
    """The sizes at which the cheapest algorithm changes; a change of its options is not a crossover.

    A grid of six sizes per doubling finds the crossovers, and bisection their sizes to within a ten-thousandth. An
    algorithm that is the cheapest over less than a step of the grid may be missed.
    """
    if not smallest < largest:
        return []
    choices = costed_algorithms(collective, cluster, names, execution=execution)
    low, high = log2(smallest), log2(largest)
    cells = max(2, round(_GRID_CELLS_PER_DOUBLING * (high - low)))
    grid = [low + (high - low) * n / cells for n in range(cells + 1)]
    changes = [change for left, right in pairwise(grid) for change in _changes_between(choices, left, right)]
    steps = pairwise([(smallest, _cheapest_of(choices, smallest)), *changes])
    pairs = ((size, before.algorithm, after.algorithm) for (_, before), (size, after) in steps)
    return [AlgorithmCrossover(size, before, after) for size, before, after in pairs if before != after]


def log_spaced_sizes(smallest: float, largest: float, points: int) -> list[float]:
    """Sizes at equal distances on a logarithmic scale."""
    return [smallest * (largest / smallest) ** (n / (points - 1)) for n in range(points)]
