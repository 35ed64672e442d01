"""The fabric of a cluster: bandwidths of each device by topology, and classes of links by device or cluster file."""

import tomllib
from typing import Any

import pytest

from motet.cluster.cluster import cluster_from_dict, cluster_presets, load_cluster
from motet.collectives.cost.cluster_fabric import VendorCosts, fabric_of
from motet.collectives.cost.group_shapes import LINK_CLASSES, GroupPlacement
from motet.core.errors import InputError


@pytest.mark.parametrize(
    ("preset", "link", "inside", "between"),
    [
        ("dgx-h100", "NVLink4", 450e9, 50e9),
        ("h800", "NVLink4", 200e9, 50e9),
        ("p100", "NVLink2", 80e9, 6.25e9),
        ("dgx-2", "NVLink2", 150e9, 6.25e9),  # Two devices share a card
        ("a100-pcie", "PCIe", 32e9, 25e9 / 8),
        ("mi300x-8", "xGMI", 7 * 64e9, 50e9),  # A mesh uses all links
        ("tpu-v5e", "ICI", 4 * 50e9, 25e9 / 8),
        ("cpu-hosts", "PCIe", 4e9 / 8, 1.25e9 / 8),  # All ranks share a bus
    ],
)
def test_bandwidths_of_a_device(preset: str, link: str, inside: float, between: float) -> None:
    fabric = fabric_of(load_cluster(preset, hosts=2))
    assert (fabric.intra_link, fabric.intra_Bps, fabric.inter_Bps) == (link, inside, between)
    assert fabric.in_switch_inside == (link == "NVLink4")


def changed(preset: str, hosts: int = 2, **vendor: Any) -> dict[str, Any]:
    tree = tomllib.loads(cluster_presets()[preset])
    tree["hosts"] = hosts
    for section, values in vendor.items():
        tree[section]["vendor"] = values
    return tree


def test_a_torus_between_hosts_is_shared_by_their_devices() -> None:
    tree = changed("dgx-h100", hosts=9)
    tree["between"] = {"kind": "torus", "dims": [3, 3], "alpha_s": 1e-6, "bandwidth_Bps": 10e9}
    assert fabric_of(cluster_from_dict(tree)).inter_Bps == 4 * 10e9 / 8


def test_a_cluster_file_replaces_constants_of_links() -> None:
    numbers = {"efficiency": 0.5, "one_way_efficiency": 0.4, "hop_s": 2e-6, "in_switch_efficiency": 0.3}
    fabric = fabric_of(
        cluster_from_dict(changed("dgx-h100", inside={"link": "NVLink5", **numbers}, between={"link": "EFA"}))
    )
    assert fabric.inter_class == LINK_CLASSES["EFA"] and fabric.inter_link == "EFA" and fabric.intra_link == "NVLink5"
    assert fabric.intra_class is not None
    assert {name: getattr(fabric.intra_class, name) for name in numbers} == numbers
    group = GroupPlacement(8, 8)
    usual, slower = (
        VendorCosts(fabric_of(cluster_from_dict(changed("a100", **vendor)))).time("all-gather", 2**30, group).seconds
        for vendor in ({}, {"inside": {"efficiency": LINK_CLASSES["NVLink3"].efficiency / 2}})
    )
    assert 1.9 < slower / usual < 2.0


def test_an_unknown_class_of_links_is_an_error() -> None:
    with pytest.raises(InputError, match=r"vendor.link = 'NVLink9' is not a class of links; give one of NVLink2, "):
        fabric_of(cluster_from_dict(changed("a100", inside={"link": "NVLink9"})))
    with pytest.raises(InputError, match=r"between.vendor.efficiency.value = 2 must be at most 1.0"):
        cluster_from_dict(changed("a100", between={"efficiency": 2}))
