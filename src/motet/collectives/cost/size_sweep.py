"""Time over message size of the algorithms of a collective on a cluster, their crossovers, and a plot as text."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import log

from motet.cluster.cluster import Cluster
from motet.collectives.cost.cheapest_algorithm import CostedAlgorithm, cheapest_algorithm_ranges, costed_algorithms
from motet.collectives.draw.frames import align_columns
from motet.core.units import format_bytes


@dataclass(frozen=True)
class AlgorithmTimeCurve:
    """The predicted time of an algorithm at each size, with those options that are best there."""

    algorithm: str
    seconds: tuple[float, ...]
    best_candidates: tuple[CostedAlgorithm, ...]


@dataclass(frozen=True)
class AlgorithmCrossover:
    """From this size on another algorithm is the cheapest."""

    size: float
    before: str
    after: str


def time_curves(
    collective: str, cluster: Cluster, sizes: Sequence[float], names: tuple[str, ...] | None = None
) -> list[AlgorithmTimeCurve]:
    """Of all algorithms that the ranks can take, or of those that are named."""
    by_name: dict[str, list[CostedAlgorithm]] = {}
    for candidate in costed_algorithms(collective, cluster, names):
        by_name.setdefault(candidate.algorithm, []).append(candidate)
    sweep = []
    for name, variants in by_name.items():
        best = [min(variants, key=lambda candidate: _seconds(candidate, size)) for size in sizes]
        seconds = tuple(_seconds(candidate, size) for candidate, size in zip(best, sizes, strict=True))
        sweep.append(AlgorithmTimeCurve(name, seconds, tuple(best)))
    return sweep


def _seconds(candidate: CostedAlgorithm, size: float) -> float:
    return float(candidate.cost.seconds(size))


def crossovers(
    collective: str, cluster: Cluster, smallest: float, largest: float, names: tuple[str, ...] | None = None
) -> list[AlgorithmCrossover]:
    """Where one algorithm takes over from another. That the best number of pieces changes is no crossover."""
    if not smallest < largest:
        return []
    ranges = cheapest_algorithm_ranges(collective, cluster, (smallest, largest), names)
    pairs = ((after.smallest, a.candidate.algorithm, after.candidate.algorithm) for a, after in pairwise(ranges))
    return [AlgorithmCrossover(size, before, after) for size, before, after in pairs if before != after]


def log_spaced_sizes(smallest: float, largest: float, points: int) -> list[float]:
    """Sizes as far from each other on a logarithmic scale."""
    return [smallest * (largest / smallest) ** (n / (points - 1)) for n in range(points)]


def format_seconds(seconds: float) -> str:
    """`3.1 us`, `12.5 ms`, `1.25 s`: three digits whatever the size."""
    for unit, name in ((1e-6, "us"), (1e-3, "ms")):
        if seconds < 999.5 * unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds:.3g} s"


_PLOT_ROWS = 16
_CURVE_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def ascii_plot(
    curves: Sequence[AlgorithmTimeCurve], sizes: Sequence[float], crossings: Sequence[AlgorithmCrossover]
) -> list[str]:
    """Both scales are logarithmic. A letter for each algorithm, a capital for the cheapest, which hides others."""
    low = min(min(curve.seconds) for curve in curves)
    high = max(max(curve.seconds) for curve in curves)

    def row(seconds: float) -> int:
        return round((_PLOT_ROWS - 1) * log(seconds / low) / max(log(high / low), 1e-9))

    cells = [[" "] * len(sizes) for _ in range(_PLOT_ROWS)]
    for x in range(len(sizes)):
        ordered = sorted(zip(curves, _CURVE_LETTERS, strict=False), key=lambda pair: -pair[0].seconds[x])
        for curve, letter in ordered:
            cells[row(curve.seconds[x])][x] = letter.upper() if curve is ordered[-1][0] else letter
    labels = {_PLOT_ROWS - 1: format_seconds(high), 0: format_seconds(low)}
    lines = [f"{labels.get(y, ''):>10} |{''.join(cells[y]).rstrip()}" for y in reversed(range(_PLOT_ROWS))]
    marks = [" "] * len(sizes)
    for crossover in crossings:
        marks[min(range(len(sizes)), key=lambda x: abs(log(sizes[x] / crossover.size)))] = "^"
    ends = format_bytes(sizes[0]), format_bytes(sizes[-1])
    lines += [
        f"{'':10} +{'-' * len(sizes)}",
        f"{'':12}{''.join(marks)}".rstrip(),
        f"{'':12}{ends[0]}{ends[1]:>{len(sizes) - len(ends[0])}}",
    ]
    names = [f"{letter} {curve.algorithm}" for curve, letter in zip(curves, _CURVE_LETTERS, strict=False)]
    names += [""] * (-len(names) % 3)
    return lines + align_columns([names[n : n + 3] for n in range(0, len(names), 3)])
