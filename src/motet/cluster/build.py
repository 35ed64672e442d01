"""Makes a `Cluster` of what a cluster file says: one small function for each kind of network."""

from math import prod

from motet.cluster.cluster import Cluster
from motet.cluster.device import Figure, find_device
from motet.cluster.link import Link, figure
from motet.cluster.settings import (
    ClusterSettings,
    LinkSettings,
    NicSettings,
    SpineLeafSettings,
    TorusSettings,
)
from motet.cluster.topology import Hosts, Level, Mesh, Network, Torus, Tree
from motet.core.errors import InputError

_MOST_RANKS = 2**17
"""Each takes about a kilobyte here. The largest clusters in use have about as many."""


def build_cluster(settings: ClusterSettings, name: str) -> Cluster:
    """The cluster; what does not fit together is an `InputError`."""
    if settings.hosts * settings.devices_per_host > _MOST_RANKS:
        raise InputError(
            f"hosts = {settings.hosts} times devices_per_host = {settings.devices_per_host} are more than the "
            f"{_MOST_RANKS} ranks that a cluster may have; give fewer"
        )
    network = _inside(settings)
    if settings.hosts > 1 or settings.between:  # a mistake in what joins hosts is told even while there is one
        between = _between(settings)
        network = Hosts(settings.hosts, network, between) if settings.hosts > 1 else network
    return Cluster(name, network.ranks, settings.devices_per_host, network, _gamma(settings), settings.device)


def _inside(settings: ClusterSettings) -> Network:
    devices, inside = settings.devices_per_host, settings.inside
    match inside.kind:
        case "switch":
            return Tree(devices, _port(inside))
        case "mesh":
            return Mesh(devices, _port(inside))
        case "bus":
            bus = Link(figure(0), inside.bus_Bps.figure)
            return Tree(devices, _port(inside), (Level("bus", (0,) * devices, switch=bus),))
        case "pcie":
            switches = tuple(device // inside.devices_per_switch for device in range(devices))
            uplink = Link(figure(0), inside.bandwidth_Bps.figure)
            bridge = Link(figure(0), inside.bridge_Bps.figure)
            levels = Level("switch", switches, uplink=uplink), Level("bridge", (0,) * devices, switch=bridge)
            return Tree(devices, _port(inside), levels)
        case "torus":
            return _torus(inside, devices, "devices_per_host")


def _between(settings: ClusterSettings) -> Network:
    between = settings.between
    if between is None:
        raise InputError(f"hosts = {settings.hosts} need a section [between] that joins them; give one, or hosts = 1")
    if between.kind == "torus":
        return _torus(between, settings.hosts, "hosts")
    return _nics(between, settings.hosts, settings.devices_per_host)


def _torus(settings: TorusSettings, ranks: int, key: str) -> Torus:
    dims = settings.dims
    if prod(dims) != ranks:
        sizes = " x ".join(map(str, dims))
        raise InputError(f"a torus of dims {sizes} = {prod(dims)} does not fit {key} = {ranks}; make them equal")
    wrap = settings.wrap * len(dims) if len(settings.wrap) == 1 else settings.wrap
    if len(wrap) != len(dims):
        raise InputError(f"wrap has {len(wrap)} values for {len(dims)} dims; give one each, or one true or false")
    return Torus(dims, wrap, _port(settings), Link(settings.hop_s.figure, settings.bandwidth_Bps.figure))


def _nics(settings: NicSettings | SpineLeafSettings, hosts: int, devices: int) -> Tree:
    """A rank's port to the network is as fast as its NIC, which it may share with others of its host."""
    if devices % settings.nics:
        raise InputError(
            f"nics = {settings.nics} cannot be shared evenly by {devices} devices per host; "
            "give a number that divides it (several NICs of one device are one faster NIC)"
        )
    ranks = range(hosts * devices)
    nics = tuple(rank * settings.nics // devices for rank in ranks)
    nic = Level("nic", nics, uplink=Link(figure(0), settings.bandwidth_Bps.figure))
    levels = (nic, _leaves(settings, nics)) if settings.kind == "spine_leaf" else (nic,)
    return Tree(len(ranks), _port(settings), levels)


def _leaves(settings: SpineLeafSettings, nics: tuple[int, ...]) -> Level:
    """The leaves above NICs that are counted over all hosts. A leaf that is not full has all of its uplinks."""
    per_host, per_leaf = settings.nics, settings.hosts_per_leaf
    if settings.rails:
        leaves = tuple(nic // per_host // per_leaf * per_host + nic % per_host for nic in nics)
        below = per_leaf
    else:
        leaves = tuple(nic // per_host // per_leaf for nic in nics)
        below = per_leaf * per_host
    bandwidth = figure(settings.bandwidth_Bps.value * below / settings.oversubscription)
    uplink = Link(settings.hop_s.figure, bandwidth, hashed_lanes=settings.uplinks if settings.flows == "hashed" else 1)
    return Level("leaf", leaves, uplink=uplink)


def _port(settings: LinkSettings) -> Link:
    return Link(settings.alpha_s.figure, settings.bandwidth_Bps.figure, is_port=True)


def _gamma(settings: ClusterSettings) -> Figure:
    if settings.gamma_s_per_byte is not None:
        return settings.gamma_s_per_byte.figure
    device = find_device(settings.device)
    if device is None:
        raise InputError(
            f"device = {settings.device!r} is not in the table of devices, so gamma_s_per_byte must be given; "
            "three bytes of memory traffic for each byte are a fair guess"
        )
    return figure(3 / device.bandwidth_Bps.value)  # two are read, one is written
