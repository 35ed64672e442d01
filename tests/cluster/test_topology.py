"""Networks: every rank reaches every other over links that exist, and no more than it must; what hashed flows cost."""

from collections import Counter, defaultdict, deque
from dataclasses import replace
from fractions import Fraction
from itertools import permutations, product
from math import comb, prod
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.cluster.cluster import Cluster, TorusNetwork, cluster_from_dict, uniform_cluster
from motet.cluster.cluster_settings import NetworkLink, expected_max_load, with_origin
from refusals import refused

PORT = {"alpha_s": 1e-6, "bandwidth_Bps": 8}


def made(devices: int, hosts: int = 1, inside: dict[str, Any] | None = None, **between: Any) -> Cluster:
    tree: dict[str, Any] = {"devices_per_host": devices, "hosts": hosts, "gamma_s_per_byte": 0}
    tree["inside"] = PORT | (inside or {"kind": "switch"})
    return cluster_from_dict(tree | ({"between": PORT | between} if between else {}))


def torus(*dims: int, wrap: bool = True) -> Cluster:
    port = NetworkLink(with_origin(1), with_origin(1), is_port=True)
    network = TorusNetwork(dims, (wrap,) * len(dims), port, NetworkLink(with_origin(0), with_origin(1)))
    return Cluster("torus", network.ranks, 1, network, with_origin(0))


def inside_kinds(devices: int) -> list[dict[str, Any]]:
    return [
        {"kind": "switch"},
        {"kind": "mesh"},
        {"kind": "bus", "bus_Bps": 16},
        {"kind": "pcie", "devices_per_switch": 2, "bridge_Bps": 16},
        {"kind": "torus", "dims": [devices]},
        {"kind": "torus", "dims": [2, devices // 2], "wrap": [False, True]},
    ]


def between_kinds(hosts: int) -> list[dict[str, Any]]:
    return [
        {"kind": "switch", "nics": 2},
        {"kind": "torus", "dims": [hosts], "hop_s": 1e-7},
        {"kind": "spine_leaf", "hosts_per_leaf": 2, "uplinks": 3},
        {"kind": "spine_leaf", "hosts_per_leaf": 2, "uplinks": 3, "nics": 4, "rails": True},
    ]


def links_of(cluster: Cluster) -> dict[str, NetworkLink]:
    pairs = permutations(range(cluster.ranks), 2)
    return {name: cluster.link(name) for src, dst in pairs for name in cluster.route(src, dst)}


def check_routes(cluster: Cluster) -> None:
    """Between any two ranks: first and last a port, of its own end, and no link twice."""
    out: dict[str, int] = {}
    into: dict[str, int] = {}
    for src in range(cluster.ranks):
        assert cluster.route(src, src) == () and cluster.latency_s(src, src) == 0
        for dst in set(range(cluster.ranks)) - {src}:
            route = cluster.route(src, dst)
            assert [name for name in route if cluster.link(name).is_port] == [route[0], route[-1]]
            assert len(set(route)) == len(route) == len(cluster.route(dst, src))
            assert cluster.latency_s(src, dst) == pytest.approx(cluster.latency_s(dst, src))
            assert (out.setdefault(route[0], src), into.setdefault(route[-1], dst)) == (src, dst)
    assert not set(out) & set(into)


@pytest.mark.parametrize("kind", range(len(inside_kinds(8))))
@pytest.mark.parametrize("devices", [2, 4, 8])
def test_routes_inside_of_a_host(devices: int, kind: int) -> None:
    check_routes(made(devices, inside=inside_kinds(devices)[kind]))


@pytest.mark.parametrize("kind", range(len(between_kinds(3))))
@pytest.mark.parametrize("inside", inside_kinds(4), ids=lambda inside: inside["kind"])
def test_routes_between_hosts(inside: dict[str, Any], kind: int) -> None:
    between = between_kinds(3)[kind]
    cluster = made(4, 3, inside, **between)
    assert (cluster.ranks, cluster.hosts) == (12, 3)
    for src in range(12):
        for dst in range(12):
            across = {name.partition("/")[0] for name in cluster.route(src, dst)}
            assert across == ({"net"} if src // 4 != dst // 4 else {f"host{src // 4}"} if src != dst else set())
    if between["kind"] != "torus":
        check_routes(cluster)
    else:  # its ports belong to hosts
        assert cluster.route(0, 4) == cluster.route(3, 7) == ("net/0.out+0", "net/0+0", "net/1.in+0")
        assert cluster.latency_s(0, 8) == 1e-7


def test_a_uniform_network_is_ports_alone_and_exact() -> None:
    cluster = uniform_cluster(5, Fraction(1, 7), Fraction(3), Fraction(1, 11))
    check_routes(cluster)
    assert cluster.route(1, 4) == ("1.out", "4.in") and (len(links_of(cluster)), cluster.hosts) == (10, 5)
    port = cluster.link("1.out")
    assert port.alpha_s.value + 6 / port.bandwidth_Bps.value == Fraction(15, 7) and port.alpha_s.origin == "assumed"
    assert cluster.gamma_s_per_byte.value == Fraction(1, 11)


def test_devices_share_bridges_buses_and_nics() -> None:
    cluster = made(4, inside=inside_kinds(4)[3])
    assert cluster.route(0, 1) == ("0.out", "1.in")
    assert cluster.route(0, 3) == ("0.out", "switch0.up", "bridge0", "switch1.down", "3.in")
    cluster = made(3, inside=inside_kinds(2)[2])
    assert all("bus0" in cluster.route(a, b) for a in range(3) for b in range(3) if a != b)
    cluster = made(8, 2, kind="switch", nics=2)
    assert [cluster.route(src, 8)[1] for src in range(8)] == ["net/nic0.up"] * 4 + ["net/nic1.up"] * 4


def test_rails_stay_under_their_leaf() -> None:
    """Rails: the same device of two hosts is one leaf away and its neighbours are not; without them, all are."""
    options: dict[str, Any] = {"kind": "spine_leaf", "nics": 4, "hosts_per_leaf": 2, "uplinks": 1, "hop_s": 1e-6}
    rails, plain = made(4, 4, rails=True, **options), made(4, 4, **options)
    hops = [[cluster.latency_s(0, dst) for dst in (4, 5, 8, 9)] for cluster in (rails, plain)]
    assert hops == [[0, 2e-6, 2e-6, 2e-6], [0, 0, 2e-6, 2e-6]]


def loads(cluster: Cluster, pairs: list[tuple[int, int]]) -> dict[str, float]:
    crossed = Counter(name for pair in pairs for name in cluster.route(*pair))
    return {name: times / cluster.link(name).bandwidth_Bps.value for name, times in crossed.items()}


@given(st.integers(1, 3), st.sampled_from([1, 2, 4]), st.sampled_from([0.5, 1.0, 2.0, 3.0]), st.booleans())
def test_the_cut_above_a_leaf_is_narrower_by_the_oversubscription(
    hosts: int, nics: int, by: float, rails: bool
) -> None:
    choices: dict[str, Any] = {"kind": "spine_leaf", "nics": nics, "hosts_per_leaf": hosts, "uplinks": 4}
    cluster = made(4, 2 * hosts, **choices, oversubscription=by, rails=rails, flows="pinned")
    half = cluster.ranks // 2  # every leaf has all of its hosts in one half
    found = loads(cluster, [(src, src + half) for src in range(half)] + [(src + half, src) for src in range(half)])
    leaf = {name: seconds for name, seconds in found.items() if "leaf" in name}
    nic = {seconds for name, seconds in found.items() if "nic" in name}
    assert len(leaf) == 4 * (nics if rails else 1) and len(nic) == 1
    assert all(seconds == pytest.approx(by * max(nic)) for seconds in leaf.values())


def test_hashed_uplinks_know_their_paths() -> None:
    hashed = made(2, 4, kind="spine_leaf", hosts_per_leaf=2, uplinks=4)
    pinned = made(2, 4, kind="spine_leaf", hosts_per_leaf=2, uplinks=4, flows="pinned")
    assert [hashed.link(name).imbalance(1) for name in ("net/leaf0.up", "net/nic0.up")] == [4, 1]
    assert pinned.link("net/leaf0.up").imbalance(1) == 1


@st.composite
def tori(draw: st.DrawFn) -> TorusNetwork:
    dims = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4).filter(lambda dims: prod(dims) <= 64))
    port = torus(2).link("0.out+0")
    return TorusNetwork(tuple(dims), tuple(draw(st.booleans()) for _ in dims), port, port)


def ends_of_wires(network: TorusNetwork) -> dict[str, tuple[int, int]]:
    routes = {pair: network.route(*pair) for pair in product(range(network.ranks), repeat=2)}
    return {route[1]: pair for pair, route in routes.items() if len(route) == 3}


@settings(deadline=None, max_examples=12)
@given(tori())
def test_a_torus_goes_from_neighbour_to_neighbour_on_a_shortest_way(network: TorusNetwork) -> None:
    ends, steps = ends_of_wires(network), defaultdict(set)
    for tail, head in ends.values():
        steps[tail].add(head)
    for src in range(network.ranks):
        far, todo = {src: 0}, deque([src])
        while todo:
            at = todo.popleft()
            for there in steps[at] - set(far):
                far[there] = far[at] + 1
                todo.append(there)
        for dst in range(network.ranks):
            route = network.route(src, dst)
            assert max(0, len(route) - 2) == far[dst] and len(network.route(dst, src)) == len(route)
            at = src
            for wire in route[1:-1]:
                assert ends[wire][0] == at
                at = ends[wire][1]
            assert at == dst


@pytest.mark.parametrize(
    ("dims", "wrap", "ports", "wires"),
    [
        ((4, 4, 4), True, 6 * 2 * 64, 6 * 64),
        ((2, 2), True, 2 * 2 * 4, 2 * 4),  # one of the two cables between the same two
        ((3, 5), False, 2 * (2 * 2 * 5 + 2 * 4 * 3), 2 * 2 * 5 + 2 * 4 * 3),
        ((1, 7), True, 2 * 2 * 7, 2 * 7),
    ],
)
def test_a_torus_has_a_link_to_each_neighbour(dims: tuple[int, ...], wrap: bool, ports: int, wires: int) -> None:
    assert Counter(link.is_port for link in links_of(torus(*dims, wrap=wrap)).values()) == {True: ports, False: wires}


def test_a_torus_goes_the_shorter_way_round() -> None:
    ring = torus(6)
    assert ring.route(0, 5) == ("0.out-0", "0-0", "5.in-0")
    assert ring.route(1, 4) == ("1.out+0", "1+0", "2+0", "3+0", "4.in+0") and len(torus(6, wrap=False).route(0, 5)) == 7
    check_routes(torus(3, 4))


def test_the_first_ranks_of_a_cluster_keep_their_routes() -> None:
    whole = made(4, 3, kind="switch")
    part = replace(whole, ranks=6)
    assert (part.ranks, part.hosts) == (6, 2) and part.route(0, 5) == whole.route(0, 5)
    refused("cluster cluster has 12 ranks, not 13: use fewer, or describe it with more", replace, part, ranks=13)
    refused("cannot have 0 ranks; give 1 or more", replace, whole, ranks=0)
    refused("cannot have 0 ranks", uniform_cluster, 0, 1, 1)


def paths(count: int) -> NetworkLink:
    return NetworkLink(with_origin(0), with_origin(1), hashed_paths=count)


def counted(balls: int, bins: int) -> Fraction:
    """The expectation over all `bins ** balls` ways, counted: the tail sum of P(fullest > k)."""

    def ways(most: int) -> int:
        found = [1] + [0] * balls  # of placing n balls into the bins so far, none with more than `most`
        for _ in range(bins):
            found = [sum(comb(n, i) * found[n - i] for i in range(min(n, most) + 1)) for n in range(balls + 1)]
        return found[balls]

    return sum((1 - Fraction(ways(k), bins**balls) for k in range(balls)), Fraction(0))


@pytest.mark.parametrize("bins", [1, 2, 3, 5, 16, 365])
@pytest.mark.parametrize("balls", [0, 1, 2, 3, 7, 16, 24])
def test_the_fullest_bin_is_as_full_as_counted(balls: int, bins: int) -> None:
    assert expected_max_load(balls, bins) == pytest.approx(float(counted(balls, bins)), rel=1e-10, abs=1e-12)


@given(st.integers(1, 400), st.integers(1, 64))
def test_the_fullest_bin_has_at_least_the_mean_and_at_most_all_and_imbalance_follows(balls: int, bins: int) -> None:
    fullest = expected_max_load(balls, bins)
    assert max(1, balls / bins) * (1 - 1e-10) <= fullest <= balls * (1 + 1e-10)
    assert expected_max_load(balls + 1, bins) > fullest - 1e-9
    assert 1 - 1e-10 <= paths(bins).imbalance(balls) <= bins * (1 + 1e-10)


def test_imbalance_of_one_flow_of_very_many_and_of_fractions() -> None:
    assert paths(8).imbalance(1) == 8  # it has one path of eight
    assert 1 < paths(8).imbalance(20_000) < 1.04 and paths(1).imbalance(5) == 1
    link = NetworkLink(with_origin(Fraction(1, 3)), with_origin(Fraction(7)))
    assert Fraction(1) / link.bandwidth_Bps.value + link.alpha_s.value == Fraction(10, 21)
    assert isinstance(link.imbalance(3) * Fraction(1, 3), Fraction)


@pytest.mark.parametrize(
    ("alpha_s", "bandwidth", "count", "words"),
    [
        (0, 0, 1, "bandwidth_Bps = 0 carries nothing; give more than 0"),
        (0, float("nan"), 1, "bandwidth_Bps = nan carries nothing"),
        (-1, 1, 1, "alpha_s = -1 has a negative start-up; give 0 or more"),
        (0, 1, 0, "0 paths; give 1 or more"),
    ],
)
def test_impossible_links(alpha_s: float, bandwidth: float, count: int, words: str) -> None:
    refused(words, NetworkLink, with_origin(alpha_s), with_origin(bandwidth), hashed_paths=count)
