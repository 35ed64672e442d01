"""How ranks are joined: networks as small frozen values that name their links and the route between two ranks.

A route is (out port of the source, links in between, in port of the destination), and empty from a rank to itself.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Protocol

from motet.cluster.link import Link

Route = tuple[str, ...]


class Network(Protocol):
    """What every kind of network offers."""

    @property
    def ranks(self) -> int: ...

    def link(self, name: str) -> Link:
        """The link that routes name so."""

    def route(self, src: int, dst: int) -> Route:
        """The ids of the links that a message crosses, in order."""


@dataclass(frozen=True)
class Level:
    """One layer of switches in a tree."""

    name: str
    groups: tuple[int, ...]
    """For each rank, the switch that it is under."""
    switch: Link | None = None
    """What a message crosses that turns round at this switch. None: the switch is ideal."""
    uplink: Link | None = None
    """Up to the layer above, and as much again down from it. None: ideal."""


@dataclass(frozen=True)
class Tree:
    """Each rank has one port, full duplex, under layers of switches; above the last layer everything is joined ideally.

    A message climbs to the first switch that both ends are under.
    """

    ranks: int
    port: Link
    levels: tuple[Level, ...] = ()

    def __post_init__(self) -> None:
        assert all(len(level.groups) == self.ranks for level in self.levels)

    def link(self, name: str) -> Link:
        return self._links[name]

    @cached_property
    def _links(self) -> dict[str, Link]:
        found = {f"{rank}.{side}": self.port for rank in range(self.ranks) for side in ("out", "in")}
        for level in self.levels:
            for group in sorted(set(level.groups)):
                if level.switch:
                    found[f"{level.name}{group}"] = level.switch
                if level.uplink:
                    found |= {f"{level.name}{group}.{way}": level.uplink for way in ("up", "down")}
        return found

    def route(self, src: int, dst: int) -> Route:
        if src == dst:
            return ()
        up, down = [f"{src}.out"], [f"{dst}.in"]
        for level in self.levels:
            here, there = level.groups[src], level.groups[dst]
            if here == there:
                turn = [f"{level.name}{here}"] if level.switch else []
                return (*up, *turn, *reversed(down))
            if level.uplink:
                up.append(f"{level.name}{here}.up")
                down.append(f"{level.name}{there}.down")
        return (*up, *reversed(down))


@dataclass(frozen=True)
class Mesh:
    """Every pair of ranks has links of its own: a rank has a port for each peer."""

    ranks: int
    port: Link

    def link(self, name: str) -> Link:
        return self.port

    def route(self, src: int, dst: int) -> Route:
        return () if src == dst else (f"{src}.out>{dst}", f"{dst}.in<{src}")


@dataclass(frozen=True)
class Torus:
    """Ranks at the points of an n-dimensional grid, the last dimension counting fastest, with wires to each neighbour.

    A rank has a port for each neighbour and direction. Routes go dimension by dimension, the shorter way round.
    """

    dims: tuple[int, ...]
    wrap: tuple[bool, ...]
    """Whether the ends of each dimension are joined; nowhere: a mesh."""
    port: Link
    wire: Link

    def __post_init__(self) -> None:
        assert self.dims and len(self.dims) == len(self.wrap)

    @property
    def ranks(self) -> int:
        return prod(self.dims)

    def link(self, name: str) -> Link:
        return self.port if "." in name else self.wire

    def route(self, src: int, dst: int) -> Route:
        wires = list(self._hops(src, dst))
        if not wires:
            return ()
        return (f"{src}.out{wires[0][1]}", *(f"{rank}{way}" for rank, way in wires), f"{dst}.in{wires[-1][1]}")

    def _hops(self, src: int, dst: int) -> Iterator[tuple[int, str]]:
        """Each rank that is left on the way, and in which direction."""
        place, goal = self._place(src), self._place(dst)
        for axis, (size, wraps) in enumerate(zip(self.dims, self.wrap, strict=True)):
            ahead = goal[axis] - place[axis]
            if wraps:
                ahead %= size
                ahead -= size if 2 * ahead > size else 0  # half-way round counts as ahead
            step = 1 if ahead > 0 else -1
            for _ in range(abs(ahead)):
                yield self._rank(place), _way(axis, step)
                place[axis] = (place[axis] + step) % size

    def _place(self, rank: int) -> list[int]:
        place = []
        for size in reversed(self.dims):
            rank, at = divmod(rank, size)
            place.append(at)
        return place[::-1]

    def _rank(self, place: "tuple[int, ...] | list[int]") -> int:
        rank = 0
        for size, at in zip(self.dims, place, strict=True):
            rank = rank * size + at
        return rank


def _way(axis: int, step: int) -> str:
    """`+0`: ahead along dimension 0."""
    return f"{'+' if step > 0 else '-'}{axis}"


@dataclass(frozen=True)
class Hosts:
    """Equal hosts: one network inside of each, another between them."""

    hosts: int
    inside: Network
    between: Network
    """Its endpoints are the ranks of all hosts, or the hosts."""

    def __post_init__(self) -> None:
        assert self.between.ranks in (self.hosts, self.ranks)

    @property
    def ranks(self) -> int:
        return self.hosts * self.inside.ranks

    def link(self, name: str) -> Link:
        place, _, at = name.partition("/")
        return (self.between if place == "net" else self.inside).link(at)

    def route(self, src: int, dst: int) -> Route:
        host, at = divmod(src, self.inside.ranks)
        other, there = divmod(dst, self.inside.ranks)
        if host == other:
            return tuple(f"host{host}/{name}" for name in self.inside.route(at, there))
        per_endpoint = self.ranks // self.between.ranks
        return tuple(f"net/{name}" for name in self.between.route(src // per_endpoint, dst // per_endpoint))
