"""The fabric of a cluster for the costs of vendor libraries: classes of its links, and what each device has of them."""

from dataclasses import replace

from motet.cluster.cluster import Cluster
from motet.cluster.cluster_settings import VendorLinkSettings
from motet.cluster.topology import FullMesh, NetworkTopology, SwitchTree, TorusNetwork, TwoLevelNetwork
from motet.collectives.cost.leaf_switches import leaf_switches_of
from motet.collectives.cost.link_classes import LINK_CLASSES, LinkClass
from motet.collectives.cost.vendor_library import FabricSpec, fabric_of_device
from motet.core.errors import InputError, check_input


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
    check_input(link in LINK_CLASSES, f"vendor.link = {link!r} is no class of links; give one of {names}")
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
