"""Constants of links, protocols and libraries, by which the times of NCCL and RCCL are predicted, with their origins.

`scripts/fit_collectives.py` fits them together to published curves of nccl-tests; its priors are datasheets and the
table by which NCCL chooses algorithms. A constant belongs to a class of links, a protocol or an algorithm, never to a
device, a source or a curve.
"""

from math import inf
from typing import NamedTuple


class LinkClass(NamedTuple):
    """Constants of a class of links: the reached share of its datasheet bandwidth, and the start-up of a hop."""

    efficiency: float
    hop_s: float
    origin: str
    in_switch_efficiency: float = 0.0  # Of the bytes that in-switch reduction moves; 0 without it
    one_way_efficiency: float = 0.0  # Of collectives that add nothing up, if it is less; 0: the same
    host_limit_Bps: float = inf  # noqa: N815 - a unit; what the processor of a host carries at most

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
