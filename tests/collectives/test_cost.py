"""The cost of Programs on clusters: contention on shared links, and crossovers."""

from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import pytest

from motet.cluster.cluster import Cluster, SwitchLevel, SwitchTree, TorusNetwork, load_cluster, uniform_cluster
from motet.cluster.cluster_settings import NetworkLink
from motet.cluster.device_specs import HardwareNumberWithOrigin
from motet.collectives.algorithms import build, closed_form, find_algorithm
from motet.collectives.cost import cheapest_algorithm
from motet.collectives.cost.alpha_beta import bus_bandwidth_factor, estimate_cost
from motet.collectives.cost.cheapest_algorithm import cheapest, costed_algorithms, crossovers
from motet.core.errors import InputError
from refusals import refused

MIB = 2**20
UNIFORM = uniform_cluster(8, 5e-6, 25e9, 1e-12)


def _figure(value: float) -> HardwareNumberWithOrigin:
    return HardwareNumberWithOrigin(value, "assumed")


def _two_level(hosts: int, each: int, inside_Bps: float, uplink_Bps: float) -> Cluster:  # noqa: N803 - a unit
    port = NetworkLink(_figure(1e-6), _figure(inside_Bps), is_port=True)
    uplink = NetworkLink(_figure(1e-5), _figure(uplink_Bps))
    groups = tuple(rank // each for rank in range(hosts * each))
    network = SwitchTree(hosts * each, port, (SwitchLevel("host", groups, uplink=uplink),))
    return Cluster("two-level", hosts * each, each, network, _figure(0.0))


def _torus(*dims: int) -> Cluster:
    port, wire = (NetworkLink(_figure(0.0), _figure(10e9), is_port=is_port) for is_port in (True, False))
    return Cluster("torus", 16, 1, TorusNetwork(dims, (True,) * len(dims), port, wire), _figure(0.0))


def test_messages_that_share_a_link_wait_for_each_other() -> None:
    """Both ranks of a host use its uplink in an all-to-all step of distance 2, which takes twice as long."""
    pairwise = estimate_cost(build("all-to-all", "pairwise", 4), _two_level(2, 2, 100e9, 1e9))
    size = 400e6
    chunk_s, latency_s = size / 4 / 1e9, 2 * 1e-5
    times = [chunk_s + latency_s, 2 * chunk_s + latency_s, chunk_s + latency_s]
    assert [float(step.seconds(size)) for step in pairwise.steps] == pytest.approx(times, rel=1e-2)


def test_hierarchies_win_where_the_links_between_hosts_are_slow() -> None:
    slow, even = _two_level(4, 4, 100e9, 1e9), uniform_cluster(16, 1e-6, 100e9)
    programs = [build("all-reduce", name, 16) for name in ("ring", "hierarchical-sharded")]
    ring, sharded = (float(estimate_cost(program, slow).seconds(64 * MIB)) for program in programs)
    assert sharded < ring
    # The ring crosses each uplink with 2 (N-1)/N of the data, the hierarchy with 2 (H-1)/H.
    assert ring / sharded == pytest.approx((30 / 16) / (6 / 4), rel=0.05)
    assert cheapest("all-reduce", 64 * MIB, slow).algorithm == "hierarchical-sharded"
    assert cheapest("all-reduce", 64 * MIB, even).algorithm != "hierarchical-sharded"


@pytest.mark.parametrize(("ranks", "groups"), [(16, 2), (12, 3), (10, 5), (11, None), (8, None), (6, None)])
def test_hierarchies_have_no_group_on_two_hosts(ranks: int, groups: int | None) -> None:
    """Also where the last host is not full: two groups of 6 among 8 and 4 ranks would mix the hosts."""
    cluster = replace(load_cluster("dgx-h100", hosts=2), ranks=ranks)
    assert cheapest_algorithm.even_host_groups(cluster) == groups
    if groups:
        size = ranks // groups
        assert all(first // 8 == (first + size - 1) // 8 for first in range(0, ranks, size))
        chosen = {c.algorithm: dict(c.options) for c in costed_algorithms("all-reduce", cluster)}
        assert chosen["hierarchical"] == chosen["hierarchical-sharded"] == {"hosts": groups}


def test_a_torus_algorithm_uses_the_wires_of_its_torus() -> None:
    """On a 4 x 4 torus all four wires of a rank work at once: a quarter of the time of a ring."""
    best = cheapest("all-reduce", 64 * MIB, _torus(4, 4))
    assert str(best) == "torus-2d dims=4x4"
    assert float(best.cost.seconds(64 * MIB)) == pytest.approx((2 * 15 / 16 * 64 * MIB / 10e9) / 4)


FREE_TORUS = {(2, 2, 2, 2): "torus dims=2x2x2x2", (4, 4, 1): "torus-2d dims=4x4", (2, 2, 4): "torus-3d dims=2x2x4"}


@pytest.mark.parametrize(("dims", "best"), [*FREE_TORUS.items(), ((16, 1), "bidirectional-ring")])
def test_the_free_torus_is_tried_where_no_other_fits(dims: tuple[int, ...], best: str) -> None:
    cluster = _torus(*dims)
    assert str(cheapest("all-reduce", 64 * MIB, cluster)) == best
    assert ("torus" in algorithms(cluster)) == best.startswith("torus ")


def algorithms(cluster: Cluster, *names: str) -> list[str]:
    return [candidate.algorithm for candidate in costed_algorithms("all-reduce", cluster, names or None)]


def test_crossovers_say_what_is_cheapest_at_every_size() -> None:
    (found,) = crossovers("all-reduce", UNIFORM, 1024, 2**30)
    assert (found.before, found.after) == ("recursive-doubling", "halving-doubling")
    # 3 (a + S b + S g) = 6 a + 2 * 7/8 S b + 7/8 S g
    assert found.size == pytest.approx(3 * 5e-6 / ((3 - 7 / 4) / 25e9 + (3 - 7 / 8) * 1e-12), rel=1e-3)
    cluster = replace(UNIFORM, ranks=5)
    for collective in ("broadcast", "all-reduce", "all-to-all"):
        changes = crossovers(collective, cluster, 1024, 2**30)
        edges = [1024, *(change.size for change in changes), 2**30]
        names = [change.before for change in changes] + [change.after for change in changes[-1:]]
        for (low, high), name in zip(pairwise(edges), names or [None], strict=True):
            choices = costed_algorithms(collective, cluster)
            best = min(choices, key=lambda candidate: candidate.seconds((low * high) ** 0.5))
            assert name in (None, best.algorithm)


def test_auto_lets_no_replicas_drift_and_uneven_chunks_cost_what_they_weigh() -> None:
    assert {"naive", "torus"}.isdisjoint(algorithms(UNIFORM))
    assert algorithms(UNIFORM, "naive", "torus") == ["naive", "torus"]
    assert not find_algorithm("all-reduce", "naive").same_bits
    uneven = replace(build("broadcast", "pipelined-ring", 3, pieces=2), sizes=(3, 1))
    network = uniform_cluster(3, Fraction(0), Fraction(1))
    assert [step.seconds(Fraction(8)) for step in estimate_cost(uneven, network).steps] == [6, 6, 2]


def test_bus_bandwidth_is_counted_as_nccl_tests_do() -> None:
    assert bus_bandwidth_factor("all-reduce", 8) == Fraction(14, 8)
    for name in ("reduce-scatter", "all-gather", "all-to-all"):
        assert bus_bandwidth_factor(name, 4) == Fraction(3, 4)
    assert {bus_bandwidth_factor(name, 4) for name in ("broadcast", "reduce", "send")} == {1}
    # A ring on a uniform network without start-ups: the bus bandwidth is that of the link.
    seconds = closed_form("all-reduce", "ring", 8).seconds(0, Fraction(1000, 25), 0)
    assert Fraction(1000) / Fraction(seconds) * bus_bandwidth_factor("all-reduce", 8) == 25


def test_bad_questions_get_a_sentence() -> None:
    with pytest.raises(InputError, match=r"does not fit on cluster uniform, which has 8 ranks"):
        estimate_cost(build("all-reduce", "ring", 9), UNIFORM)
    refused(r"a message of 0 bytes: give more than 0", cheapest, "all-reduce", 0, UNIFORM)
    refused(r"has 1 rank; a collective needs at least 2", cheapest, "all-reduce", 1, replace(UNIFORM, ranks=1))
    assert crossovers("all-reduce", UNIFORM, 64, 64) == []
    with pytest.raises(InputError, match=r"7 ranks: all-reduce/torus-2d takes 4, 6"):
        costed_algorithms("all-reduce", replace(UNIFORM, ranks=7), ("torus-2d",))
