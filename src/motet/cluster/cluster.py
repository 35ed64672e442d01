"""A `Cluster`: ranks, the network that joins them, and the cost of reducing a byte; numbers with their origin."""

from dataclasses import dataclass

from motet.cluster.cluster_settings import VendorLinkSettings
from motet.cluster.device_specs import HardwareNumberWithOrigin
from motet.cluster.network_link import NetworkLink, Number, with_origin
from motet.cluster.topology import NetworkTopology, Route, SwitchTree
from motet.core.errors import check_input


@dataclass(frozen=True)
class Cluster:
    """The first `ranks` devices of a network, host after host."""

    name: str
    ranks: int
    devices_per_host: int
    network: NetworkTopology
    gamma_s_per_byte: HardwareNumberWithOrigin  # Time to add one received byte
    device: str = ""  # The device of each rank, which the table of devices need not have
    vendor_links: tuple[VendorLinkSettings, VendorLinkSettings] = (VendorLinkSettings(), VendorLinkSettings())

    def __post_init__(self) -> None:
        check_input(self.ranks >= 1, f"a cluster cannot have {self.ranks} ranks; give 1 or more")
        most = self.network.ranks
        message = f"cluster {self.name} has {most} ranks, not {self.ranks}: use fewer, or describe it with more hosts"
        check_input(self.ranks <= most, message)

    @property
    def hosts(self) -> int:
        """The number of hosts with at least one of the ranks."""
        return -(-self.ranks // self.devices_per_host)

    def link(self, name: str) -> NetworkLink:
        """The link that routes call `name`."""
        return self.network.link(name)

    def route(self, src: int, dst: int) -> Route:
        """The names of the links that a message crosses, the ports first and last; empty from a rank to itself."""
        assert 0 <= src < self.ranks and 0 <= dst < self.ranks, (src, dst, self.ranks)
        return self.network.route(src, dst)

    def latency_s(self, src: int, dst: int) -> float:
        """The delay of the links between the two ports, without the start-up at the ports."""
        return sum(self.link(name).alpha_s.value for name in self.route(src, dst)[1:-1])


def uniform_cluster(
    ranks: int,
    alpha_s: Number,
    bandwidth_Bps: Number,  # noqa: N803 - a unit
    gamma_s_per_byte: Number = 0,
) -> Cluster:
    """One full-duplex port per rank to an ideal switch, on which closed forms are exact. Fractions stay Fractions."""
    port = NetworkLink(with_origin(alpha_s), with_origin(bandwidth_Bps), is_port=True)
    return Cluster("uniform", ranks, 1, SwitchTree(ranks, port), with_origin(gamma_s_per_byte))
