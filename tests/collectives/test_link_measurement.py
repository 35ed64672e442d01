"""Calibration: the line through measured times, and a cluster that collectives can be costed on."""

import sys
from pathlib import Path
from typing import Any

import pytest

from motet.cluster.cluster import cluster_from_dict
from motet.collectives import build
from motet.collectives.cost.alpha_beta import estimate_cost
from motet.core.errors import InputError
from motet.parallel.process.process_group import RankGroup
from on_ranks import group_of
from ranks import Ranks

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "parts"))

from link_measurement import calibrate_cluster

from motet.cluster.cluster_settings import fit_alpha_beta


def test_a_line_is_found_again_and_none_starts_below_zero() -> None:
    sizes = [1000, 10_000, 1_000_000]
    assert fit_alpha_beta(sizes, [1e-4 + size / 2e7 for size in sizes]) == pytest.approx((1e-4, 2e7))
    # If a burst passes for free, the fit is the best line without a start-up.
    line = fit_alpha_beta([1000, 2000], [1000 / 1e6 - 5e-4, 2000 / 1e6 - 5e-4])
    assert line.alpha_s == 0 and 1e6 < line.bandwidth_Bps < 2e6
    assert fit_alpha_beta([1000], [1e-3]) == (0, pytest.approx(1e6))


def calibrated(group: RankGroup, devices_per_host: int) -> dict[str, Any]:
    return calibrate_cluster(group_of(group), devices_per_host, sizes=(1 << 10, 1 << 16), repeats=3)


@pytest.mark.parametrize(("world", "devices_per_host"), [(2, 2), (4, 2), (3, 1)])
def test_a_cluster_comes_of_it(ranks: Ranks, world: int, devices_per_host: int) -> None:
    trees = ranks.run(world, calibrated, devices_per_host)
    assert all(tree == trees[0] for tree in trees)
    cluster = cluster_from_dict(trees[0], "here")
    assert (cluster.ranks, cluster.hosts) == (world, world // devices_per_host)
    assert cluster.gamma_s_per_byte.origin == "measured"
    predicted = estimate_cost(build("all-reduce", "ring", world), cluster)
    assert 0 < predicted.seconds(1 << 20) < predicted.seconds(1 << 24) < 60


def test_hosts_must_be_full(ranks: Ranks) -> None:
    ranks.run(3, refused)


def refused(group: RankGroup) -> None:
    with pytest.raises(InputError, match=r"^3 ranks on hosts of 2: give a group of 2 or more that fills its hosts$"):
        calibrated(group, 2)
