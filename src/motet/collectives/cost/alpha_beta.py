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
from motet.collectives.algorithms.registry import Number
from motet.collectives.program import Program, Step
from motet.core.errors import InputError


@dataclass(frozen=True)
class LinkLoad:
    """What one link has to do in a step: it takes `fixed_s + per_byte_s * S`."""

    link: str
    fixed_s: Number
    per_byte_s: Number

    def seconds(self, size: Number) -> Number:
        return self.fixed_s + self.per_byte_s * size


@dataclass(frozen=True)
class CollectiveStepCost:
    """What a step costs, for messages of any size."""

    latency_s: Number
    busiest_links: tuple[LinkLoad, ...]  # Of the links that are the busiest at some size
    reduction_s_per_byte: Number

    def seconds(self, size: Number) -> Number:
        return self.latency_s + self.busiest_link(size).seconds(size) + self.reduction_s_per_byte * size

    def busiest_link(self, size: Number) -> LinkLoad:
        return max(self.busiest_links, key=lambda load: load.seconds(size))


@dataclass(frozen=True)
class CollectiveCost:
    """What a Program costs on a Cluster, for messages of any size in bytes."""

    steps: tuple[CollectiveStepCost, ...]

    def seconds(self, size: Number) -> Number:
        return sum((times * step.seconds(size) for step, times in self._step_counts.items()), start=Fraction(0))

    @cached_property
    def _step_counts(self) -> Counter[CollectiveStepCost]:
        """How often each step is there: many cost the same."""
        return Counter(self.steps)


RankGroups = tuple[tuple[int, ...], ...]  # Equally many ranks of a cluster in each; no rank is in two


def estimate_cost(program: Program, cluster: Cluster, rank_groups: RankGroups | None = None) -> CollectiveCost:
    """Of sets of ranks that all play it at once: rank i of the Program is the i-th of each; of the cluster, if not
    given."""
    rank_groups = rank_groups or (tuple(range(program.ranks)),)
    if max(map(max, rank_groups)) >= cluster.ranks:
        raise InputError(
            f"{program} does not fit on cluster {cluster.name}, which has {cluster.ranks} ranks; give it more hosts"
        )
    step_costs = _CollectiveStepCostCalculator(program.message_size_units, cluster)
    return CollectiveCost(
        tuple(step_costs.step_cost(_step_traffic(program, step, rank_groups)) for step in program.steps if step)
    )


# What a step moves: (src, dst, relative size, how much of it is added). Many steps move alike, with other chunks.
_StepTraffic = tuple[tuple[int, int, int, int], ...]


def _step_traffic(program: Program, step: Step, rank_groups: RankGroups) -> _StepTraffic:
    pair_sizes: dict[tuple[int, int], list[int]] = {}
    for t in step:
        moved_and_reduced = pair_sizes.setdefault((t.src, t.dst), [0, 0])
        size = program.relative_size(t)
        moved_and_reduced[0] += size
        moved_and_reduced[1] += size if t.op == "reduce" else 0
    return tuple(
        sorted(
            (one[src], one[dst], weight, added)
            for (src, dst), (weight, added) in pair_sizes.items()
            for one in rank_groups
        )
    )


class _CollectiveStepCostCalculator:
    """The steps of a Program on a cluster. Each route, and each pattern of messages, is worked out once."""

    def __init__(self, message_size_units: int, cluster: Cluster) -> None:
        self._message_size_units = message_size_units
        self._cluster = cluster
        self._route = lru_cache(maxsize=None)(cluster.route)
        self._latency_s = lru_cache(maxsize=None)(cluster.latency_s)
        self.step_cost = lru_cache(maxsize=None)(self._compute_step_cost)

    def _compute_step_cost(self, traffic: _StepTraffic) -> CollectiveStepCost:
        link_sizes: Counter[str] = Counter()
        link_flows: Counter[str] = Counter()
        reduced_sizes: Counter[int] = Counter()
        for src, dst, size, added in traffic:
            for link in self._route(src, dst):
                link_sizes[link] += size
                link_flows[link] += 1
            reduced_sizes[dst] += added
        latency = max(self._latency_s(src, dst) for src, dst, _, _ in traffic)
        loads = [
            _link_load(link, link_flows[link], Fraction(link_sizes[link], self._message_size_units), self._cluster)
            for link in link_sizes
        ]
        gamma = self._cluster.gamma_s_per_byte.value
        return CollectiveStepCost(
            latency, _upper_envelope(loads), Fraction(max(reduced_sizes.values()), self._message_size_units) * gamma
        )


def _link_load(name: str, flows: int, message_fraction: Fraction, cluster: Cluster) -> LinkLoad:
    link = cluster.link(name)
    if link.is_port:
        return LinkLoad(name, flows * link.alpha_s.value, message_fraction / link.bandwidth_Bps.value)
    return LinkLoad(name, 0, message_fraction * cluster.imbalance(name, flows) / link.bandwidth_Bps.value)


def _upper_envelope(loads: list[LinkLoad]) -> tuple[LinkLoad, ...]:
    """Those that no other is at least as slow as at every size."""
    envelope: list[LinkLoad] = []
    for load in sorted(loads, key=lambda load: (-load.per_byte_s, -load.fixed_s)):
        if not envelope or load.fixed_s > max(other.fixed_s for other in envelope):
            envelope.append(load)
    return tuple(envelope)


COLLECTIVES_WITHOUT_DATA = ("barrier", "signal")  # Only tokens travel: these cost what a message of no bytes does


def bus_bandwidth_factor(collective: str, ranks: int) -> Fraction:
    """Bus bandwidth as nccl-tests defines it is this times S / time: what each rank's link carries at least.

    So it can be compared with the speed of the hardware, whatever the collective and the number of ranks.
    """
    if collective == "all-reduce":
        return Fraction(2 * (ranks - 1), ranks)
    if collective in ("reduce-scatter", "all-gather", "all-to-all", "gather", "scatter"):
        return Fraction(ranks - 1, ranks)
    return Fraction(1)
