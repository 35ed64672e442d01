"""Which algorithm is the cheapest on a cluster, for a message of this size, and at which sizes the answer changes."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, pairwise
from math import exp2, gcd, log2

from motet.cluster.cluster import Cluster
from motet.cluster.topology import TorusNetwork
from motet.collectives.cost import WITHOUT_DATA, Cost, Sets, cost
from motet.collectives.library import Algorithm, algorithms, find
from motet.collectives.score import Program
from motet.core.errors import InputError

PIECES = (1, 2, 4, 8, 16, 32, 64)
"""The numbers of pieces that are tried where an algorithm can have any."""


EQUAL = 1 + 1e-9
"""Times whose ratio is no more than this differ by rounding only."""


@dataclass(frozen=True)
class Candidate:
    """An algorithm with its options settled, as a Program, and what it costs here."""

    algorithm: str
    options: tuple[tuple[str, object], ...]
    program: Program
    cost: Cost

    def __str__(self) -> str:
        return " ".join([self.algorithm, *(f"{name}={_written(value)}" for name, value in self.options)])


def _written(value: object) -> str:
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)


@lru_cache(maxsize=64)
def candidates(
    collective: str, cluster: Cluster, names: tuple[str, ...] | None = None, sets: Sets | None = None
) -> tuple[Candidate, ...]:
    """Every algorithm that takes so many ranks; hosts and dimensions are those of the cluster.

    Unless they are asked for by name, those are left out after which ranks would hold different bits: replicas that
    differ drift apart. `sets`: those of the cluster's ranks that do it at once; all of them as one if not given.
    """
    ranks = len(sets[0]) if sets else cluster.ranks
    if ranks < 2:
        raise InputError(f"cluster {cluster.name} has {ranks} rank; a collective needs at least 2")
    found = [find(collective, name) for name in names or algorithms(collective)]
    if names:
        for algorithm in found:
            algorithm.refuse(ranks)
    else:
        found = [algorithm for algorithm in found if algorithm.takes(ranks) and algorithm.same_bits]
        grid = () if sets else _grid(cluster)
        found = [algorithm for algorithm in found if len(algorithm.axes) < 2 or _only_free_grid(found, grid)]
    return tuple(
        Candidate(algorithm.name, options, program, cost(program, cluster, sets))
        for algorithm in found
        for options in _settled(algorithm, cluster, sets)
        for program in [algorithm.build(ranks, **dict(options))]
    )


def _settled(algorithm: Algorithm, cluster: Cluster, sets: Sets | None) -> list[tuple[tuple[str, object], ...]]:
    """The options worth trying."""
    if "pieces" in algorithm.options:
        return [(("pieces", pieces),) for pieces in PIECES]
    hosts = even_hosts(cluster, sets)
    if "hosts" in algorithm.options and hosts:
        return [(("hosts", hosts),)]
    dims = () if sets else _grid(cluster)
    return [(("dims", dims),)] if len(dims) in algorithm.axes else [()]


def _grid(cluster: Cluster) -> tuple[int, ...]:
    """The dimensions of a cluster that is one whole grid, without those of length 1; none otherwise."""
    network = cluster.network
    if not isinstance(network, TorusNetwork) or network.ranks != cluster.ranks:
        return ()
    return tuple(length for length in network.dims if length > 1)


def _only_free_grid(among: Sequence[Algorithm], grid: tuple[int, ...]) -> bool:
    """Whether a grid of so many dimensions is only for the algorithm that takes any number of them. One is a ring."""
    axes = len(grid)
    return axes > 1 and sum(axes in algorithm.axes for algorithm in among) == 1


def even_hosts(cluster: Cluster, sets: Sets | None = None) -> int | None:
    """Into how many groups of one size the ranks of a set fall, none of which is on two hosts; None on one host, or if
    each is alone.

    These are the hosts where all are full. Of 8 and 4 ranks on two hosts there are three groups, since two of 6 would
    have ranks of both hosts in one.
    """
    sets = sets or (tuple(range(cluster.ranks)),)
    stays = [len(list(stay)) for one in sets for _, stay in groupby(one, lambda rank: rank // cluster.devices_per_host)]
    ranks = len(sets[0])
    groups = ranks // gcd(*stays)
    return groups if 1 < groups < ranks else None


def cheapest(
    collective: str,
    size: float,
    cluster: Cluster,
    names: tuple[str, ...] | None = None,
    sets: Sets | None = None,
) -> Candidate:
    """What `auto` picks for a message of so many bytes."""
    if size <= 0 and collective not in WITHOUT_DATA:
        raise InputError(f"a message of {size} bytes: give more than 0")
    return _first(candidates(collective, cluster, names, sets), size)


def _first(among: Sequence[Candidate], size: float) -> Candidate:
    """Of those that differ by no more than rounding the one with the fewest messages."""
    seconds = [float(candidate.cost.seconds(size)) for candidate in among]
    best = min(seconds) * EQUAL
    equals = [candidate for candidate, time_s in zip(among, seconds, strict=True) if time_s <= best]
    return min(equals, key=lambda candidate: candidate.program.messages)


@dataclass(frozen=True)
class Reign:
    """An algorithm is the cheapest from one size to another, in bytes."""

    candidate: Candidate
    smallest: float
    largest: float


def reigns(
    collective: str,
    cluster: Cluster,
    sizes: tuple[float, float] = (1024, 2**30),
    names: tuple[str, ...] | None = None,
) -> tuple[Reign, ...]:
    """The cheapest algorithm at every size, from small to large; between two of them lies a crossover.

    Found on a grid of six sizes per doubling and then to within a ten-thousandth by halving; what reigns for less than
    a step of the grid may not be seen.
    """
    among = candidates(collective, cluster, names)
    low, high = log2(sizes[0]), log2(sizes[1])
    if not low < high:
        raise InputError(f"sizes {sizes[0]:.0f} to {sizes[1]:.0f}: the second must be larger than the first")
    cells = max(2, round(_CELLS_PER_DOUBLING * (high - low)))
    grid = [low + (high - low) * n / cells for n in range(cells + 1)]
    changes = [change for left, right in pairwise(grid) for change in _changes(among, left, right)]
    starts = [(sizes[0], _first(among, sizes[0])), *changes]
    ends = [size for size, _ in changes] + [sizes[1]]
    return tuple(Reign(candidate, start, end) for (start, candidate), end in zip(starts, ends, strict=True))


_CELLS_PER_DOUBLING = 6


def _changes(among: Sequence[Candidate], left: float, right: float) -> list[tuple[float, Candidate]]:
    """Where between two sizes (as logarithms) another algorithm becomes the cheapest, and which."""
    after = _first(among, exp2(right))
    if _first(among, exp2(left)) is after:
        return []
    if right - left < 1e-4:
        return [(exp2(right), after)]
    middle = (left + right) / 2
    return _changes(among, left, middle) + _changes(among, middle, right)
