"""The predicted times of vendor libraries against published peaks, ceilings of links and bad input."""

import pytest

from motet.cluster.cluster_toml import load_cluster
from motet.collectives.cost.group_shapes import GroupPlacement
from motet.collectives.cost.vendor_library import FabricSpec, VendorCosts, fabric_of
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
