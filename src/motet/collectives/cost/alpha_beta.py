"""The time of a Program on a Cluster: alpha-beta-gamma along the links that its messages cross.

Steps follow one another. In a step every port carries its messages in turn, each with its start-up (alpha) and its
bytes (beta). A link in between carries the bytes of all messages that cross it. The step ends when the busiest link and
then the busiest adder (gamma) are done. The model ignores ranks that run ahead into the next step.
"""

from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, cached_property, lru_cache

from motet.cluster.cluster import Cluster
from motet.cluster.cluster_settings import Number
from motet.collectives.program import Program, Step
from motet.core.errors import check_input

COLLECTIVES_WITHOUT_DATA = ("barrier", "signal")  # Only tokens travel, at the cost of a message of 0 bytes

RankGroups = tuple[tuple[int, ...], ...]  # Disjoint groups of equally many ranks of a cluster

# (src, dst, relative size, size of the added part) of a step's messages. Many steps differ only in their chunks.
StepTraffic = tuple[tuple[int, int, int, int], ...]


@dataclass(frozen=True)
class LinkLoad:
    """The work of one link in a step, which takes `fixed_s + per_byte_s * S`."""

    fixed_s: Number
    per_byte_s: Number

    def seconds(self, size: Number) -> Number:
        return self.fixed_s + self.per_byte_s * size


@dataclass(frozen=True)
class CollectiveStepCost:
    """The cost of a step, for messages of any size."""

    latency_s: Number
    busiest_links: tuple[LinkLoad, ...]  # The links that are the busiest at some size
    reduction_s_per_byte: Number

    def seconds(self, size: Number) -> Number:
        longest_s = max(load.seconds(size) for load in self.busiest_links)
        return self.latency_s + longest_s + self.reduction_s_per_byte * size


@dataclass(frozen=True)
class CollectiveCost:
    """The cost of a Program on a Cluster, for messages of any size in bytes."""

    steps: tuple[CollectiveStepCost, ...]

    def seconds(self, size: Number) -> Number:
        return sum((times * step.seconds(size) for step, times in self._step_counts.items()), start=Fraction(0))

    @cached_property
    def _step_counts(self) -> Counter[CollectiveStepCost]:
        return Counter(self.steps)


def estimate_cost(program: Program, cluster: Cluster, rank_groups: RankGroups | None = None) -> CollectiveCost:
    """The cost if all groups, by default the first ranks alone, execute the Program: its rank i is the i-th of each."""
    groups = rank_groups or (tuple(range(program.ranks)),)
    check_groups(program, cluster, groups)
    message_size, gamma = program.message_size_units, cluster.gamma_s_per_byte.value
    route, latency_s = lru_cache(maxsize=None)(cluster.route), lru_cache(maxsize=None)(cluster.latency_s)

    @cache
    def step_cost(traffic: StepTraffic) -> CollectiveStepCost:
        sizes: Counter[str] = Counter()
        flows: Counter[str] = Counter()
        added_sizes: Counter[int] = Counter()
        for src, dst, size, added in traffic:
            for link in route(src, dst):
                sizes[link] += size
                flows[link] += 1
            added_sizes[dst] += added
        loads = [_link_load(link, flows[link], Fraction(sizes[link], message_size), cluster) for link in sizes]
        longest_s = max(latency_s(src, dst) for src, dst, _, _ in traffic)
        reduction_s_per_byte = Fraction(max(added_sizes.values()), message_size) * gamma
        return CollectiveStepCost(longest_s, upper_envelope(loads), reduction_s_per_byte)

    return CollectiveCost(tuple(step_cost(step_traffic(program, step, groups)) for step in program.steps if step))


def check_groups(program: Program, cluster: Cluster, rank_groups: RankGroups) -> None:
    """Raise an `InputError` if the cluster has too few ranks."""
    size_text = f"cluster {cluster.name}, which has {cluster.ranks} ranks"
    fits = max(map(max, rank_groups)) < cluster.ranks
    check_input(fits, f"{program} does not fit on {size_text}; give it more hosts")


def step_traffic(program: Program, step: Step, rank_groups: RankGroups) -> StepTraffic:
    """The messages of a step, of all groups."""
    sizes: Counter[tuple[int, int]] = Counter()
    added_sizes: Counter[tuple[int, int]] = Counter()
    for t in step:
        size = program.relative_size(t)
        sizes[t.src, t.dst] += size
        added_sizes[t.src, t.dst] += size if t.op == "reduce" else 0
    pairs = ((group, pair) for pair in sizes for group in rank_groups)
    return tuple(sorted((group[p[0]], group[p[1]], sizes[p], added_sizes[p]) for group, p in pairs))


def _link_load(name: str, flows: int, message_fraction: Fraction, cluster: Cluster) -> LinkLoad:
    link = cluster.link(name)
    if link.is_port:
        return LinkLoad(flows * link.alpha_s.value, message_fraction / link.bandwidth_Bps.value)
    return LinkLoad(0, message_fraction * link.imbalance(flows) / link.bandwidth_Bps.value)


def upper_envelope(loads: list[LinkLoad]) -> tuple[LinkLoad, ...]:
    """The loads that take the longest at some size."""
    envelope: list[LinkLoad] = []
    for load in sorted(loads, key=lambda load: (-load.per_byte_s, -load.fixed_s)):
        if not envelope or load.fixed_s > max(other.fixed_s for other in envelope):
            envelope.append(load)
    return tuple(envelope)


def bus_bandwidth_factor(collective: str, ranks: int) -> Fraction:
    """Bus bandwidth, as nccl-tests defines it, over S / time: the part of S that each rank's link carries at least."""
    if collective == "all-reduce":
        return Fraction(2 * (ranks - 1), ranks)
    if collective in ("reduce-scatter", "all-gather", "all-to-all", "gather", "scatter"):
        return Fraction(ranks - 1, ranks)
    return Fraction(1)
