"""The predicted times of vendor libraries against published peaks, ceilings of links and bad input."""

from dataclasses import replace

import pytest

from motet.cluster.cluster import load_cluster
from motet.collectives.cost.cluster_fabric import FabricSpec, VendorCosts, fabric_of
from motet.collectives.cost.group_shapes import GroupPlacement, LeafSwitches, leaf_switches_of
from motet.core.errors import InputError

GIB = 2**30
H100, A100 = (VendorCosts(fabric_of(load_cluster(name, hosts=4))) for name in ("dgx-h100", "dgx-a100"))


@pytest.mark.parametrize(
    ("costs", "collective", "placement", "factor", "measured"),
    [
        (H100, "all-reduce", GroupPlacement(8, 8), 1.75, 480e9),
        (H100, "all-reduce", GroupPlacement(16, 8), 1.875, 465e9),
        (A100, "all-reduce", GroupPlacement(8, 8), 1.75, 235e9),
        (A100, "all-reduce", GroupPlacement(16, 8), 1.875, 189e9),
        (A100, "all-to-all", GroupPlacement(8, 8), 0.875, 224e9),
    ],
)
def test_the_bus_bandwidth_of_large_sizes_is_near_the_published_one(costs, collective, placement, factor, measured):
    bandwidth = 8 * GIB * factor / costs.time(collective, 8 * GIB, placement).seconds
    assert bandwidth == pytest.approx(measured, rel=0.1)


def test_time_grows_with_the_size_and_a_single_rank_waits_for_nobody():
    for collective in ("all-reduce", "all-gather", "all-to-all", "broadcast", "send-receive"):
        times = [H100.time(collective, 2**power, GroupPlacement(16, 8)).seconds for power in range(34)]
        assert times == sorted(times) and times[0] < times[-1]
    assert H100.time("all-reduce", GIB, GroupPlacement(1, 1)).seconds == 0


def test_a_ring_over_hosts_is_not_faster_than_the_nics():
    time = A100.time("all-gather", 16 * GIB, GroupPlacement(16, 8), algorithms=("ring",))
    assert 16 * GIB * 15 / 16 / time.seconds < 8 * 25e9
    one_nic = A100.time("all-gather", 16 * GIB, GroupPlacement(4, 1))
    assert 16 * GIB * 3 / 4 / one_nic.seconds < 25e9


def test_bad_input_is_one_sentence():
    with pytest.raises(InputError, match="collective 'sum' is unknown; give one of all-reduce"):
        H100.time("sum", 1, GroupPlacement(2, 2))
    with pytest.raises(InputError, match="algorithms tree do not run all-gather here; give ring"):
        H100.time("all-gather", 1, GroupPlacement(2, 2), algorithms=("tree",))
    with pytest.raises(InputError, match="link class 'token ring' is unknown; give one of NVLink2"):
        FabricSpec("token ring", 1e9, "RDMA", 1e9, 8)
    with pytest.raises(InputError, match="ranks_per_host = 3 does not fit a group of 2 ranks"):
        GroupPlacement(2, 3)


def test_switches_between_hosts_that_add_up_take_as_long_over_any_number_of_hosts():
    sharp = VendorCosts(replace(H100.fabric, in_network_reduction=True))
    times = {hosts: sharp.time("all-reduce", 2**28, GroupPlacement(8 * hosts, 8)) for hosts in (2, 4, 64)}
    assert {time.algorithm for time in times.values()} == {"nvls-collnet"}
    assert times[2].seconds == times[4].seconds == times[64].seconds
    assert times[64].seconds < H100.time("all-reduce", 2**28, GroupPlacement(512, 8)).seconds
    assert sharp.time("all-gather", 2**28, GroupPlacement(16, 8)).algorithm == "ring"
    # Each host sends all bytes once, of which 0.54 of the NICs' bandwidth is published for two hosts of A100.
    a100 = VendorCosts(FabricSpec("NVLink3", 300e9, "RDMA", 12.5e9, 8, in_network_reduction=True))
    assert 2**40 / a100.time("all-reduce", 2**40, GroupPlacement(16, 8)).seconds == pytest.approx(54e9, rel=0.01)


def test_a_process_that_drives_all_devices_starts_them_one_after_another():
    spec = FabricSpec("NVLink3", 300e9, "RDMA", 25e9, 8)
    one = VendorCosts(replace(spec, devices_per_process=8))
    for collective, published_s in (("all-reduce", 35e-6), ("all-to-all", 88e-6)):
        time = one.time(collective, 64, GroupPlacement(8, 8))
        assert time.seconds == pytest.approx(published_s, rel=0.2)
        assert time.seconds > 1.5 * VendorCosts(spec).time(collective, 64, GroupPlacement(8, 8)).seconds


def test_messages_of_two_devices_get_channels_as_they_grow():
    """On B200 a message of 64 MiB takes as long as one of 256 MiB, published in 2026: 0.79 and 0.81 ms."""
    b200 = VendorCosts(FabricSpec("NVLink5", 900e9, "RDMA400", 50e9, 8, in_switch_inside=True))
    times = [b200.time("send-receive", size * 2**20, GroupPlacement(8, 8)).seconds for size in (64, 256, 4096)]
    assert times == pytest.approx([0.793e-3, 0.81e-3, 6.52e-3], rel=0.08)


def test_sockets_are_limited_by_the_host():
    spec = FabricSpec("NVLink3", 300e9, "Socket", 25e9, 8)
    slow, fast = (VendorCosts(replace(spec, inter_Bps=speed)) for speed in (25e9, 100e9))
    assert slow.time("all-gather", GIB, GroupPlacement(16, 8)) == fast.time("all-gather", GIB, GroupPlacement(16, 8))


def test_leaf_switches_slow_down_what_leaves_them():
    rails = LeafSwitches(hosts=4, nics=4, oversubscription=2.0, hop_s=1e-6)
    assert rails.slowdown("ring", 4) == rails.slowdown("direct", 4) == 1 and rails.hops_s("ring", 4, 8) == 0
    assert rails.slowdown("ring", 8) == 1  # One of four hosts uses half of the uplinks' bandwidth
    assert rails.slowdown("direct", 16) == pytest.approx(2 * (1 - 3 / 15))
    assert rails.hops_s("ring", 16, 8) == pytest.approx(2 * 1e-6 * 8 / 4)
    assert rails.hops_s("tree", 16, 8) == pytest.approx(2 * 1e-6 * 8 * 2 / 4)
    hashed = replace(rails, hashed_paths=8)
    assert rails.slowdown("direct", 16) < hashed.slowdown("direct", 16)
    with pytest.raises(InputError, match=r"an oversubscription of 0 with a hop of 0\.0 s makes no sense"):
        LeafSwitches(4, 4, oversubscription=0)
    with pytest.raises(InputError, match="leaf switches with 0 hosts"):
        LeafSwitches(0, 4)
    assert leaf_switches_of(load_cluster("dgx-h100", hosts=4)) is None  # All hosts are under the same leaves
    assert leaf_switches_of(load_cluster("dgx-h100", hosts=64)) == LeafSwitches(32, 32, hop_s=0.5e-6)
