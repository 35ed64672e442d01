"""Links in words: what published tables call them, and the class and the share of a device that follow."""

import csv
from pathlib import Path

import pytest

from motet.collectives.cost.published_curves import (
    COLUMNS,
    inside_link,
    is_rack,
    network_link,
    one_process,
    read_published_curves,
    reduces_in_network,
)
from refusals import refused

EMPTY = dict.fromkeys((*COLUMNS, "notes"), "") | {"id": "x"}


@pytest.mark.parametrize(
    ("device", "words", "link", "gigabytes"),
    [
        ("H200", "NVLink4", "NVLink4", 450),
        ("H200-SXM-141GB", "", "NVLink4", 450),
        ("H800", "NVLink4 (400 GB/s cap)", "NVLink4", 200),
        ("A800-SXM", "-", "NVLink3", 200),
        ("GH200", "NVLink-4 (900 GB/s)", "NVLink4", 450),
        ("GB200", "NVLink5 1.8TB/s", "NVLink5", 900),
        ("H100-PCIe", "NVLink4 bridge (12 links)", "NVLink4", 300),
        ("RTX A6000", "NVLink3 bridge", "NVLink3", 56),
        ("A40", "NVLink bridge", "NVLink3", 56),
        ("A40", "NVLink3", "NVLink3", 56),
        ("A30", "NVLink", "NVLink3", 100),
        ("A100-PCIE-40GB", "NVLink", "NVLink3", 300),
        ("h100-pcie", "NVLink", "NVLink4", 300),
        ("H100 NVL", "NVLink4 bridge", "NVLink4", 300),
        ("H200 NVL", "NVLink bridge", "NVLink4", 450),
        ("RTX 2080 Ti", "NVLink", "NVLink2", 50),
        ("L40S", "NVLink", "PCIe", 32),
        ("RTX 4090", "no NVLink", "PCIe", 32),
        ("H100 NVL", "", "PCIe", 64),
        ("L40S", "PCIe Gen4 x16", "PCIe", 32),
        ("L40S", "PCIe Gen5", "PCIe", 64),
        ("A10G", "PCIe (no P2P, host SHM)", "PCIe", 32 / 6),
        ("T4", "", "PCIe", 16),
        ("MI300X", "Infinity Fabric", "xGMI", 448),
        ("MI300X", "xGMI 7x128 GB/s", "xGMI", 448),
        ("MI355X", "", "xGMI", 538),
        ("MI250X", "xGMI", "xGMI", 150),
        ("P100-SXM2", "NVLink", "NVLink2", 80),
        ("new", "64 GB/s one way", "PCIe", 64),
        ("new", "NVLink5", "NVLink5", 900),
    ],
)
def test_links_inside_of_a_host(device: str, words: str, link: str, gigabytes: float) -> None:
    name, bandwidth = inside_link(EMPTY | {"gpu": device, "intra_link": words}, 8)
    assert (name, bandwidth) == (link, pytest.approx(gigabytes * 1e9))


@pytest.mark.parametrize(
    ("device", "words", "link", "gigabytes"),
    [
        ("H100", "8x400Gb IB NDR", "RDMA400", 50),
        ("H200", "RoCE v2 400G", "RDMA400", 50),
        ("B200", "8x IB XDR", "RDMA400", 100),
        ("B300", "800 Gb/s per GPU, Quantum-X800 XDR", "RDMA400", 100),
        ("A100", "8 x 200 Gbps HDR InfiniBand", "RDMA", 25),
        ("A100", "4x25GB/s IB", "RDMA", 12.5),
        ("V100", "EDR", "RDMA", 1.5625),
        ("A100", "EFA", "EFA", 6.25),
        ("A100", "4x100G EFA v1", "EFA", 6.25),
        ("H100", "EFA v2", "EFA400", 50),
        ("H200", "EFA v3 16x200G", "EFA400", 50),
        ("MI250X", "4x200G Slingshot-11", "Slingshot", 12.5),
        ("GH200", "Slingshot-11", "Slingshot", 25),
        ("H100", "GPUDirect-TCPXO", "TCPXO", 25),
        ("H100", "TCPX", "TCPX", 12.5),
        ("A10G", "Ethernet 100G", "Socket", 1.5625),
        ("L40S", "2x100GbE TCP", "Socket", 3.125),
        ("MI300X", "8x400G Broadcom Thor2 RoCE", "RDMA400", 50),
    ],
)
def test_links_between_hosts(device: str, words: str, link: str, gigabytes: float) -> None:
    name, bandwidth = network_link(EMPTY | {"gpu": device, "inter_link": words}, 8)
    assert (name, bandwidth) == (link, pytest.approx(gigabytes * 1e9))
    stated = {"gpu": device, "inter_link": words, "nominal_inter_GBps_per_gpu": "25"}
    assert network_link(EMPTY | stated, 8)[1] == 25e9


def test_what_says_nothing_is_one_sentence() -> None:
    row = EMPTY | {"gpu": "new", "intra_link": "fast", "inter_link": "fast"}
    refused("row x: gpu 'new' with link 'fast' is unknown; give a device such as V100", inside_link, row, 2)
    refused("row x: nominal_inter_GBps_per_gpu is empty and inter_link 'fast' has no speed", network_link, row, 2)
    assert inside_link(row, 1).name == "PCIe"  # A host of one device uses no link inside


@pytest.mark.parametrize(
    ("words", "is_one"),
    [
        ("-g 8 one process", True),
        ("1 process 8 GPUs", True),
        ("one process per GPU", False),
        ("-g 1, 8 ranks", False),
        ("mpirun -np 8 -g 8", False),
        ("", False),
    ],
)
def test_how_a_run_was_started(words: str, is_one: bool) -> None:
    assert one_process(EMPTY | {"notes": words}) is is_one


@pytest.mark.parametrize(
    ("words", "reduces"),
    [("SHARP (CollNet)", True), ("NVLS (NVLink SHARP)", False), ("no SHARP", False), ("default", False)],
)
def test_who_adds_up_between_hosts(words: str, reduces: bool) -> None:
    assert reduces_in_network(EMPTY | {"algo": words}) is reduces


def test_hosts_of_a_rack_are_joined_by_nvlink() -> None:
    assert is_rack(EMPTY | {"gpu": "GB200", "inter_link": "-"}, 4)
    assert is_rack(EMPTY | {"gpu": "H200", "inter_link": "NVLink5 (NVL72)"}, 4)
    assert not is_rack(EMPTY | {"gpu": "GB200", "inter_link": "8x400Gb IB"}, 4)


@pytest.mark.parametrize("collective", ["allreduce", "All-Gather", "reduce_scatter_perf", "alltoallv", "gather"])
@pytest.mark.parametrize(
    "changes",
    [
        {"gpu": "GB200", "nodes": "4", "gpus_per_node": "4", "inter_link": "NVLink5 (NVL72)"},
        {"gpu": "MI250X", "nodes": "16", "gpus_per_node": "8", "inter_link": "4x200G Slingshot-11"},
        {"gpu": "GH200", "nodes": "8", "gpus_per_node": "1", "inter_link": "200G Slingshot"},
        {"gpu": "A10G", "nodes": "1", "gpus_per_node": "4"},
        {"gpu": "H200", "nodes": "2", "gpus_per_node": "", "ranks": "16", "inter_link": "EFA v3"},
    ],
)
def test_rows_of_other_devices_and_networks_are_predicted(
    tmp_path: Path, collective: str, changes: dict[str, str]
) -> None:
    path = tmp_path / "rows.csv"
    row = EMPTY | {"collective": collective, "bytes": str(2**28), "time_us": "5000", "quality": "A"} | changes
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(EMPTY))
        writer.writeheader()
        writer.writerow(row)
    (time,) = read_published_curves(path).times
    assert time.predicted_s > 0 and time.ranks == int(changes["nodes"]) * int(changes["gpus_per_node"] or 8)
