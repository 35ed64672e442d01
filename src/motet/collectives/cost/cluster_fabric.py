"""The fabric of a cluster for the costs of vendor libraries: classes of its links, and the share of each device.

The time that NCCL or RCCL needs for a collective, from closed forms by the shape of its group.

Unlike the steps of a Program, pieces are in flight over all links simultaneously: start-ups along the path of the first
piece, an overhead that shrinks relative to the size, and then the bytes over the slowest link.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import sqrt
from typing import Literal, NamedTuple

from motet.cluster.cluster import Cluster, FullMesh, NetworkTopology, SwitchTree, TorusNetwork, TwoLevelNetwork
from motet.cluster.cluster_settings import VendorLinkSettings
from motet.cluster.device_specs import match_device
from motet.collectives.cost.group_shapes import (
    CLASSIC_COLLECTIVES,
    LIBRARY,
    LINK_CLASSES,
    POINT_TO_POINT_COLLECTIVES,
    PROTOCOLS,
    AlgorithmShape,
    GroupPlacement,
    LeafSwitches,
    LinkClass,
    Protocol,
    algorithm_shapes,
    leaf_switches_of,
)
from motet.core.errors import InputError, check_input

_FAST_NIC_BPS = 40e9


@dataclass(frozen=True)
class FabricSpec:
    """The facts of a cluster that costs need. Bandwidths are datasheet values of a device and one direction."""

    intra_link: str
    intra_Bps: float  # noqa: N815 - a unit
    inter_link: str
    inter_Bps: float  # noqa: N815 - a unit
    devices_per_host: int
    in_switch_inside: bool = False
    library: Literal["nccl", "rccl"] = "nccl"
    startup_factor: float = 1.0  # Factor on the start-up of all collectives, for a measured cluster
    in_network_reduction: bool = False  # Switches between hosts add up, as SHARP does
    leaves: LeafSwitches | None = None
    devices_per_process: int = 1  # A process that drives several launches on one after another
    intra_class: LinkClass | None = None  # Constants of a cluster file in place of those of `intra_link`
    inter_class: LinkClass | None = None

    def __post_init__(self) -> None:
        for name in (self.intra_link, self.inter_link):
            check_input(name in LINK_CLASSES, f"link class {name!r} is unknown; give one of {', '.join(LINK_CLASSES)}")
        check_input(self.intra_Bps > 0 and self.inter_Bps > 0, "a bandwidth of 0 carries nothing; give more than 0")

    @property
    def inside(self) -> LinkClass:
        """Constants of the links inside of a host."""
        return self.intra_class or LINK_CLASSES[self.intra_link]

    @property
    def between(self) -> LinkClass:
        """Constants of the links between hosts."""
        return self.inter_class or LINK_CLASSES[self.inter_link]


@dataclass(frozen=True)
class VendorTime:
    """The predicted time of a collective, and the algorithm and protocol of the library."""

    seconds: float
    algorithm: str
    protocol: str
    startup_s: float


class _AlgorithmTime(NamedTuple):
    """The time of an algorithm with a protocol, for messages of any size."""

    algorithm: str
    protocol: str
    startup_s: float
    s_per_byte: float
    hops_piece_s: float  # The overheads of a piece over all hops
    has_few_channels: bool  # Like a message between two devices of a host, unless it is large

    def seconds(self, size_bytes: float) -> float:
        bytes_s = size_bytes * self.s_per_byte
        if self.has_few_channels:
            few_channels_s = bytes_s / LIBRARY["fewest channels"].value
            bytes_s = max(bytes_s, min(few_channels_s, LIBRARY["channels double"].value))
        return self.startup_s + 2 * sqrt(self.hops_piece_s * bytes_s) + bytes_s


class VendorCosts:
    """Times of collectives on a fabric, kept for repeated questions."""

    def __init__(self, fabric: FabricSpec) -> None:
        self.fabric = fabric
        self._algorithms: dict[tuple[str, GroupPlacement], tuple[_AlgorithmTime, ...]] = {}
        self._seconds: dict[tuple[str, float, int, int], float] = {}

    def time(
        self, collective: str, size_bytes: float, placement: GroupPlacement, *, algorithms: tuple[str, ...] = ()
    ) -> VendorTime:
        """The time of the fastest algorithm and protocol, of all or of `algorithms`."""
        key = (collective, placement)
        if key not in self._algorithms:
            self._algorithms[key] = tuple(self._algorithm_times(collective, placement))
        check_input(size_bytes >= 0, f"a size of {size_bytes} bytes: give 0 or more")
        if placement.ranks == 1:
            return VendorTime(0.0, "none", "none", 0.0)
        chosen = self._algorithms[key]
        if algorithms:
            chosen = tuple(each for each in chosen if each.algorithm in algorithms)
            names = ", ".join(shape.algorithm for shape in self.shapes(collective, placement))
            check_input(bool(chosen), f"algorithms {', '.join(algorithms)} do not run {collective} here; give {names}")
        seconds, best = min((each.seconds(size_bytes), each) for each in chosen)
        return VendorTime(seconds, best.algorithm, best.protocol, best.startup_s)

    def seconds(self, collective: str, size_bytes: float, *, ranks: int, ranks_per_host: int) -> float:
        """The time alone, in the form that the planner asks for."""
        key = (collective, size_bytes, ranks, ranks_per_host)
        if key not in self._seconds:
            self._seconds[key] = self.time(collective, size_bytes, GroupPlacement(ranks, ranks_per_host)).seconds
        return self._seconds[key]

    def shapes(self, collective: str, placement: GroupPlacement) -> tuple[AlgorithmShape, ...]:
        """The algorithms of the library for a group."""
        if collective not in CLASSIC_COLLECTIVES + POINT_TO_POINT_COLLECTIVES:
            known = ", ".join(CLASSIC_COLLECTIVES + POINT_TO_POINT_COLLECTIVES)
            raise InputError(f"collective {collective!r} is unknown; give one of {known}")
        in_switch, in_network = self.fabric.in_switch_inside, self.fabric.in_network_reduction
        return tuple(algorithm_shapes(collective, placement, in_switch=in_switch, in_network=in_network))

    def _algorithm_times(self, collective: str, placement: GroupPlacement) -> Iterator[_AlgorithmTime]:
        launch_s = self._launch_s(collective, placement)
        for shape in self.shapes(collective, placement):
            s_per_byte = self._s_per_byte(shape, collective, placement.hosts)
            hops_piece_s = (shape.inside_hops + shape.between_hops) * LIBRARY["piece"].value
            has_few_channels = collective == "send-receive" and placement.hosts == 1
            for name, protocol in PROTOCOLS.items():
                if shape.reduces_in_switch and name != "Simple":
                    continue
                startup_s = self.fabric.startup_factor * (launch_s + self._hops_s(shape, protocol, placement.hosts))
                rest = s_per_byte / protocol.rate, hops_piece_s, has_few_channels
                yield _AlgorithmTime(shape.algorithm, name, startup_s, *rest)

    def _launch_s(self, collective: str, placement: GroupPlacement) -> float:
        """The time until all devices of a process have started; those of other processes start simultaneously."""
        devices = min(self.fabric.devices_per_process, placement.ranks_per_host)
        launch_s = LIBRARY["launch"].value + (devices - 1) * LIBRARY["launch in turn"].value
        if collective == "all-to-all" and devices > 1:
            launch_s += devices**2 * LIBRARY["message in turn"].value
        return launch_s

    def _hops_s(self, shape: AlgorithmShape, protocol: Protocol, hosts: int) -> float:
        inside, between = self.fabric.inside, self.fabric.between
        hops_s = shape.inside_hops * inside.hop_s * protocol.inside
        hops_s += shape.between_hops * between.hop_s * protocol.between
        if self.fabric.leaves:
            hops_s += self.fabric.leaves.hops_s(shape.algorithm, hosts, shape.between_hops)
        return hops_s + (LIBRARY["in-switch start-up"].value if shape.reduces_in_switch else 0)

    def _s_per_byte(self, shape: AlgorithmShape, collective: str, hosts: int) -> float:
        """The time of a byte of the message over the slowest link."""
        fabric, algorithm = self.fabric, shape.algorithm
        inside, between = fabric.inside, fabric.between
        inside_Bps = fabric.intra_Bps  # noqa: N806 - a unit
        inside_Bps *= inside.in_switch_efficiency if shape.reduces_in_switch else inside.efficiency  # noqa: N806
        if hosts > 1 and (algorithm == "tree" or shape.reduces_in_switch):
            inside_Bps *= LIBRARY["tree share" if algorithm == "tree" else "in-switch tree share"].value  # noqa: N806
        reached = between.reached(is_sum=collective == "all-reduce")
        reached = LIBRARY["in-network share"].value if "collnet" in algorithm else reached
        between_Bps = min(fabric.inter_Bps * reached, between.host_limit_Bps / fabric.devices_per_host)  # noqa: N806
        between_s = shape.between_bytes / between_Bps
        if fabric.leaves:
            between_s *= fabric.leaves.slowdown(algorithm, hosts)
        return max(shape.inside_bytes / inside_Bps, between_s)


def fabric_of_device(device: str, devices_per_host: int, *, intra_Bps: float, inter_Bps: float) -> FabricSpec:  # noqa: N803
    """The fabric of hosts of a device, which InfiniBand or RoCE joins with a share of the NICs for each device."""
    spec = match_device(device)
    link = spec.link if spec else "PCIe"
    in_switch = link in ("NVLink4", "NVLink5")
    library: Literal["nccl", "rccl"] = "rccl" if link == "xGMI" else "nccl"
    between = rdma_class(inter_Bps)
    return FabricSpec(link, intra_Bps, between, inter_Bps, devices_per_host, in_switch, library)


def rdma_class(nic_Bps: float) -> str:  # noqa: N803 - a unit
    """The class of InfiniBand and RoCE by the NIC's share of a device."""
    return "RDMA400" if nic_Bps >= _FAST_NIC_BPS else "RDMA"


def fabric_of(cluster: Cluster) -> FabricSpec:
    """The fabric of a cluster."""
    network, per_host = cluster.network, cluster.devices_per_host
    inside, between = (network.inside, network.between) if isinstance(network, TwoLevelNetwork) else (network, None)
    speed = _ring_bandwidth(inside)
    shared = speed if between is None else _bandwidth_between(between, per_host)
    fabric = fabric_of_device(cluster.device, per_host, intra_Bps=speed, inter_Bps=shared)
    in_host, between_hosts = cluster.vendor_links
    intra, inter = _link_class(in_host, fabric.intra_link), _link_class(between_hosts, fabric.inter_link)
    has_switch = intra.in_switch_efficiency > 0 and isinstance(inside, SwitchTree)
    return replace(
        fabric,
        intra_link=in_host.link or fabric.intra_link,
        inter_link=between_hosts.link or fabric.inter_link,
        in_switch_inside=has_switch,
        intra_class=intra,
        inter_class=inter,
        leaves=leaf_switches_of(cluster),
    )


def _link_class(vendor: VendorLinkSettings, usual_link: str) -> LinkClass:
    """The constants of a class of links, with those of a cluster file in their place."""
    link, names = vendor.link or usual_link, ", ".join(LINK_CLASSES)
    check_input(link in LINK_CLASSES, f"vendor.link = {link!r} is not a class of links; give one of {names}")
    usual, in_switch = LINK_CLASSES[link], vendor.in_switch_efficiency
    return usual._replace(
        efficiency=vendor.efficiency.value if vendor.efficiency else usual.efficiency,
        one_way_efficiency=vendor.one_way_efficiency.value if vendor.one_way_efficiency else usual.one_way_efficiency,
        in_switch_efficiency=in_switch.value if in_switch else usual.in_switch_efficiency,
        hop_s=vendor.hop_s.value if vendor.hop_s else usual.hop_s,
    )


def _ring_bandwidth(inside: NetworkTopology) -> float:
    """The bandwidth of each device in rings inside of a host, which use all links of a mesh or a torus."""
    if isinstance(inside, TwoLevelNetwork):
        raise InputError("the hosts of a cluster have hosts inside; give one level of hosts")
    speed = inside.port.bandwidth_Bps.value
    if isinstance(inside, FullMesh):
        return speed * max(1, inside.ranks - 1)
    if isinstance(inside, TorusNetwork):
        return speed * _links_of_torus(inside)
    for level in inside.levels:
        if level.switch is not None:  # All messages share a bus; of a ring's, few cross the bridge
            speed = min(speed, level.switch.bandwidth_Bps.value / (inside.ranks if level.name == "bus" else 1))
    return speed


def _bandwidth_between(between: NetworkTopology, devices_per_host: int) -> float:
    """The share of a host's cards, or of its links to neighbours, that each of its devices has."""
    if isinstance(between, TorusNetwork):  # The devices of a host share its links
        return between.port.bandwidth_Bps.value * _links_of_torus(between) / devices_per_host
    assert isinstance(between, SwitchTree)
    cards = len(set(between.levels[0].groups[:devices_per_host])) if between.levels else devices_per_host
    return between.port.bandwidth_Bps.value * cards / devices_per_host


def _links_of_torus(torus: TorusNetwork) -> int:
    return max(1, sum(min(size - 1, 2) for size in torus.dims))
