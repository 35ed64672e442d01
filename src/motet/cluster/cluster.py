"""A `Cluster`: ranks, the network that joins them, and the cost of reducing a byte; numbers with their origin.

Networks as small frozen values that name their links and the route between two ranks.

A route is (out port of the source, links in between, in port of the destination), and empty from a rank to itself.

Reads a `Cluster` from a TOML file or a preset; a mistake in it is an `InputError`.

The device of a cluster file: a row of the table of devices, with the numbers of the file's section [datasheet].
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, Union

from motet.cluster import cluster_settings
from motet.cluster.cluster_settings import (
    ClusterSettings,
    DatasheetFlopsSettings,
    DatasheetSettings,
    NetworkLink,
    Number,
    VendorLinkSettings,
    with_origin,
)
from motet.cluster.device_specs import (
    GENERATIONS,
    DeviceSpec,
    HardwareNumberWithOrigin,
    find_planned_device,
    match_device,
    usable_share,
)
from motet.core.config_loading import builtin_texts, read_toml, settings_from_dict
from motet.core.errors import InputError, check_input

Route = tuple[str, ...]

# A network has a number of `ranks`, the `route` between two of them, and the `link` that routes call by a name.
NetworkTopology = Union["SwitchTree", "FullMesh", "TorusNetwork", "TwoLevelNetwork"]


@dataclass(frozen=True)
class SwitchLevel:
    """One layer of switches in a tree."""

    name: str
    groups: tuple[int, ...]  # For each rank, the switch that it is under
    switch: NetworkLink | None = None  # Crossed by messages that turn round at this switch; None if it is ideal
    uplink: NetworkLink | None = None  # Link in each direction, to and from the layer above; None if it is ideal


@dataclass(frozen=True)
class SwitchTree:
    """Each rank has one full-duplex port under layers of switches, with an ideal switch above the last layer.

    A message climbs to the first switch that both ends are under.
    """

    ranks: int
    port: NetworkLink
    levels: tuple[SwitchLevel, ...] = ()

    def __post_init__(self) -> None:
        assert all(len(level.groups) == self.ranks for level in self.levels)

    def link(self, name: str) -> NetworkLink:
        return self._links[name]

    @cached_property
    def _links(self) -> dict[str, NetworkLink]:
        links = {f"{rank}.{side}": self.port for rank in range(self.ranks) for side in ("out", "in")}
        for level in self.levels:
            for group in sorted(set(level.groups)):
                if level.switch:
                    links[f"{level.name}{group}"] = level.switch
                if level.uplink:
                    links |= {f"{level.name}{group}.{way}": level.uplink for way in ("up", "down")}
        return links

    def route(self, src: int, dst: int) -> Route:
        if src == dst:
            return ()
        up, down = [f"{src}.out"], [f"{dst}.in"]
        for level in self.levels:
            src_switch, dst_switch = level.groups[src], level.groups[dst]
            if src_switch == dst_switch:
                return (*up, *([f"{level.name}{src_switch}"] if level.switch else []), *reversed(down))
            if level.uplink:
                up.append(f"{level.name}{src_switch}.up")
                down.append(f"{level.name}{dst_switch}.down")
        return (*up, *reversed(down))


@dataclass(frozen=True)
class FullMesh:
    """Every pair of ranks has its own links: a rank has a port for each peer."""

    ranks: int
    port: NetworkLink

    def link(self, name: str) -> NetworkLink:
        return self.port

    def route(self, src: int, dst: int) -> Route:
        return () if src == dst else (f"{src}.out>{dst}", f"{dst}.in<{src}")


@dataclass(frozen=True)
class TorusNetwork:
    """Ranks at the points of an n-dimensional grid, the last dimension counting fastest, with wires to each neighbour.

    A rank has a port for each neighbour and direction. Routes go dimension by dimension, the shorter way round.
    """

    dims: tuple[int, ...]
    wrap: tuple[bool, ...]  # Whether the ends of each dimension are joined; nowhere: a mesh
    port: NetworkLink
    wire: NetworkLink

    def __post_init__(self) -> None:
        assert self.dims and len(self.dims) == len(self.wrap)

    @property
    def ranks(self) -> int:
        return prod(self.dims)

    def link(self, name: str) -> NetworkLink:
        return self.port if "." in name else self.wire

    def route(self, src: int, dst: int) -> Route:
        wires = list(self._hops(src, dst))
        if not wires:
            return ()
        return (f"{src}.out{wires[0][1]}", *(f"{rank}{way}" for rank, way in wires), f"{dst}.in{wires[-1][1]}")

    def _hops(self, src: int, dst: int) -> Iterator[tuple[int, str]]:
        position, goal = self._coordinates(src), self._coordinates(dst)
        for axis, (size, wraps) in enumerate(zip(self.dims, self.wrap, strict=True)):
            ahead = goal[axis] - position[axis]
            if wraps:
                ahead %= size
                ahead -= size if 2 * ahead > size else 0  # half-way round counts as ahead
            step = 1 if ahead > 0 else -1
            for _ in range(abs(ahead)):
                yield self._rank(position), f"{'+' if step > 0 else '-'}{axis}"
                position[axis] = (position[axis] + step) % size

    def _coordinates(self, rank: int) -> list[int]:
        return [rank // prod(self.dims[axis + 1 :]) % size for axis, size in enumerate(self.dims)]

    def _rank(self, coordinates: Sequence[int]) -> int:
        return sum(coordinate * prod(self.dims[axis + 1 :]) for axis, coordinate in enumerate(coordinates))


@dataclass(frozen=True)
class TwoLevelNetwork:
    """Equal hosts with a network inside of each and a network between them."""

    hosts: int
    inside: NetworkTopology
    between: NetworkTopology  # Its endpoints are the ranks of all hosts, or the hosts

    def __post_init__(self) -> None:
        assert self.between.ranks in (self.hosts, self.ranks)

    @property
    def ranks(self) -> int:
        return self.hosts * self.inside.ranks

    def link(self, name: str) -> NetworkLink:
        level, _, link_name = name.partition("/")
        return (self.between if level == "net" else self.inside).link(link_name)

    def route(self, src: int, dst: int) -> Route:
        src_host, src_device = divmod(src, self.inside.ranks)
        dst_host, dst_device = divmod(dst, self.inside.ranks)
        if src_host == dst_host:
            return tuple(f"host{src_host}/{name}" for name in self.inside.route(src_device, dst_device))
        per_endpoint = self.ranks // self.between.ranks
        return tuple(f"net/{name}" for name in self.between.route(src // per_endpoint, dst // per_endpoint))


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


_MOST_FLOP_PER_BYTE = 1e5  # FLOP for each byte of memory traffic; the table's devices have up to 2000
_NEEDED_FLOPS = ("bfloat16", "float16", "float32")


def device_of_cluster(settings: ClusterSettings) -> DeviceSpec:
    """The device that a cluster file names or describes; an error if its numbers are incomplete or contradictory."""
    sheet = settings.datasheet
    if sheet is None:
        return find_planned_device(settings.device)
    known = match_device(settings.device)
    device = _with_numbers(known or _new_device(settings.device, sheet), sheet)
    if known and replace(device, power_W=known.power_W, price_per_hour=known.price_per_hour) != known:
        # Errors of published steps are those of the table's device, not of this one
        device = replace(device, name=f"{known.name} of the cluster file")
    names = ", ".join(GENERATIONS)
    check_input(
        not sheet.generation or sheet.generation in GENERATIONS,
        f"datasheet.generation = {sheet.generation!r} is not in the table of devices; give one of {names}",
    )
    for dtype, flops in device.peak_flops.items():
        ratio = flops.value / device.bandwidth_Bps.value
        check_input(
            ratio <= _MOST_FLOP_PER_BYTE,
            f"datasheet.flops.{dtype} = {flops.value:g} FLOP/s and bandwidth_Bps = {device.bandwidth_Bps.value:g} are "
            f"{ratio:.2g} FLOP for each byte of memory, more than {_MOST_FLOP_PER_BYTE:g}; correct one of them",
        )
    return device


def _new_device(name: str, sheet: DatasheetSettings) -> DeviceSpec:
    """A device that the table does not have, from the numbers that planning needs."""
    flops = _peak_flops(sheet.flops)
    missing = [key for key in ("memory_bytes", "bandwidth_Bps") if getattr(sheet, key) is None]
    missing += [] if any(dtype in flops for dtype in _NEEDED_FLOPS) else ["flops.bfloat16"]
    if missing or sheet.memory_bytes is None or sheet.bandwidth_Bps is None:
        raise InputError(
            f"device = {name!r} is not in the table of devices, and section [datasheet] does not give "
            f"{', '.join(missing)}; add it, or name a device of the table"
        )
    memory, bandwidth = sheet.memory_bytes.with_origin, sheet.bandwidth_Bps.with_origin
    return DeviceSpec(name or "device", flops, memory, bandwidth, usable_share(name))


def _with_numbers(device: DeviceSpec, sheet: DatasheetSettings) -> DeviceSpec:
    return replace(
        device,
        peak_flops={**device.peak_flops, **_peak_flops(sheet.flops)},
        memory_bytes=sheet.memory_bytes.with_origin if sheet.memory_bytes else device.memory_bytes,
        bandwidth_Bps=sheet.bandwidth_Bps.with_origin if sheet.bandwidth_Bps else device.bandwidth_Bps,
        usable_share=sheet.usable_memory.with_origin if sheet.usable_memory else device.usable_share,
        power_W=sheet.power_W.with_origin if sheet.power_W else device.power_W,
        price_per_hour=sheet.price_per_hour.with_origin if sheet.price_per_hour else device.price_per_hour,
        units=sheet.units or device.units,
        generation=sheet.generation or device.generation,
    )


def _peak_flops(flops: DatasheetFlopsSettings) -> dict[str, HardwareNumberWithOrigin]:
    numbers = {
        "float64": flops.float64,
        "float32": flops.float32,
        "tfloat32": flops.tfloat32,
        "bfloat16": flops.bfloat16,
        "float16": flops.float16,
        "float8": flops.float8,
        "float4": flops.float4,
    }
    return {dtype: number.with_origin for dtype, number in numbers.items() if number is not None}


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
    raise InputError(f"{source}: dims = {dims} resizes a torus, and this cluster has none; {remedy}")


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
            f"device = {settings.device!r} is not in the table of devices; give gamma_s_per_byte, or the section "
            "[datasheet]; three bytes of memory traffic for each byte are a fair guess"
        )
    return with_origin(3 / device.bandwidth_Bps.value)  # two are read, one is written
