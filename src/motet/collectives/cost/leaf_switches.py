"""Leaf switches between hosts: how much longer the bytes of a collective take on uplinks than on NICs."""

from dataclasses import dataclass
from math import ceil, log2

from motet.cluster.cluster import Cluster
from motet.cluster.network_link import NetworkLink, expected_max_load
from motet.cluster.topology import SwitchTree, TwoLevelNetwork
from motet.core.errors import check_input

_FLOWS_PER_NIC = 2  # NCCL's channels for each NIC, at least
_MOST_FLOWS = 1024  # More are spread as evenly as these


@dataclass(frozen=True)
class LeafSwitches:
    """Leaves under an ideal spine. A leaf takes all NICs of its hosts or, with rails, one of each."""

    hosts: int  # For each leaf
    nics: int  # For each leaf
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
