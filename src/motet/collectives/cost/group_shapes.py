"""Closed forms of the algorithms of vendor libraries: hops of the first piece and bytes over each kind of link.

Leaf switches between hosts: how much longer the bytes of a collective take on uplinks than on NICs.

Constants of links, protocols and libraries, by which the times of NCCL and RCCL are predicted, with their origins.

`scripts/fit_collectives.py` fits them together to published curves of nccl-tests; its priors are datasheets and the
table by which NCCL chooses algorithms. A constant belongs to a class of links, a protocol or an algorithm, never to a
device, a source or a curve.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, inf, log2
from typing import NamedTuple

from motet.cluster.cluster import Cluster, SwitchTree, TwoLevelNetwork
from motet.cluster.cluster_settings import NetworkLink, expected_max_load
from motet.core.errors import check_input

CLASSIC_COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "broadcast", "reduce")
POINT_TO_POINT_COLLECTIVES = ("all-to-all", "gather", "scatter", "send-receive")


@dataclass(frozen=True)
class GroupPlacement:
    """A group of ranks over hosts; the other devices of the hosts belong to like groups that work simultaneously."""

    ranks: int
    ranks_per_host: int

    def __post_init__(self) -> None:
        size, per_host = self.ranks, self.ranks_per_host
        check_input(size >= 1, f"a group of {size} ranks executes nothing; give 1 or more")
        message = f"ranks_per_host = {per_host} does not fit a group of {size} ranks; give 1 to {size}"
        check_input(1 <= per_host <= size, message)

    @property
    def hosts(self) -> int:
        """The number of hosts with a rank of the group."""
        return -(-self.ranks // self.ranks_per_host)


class AlgorithmShape(NamedTuple):
    """The hops of the first piece, and the bytes over each kind of link of the busiest device relative to the size."""

    algorithm: str
    inside_hops: float
    between_hops: float
    inside_bytes: float
    between_bytes: float

    @property
    def reduces_in_switch(self) -> bool:
        """Whether the switch inside of a host adds up."""
        return self.algorithm.startswith("nvls")


def algorithm_shapes(
    collective: str, placement: GroupPlacement, *, in_switch: bool = False, in_network: bool = False
) -> Iterator[AlgorithmShape]:
    """The algorithms among which a library chooses; the only one if switches between hosts add up."""
    if collective in POINT_TO_POINT_COLLECTIVES:
        yield _direct(collective, placement)
        return
    if collective == "all-reduce" and in_network and placement.hosts > 1:
        yield _in_network(placement, in_switch=in_switch)
        return
    yield _ring(collective, placement)
    if collective == "all-reduce":
        yield from _trees(placement, in_switch=in_switch)


def _direct(collective: str, placement: GroupPlacement) -> AlgorithmShape:
    n, m, hosts = placement.ranks, placement.ranks_per_host, placement.hosts
    if collective == "send-receive":
        return AlgorithmShape("direct", hosts == 1, hosts > 1, 1.0 if m > 1 else 0.0, 1.0 if hosts > 1 else 0.0)
    return AlgorithmShape("direct", (m - 1) / 2, (n - m) / 2, (m - 1) / n, (n - m) / n)


def _ring(collective: str, placement: GroupPlacement) -> AlgorithmShape:
    """Each of m rings leaves a host over another NIC."""
    n, m, hosts = placement.ranks, placement.ranks_per_host, placement.hosts
    crossing = hosts / n if hosts > 1 else 0.0  # The part of a ring's edges that lead to another host
    passes = 2 if collective == "all-reduce" else 1
    steps = passes * (n - 1)
    all_pass = collective in ("broadcast", "reduce")  # All bytes pass every edge
    ring_bytes = 1.0 if all_pass else passes * (n - 1) / n
    between_bytes = ring_bytes / m if hosts > 1 else 0.0
    return AlgorithmShape("ring", steps * (1 - crossing), steps * crossing, ring_bytes if m > 1 else 0.0, between_bytes)


def _trees(placement: GroupPlacement, *, in_switch: bool) -> Iterator[AlgorithmShape]:
    """A chain or the switch inside of hosts, and two binary trees between them, each with half of the bytes."""
    m, hosts = placement.ranks_per_host, placement.hosts
    depth = 2 * ceil(log2(hosts))
    # From three hosts on some host has two children in one tree, and is a leaf of the other one.
    tree_bytes = (0.0, 1.0, 2.0)[min(hosts, 3) - 1] / m
    if hosts > 1:
        chain_bytes = 0.0 if m == 1 else 1.0 if m == 2 else 2.0  # Both trees; a middle device sends up and down
        yield AlgorithmShape("tree", 2 * (m - 1), depth, chain_bytes, tree_bytes)
    if in_switch and m > 2:
        yield AlgorithmShape("nvls" if hosts == 1 else "nvls-tree", 2, depth, 1 + 1 / m, tree_bytes)


def _in_network(placement: GroupPlacement, *, in_switch: bool) -> AlgorithmShape:
    """Every host sends all bytes up once, and gets their sums."""
    m = placement.ranks_per_host
    if in_switch and m > 2:
        return AlgorithmShape("nvls-collnet", 2, 2, 1 + 1 / m, 1 / m)
    return AlgorithmShape("collnet", 2 if m > 1 else 0, 2, 2 * (m - 1) / m, 1 / m)


_FLOWS_PER_NIC = 2  # NCCL's channels for each NIC, at least
_MOST_FLOWS = 1024  # More are spread as evenly as these


@dataclass(frozen=True)
class LeafSwitches:
    """Leaves under an ideal spine. A leaf takes all NICs of its hosts or, with rails, one of each."""

    hosts: int  # Hosts of each leaf
    nics: int  # NICs of each leaf
    oversubscription: float = 1.0
    hashed_paths: int = 1  # Uplinks on which flows are hashed; 1 if flows are spread evenly
    hop_s: float = 0.0  # The delay of an uplink, once up and once down

    def __post_init__(self) -> None:
        text = f"leaf switches with {self.hosts} hosts, {self.nics} NICs and {self.hashed_paths} paths"
        check_input(min(self.hosts, self.nics, self.hashed_paths) >= 1, f"{text} carry nothing; give 1 or more")
        speed = f"an oversubscription of {self.oversubscription} with a hop of {self.hop_s} s makes no sense"
        check_input(
            self.oversubscription > 0 and self.hop_s >= 0, f"{speed}; give more than 0, and a hop of at least 0"
        )

    def slowdown(self, algorithm: str, hosts: int) -> float:
        """The time on the busiest uplink over the time on a NIC, or 1 if NICs are busier; hosts are neighbours."""
        if hosts <= self.hosts:
            return 1.0
        share = self._crossing_share(algorithm, hosts)
        nics = self.nics if algorithm == "direct" else self.nics / self.hosts  # A ring or tree leaves from one host
        flows = min(_MOST_FLOWS, max(1, round(_FLOWS_PER_NIC * nics)))
        paths = self.hashed_paths
        imbalance = paths * expected_max_load(flows, paths) / flows if paths > 1 else 1.0
        return max(1.0, share * self.oversubscription * imbalance)

    def hops_s(self, algorithm: str, hosts: int, hops: float) -> float:
        """The delay of uplinks on the way of the first piece, which has a number of hops between hosts."""
        if hosts <= self.hosts:
            return 0.0
        share = self._crossing_share(algorithm, hosts)
        if algorithm not in ("direct", "ring"):
            share = log2(ceil(hosts / self.hosts)) / log2(hosts)  # The upper levels of a tree
        return 2 * self.hop_s * hops * share

    def _crossing_share(self, algorithm: str, hosts: int) -> float:
        """The bytes over a leaf's uplinks over those of all its NICs: all-to-all to other leaves, else of one host."""
        return 1 - (self.hosts - 1) / (hosts - 1) if algorithm == "direct" else 1 / self.hosts


def leaf_switches_of(cluster: Cluster) -> LeafSwitches | None:
    """The leaf switches between the hosts of a cluster, if one of them does not take all."""
    network = cluster.network
    between = network.between if isinstance(network, TwoLevelNetwork) else None
    if not isinstance(between, SwitchTree) or len(between.levels) < 2:
        return None
    nics, leaf = (level.groups for level in between.levels[:2])
    uplink, nic = between.levels[1].uplink, between.levels[0].uplink
    under = [rank for rank, switch in enumerate(leaf) if switch == leaf[0]]
    hosts = len({rank // cluster.devices_per_host for rank in under})
    if hosts >= cluster.hosts or uplink is None or nic is None:
        return None
    count = len({nics[rank] for rank in under})
    return LeafSwitches(hosts, count, _oversubscription(nic, uplink, count), uplink.hashed_paths, uplink.alpha_s.value)


def _oversubscription(nic: NetworkLink, uplink: NetworkLink, nics: int) -> float:
    return nics * nic.bandwidth_Bps.value / uplink.bandwidth_Bps.value


class LinkClass(NamedTuple):
    """Constants of a class of links: the reached share of its datasheet bandwidth, and the start-up of a hop."""

    efficiency: float
    hop_s: float
    origin: str
    in_switch_efficiency: float = 0.0  # For the bytes of in-switch reduction; 0 without it
    one_way_efficiency: float = 0.0  # For collectives that add nothing up, if lower; 0: the same
    host_limit_Bps: float = inf  # noqa: N815 - a unit; the most that a host's processor carries

    def reached(self, *, is_sum: bool) -> float:
        """The efficiency for an all-reduce or for another collective."""
        return self.efficiency if is_sum else self.one_way_efficiency or self.efficiency


LINK_CLASSES = {
    "NVLink2": LinkClass(0.845, 2.2e-6, "fitted: hosts of 8 and 12 V100"),
    "NVLink3": LinkClass(0.775, 1.0e-6, "fitted: hosts of 8 A100, four parties"),
    "NVLink4": LinkClass(0.83, 0.53e-6, "fitted: hosts of 8 H100 and H800, 3 parties", in_switch_efficiency=0.675),
    "NVLink5": LinkClass(0.765, 1.07e-6, "fitted: hosts of 8 B200 and B300, two parties", in_switch_efficiency=0.61),
    "xGMI": LinkClass(0.7, 0.7e-6, "peak and start-up of one host of 8 MI350X, started in two ways"),
    "PCIe": LinkClass(0.69, 1.0e-6, "fitted: pairs of RTX 4090 and RTX 2080 Ti"),
    # InfiniBand and RoCE, of less and of at least 40 GB/s for each device
    "RDMA": LinkClass(0.915, 9.7e-6, "fitted: two hosts of A100, four parties, and two GB10"),
    "RDMA400": LinkClass(
        0.915, 6.3e-6, "fitted: two hosts of H100 and of B200, seven parties", one_way_efficiency=0.75
    ),
    "EFA": LinkClass(0.85, 74e-6, "fitted: two hosts of A100, two parties"),
    "EFA400": LinkClass(0.9, 28e-6, "start-up of two hosts of H100 as published, 72 us; efficiency assumed"),
    "TCPXO": LinkClass(0.93, 32e-6, "fitted: two hosts of H100, three parties"),
    "TCPX": LinkClass(0.7, 135e-6, "fitted: two hosts of H100, one party"),
    "ICI": LinkClass(0.8, 1.0e-6, "assumed: no time of the collectives of TPUs is public"),
    "Slingshot": LinkClass(0.85, 12e-6, "assumed: between RDMA and TCPXO"),
    "Socket": LinkClass(0.8, 29e-6, "TCP through host memory: one run over IPoIB", host_limit_Bps=3.2e9),
}


class Protocol(NamedTuple):
    """The start-up of a hop over that of protocol LL, inside of hosts and between, and the reached bandwidth."""

    inside: float
    between: float
    rate: float
    origin: str


PROTOCOLS = {
    "LL": Protocol(1.0, 1.0, 0.24, "fitted; a half of the bytes are flags, and pieces are small"),
    "LL128": Protocol(1.4, 2.4, 0.785, "fitted; 8 of 128 bytes are flags"),
    "Simple": Protocol(3.1, 3.6, 1.0, "fitted; NCCL's table has 3 to 6"),
}


class LibraryConstant(NamedTuple):
    """A constant of the library, in seconds or as a share."""

    value: float
    origin: str


LIBRARY = {
    "launch": LibraryConstant(8.4e-6, "fitted: a kernel launch and the first flags"),
    "launch in turn": LibraryConstant(2.4e-6, "fitted: each further device of a process that drives several, A100"),
    "message in turn": LibraryConstant(0.89e-6, "fitted: each message of an all-to-all by one process, A100"),
    "piece": LibraryConstant(0.23e-6, "fitted: overhead of a piece in flight, from how curves approach their peaks"),
    "tree share": LibraryConstant(0.86, "fitted: chains inside of two hosts of A100, over rings"),
    "in-switch tree share": LibraryConstant(0.92, "fitted: NVLink SHARP on two hosts of H100, over one host"),
    "in-switch start-up": LibraryConstant(75e-6, "fitted: NVLink SHARP at 1 to 4 MiB"),
    "in-network share": LibraryConstant(0.54, "fitted: SHARP over InfiniBand on 2 hosts of A100 and 12 of H100"),
    "fewest channels": LibraryConstant(0.129, "fitted: share of a link that messages between two devices start with"),
    "channels double": LibraryConstant(0.83e-3, "fitted: a message that takes longer gets more channels, B200, A100"),
}
