"""The time that NCCL or RCCL needs for a collective, from closed forms by the shape of its group.

Unlike the steps of a Program, pieces are in flight over all links simultaneously: start-ups along the path of the first
piece, an overhead that shrinks relative to the size, and then the bytes over the slowest link.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, log2, sqrt
from typing import Literal, NamedTuple

from motet.cluster.device_specs import match_device
from motet.core.errors import InputError, check_input

CLASSIC_COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "broadcast", "reduce")
POINT_TO_POINT_COLLECTIVES = ("all-to-all", "gather", "scatter", "send-receive")


class LinkClass(NamedTuple):
    """Constants of a class of links: the reached share of its datasheet bandwidth, and the start-up of a hop."""

    efficiency: float
    hop_s: float
    in_switch_efficiency: float = 0.0  # Of the bytes that in-switch reduction moves; 0 without it
    one_way_efficiency: float = 0.0  # Of collectives that add nothing up, if it is less; 0: the same


# Efficiencies are peaks of published runs of nccl-tests over datasheet bandwidths. Start-ups inside of a host follow
# the table by which NCCL chooses algorithms, and those between hosts published times of small messages; all were then
# fitted together to the published curves. Those of xGMI, PCIe and sockets are assumed or rest on one curve.
LINK_CLASSES = {
    "NVLink2": LinkClass(0.86, 2.1e-6),
    "NVLink3": LinkClass(0.785, 1.8e-6),
    "NVLink4": LinkClass(0.85, 0.43e-6, in_switch_efficiency=0.69),
    "NVLink5": LinkClass(0.75, 0.92e-6, in_switch_efficiency=0.60),
    "xGMI": LinkClass(0.8, 1.1e-6),  # Assumed
    "PCIe": LinkClass(0.7, 1.0e-6),
    "ICI": LinkClass(0.8, 1.0e-6),  # Of TPUs; assumed
    "RDMA": LinkClass(0.94, 6e-6),  # InfiniBand and RoCE
    "RDMA400": LinkClass(0.92, 6e-6, one_way_efficiency=0.75),  # 400 Gbit/s and more for each device
    "EFA": LinkClass(0.86, 72e-6),
    "TCPXO": LinkClass(0.97, 35e-6),
    "Socket": LinkClass(0.12, 25e-6),  # TCP without GPUDirect: fitted to one run over IPoIB
}

_FITTED = "fitted to published curves, from peaks of nccl-tests and NCCL's table of start-ups"
LINK_ORIGINS = {
    **dict.fromkeys(("NVLink2", "NVLink3", "NVLink4", "NVLink5", "PCIe", "RDMA", "RDMA400", "EFA", "TCPXO"), _FITTED),
    "xGMI": "assumed, near the one published curve",
    "ICI": "assumed: no time of its collectives is public",
    "Socket": "fitted to one published run over IPoIB",
}

# The start-up of a hop over that of protocol LL, inside and between, and the part of the bandwidth that is left.
PROTOCOLS = {"LL": (1.0, 1.0, 0.24), "LL128": (1.8, 2.3, 0.79), "Simple": (3.3, 3.9, 1.0)}  # Fitted, from NCCL's ratios
_FAST_NIC_BPS = 40e9
LAUNCH_S = 10e-6  # Kernel launch and first flags, measured as the start-up of one hop less the hop
PIECE_S = 0.125e-6  # Overhead of a piece in flight, from how published curves approach their peaks
TREE_EFFICIENCY = 0.85  # Of a ring inside of a host, and of NVLink SHARP if a tree follows; two hosts of A100 and H100
IN_SWITCH_STARTUP_S = 57e-6  # NVLink SHARP, from published times at 1-4 MiB


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
    startup_factor: float = 1.0  # On the start-up of all collectives, of a cluster that was measured
    intra_class: LinkClass | None = None  # Constants of a cluster file in place of those of `intra_link`
    inter_class: LinkClass | None = None

    def __post_init__(self) -> None:
        for name in (self.intra_link, self.inter_link):
            check_input(name in LINK_CLASSES, f"link class {name!r} is unknown; give one of {', '.join(LINK_CLASSES)}")
        check_input(self.intra_Bps > 0 and self.inter_Bps > 0, "a bandwidth of 0 carries nothing; give more than 0")


@dataclass(frozen=True)
class VendorTime:
    """The predicted time of a collective, and the algorithm and protocol of the library."""

    seconds: float
    algorithm: str
    protocol: str
    startup_s: float


class _Shape(NamedTuple):
    """The hops of the first piece, and the bytes over each kind of link of a device relative to the size."""

    algorithm: str
    inside_hops: float
    between_hops: float
    inside_bytes: float
    between_bytes: float


class VendorCosts:
    """Times of collectives on a fabric, kept for repeated questions."""

    def __init__(self, fabric: FabricSpec) -> None:
        self.fabric = fabric
        self._times: dict[tuple[str, float, GroupPlacement, tuple[str, ...]], VendorTime] = {}

    def time(
        self, collective: str, size_bytes: float, placement: GroupPlacement, *, algorithms: tuple[str, ...] = ()
    ) -> VendorTime:
        """The time of the fastest algorithm and protocol, of all or of `algorithms`."""
        key = (collective, size_bytes, placement, algorithms)
        if key not in self._times:
            self._times[key] = self._compute(collective, size_bytes, placement, algorithms=algorithms)
        return self._times[key]

    def seconds(self, collective: str, size_bytes: float, *, ranks: int, ranks_per_host: int) -> float:
        """The time alone, in the form that the planner asks for."""
        return self.time(collective, size_bytes, GroupPlacement(ranks, ranks_per_host)).seconds

    def _compute(
        self, collective: str, size_bytes: float, placement: GroupPlacement, *, algorithms: tuple[str, ...]
    ) -> VendorTime:
        if collective not in CLASSIC_COLLECTIVES + POINT_TO_POINT_COLLECTIVES:
            known = ", ".join(CLASSIC_COLLECTIVES + POINT_TO_POINT_COLLECTIVES)
            raise InputError(f"collective {collective!r} is unknown; give one of {known}")
        check_input(size_bytes >= 0, f"a size of {size_bytes} bytes: give 0 or more")
        if placement.ranks == 1:
            return VendorTime(0.0, "none", "none", 0.0)
        shapes = list(_shapes(collective, placement, self.fabric.in_switch_inside))
        chosen = [shape for shape in shapes if not algorithms or shape.algorithm in algorithms]
        names = ", ".join(shape.algorithm for shape in shapes)
        check_input(bool(chosen), f"algorithms {', '.join(algorithms)} do not run {collective} here; give {names}")
        is_sum = collective == "all-reduce"
        times = (
            self._shape_time(shape, size_bytes, protocol, is_sum=is_sum) for shape in chosen for protocol in PROTOCOLS
        )
        return min((time for time in times if time), key=lambda time: time.seconds)

    def _shape_time(self, shape: _Shape, size_bytes: float, protocol: str, *, is_sum: bool) -> VendorTime | None:
        inside = self.fabric.intra_class or LINK_CLASSES[self.fabric.intra_link]
        between = self.fabric.inter_class or LINK_CLASSES[self.fabric.inter_link]
        inside_factor, between_factor, rate = PROTOCOLS[protocol]
        in_switch = shape.algorithm.startswith("nvls")
        if in_switch and protocol != "Simple":
            return None
        hops_s = shape.inside_hops * inside.hop_s * inside_factor + shape.between_hops * between.hop_s * between_factor
        startup_s = self.fabric.startup_factor * (LAUNCH_S + hops_s + (IN_SWITCH_STARTUP_S if in_switch else 0))
        efficiency = inside.in_switch_efficiency if in_switch else inside.efficiency
        one_way = between.one_way_efficiency
        reached = between.efficiency if is_sum or not one_way else one_way
        bytes_s = max(
            shape.inside_bytes / (self.fabric.intra_Bps * efficiency * rate),
            shape.between_bytes / (self.fabric.inter_Bps * reached * rate),
        )
        bytes_s *= size_bytes
        pipeline_s = 2 * sqrt((shape.inside_hops + shape.between_hops) * PIECE_S * bytes_s)
        return VendorTime(startup_s + pipeline_s + bytes_s, shape.algorithm, protocol, startup_s)


def _shapes(collective: str, placement: GroupPlacement, in_switch: bool) -> Iterator[_Shape]:
    n, m, hosts = placement.ranks, placement.ranks_per_host, placement.hosts
    crossing = hosts / n if hosts > 1 else 0.0  # The part of a ring's edges that lead to another host
    if collective in POINT_TO_POINT_COLLECTIVES:
        if collective == "send-receive":
            yield _Shape("direct", hosts == 1, hosts > 1, 1.0 if m > 1 else 0.0, 1.0 if hosts > 1 else 0.0)
        else:
            yield _Shape("direct", (m - 1) / 2, (n - m) / 2, (m - 1) / n, (n - m) / n)
        return
    passes = 2 if collective == "all-reduce" else 1
    pipelined = collective in ("broadcast", "reduce")  # All bytes pass every edge
    ring_bytes = 1.0 if pipelined else passes * (n - 1) / n
    steps = passes * (n - 1)
    inside_bytes = ring_bytes if m > 1 else 0.0
    yield _Shape("ring", steps * (1 - crossing), steps * crossing, inside_bytes, ring_bytes / m if hosts > 1 else 0.0)
    if collective != "all-reduce":
        return
    tree_bytes = 2 * (hosts - 1) / hosts / m
    depth = 2 * ceil(log2(hosts))
    if hosts > 1:
        chain_bytes = 0.0 if m == 1 else 1.0 if m == 2 else 2.0  # Both trees; a middle device sends up and down
        yield _Shape("tree", 2 * (m - 1), depth, chain_bytes / TREE_EFFICIENCY, tree_bytes)
    if in_switch and m > 2:
        name, share = ("nvls", 1.0) if hosts == 1 else ("nvls-tree", TREE_EFFICIENCY)
        yield _Shape(name, 2, depth, (1 + 1 / m) / share, tree_bytes)


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
