"""The table of devices: found by the names that drivers report, and by no similar one."""

import pytest

from motet.cluster.device_specs import DEVICES, find_device
from motet.core.dtypes import DTYPE_BYTES

REPORTED = {
    "NVIDIA A100-SXM4-80GB": ("A100-SXM4-80GB", "bfloat16", 312e12),
    "A100-SXM4-40GB": ("A100-SXM4-40GB", "float64", 19.5e12),
    "NVIDIA A100 80GB PCIe": ("A100 80GB PCIe", "tfloat32", 156e12),
    "NVIDIA A800-SXM4-80GB": ("A100-SXM4-80GB", "float32", 19.5e12),
    "NVIDIA H100 80GB HBM3": ("H100 SXM", "bfloat16", 989.4e12),
    "NVIDIA H100 PCIe": ("H100 PCIe", "bfloat16", 756e12),
    "NVIDIA H200": ("H200", "float8", 1978.9e12),
    "NVIDIA B200": ("B200", "bfloat16", 2250e12),
    "Tesla V100-SXM2-16GB": ("V100-SXM2-16GB", "float16", 125e12),
    "NVIDIA L40S": ("L40S", "float16", 362e12),
    "NVIDIA GeForce RTX 4090": ("RTX 4090", "float32", 82.6e12),
    "AMD Instinct MI300X": ("MI300X", "bfloat16", 1307.4e12),
}


@pytest.mark.parametrize("reported", REPORTED)
def test_a_device_is_found_by_the_name_that_is_reported(reported):
    name, dtype, peak = REPORTED[reported]
    device = find_device(reported)
    assert device is not None and (device.name, device.peak_flops[dtype].value) == (name, peak)


@pytest.mark.parametrize(
    "reported",
    [f"NVIDIA {name}" for name in ("GeForce RTX 4090 Laptop GPU", "GeForce RTX 4090 D", "A100-SXM4-80GB MIG 1g.10gb")]
    + ["A10G", ""],
)
def test_a_similar_name_is_another_device(reported):
    assert find_device(reported) is None


def test_the_table_is_in_order():
    assert "bfloat16" not in find_device("Tesla V100-SXM2-16GB").peak_flops
    assert "float8" not in find_device("NVIDIA A100-SXM4-80GB").peak_flops
    assert len({device.name for device in DEVICES}) == len(DEVICES)
    for device in DEVICES:
        figures = [*device.peak_flops.values(), device.memory_bytes, device.bandwidth_Bps]
        assert {figure.origin for figure in figures} == {"datasheet"}
        assert set(device.peak_flops) <= {*DTYPE_BYTES, "tfloat32", "float8"}
        # Mistaken units would be off by a thousand.
        assert 15e9 < device.memory_bytes.value < 300e9 and 0.25e12 < device.bandwidth_Bps.value < 9e12
        peaks = {dtype: figure.value for dtype, figure in device.peak_flops.items()}
        assert 5e12 < peaks["float32"] < peaks["float16"] < 3e15
        assert peaks.get("bfloat16", peaks["float16"]) == peaks["float16"]
        assert 1.9 < peaks.get("float8", 2 * peaks["float16"]) / peaks["float16"] < 2.1
