"""Time over message size of the algorithms of a collective on a cluster, and their crossovers."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from motet.cluster.cluster import Cluster
from motet.collectives.cost.cheapest_algorithm import CostedAlgorithm, cheapest_algorithm_ranges, costed_algorithms


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
    collective: str, cluster: Cluster, sizes: Sequence[float], names: tuple[str, ...] | None = None
) -> list[AlgorithmTimeCurve]:
    """The curves of all algorithms that support the number of ranks, or of `names`."""
    by_name: dict[str, list[CostedAlgorithm]] = {}
    for candidate in costed_algorithms(collective, cluster, names):
        by_name.setdefault(candidate.algorithm, []).append(candidate)
    sweep = []
    for name, variants in by_name.items():
        best = [min(variants, key=lambda candidate: candidate.seconds(size)) for size in sizes]
        seconds = tuple(candidate.seconds(size) for candidate, size in zip(best, sizes, strict=True))
        sweep.append(AlgorithmTimeCurve(name, seconds, tuple(best)))
    return sweep


def crossovers(
    collective: str, cluster: Cluster, smallest: float, largest: float, names: tuple[str, ...] | None = None
) -> list[AlgorithmCrossover]:
    """The sizes at which the cheapest algorithm changes; a change of its options is no crossover."""
    if not smallest < largest:
        return []
    ranges = cheapest_algorithm_ranges(collective, cluster, (smallest, largest), names)
    pairs = ((after.smallest, a.candidate.algorithm, after.candidate.algorithm) for a, after in pairwise(ranges))
    return [AlgorithmCrossover(size, before, after) for size, before, after in pairs if before != after]


def log_spaced_sizes(smallest: float, largest: float, points: int) -> list[float]:
    """Sizes at equal distances on a logarithmic scale."""
    return [smallest * (largest / smallest) ** (n / (points - 1)) for n in range(points)]
