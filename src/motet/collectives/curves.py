"""Time over message size of the algorithms of a collective on a cluster, their crossovers, and a plot as text."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import log

from motet.cluster.cluster import Cluster
from motet.collectives.choose import Candidate, candidates, reigns
from motet.collectives.draw import columns
from motet.core.units import format_bytes


@dataclass(frozen=True)
class Curve:
    """The predicted time of an algorithm at each size, with those options that are best there."""

    algorithm: str
    seconds: tuple[float, ...]
    best: tuple[Candidate, ...]


@dataclass(frozen=True)
class Crossover:
    """From this size on another algorithm is the cheapest."""

    size: float
    before: str
    after: str


def curves(
    collective: str, cluster: Cluster, sizes: Sequence[float], names: tuple[str, ...] | None = None
) -> list[Curve]:
    """Of all algorithms that the ranks can take, or of those that are named."""
    by_name: dict[str, list[Candidate]] = {}
    for candidate in candidates(collective, cluster, names):
        by_name.setdefault(candidate.algorithm, []).append(candidate)
    found = []
    for name, among in by_name.items():
        best = [min(among, key=lambda candidate: _seconds(candidate, size)) for size in sizes]
        seconds = tuple(_seconds(candidate, size) for candidate, size in zip(best, sizes, strict=True))
        found.append(Curve(name, seconds, tuple(best)))
    return found


def _seconds(candidate: Candidate, size: float) -> float:
    return float(candidate.cost.seconds(size))


def crossovers(
    collective: str, cluster: Cluster, smallest: float, largest: float, names: tuple[str, ...] | None = None
) -> list[Crossover]:
    """Where one algorithm takes over from another. That the best number of pieces changes is no crossover."""
    if not smallest < largest:
        return []
    found = reigns(collective, cluster, (smallest, largest), names)
    pairs = ((after.smallest, a.candidate.algorithm, after.candidate.algorithm) for a, after in pairwise(found))
    return [Crossover(size, before, after) for size, before, after in pairs if before != after]


def grid(smallest: float, largest: float, points: int) -> list[float]:
    """Sizes as far from each other on a logarithmic scale."""
    return [smallest * (largest / smallest) ** (n / (points - 1)) for n in range(points)]


def format_seconds(seconds: float) -> str:
    """`3.1 us`, `12.5 ms`, `1.25 s`: three digits whatever the size."""
    for unit, name in ((1e-6, "us"), (1e-3, "ms")):
        if seconds < 999.5 * unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds:.3g} s"


_ROWS = 16
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def plot(found: Sequence[Curve], sizes: Sequence[float], crossed: Sequence[Crossover]) -> list[str]:
    """Both scales are logarithmic. A letter for each algorithm, a capital for the cheapest, which hides others."""
    low = min(min(curve.seconds) for curve in found)
    high = max(max(curve.seconds) for curve in found)

    def row(seconds: float) -> int:
        return round((_ROWS - 1) * log(seconds / low) / max(log(high / low), 1e-9))

    cells = [[" "] * len(sizes) for _ in range(_ROWS)]
    for x in range(len(sizes)):
        ordered = sorted(zip(found, _LETTERS, strict=False), key=lambda pair: -pair[0].seconds[x])
        for curve, letter in ordered:
            cells[row(curve.seconds[x])][x] = letter.upper() if curve is ordered[-1][0] else letter
    labels = {_ROWS - 1: format_seconds(high), 0: format_seconds(low)}
    lines = [f"{labels.get(y, ''):>10} |{''.join(cells[y]).rstrip()}" for y in reversed(range(_ROWS))]
    marks = [" "] * len(sizes)
    for crossover in crossed:
        marks[min(range(len(sizes)), key=lambda x: abs(log(sizes[x] / crossover.size)))] = "^"
    ends = format_bytes(sizes[0]), format_bytes(sizes[-1])
    lines += [
        f"{'':10} +{'-' * len(sizes)}",
        f"{'':12}{''.join(marks)}".rstrip(),
        f"{'':12}{ends[0]}{ends[1]:>{len(sizes) - len(ends[0])}}",
    ]
    names = [f"{letter} {curve.algorithm}" for curve, letter in zip(found, _LETTERS, strict=False)]
    names += [""] * (-len(names) % 3)
    return lines + columns([names[n : n + 3] for n in range(0, len(names), 3)])
