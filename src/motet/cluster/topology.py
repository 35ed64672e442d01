"""Networks as small frozen values that name their links and the route between two ranks.

A route is (out port of the source, links in between, in port of the destination), and empty from a rank to itself.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Union

from motet.cluster.network_link import NetworkLink

Route = tuple[str, ...]

# A network has a number of `ranks`, the `route` between two of them, and the `link` that routes call by a name.
NetworkTopology = Union["SwitchTree", "FullMesh", "TorusNetwork", "TwoLevelNetwork"]


@dataclass(frozen=True)
class SwitchLevel:
    """One layer of switches in a tree."""

    name: str
    groups: tuple[int, ...]  # For each rank, the switch that it is under
    switch: NetworkLink | None = None  # Crossed by messages that turn round at this switch; None if it is ideal
    uplink: NetworkLink | None = None  # In each direction, to and from the layer above; None if it is ideal


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
