"""Closed forms of the algorithms of vendor libraries: hops of the first piece and bytes over each kind of link."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, log2
from typing import NamedTuple

from motet.core.errors import check_input

CLASSIC_COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "broadcast", "reduce")
POINT_TO_POINT_COLLECTIVES = ("all-to-all", "gather", "scatter", "send-receive")


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


class AlgorithmShape(NamedTuple):
    """The hops of the first piece, and the bytes over each kind of link of the busiest device relative to the size."""

    algorithm: str
    inside_hops: float
    between_hops: float
    inside_bytes: float
    between_bytes: float

    @property
    def reduces_in_switch(self) -> bool:
        """Whether the switch inside of a host adds up."""
        return self.algorithm.startswith("nvls")


def algorithm_shapes(
    collective: str, placement: GroupPlacement, *, in_switch: bool = False, in_network: bool = False
) -> Iterator[AlgorithmShape]:
    """The algorithms among which a library chooses; the only one if switches between hosts add up."""
    if collective in POINT_TO_POINT_COLLECTIVES:
        yield _direct(collective, placement)
        return
    if collective == "all-reduce" and in_network and placement.hosts > 1:
        yield _in_network(placement, in_switch=in_switch)
        return
    yield _ring(collective, placement)
    if collective == "all-reduce":
        yield from _trees(placement, in_switch=in_switch)


def _direct(collective: str, placement: GroupPlacement) -> AlgorithmShape:
    n, m, hosts = placement.ranks, placement.ranks_per_host, placement.hosts
    if collective == "send-receive":
        return AlgorithmShape("direct", hosts == 1, hosts > 1, 1.0 if m > 1 else 0.0, 1.0 if hosts > 1 else 0.0)
    return AlgorithmShape("direct", (m - 1) / 2, (n - m) / 2, (m - 1) / n, (n - m) / n)


def _ring(collective: str, placement: GroupPlacement) -> AlgorithmShape:
    """Each of m rings leaves a host over another NIC."""
    n, m, hosts = placement.ranks, placement.ranks_per_host, placement.hosts
    crossing = hosts / n if hosts > 1 else 0.0  # The part of a ring's edges that lead to another host
    passes = 2 if collective == "all-reduce" else 1
    steps = passes * (n - 1)
    all_pass = collective in ("broadcast", "reduce")  # All bytes pass every edge
    ring_bytes = 1.0 if all_pass else passes * (n - 1) / n
    between_bytes = ring_bytes / m if hosts > 1 else 0.0
    return AlgorithmShape("ring", steps * (1 - crossing), steps * crossing, ring_bytes if m > 1 else 0.0, between_bytes)


def _trees(placement: GroupPlacement, *, in_switch: bool) -> Iterator[AlgorithmShape]:
    """A chain or the switch inside of hosts, and two binary trees between them, each with half of the bytes."""
    m, hosts = placement.ranks_per_host, placement.hosts
    depth = 2 * ceil(log2(hosts))
    # From three hosts on some host has two children in one tree, and is a leaf of the other one.
    tree_bytes = (0.0, 1.0, 2.0)[min(hosts, 3) - 1] / m
    if hosts > 1:
        chain_bytes = 0.0 if m == 1 else 1.0 if m == 2 else 2.0  # Both trees; a middle device sends up and down
        yield AlgorithmShape("tree", 2 * (m - 1), depth, chain_bytes, tree_bytes)
    if in_switch and m > 2:
        yield AlgorithmShape("nvls" if hosts == 1 else "nvls-tree", 2, depth, 1 + 1 / m, tree_bytes)


def _in_network(placement: GroupPlacement, *, in_switch: bool) -> AlgorithmShape:
    """Every host sends all bytes up once, and gets their sums."""
    m = placement.ranks_per_host
    if in_switch and m > 2:
        return AlgorithmShape("nvls-collnet", 2, 2, 1 + 1 / m, 1 / m)
    return AlgorithmShape("collnet", 2 if m > 1 else 0, 2, 2 * (m - 1) / m, 1 / m)
