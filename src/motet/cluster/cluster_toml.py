"""Reads a `Cluster` from a TOML file or a preset; a mistake in it is an `InputError`."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from motet.cluster import cluster_settings
from motet.cluster.cluster import Cluster
from motet.cluster.cluster_settings import VendorLinkSettings
from motet.cluster.device_specs import HardwareNumberWithOrigin, match_device
from motet.cluster.devices.described_device import device_of_cluster
from motet.cluster.network_link import NetworkLink, with_origin
from motet.cluster.topology import FullMesh, NetworkTopology, SwitchLevel, SwitchTree, TorusNetwork, TwoLevelNetwork
from motet.core.config_loading import builtin_texts, read_toml, settings_from_dict
from motet.core.errors import InputError, check_input

# Short name -> preset
PRESET_ALIASES = {
    "a100": "dgx-a100",
    "h100": "dgx-h100",
    "gb200": "gb200-nvl72",
    "gb300": "gb300-nvl72",
    "mi300x": "mi300x-8",
    "cpu": "laptop",
}


def cluster_presets() -> dict[str, str]:
    """Name -> TOML text of the clusters that come with motet, and of their short names."""
    presets = builtin_texts("motet.cluster", "presets")
    aliases = {alias: presets[name] for alias, name in PRESET_ALIASES.items()}
    return dict(sorted((presets | aliases).items()))


def load_cluster(source: str, *, hosts: int | None = None, dims: Sequence[int] | None = None) -> Cluster:
    """The cluster of a TOML file or preset, with other sizes if they are given: `load_cluster("dgx-h100", hosts=16)`.

    `dims` resizes a torus and the number of its devices (or hosts).
    """
    values = read_toml("cluster", source, cluster_presets())
    if dims is not None:
        _resize_torus(values, list(dims), source)
    if hosts is not None:
        values["hosts"] = hosts
    return cluster_from_dict(values, source)


def load_cluster_for_ranks(source: str, ranks: int) -> Cluster:
    """The first ranks of a file or preset, with more hosts if it has fewer ranks and can have more."""
    cluster = load_cluster(source)
    if ranks > cluster.ranks:
        with suppress(InputError):  # if the cluster cannot have more hosts, the error below is clearer
            cluster = load_cluster(source, hosts=-(-ranks // cluster.devices_per_host))
    return replace(cluster, ranks=ranks)


def cluster_from_dict(values: dict[str, Any], source: str = "cluster") -> Cluster:
    """The cluster of nested values as TOML gives them."""
    settings = settings_from_dict(cluster_settings.ClusterSettings, values, source)
    try:
        return build_cluster(settings, Path(source).stem)
    except InputError as error:
        raise InputError(f"{source}: {error}") from None


def _resize_torus(values: dict[str, Any], dims: list[int], source: str) -> None:
    for section, size in (("inside", "devices_per_host"), ("between", "hosts")):
        network = values.get(section)
        if isinstance(network, dict) and network.get("kind") == "torus":
            values |= {section: {**network, "dims": dims}, size: prod(dims)}
            return
    remedy = "give --hosts, or hosts= in Python"
    raise InputError(f"{source}: dims = {dims} is for a torus, and this cluster has none; {remedy}")


MAX_RANKS = 2**17  # About as many as the largest clusters have; each takes about a kilobyte here


def build_cluster(settings: cluster_settings.ClusterSettings, name: str) -> Cluster:
    """The cluster of these settings; an `InputError` if they contradict each other."""
    hosts, devices, between = settings.hosts, settings.devices_per_host, settings.between
    excess = f"devices_per_host = {devices} are more than the {MAX_RANKS} ranks that a cluster may have; give fewer"
    check_input(hosts * devices <= MAX_RANKS, f"hosts = {hosts} times {excess}")
    network = _intra_host_network(settings)
    if between is not None:  # with one host, mistakes in [between] are still reported
        if between.kind == "torus":
            joined: NetworkTopology = _torus_network(between, hosts, "hosts")
        else:
            joined = _nic_network(between, hosts, devices)
        network = TwoLevelNetwork(hosts, network, joined) if hosts > 1 else network
    message = f"hosts = {hosts} need a section [between] that joins them; give one, or hosts = 1"
    check_input(between is not None or hosts == 1, message)
    vendor = (settings.inside.vendor, between.vendor if between is not None else VendorLinkSettings())
    return Cluster(name, network.ranks, devices, network, _reduce_s_per_byte(settings), settings.device, vendor)


def _intra_host_network(settings: cluster_settings.ClusterSettings) -> NetworkTopology:
    devices, inside = settings.devices_per_host, settings.inside
    port, one_switch = _port_link(inside), (0,) * devices
    match inside.kind:
        case "switch":
            return SwitchTree(devices, port)
        case "mesh":
            return FullMesh(devices, port)
        case "bus":
            return SwitchTree(devices, port, (SwitchLevel("bus", one_switch, switch=_link(inside.bus_Bps)),))
        case "pcie":
            switches = tuple(device // inside.devices_per_switch for device in range(devices))
            leaf = SwitchLevel("switch", switches, uplink=_link(inside.bandwidth_Bps))
            return SwitchTree(devices, port, (leaf, SwitchLevel("bridge", one_switch, switch=_link(inside.bridge_Bps))))
        case "torus":
            return _torus_network(inside, devices, "devices_per_host")


def _link(bandwidth: cluster_settings.BytesPerSecondSetting) -> NetworkLink:
    return NetworkLink(with_origin(0), bandwidth.with_origin)


def _torus_network(settings: cluster_settings.TorusNetworkSettings, ranks: int, key: str) -> TorusNetwork:
    dims, port = settings.dims, _port_link(settings)
    sizes = " x ".join(map(str, dims))
    message = f"a torus of dims {sizes} = {prod(dims)} does not fit {key} = {ranks}; make them equal"
    check_input(prod(dims) == ranks, message)
    wrap = settings.wrap * len(dims) if len(settings.wrap) == 1 else settings.wrap
    message = f"wrap has {len(wrap)} values for {len(dims)} dims; give one each, or one true or false"
    check_input(len(wrap) == len(dims), message)
    return TorusNetwork(dims, wrap, port, NetworkLink(settings.hop_s.with_origin, port.bandwidth_Bps))


def _nic_network(
    settings: cluster_settings.NicSwitchSettings | cluster_settings.SpineLeafNetworkSettings, hosts: int, devices: int
) -> SwitchTree:
    """NICs on switches. A rank's port is as fast as its NIC, which other ranks of the host may share."""
    remedy = "give a number that divides it (several NICs of one device are one faster NIC)"
    message = f"nics = {settings.nics} cannot be shared evenly by {devices} devices per host; {remedy}"
    check_input(devices % settings.nics == 0, message)
    nics = tuple(rank * settings.nics // devices for rank in range(hosts * devices))
    nic = SwitchLevel("nic", nics, uplink=_link(settings.bandwidth_Bps))
    levels = (nic, _leaf_switch_level(settings, nics)) if settings.kind == "spine_leaf" else (nic,)
    return SwitchTree(len(nics), _port_link(settings), levels)


def _leaf_switch_level(settings: cluster_settings.SpineLeafNetworkSettings, nics: tuple[int, ...]) -> SwitchLevel:
    """The leaf switch of each rank; NICs are counted over all hosts. A leaf that is not full has all its uplinks."""
    per_host, nics_per_leaf = settings.nics, settings.hosts_per_leaf
    leaves = tuple(nic // per_host // settings.hosts_per_leaf for nic in nics)
    if settings.rails:
        leaves = tuple(leaf * per_host + nic % per_host for leaf, nic in zip(leaves, nics, strict=True))
    else:
        nics_per_leaf *= per_host
    bandwidth = with_origin(settings.bandwidth_Bps.value * nics_per_leaf / settings.oversubscription)
    hashed_paths = settings.uplinks if settings.flows == "hashed" else 1
    return SwitchLevel("leaf", leaves, uplink=NetworkLink(settings.hop_s.with_origin, bandwidth, False, hashed_paths))


def _port_link(settings: cluster_settings.NetworkPortSettings) -> NetworkLink:
    return NetworkLink(settings.alpha_s.with_origin, settings.bandwidth_Bps.with_origin, is_port=True)


def _reduce_s_per_byte(settings: cluster_settings.ClusterSettings) -> HardwareNumberWithOrigin:
    device = device_of_cluster(settings) if settings.datasheet is not None else match_device(settings.device)
    if settings.gamma_s_per_byte is not None:
        return settings.gamma_s_per_byte.with_origin
    if device is None:
        raise InputError(
            f"device = {settings.device!r} is not in the table of devices, so gamma_s_per_byte must be given, or the "
            "section [datasheet]; three bytes of memory traffic for each byte are a fair guess"
        )
    return with_origin(3 / device.bandwidth_Bps.value)  # two are read, one is written
