"""The time of a Program whose message is cut into pieces that are in flight simultaneously, over several channels.

In a piece a rank sends each received chunk once its ports are free, and waits for no other rank. The next piece
follows once the busiest link has carried all that it carries of one piece: the time is that of the first piece plus
the busiest link's time for each other one. Each channel executes the Program with a part of the message, and with the
ranks of every host rotated, so that it leaves the host over another NIC.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from motet.cluster.cluster import Cluster
from motet.cluster.cluster_settings import NetworkLink, Number
from motet.collectives.cost.alpha_beta import (
    CollectiveCost,
    LinkLoad,
    RankGroups,
    StepTraffic,
    check_groups,
    estimate_cost,
    step_traffic,
    upper_envelope,
)
from motet.collectives.cost.cluster_fabric import FabricSpec
from motet.collectives.cost.group_shapes import LIBRARY, PROTOCOLS, Protocol
from motet.collectives.program import Program, Step, group_by_pair

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]

_PIECE_COUNTS = tuple(2**power for power in range(21))


@dataclass(frozen=True)
class PipelinedSchedule:
    """The first piece and the period of the others, for messages of any size and any number of pieces."""

    first: LinkLoad
    period: tuple[LinkLoad, ...]  # The links that are the busiest over all steps, at some size

    def seconds(self, size: Number) -> float:
        """The time with the best number of pieces."""
        return min(self._seconds_of_pieces(float(size), pieces) for pieces in _PIECE_COUNTS)

    def _seconds_of_pieces(self, size: float, pieces: int) -> float:
        period_s = max(load.seconds(size / pieces) for load in self.period)
        return float(self.first.seconds(size / pieces) + (pieces - 1) * period_s)


@dataclass(frozen=True)
class PipelinedCost:
    """The fastest of several schedules: with one or more channels, step after step or, in a library, by protocol."""

    schedules: tuple[PipelinedSchedule | CollectiveCost, ...]

    def seconds(self, size: Number) -> float:
        return min(float(schedule.seconds(size)) for schedule in self.schedules)


def estimate_pipelined_cost(
    program: Program, cluster: Cluster, rank_groups: RankGroups | None = None, *, fabric: FabricSpec | None = None
) -> PipelinedCost:
    """The cost if all groups execute the Program; with the constants of a vendor library if it has a fabric.

    Without a fabric each message occupies its ports for their start-up, as in the cost of whole steps.
    """
    groups = rank_groups or (tuple(range(program.ranks)),)
    check_groups(program, cluster, groups)
    per_host = cluster.devices_per_host
    uses_nics = per_host > 1 and all(len(group) > per_host and _fills_hosts(group, per_host) for group in groups)
    if fabric:
        loads = _ChannelLoads(program, cluster, groups, channels=per_host if uses_nics else 1)
        uses = [
            _library_use(cluster, fabric, protocol, is_sum=program.collective == "all-reduce")
            for protocol in PROTOCOLS.values()
        ]
        return PipelinedCost(tuple(map(loads.schedule, uses)))
    counts = (1, per_host) if uses_nics else (1,)
    use = _cluster_use(cluster)
    schedules = (_ChannelLoads(program, cluster, groups, channels=n).schedule(use) for n in counts)
    return PipelinedCost((*schedules, estimate_cost(program, cluster, rank_groups)))


def _fills_hosts(group: Sequence[int], per_host: int) -> bool:
    """Whether the group consists of full hosts."""
    size = len(group)
    return size % per_host == 0 and all(group[n] == group[n - n % per_host] + n % per_host for n in range(size))


def _rotated(group: Sequence[int], per_host: int, shift: int) -> tuple[int, ...]:
    if not shift:
        return tuple(group)
    return tuple(group[n - n % per_host + (n + shift) % per_host] for n in range(len(group)))


@dataclass(frozen=True)
class _LinkUse:
    """The use of links by messages: the delay of a message, its time at a port, and the factor on the time of bytes."""

    delay_s: Callable[[int, int], float]
    port_s: Callable[[NetworkLink], float]
    byte_factor: Callable[[str], float]
    gamma_s_per_byte: float = 0.0
    launch_s: float = 0.0


def _cluster_use(cluster: Cluster) -> _LinkUse:
    """The links as the cluster describes them."""

    def port_s(link: NetworkLink) -> float:
        return float(link.alpha_s.value)

    return _LinkUse(cache(cluster.latency_s), port_s, lambda name: 1.0, float(cluster.gamma_s_per_byte.value))


def _library_use(cluster: Cluster, fabric: FabricSpec, protocol: Protocol, *, is_sum: bool) -> _LinkUse:
    """The links as a vendor library uses them; it adds up while it copies."""
    inside, between = fabric.inside, fabric.between
    per_host, piece_s = cluster.devices_per_host, LIBRARY["piece"].value

    def delay_s(src: int, dst: int) -> float:
        is_inside = src // per_host == dst // per_host
        return inside.hop_s * protocol.inside if is_inside else between.hop_s * protocol.between

    def byte_factor(name: str) -> float:
        reached = between.reached(is_sum=is_sum) if name.startswith("net/") else inside.efficiency
        return 1 / (reached * protocol.rate)

    return _LinkUse(delay_s, lambda link: piece_s, byte_factor, launch_s=LIBRARY["launch"].value)


class _StepMessages:
    """The messages of the first channel in a step, as indices of links and of chunks on ranks."""

    def __init__(self, step: Step, group: Sequence[int], links: "_LinkIndices", *, chunks: int) -> None:
        pairs = group_by_pair(step)
        self.pairs = [(group[src], group[dst]) for src, dst in pairs]
        self.links = links.route_indices(self.pairs)
        self.adders = np.array([links.index(_adder(dst)) for _, dst in self.pairs])
        spans = [np.concatenate([np.arange(t.first, t.last + 1) for t in sent]) for sent in pairs.values()]
        self.counts = np.array([len(span) for span in spans])
        self.offsets = np.cumsum(self.counts) - self.counts
        self.read = np.concatenate([src * chunks + span for (src, _), span in zip(self.pairs, spans, strict=True)])
        self.written = np.concatenate([dst * chunks + span for (_, dst), span in zip(self.pairs, spans, strict=True)])


class _LinkIndices:
    """Indices of links and adders; the first stands for no link, and pads short routes."""

    def __init__(self, cluster: Cluster) -> None:
        self.route = cache(cluster.route)
        self.numbers: dict[str, int] = {"": 0}

    def index(self, name: str) -> int:
        return self.numbers.setdefault(name, len(self.numbers))

    def route_indices(self, pairs: Sequence[tuple[int, int]]) -> IntArray:
        routes = [self.route(src, dst) for src, dst in pairs]
        longest = max(map(len, routes))
        return np.array([[*map(self.index, names)] + [0] * (longest - len(names)) for names in routes])


class _ChannelLoads:
    """The loads of links in the steps of a Program that several channels execute, each with a part of the message."""

    def __init__(self, program: Program, cluster: Cluster, groups: RankGroups, *, channels: int) -> None:
        self._cluster, self._links = cluster, _LinkIndices(cluster)
        self._states = cluster.ranks * program.chunks
        steps = [step for step in program.steps if step]
        self._messages = [_StepMessages(step, groups[0], self._links, chunks=program.chunks) for step in steps]
        rotated = tuple(_rotated(group, cluster.devices_per_host, n) for n in range(channels) for group in groups)
        self._scale = 1 / (program.message_size_units * channels)
        self._traffic = [step_traffic(program, step, rotated) for step in steps]
        self._sums = {traffic: self._link_sums(traffic) for traffic in set(self._traffic)}

    def _link_sums(self, traffic: StepTraffic) -> list[tuple[str, int, int]]:
        """Messages and relative bytes of each link, and the added bytes of each rank."""
        sizes, flows, added = defaultdict[str, int](int), Counter[str](), defaultdict[str, int](int)
        for src, dst, size, added_size in traffic:
            for name in self._links.route(src, dst):
                sizes[name] += size
                flows[name] += 1
            added[_adder(dst)] += added_size
        sums = [(name, flows[name], size) for name, size in sizes.items()]
        sums += [(name, 0, size) for name, size in added.items() if size]
        for name, _, _ in sums:
            self._links.index(name)
        return sums

    def schedule(self, use: _LinkUse) -> PipelinedSchedule:
        """The first piece and the busiest links."""
        loads = {traffic: self._loads(sums, use) for traffic, sums in self._sums.items()}
        totals = np.sum([times * loads[traffic] for traffic, times in Counter(self._traffic).items()], axis=0)
        start_s = self._first_piece([loads[traffic][0] for traffic in self._traffic], use.delay_s)
        per_byte_s = self._first_piece([loads[traffic][1] for traffic in self._traffic], lambda src, dst: 0.0)
        busiest = upper_envelope([LinkLoad(float(fixed), float(byte)) for fixed, byte in totals.T])
        return PipelinedSchedule(LinkLoad(use.launch_s + start_s, per_byte_s), busiest)

    def _loads(self, sums: Sequence[tuple[str, int, int]], use: _LinkUse) -> FloatArray:
        """Two rows: the fixed time and the time of a byte of each link in a step."""
        loads = np.zeros((2, len(self._links.numbers)))
        for name, flows, size in sums:
            column = self._links.index(name)
            if not flows:
                loads[1, column] = size * self._scale * use.gamma_s_per_byte
                continue
            link = self._cluster.link(name)
            loads[0, column] = flows * use.port_s(link) if link.is_port else 0.0
            spread = use.byte_factor(name) * (1.0 if link.is_port else link.imbalance(flows))
            loads[1, column] = size * self._scale * spread / float(link.bandwidth_Bps.value)
        return loads

    def _first_piece(self, steps: Sequence[FloatArray], delay_s: Callable[[int, int], float]) -> float:
        """The time until the last chunk has arrived, by the fixed or the size-dependent part of loads."""
        arrived_s, free_s = np.zeros(self._states), np.zeros(len(self._links.numbers))
        for loads, sent in zip(steps, self._messages, strict=True):
            start_s = np.maximum(
                free_s[sent.links].max(axis=1), np.maximum.reduceat(arrived_s[sent.read], sent.offsets)
            )
            end_s = start_s + loads[sent.links].max(axis=1)
            np.maximum.at(free_s, sent.links, np.broadcast_to(end_s[:, None], sent.links.shape))
            free_s[0] = 0.0
            end_s = end_s + loads[sent.adders] + np.array([delay_s(src, dst) for src, dst in sent.pairs])
            np.maximum.at(arrived_s, sent.written, np.repeat(end_s, sent.counts))
        return float(arrived_s.max())


def _adder(rank: int) -> str:
    return f"{rank} adds"
