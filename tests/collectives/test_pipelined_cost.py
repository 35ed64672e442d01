"""Pipelined costs of Programs against sums on paper, whole steps, and the closed forms of vendor libraries."""

from dataclasses import replace
from fractions import Fraction
from functools import cache

import pytest

from motet.cluster.cluster import Cluster, build_cluster, load_cluster, uniform_cluster
from motet.cluster.cluster_settings import ClusterSettings
from motet.collectives.algorithms import algorithm_names, build, find_algorithm
from motet.collectives.cost.alpha_beta import estimate_cost
from motet.collectives.cost.cheapest_algorithm import cheapest, costed_algorithms, time_curves
from motet.collectives.cost.cluster_fabric import FabricSpec, VendorCosts, fabric_of
from motet.collectives.cost.group_shapes import LINK_CLASSES, GroupPlacement, leaf_switches_of
from motet.collectives.cost.pipelined_cost import estimate_pipelined_cost
from motet.core.errors import InputError

GIB, MIB = 2**30, 2**20
HUGE = 2.0**70  # Bytes of which start-ups and the pipeline are less than 1e-6 of the time


@cache
def hosts_of(name: str, hosts: int) -> Cluster:
    return load_cluster(name, hosts=hosts)


@cache
def single_devices(hosts: int) -> Cluster:
    """Hosts of one device each, on one switch."""
    port = {"kind": "switch", "alpha_s": 2e-6, "bandwidth_Bps": 450e9}
    between = {"kind": "switch", "nics": 1, "alpha_s": 4e-6, "bandwidth_Bps": 50e9}
    values = {"device": "H100 SXM", "devices_per_host": 1, "hosts": hosts, "inside": port, "between": between}
    return build_cluster(ClusterSettings.model_validate(values), "single")


def spine_leaf(hosts: int, **changes: object) -> Cluster:
    port = {"kind": "switch", "alpha_s": 2e-6, "bandwidth_Bps": 450e9}
    between = {"kind": "spine_leaf", "nics": 4, "alpha_s": 4e-6, "bandwidth_Bps": 50e9, "hosts_per_leaf": 2}
    between |= {"uplinks": 8, "flows": "pinned", "oversubscription": 8} | changes
    values = {"device": "H100 SXM", "devices_per_host": 4, "hosts": hosts, "inside": port, "between": between}
    return build_cluster(ClusterSettings.model_validate(values), "leaves")


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_a_chain_takes_the_first_piece_and_a_period_for_each_other_one(ranks: int) -> None:
    alpha, bandwidth = 1e-6, 1e9
    chain = estimate_pipelined_cost(
        build("broadcast", "pipelined-ring", ranks, pieces=1), uniform_cluster(ranks, alpha, bandwidth)
    )
    for size in (1.0, 1e6, 1e9):
        times = [(ranks - 1 + pieces - 1) * (alpha + size / pieces / bandwidth) for pieces in (2**n for n in range(21))]
        assert chain.seconds(size) == pytest.approx(min(times), rel=1e-12)


def test_a_ring_is_a_pipeline_already() -> None:
    ring = estimate_pipelined_cost(build("all-reduce", "ring", 8), uniform_cluster(8, 1e-6, 1e9, Fraction(0)))
    for size in (1.0, 1e6, 1e9):
        assert ring.seconds(size) == pytest.approx(14 * (1e-6 + size / 8 / 1e9), rel=1e-12)


@pytest.mark.parametrize(
    "cluster", [uniform_cluster(8, 1e-6, 1e9, 1e-11), hosts_of("dgx-h100", 2)], ids=["uniform", "hosts"]
)
@pytest.mark.parametrize("collective", ["all-reduce", "all-gather", "all-to-all", "broadcast", "reduce"])
def test_pieces_in_flight_are_never_slower_than_whole_steps(cluster: Cluster, collective: str) -> None:
    for name in algorithm_names(collective):
        if find_algorithm(collective, name).supports(cluster.ranks):
            program = build(collective, name, cluster.ranks)
            pipelined, steps = estimate_pipelined_cost(program, cluster), estimate_cost(program, cluster)
            for size in (1.0, MIB, GIB):
                assert pipelined.seconds(size) <= float(steps.seconds(size)) * (1 + 1e-12), name


RINGS = [("all-reduce", "ring"), ("all-gather", "ring"), ("reduce-scatter", "ring"), ("all-to-all", "pairwise")]


@pytest.mark.parametrize("name", ["dgx-h100", "dgx-a100"])
@pytest.mark.parametrize("hosts", [1, 2, 4, 8])
@pytest.mark.parametrize(("collective", "algorithm"), RINGS)
def test_closed_forms_are_the_pipelined_costs_of_programs(
    name: str, hosts: int, collective: str, algorithm: str
) -> None:
    cluster = hosts_of(name, hosts)
    fabric = fabric_of(cluster)
    program = estimate_pipelined_cost(build(collective, algorithm, cluster.ranks), cluster, fabric=fabric)
    closed_name = "direct" if algorithm == "pairwise" else "ring"
    _agree(program.seconds, VendorCosts(fabric), collective, closed_name, GroupPlacement(cluster.ranks, 8))


@pytest.mark.parametrize("hosts", [2, 4, 8, 16, 64])
def test_the_closed_form_of_trees_is_the_pipelined_double_tree(hosts: int) -> None:
    cluster = single_devices(hosts)
    fabric = fabric_of(cluster)
    program = build("all-reduce", "double-tree", hosts, pieces=1)
    seconds = estimate_pipelined_cost(program, cluster, fabric=fabric).seconds
    _agree(seconds, VendorCosts(fabric), "all-reduce", "tree", GroupPlacement(hosts, 1))


def _agree(seconds, costs: VendorCosts, collective: str, algorithm: str, placement: GroupPlacement) -> None:
    """Bytes take the same time; with start-ups and the pipeline the two are a few percent apart at 16 GiB."""
    closed = (costs.time(collective, size, placement, algorithms=(algorithm,)).seconds for size in (HUGE, 16 * GIB))
    assert seconds(HUGE) == pytest.approx(next(closed), rel=1e-5)
    assert seconds(16 * GIB) == pytest.approx(next(closed), rel=0.04)


@pytest.mark.parametrize("name", ["dgx-h100", "dgx-a100"])
@pytest.mark.parametrize("hosts", [2, 4, 8])
def test_a_hierarchy_takes_as_long_as_its_busiest_link(name: str, hosts: int) -> None:
    """Inside 2 (M-1)/M of the message pass a port, and between hosts 2 (H-1)/N of it pass a NIC."""
    cluster = hosts_of(name, hosts)
    fabric = fabric_of(cluster)
    program = build("all-reduce", "hierarchical-sharded", cluster.ranks, hosts=hosts)
    inside_Bps = fabric.intra_Bps * LINK_CLASSES[fabric.intra_link].efficiency  # noqa: N806 - a unit
    between_Bps = fabric.inter_Bps * LINK_CLASSES[fabric.inter_link].efficiency  # noqa: N806 - a unit
    busiest_s = max(2 * 7 / 8 / inside_Bps, 2 * (hosts - 1) / cluster.ranks / between_Bps)
    seconds = estimate_pipelined_cost(program, cluster, fabric=fabric).seconds
    assert seconds(HUGE) == pytest.approx(HUGE * busiest_s, rel=1e-5)


def test_the_order_of_algorithms_on_two_hosts_is_that_of_published_runs() -> None:
    """1 GiB on two hosts of eight H100 takes 4.3 to 4.6 ms with reduction in the switch, and more by rings."""
    cluster = hosts_of("dgx-h100", 2)
    fabric = fabric_of(cluster)
    closed = {c.algorithm: c.seconds(GIB) for c in costed_algorithms("all-reduce", cluster, execution="library")}
    programs = {
        name: estimate_pipelined_cost(build("all-reduce", name, 16, **options), cluster, fabric=fabric).seconds(GIB)
        for name, options in (("ring", {}), ("hierarchical-sharded", {"hosts": 2}))
    }
    assert closed["nvls-tree"] < programs["hierarchical-sharded"] < programs["ring"] < closed["tree"]
    assert 4.3e-3 < closed["nvls-tree"] < 4.7e-3
    assert 4.3e-3 < cheapest("all-reduce", GIB, cluster, execution="pipelined").seconds(GIB) < 5.2e-3
    assert cheapest("all-reduce", GIB, cluster).seconds(GIB) > 7e-3


@pytest.mark.parametrize("hosts", [2, 4, 8])
@pytest.mark.parametrize(("collective", "algorithm"), [("all-reduce", "ring"), ("all-to-all", "pairwise")])
def test_leaf_switches_of_the_closed_form_are_those_of_the_network(hosts: int, collective: str, algorithm: str) -> None:
    cluster = spine_leaf(hosts)
    fabric = replace(fabric_of(cluster), leaves=leaf_switches_of(cluster))
    program = build(collective, algorithm, cluster.ranks)
    seconds = estimate_pipelined_cost(program, cluster, fabric=fabric).seconds(HUGE)
    name = "ring" if algorithm == "ring" else "direct"
    closed = VendorCosts(fabric).time(collective, HUGE, GroupPlacement(cluster.ranks, 4), algorithms=(name,)).seconds
    assert seconds == pytest.approx(closed, rel=1e-5)
    flat = VendorCosts(replace(fabric, leaves=None))
    slower = closed / flat.time(collective, HUGE, GroupPlacement(cluster.ranks, 4), algorithms=(name,)).seconds
    assert slower == pytest.approx(
        1 if hosts == 2 else 4 if name == "ring" else 8 * (hosts - 2) / (hosts - 1), rel=1e-3
    )


def test_library_algorithms_are_those_of_the_fabric() -> None:
    cluster = hosts_of("dgx-h100", 2)
    names = [curve.algorithm for curve in time_curves("all-reduce", cluster, [MIB, GIB], execution="library")]
    assert names == ["ring", "tree", "nvls-tree"]
    with pytest.raises(
        InputError, match="the library does not run all-gather with tree on cluster dgx-h100; give ring"
    ):
        costed_algorithms("all-gather", cluster, ("tree",), execution="library")
    with pytest.raises(InputError, match="collective 'barrier' is unknown"):
        costed_algorithms("barrier", cluster, execution="library")
    with pytest.raises(InputError, match="does not fit on cluster dgx-h100"):
        estimate_pipelined_cost(build("all-reduce", "ring", 17), cluster)


def test_fabric_without_in_switch_reduction_has_no_such_algorithm() -> None:
    fabric = FabricSpec("NVLink4", 450e9, "RDMA400", 50e9, 8)
    assert [shape.algorithm for shape in VendorCosts(fabric).shapes("all-reduce", GroupPlacement(16, 8))] == [
        "ring",
        "tree",
    ]
