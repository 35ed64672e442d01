"""How long a Program takes on a Cluster: alpha-beta-gamma along the links that its messages really cross.

Steps follow one another. In a step every port carries its messages in turn, each for its start-up (alpha) and its bytes
(beta); a link in between carries the bytes of all that crosses it; the step ends when the busiest link and then the
busiest adder (gamma) are done. What is left out: ranks that run ahead of others into the next step.
"""

from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache

from motet.cluster.cluster import Cluster
from motet.collectives.library.registry import Number
from motet.collectives.score import Program, Step
from motet.core.errors import InputError


@dataclass(frozen=True)
class Load:
    """What one link has to do in a step: it takes `fixed_s + per_byte_s * S`."""

    link: str
    fixed_s: Number
    per_byte_s: Number

    def seconds(self, size: Number) -> Number:
        return self.fixed_s + self.per_byte_s * size


@dataclass(frozen=True)
class StepCost:
    """What a step costs, for messages of any size."""

    latency_s: Number
    loads: tuple[Load, ...]
    """Of the links that are the busiest at some size."""
    adding_s_per_byte: Number

    def seconds(self, size: Number) -> Number:
        return self.latency_s + self.busiest(size).seconds(size) + self.adding_s_per_byte * size

    def busiest(self, size: Number) -> Load:
        return max(self.loads, key=lambda load: load.seconds(size))


@dataclass(frozen=True)
class Cost:
    """What a Program costs on a Cluster, for messages of any size in bytes."""

    steps: tuple[StepCost, ...]

    def seconds(self, size: Number) -> Number:
        return sum((times * step.seconds(size) for step, times in self._times.items()), start=Fraction(0))

    @cached_property
    def _times(self) -> Counter[StepCost]:
        """How often each step is there: many cost the same."""
        return Counter(self.steps)


Sets = tuple[tuple[int, ...], ...]
"""Equally many ranks of a cluster in each; no rank is in two."""


def cost(program: Program, cluster: Cluster, sets: Sets | None = None) -> Cost:
    """Of sets of ranks that all play it at once: rank i of the Program is the i-th of each; of the cluster, if not
    given."""
    sets = sets or (tuple(range(program.ranks)),)
    if max(map(max, sets)) >= cluster.ranks:
        raise InputError(
            f"{program} does not fit on cluster {cluster.name}, which has {cluster.ranks} ranks; give it more hosts"
        )
    crossing = _Crossing(program.whole, cluster)
    return Cost(tuple(crossing.step(_moved(program, step, sets)) for step in program.steps if step))


_Moved = tuple[tuple[int, int, int, int], ...]
"""What a step moves: (src, dst, relative size, how much of it is added). Many steps move alike, with other chunks."""


def _moved(program: Program, step: Step, sets: Sets) -> _Moved:
    weights: dict[tuple[int, int], list[int]] = {}
    for t in step:
        both = weights.setdefault((t.src, t.dst), [0, 0])
        weight = program.weight(t)
        both[0] += weight
        both[1] += weight if t.op == "reduce" else 0
    return tuple(
        sorted((one[src], one[dst], weight, added) for (src, dst), (weight, added) in weights.items() for one in sets)
    )


class _Crossing:
    """The steps of a Program on a cluster. Each route, and each pattern of messages, is worked out once."""

    def __init__(self, whole: int, cluster: Cluster) -> None:
        self._whole = whole
        self._cluster = cluster
        self._route = lru_cache(maxsize=None)(cluster.route)
        self._latency_s = lru_cache(maxsize=None)(cluster.latency_s)
        self.step = lru_cache(maxsize=None)(self._cost)

    def _cost(self, moved: _Moved) -> StepCost:
        weights: Counter[str] = Counter()
        counts: Counter[str] = Counter()
        adding: Counter[int] = Counter()
        for src, dst, weight, added in moved:
            for link in self._route(src, dst):
                weights[link] += weight
                counts[link] += 1
            adding[dst] += added
        latency = max(self._latency_s(src, dst) for src, dst, _, _ in moved)
        loads = [_load(link, counts[link], Fraction(weights[link], self._whole), self._cluster) for link in weights]
        gamma = self._cluster.gamma_s_per_byte.value
        return StepCost(latency, _hull(loads), Fraction(max(adding.values()), self._whole) * gamma)


def _load(name: str, flows: int, share: Fraction, cluster: Cluster) -> Load:
    link = cluster.link(name)
    if link.is_port:
        return Load(name, flows * link.alpha_s.value, share / link.bandwidth_Bps.value)
    return Load(name, 0, share * cluster.imbalance(name, flows) / link.bandwidth_Bps.value)


def _hull(loads: list[Load]) -> tuple[Load, ...]:
    """Those that no other is at least as slow as at every size."""
    kept: list[Load] = []
    for load in sorted(loads, key=lambda load: (-load.per_byte_s, -load.fixed_s)):
        if not kept or load.fixed_s > max(other.fixed_s for other in kept):
            kept.append(load)
    return tuple(kept)


WITHOUT_DATA = ("barrier", "signal")
"""Only tokens travel: these cost what a message of no bytes does."""


def bus_factor(collective: str, ranks: int) -> Fraction:
    """Bus bandwidth as nccl-tests defines it is this times S / time: what each rank's link carries at least.

    So it can be compared with the speed of the hardware, whatever the collective and the number of ranks.
    """
    if collective == "all-reduce":
        return Fraction(2 * (ranks - 1), ranks)
    if collective in ("reduce-scatter", "all-gather", "all-to-all", "gather", "scatter"):
        return Fraction(ranks - 1, ranks)
    return Fraction(1)
