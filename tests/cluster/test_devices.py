"""Devices by the names that people call them by, and devices that a cluster file describes."""

import csv
from pathlib import Path
from typing import Any

import pytest

from motet.cluster.cluster import build_cluster, device_of_cluster
from motet.cluster.cluster_settings import ClusterSettings
from motet.cluster.device_specs import DeviceSpec, find_planned_device
from motet.cluster.device_specs import HardwareNumberWithOrigin as Number
from motet.core.config_loading import settings_from_dict
from motet.core.errors import InputError

PUBLISHED = Path(__file__).parents[3] / "shared" / "validation"
NAMES = {
    "H100 SXM": "H100|H100-SXM5-80GB|H100-SXM-80GB|NVIDIA H100 80GB HBM3|H100 Tensor Core GPU|H100SXM5|h100_sxm",
    "H100 SXM 96GB HBM2e 500W": "H100-SXM-96GB-HBM2e-500W|H100 500W|H100 96GB",
    "H100 PCIe": "H100-PCIe-80GB|NVIDIA H100 PCIe",
    "H100 NVL": "H100 NVL 94GB|H100 94GB",
    "A100-SXM4-80GB": "A100|A100-SXM4|A100 80 GB|NVIDIA A100-SXM4-80GB",
    "A100-SXM4-40GB": "A100-SXM-40GB|A100-40GB",
    "A100 80GB PCIe": "A100-PCIe-80GB|A100 PCIe",
    "V100-SXM2-32GB": "V100|Tesla V100-SXM2-32GB",
    "V100-SXM2-16GB": "V100-16GB",
    "V100-SXM3-32GB": "V100-SXM3-32GB",
    "GH200 480GB": "GH200|GH200-96GB|NVIDIA GH200 480GB|GH200 Grace Hopper Superchip",
    "H20": "H20-96GB",
    "H200": "H200-SXM-141GB",
    "B200": "B200-SXM-180GB|B200-SXM-192GB|B200 183GB",
    "B300": "B300-SXM-288GB|B300 270GB",
    "GB200": "GB200-NVL72|GB200",
    "MI250": "MI250",
    "MI250X": "AMD Instinct MI250X|MI250X GCD",
    "MI300X": "MI300X OAM",
    "TPU v5e": "TPU-v5e|TPUv5e|v5e",
    "TPU v6e": "TPU v6e|Trillium",
    "Gaudi2": "Intel Gaudi 2",
    "RTX 4090": "GeForce RTX 4090|4090|RTX4090",
    "RTX A6000": "A6000",
    "RTX 6000 Ada Generation": "RTX 6000 Ada",
    "RTX PRO 6000": "RTX PRO 6000 Blackwell Server Edition",
    "L40S": "L40S-48GB",
}


@pytest.mark.parametrize(
    ("device", "name"), [(device, name) for device, names in NAMES.items() for name in names.split("|")]
)
def test_a_name_in_any_spelling_is_the_device(device: str, name: str) -> None:
    assert find_planned_device(name).name == device


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("H100 64GB", "H100 SXM, H100 PCIe"),  # A size that no H100 of the table has
        ("A100-SXM4-64GB", "A100-SXM4-80GB"),
        ("H100 600W", "H100 SXM"),
        ("B200 PCIe", "B200"),
        ("RTX 4090 Laptop GPU", "RTX 4090"),
        ("RTX 4090 D", "RTX 4090"),
        ("RTX 6000", "RTX A6000"),  # Of three generations
        ("A100-SXM4-80GB MIG 1g.10gb", "A100-SXM4-80GB"),
        ("A10M", "A10"),
        ("H1000", "H100 SXM"),
        ("", "P100"),
    ],
)
def test_a_similar_name_is_an_error_that_names_near_devices(name: str, near: str) -> None:
    with pytest.raises(InputError, match="is not in the table of devices; use one of it, such as") as caught:
        find_planned_device(name)
    assert near in str(caught.value) and repr(name) in str(caught.value)


@pytest.mark.parametrize("file", ["steps.csv", "collectives.csv"])
def test_every_device_of_a_published_file_is_known(file: str) -> None:
    if not (PUBLISHED / file).is_file():
        pytest.skip(f"{PUBLISHED / file} is not here")
    with (PUBLISHED / file).open() as rows:
        names = {row["gpu"] for row in csv.DictReader(rows) if "not in the excerpt" not in row["gpu"]}
    assert len(names) > 8 and all(find_planned_device(name) for name in names)


NETWORK = {"kind": "switch", "alpha_s": 1e-6, "bandwidth_Bps": 1e11}
SHEET = {"memory_bytes": 128e9, "bandwidth_Bps": 4e12, "flops": {"bfloat16": 1.2e15}}


def settings_with(device: str, sheet: dict[str, Any] | None) -> ClusterSettings:
    tree = {"device": device, "devices_per_host": 4, "inside": NETWORK, "datasheet": sheet}
    return settings_from_dict(
        ClusterSettings, {key: value for key, value in tree.items() if value is not None}, "c.toml"
    )


def device_with(device: str, sheet: dict[str, Any] | None) -> DeviceSpec:
    return device_of_cluster(settings_with(device, sheet))


def test_a_device_that_the_table_does_not_have() -> None:
    power = {"value": 750, "origin": "measured", "source": "our meter"}
    costs = {"power_W": power, "price_per_hour": 2.5, "usable_memory": 0.9, "generation": "Hopper", "units": 96}
    device = device_with("X9000", SHEET | costs)
    assert (device.name, device.generation, device.units) == ("X9000", "Hopper", 96)
    assert device.peak_flops == {"bfloat16": Number(1.2e15, "assumed")} and device.usable_bytes == 0.9 * 128e9
    assert (device.power_W, device.price_per_hour) == (Number(750, "measured", "our meter"), Number(2.5, "assumed"))
    # Adding reads two bytes and writes one.
    assert build_cluster(settings_with("X9000", SHEET), "c").gamma_s_per_byte.value == 3 / 4e12


def test_numbers_in_place_of_those_of_the_table() -> None:
    table = find_planned_device("H100 SXM")
    cheaper = device_with("H100", {"price_per_hour": 1, "power_W": 600})
    assert cheaper.name == "H100 SXM" and cheaper.price_per_hour == Number(1, "assumed")
    slower = device_with("H100", {"bandwidth_Bps": 3e12, "flops": {"float8": 1.5e15}})
    # Errors of published steps are no longer those of this device.
    assert slower.name == "H100 SXM of the cluster file" and slower.memory_bytes == table.memory_bytes
    assert slower.peak_flops == {**table.peak_flops, "float8": Number(1.5e15, "assumed")}


WRONG: list[tuple[str, dict[str, Any] | None, str]] = [
    ("X9000", None, "device 'X9000' is not in the table of devices"),
    ("X9000", {}, "does not give memory_bytes, bandwidth_Bps, flops.bfloat16; add it, or name a device"),
    ("X9000", SHEET | {"flops": {"float8": 1e15}}, "does not give flops.bfloat16; add it"),
    ("H100", {"bandwidth_Bps": 1}, "datasheet.bandwidth_Bps.value = 1 must be at least 100000000.0"),
    ("H100", {"bandwidth_Bps": 1e30}, "datasheet.bandwidth_Bps.value = 1e+30 must be at most 1e+16"),
    ("H100", {"bandwidth_Bps": 2e8}, "FLOP for each byte of memory, more than 100000; correct one of them"),
    ("H100", {"memory_bytes": 0}, "datasheet.memory_bytes.value = 0 must be at least 10000000.0"),
    ("H100", {"memory_bytes": -80e9}, "datasheet.memory_bytes.value = -80000000000.0 must be at least"),
    ("H100", {"memory_bytes": float("nan")}, "datasheet.memory_bytes.value = nan must be"),
    ("H100", {"memory_bytes": 80}, "datasheet.memory_bytes.value = 80 must be at least"),  # GB for bytes
    ("H100", {"flops": {"bfloat16": 989}}, "datasheet.flops.bfloat16.value = 989 must be at least 100000000.0"),
    ("H100", {"flops": {"bfloat16": 1e30}}, "datasheet.flops.bfloat16.value = 1e+30 must be at most 1e+19"),
    ("H100", {"flops": {"bf16": 1e15}}, "unknown key 'datasheet.flops.bf16'; did you mean 'bfloat16'?"),
    ("H100", {"power_W": 0}, "datasheet.power_W.value = 0 must be at least 0.1"),
    ("H100", {"power_W": float("inf")}, "datasheet.power_W.value = inf must be"),
    ("H100", {"price_per_hour": -1}, "datasheet.price_per_hour.value = -1 must be at least 0.0"),
    ("H100", {"usable_memory": 1.5}, "datasheet.usable_memory.value = 1.5 must be at most 1.0"),
    (
        "H100",
        {"generation": "Rubin"},
        "datasheet.generation = 'Rubin' is not in the table of devices; give one of",
    ),
    ("H100", {"units": 0}, "datasheet.units = 0 must be at least 1"),
    ("H100", {"clock_Hz": 1}, "unknown key 'datasheet.clock_Hz'"),
]


@pytest.mark.parametrize(("device", "sheet", "words"), WRONG)
def test_a_sentence_for_what_is_wrong_in_a_datasheet(device: str, sheet: dict[str, Any] | None, words: str) -> None:
    with pytest.raises(InputError) as caught:
        device_with(device, sheet)
    assert words in str(caught.value) and "\n" not in str(caught.value)
