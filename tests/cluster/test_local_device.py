"""This machine: its name, cores and memory, a peak that is measured once or looked up in the table of devices."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from motet.cluster import local_device as module
from motet.cluster.cluster_settings import HostSettings
from motet.cluster.device_specs import DEVICES, find_device
from motet.cluster.device_specs import HardwareNumberWithOrigin as Number
from motet.cluster.host_limits import keep_freed_memory, usable_cores
from motet.cluster.local_device import LocalDevice, discover_device, peak_memory_bytes, slow_matmul_warnings
from motet.collectives.cost.group_shapes import LINK_CLASSES
from motet.core.units import DTYPE_BYTES


@pytest.fixture
def gpu(monkeypatch):
    """A machine whose CUDA device has this name; measuring on it gives 7."""

    def pretend(name):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
        monkeypatch.setattr(module, "_measured_flops", lambda device, dtype, threads: 7.0)

    return pretend


def test_a_cpu_is_measured_for_each_dtype_asked_for():
    this = discover_device("cpu", ["float32", "float64", "bfloat16"])
    assert this.name
    assert list(this.peak_flops) == ["float32", "float64", "bfloat16"]
    assert all(figure.origin == "measured" and 1e8 < figure.value < 1e15 for figure in this.peak_flops.values())


def test_a_measurement_is_remembered(monkeypatch):
    first = discover_device("cpu").peak_flops["float32"]
    monkeypatch.setattr(module, "_matmul_s", lambda *_: pytest.fail("measured again"))
    assert discover_device(torch.device("cpu")).peak_flops["float32"] == first


def test_a_known_device_has_its_datasheet_and_any_other_is_measured(gpu):
    gpu("NVIDIA H100 80GB HBM3")
    this = discover_device("cuda:0", ["bfloat16", "float32"])
    assert this.name == "NVIDIA H100 80GB HBM3"
    assert this.peak_flops == {"bfloat16": Number(989.4e12, "datasheet"), "float32": Number(67e12, "datasheet")}
    for name, dtype in (("NVIDIA Unheard-Of", "float32"), ("Tesla V100-SXM2-16GB", "bfloat16")):
        gpu(name)
        assert discover_device("cuda", [dtype]).peak_flops[dtype] == Number(7.0, "measured")


def test_float32_that_may_be_rounded_has_the_peak_of_the_rounded(gpu):
    gpu("NVIDIA H100 80GB HBM3")
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        assert discover_device("cuda").peak_flops["float32"].value == 494.7e12
        gpu("Tesla V100-SXM2-16GB")  # has no such unit
        assert discover_device("cuda").peak_flops["float32"].value == 15.7e12
    finally:
        torch.set_float32_matmul_precision(before)


def test_memory_is_what_this_process_holds_and_not_what_its_parent_held():
    block = bytearray(os.urandom(1) * (256 * 1024**2))
    code = "from motet.cluster.local_device import peak_memory_bytes; print(peak_memory_bytes('cpu'))"
    hungry = peak_memory_bytes("cpu")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert int(done.stdout) < hungry and len(block) == 256 * 1024**2


def test_cuda_is_asked_where_the_device_is_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 9)
    assert peak_memory_bytes(torch.device("cuda")) == 9


def test_a_machine_without_proc_is_described_by_the_standard_library(monkeypatch):
    monkeypatch.setattr(module, "Path", lambda _: SimpleNamespace(exists=lambda: False))
    assert discover_device("cpu").name and peak_memory_bytes("cpu") > 10 * 1024**2


@pytest.mark.parametrize(("bfloat16", "warned"), [(1e9, True), (49e9, True), (50e9, False), (500e9, False)])
def test_bfloat16_without_instructions_for_it_is_told(bfloat16, warned):
    peaks = {"bfloat16": Number(bfloat16, "measured"), "float32": Number(50e9, "measured")}
    texts = slow_matmul_warnings(LocalDevice("old CPU", peaks))
    assert bool(texts) == warned
    if bfloat16 == 1e9:
        assert "50 times slower than float32" in texts[0] and "precision.recipe=fp32" in texts[0]
        assert texts[0].endswith("precision.emulate=true studies bf16 with products in float32")
    assert slow_matmul_warnings(LocalDevice("old CPU", {"float32": peaks["float32"]})) == []


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)
    (tmp_path / "own").write_text("0::/pod/box\n")
    (tmp_path / "groups").mkdir()
    return tmp_path


def cores(machine: Path) -> int:
    return usable_cores(machine / "groups", machine / "own")


def write(machine: Path, path: str, text: str) -> None:
    file = machine / "groups" / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_here_there_is_at_least_one() -> None:
    assert 1 <= usable_cores() <= (os.cpu_count() or 1)


def test_affinity_alone_and_a_container_that_sees_only_its_root(machine: Path) -> None:
    assert cores(machine) == 16 and usable_cores(machine / "groups", machine / "no such file") == 16
    (machine / "own").write_text("0::/../../other/path\n")
    write(machine, "cpu.max", "400000 100000")
    assert cores(machine) == 4


@pytest.mark.parametrize(
    ("quota", "expected"),
    [("max 100000", 16), ("250000 100000", 2), ("50000 100000", 1), ("9900000 100000", 16), ("", 16)],
)
def test_a_quota_rounds_down_to_at_least_one(machine: Path, quota: str, expected: int) -> None:
    write(machine, "pod/box/cpu.max", quota)
    assert cores(machine) == expected


def test_the_smallest_quota_on_the_way_up_counts(machine: Path) -> None:
    write(machine, "pod/box/cpu.max", "800000 100000")
    write(machine, "pod/cpu.max", "300000 100000")
    write(machine, "cpu.max", "max 100000")
    assert cores(machine) == 3


def test_version_one_of_control_groups(machine: Path) -> None:
    (machine / "own").write_text("4:memory:/a\n3:cpu,cpuacct:/a\n0::/\n")
    write(machine, "cpu,cpuacct/a/cpu.cfs_quota_us", "500000\n")
    write(machine, "cpu,cpuacct/a/cpu.cfs_period_us", "100000\n")
    write(machine, "memory/a/cpu.max", "100000 100000")  # of another controller
    assert cores(machine) == 5
    write(machine, "cpu,cpuacct/a/cpu.cfs_quota_us", "-1\n")
    assert cores(machine) == 16


_CODE = """
import ctypes, psutil
from motet.cluster.host_limits import keep_freed_memory
kept = {} and keep_freed_memory()
library = ctypes.CDLL(None)
library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
library.free.argtypes = [ctypes.c_void_p]
blocks = [library.malloc(16 << 20) for _ in range(16)]
for block in blocks:
    ctypes.memset(block, 1, 16 << 20)
for block in blocks:
    library.free(block)
print(psutil.Process().memory_info().rss >> 20)
"""


def _resident_mib(keep: bool) -> int:
    done = subprocess.run([sys.executable, "-c", _CODE.format(keep)], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc is Linux's")
def test_what_was_freed_is_still_there() -> None:
    assert _resident_mib(keep=False) < 128 and _resident_mib(keep=True) > 256


def test_elsewhere_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert keep_freed_memory() is False


REPORTED = {
    "NVIDIA A100-SXM4-80GB": ("A100-SXM4-80GB", "bfloat16", 312e12),
    "A100-SXM4-40GB": ("A100-SXM4-40GB", "float64", 19.5e12),
    "NVIDIA A100 80GB PCIe": ("A100 80GB PCIe", "tfloat32", 156e12),
    "NVIDIA A800-SXM4-80GB": ("A800-SXM4-80GB", "float32", 19.5e12),
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
    + ["A10M", ""],
)
def test_a_similar_name_is_another_device(reported):
    assert find_device(reported) is None


def test_the_table_is_in_order():
    assert "bfloat16" not in find_device("Tesla V100-SXM2-16GB").peak_flops
    assert "float8" not in find_device("NVIDIA A100-SXM4-80GB").peak_flops
    assert len({device.name for device in DEVICES}) == len(DEVICES)
    for device in DEVICES:
        figures = [*device.peak_flops.values(), device.memory_bytes, device.bandwidth_Bps, device.link_Bps]
        assumed = device.name in ("CPU", "RTX 6000D")
        assert {figure.origin for figure in figures} == {"assumed" if assumed else "datasheet"}
        assert set(device.peak_flops) <= {*DTYPE_BYTES, "tfloat32", "float8", "float4"}
        if device.name == "CPU":
            continue
        # Mistaken units would be off by a thousand.
        assert 10e9 < device.memory_bytes.value < 310e9 and 0.25e12 < device.bandwidth_Bps.value < 9e12
        assert 15e9 < device.link_Bps.value <= 900e9 and device.link in LINK_CLASSES
        assert device.power_W is None or 50 < device.power_W.value < 1500
        assert 0.9 < device.usable_share.value <= 1 and device.usable_share.source
        peaks = {dtype: figure.value for dtype, figure in device.peak_flops.items()}
        if "float32" not in peaks:  # Units of products alone
            continue
        assert 5e12 < peaks["float32"] < peaks["float16"] < 3e15
        assert peaks.get("bfloat16", peaks["float16"]) == peaks["float16"]
        assert 1.9 < peaks.get("float8", 2 * peaks["float16"]) / peaks["float16"] < 2.1


def test_the_power_of_all_but_five_devices_is_known():
    unknown = {device.name for device in DEVICES if device.power_W is None}
    assert unknown == {"TPU v5e", "TPU v5p", "TPU v6e", "RTX 6000D", "CPU"}


def test_the_host_of_cpu_ranks_is_measured() -> None:
    host = HostSettings.model_validate(module.measure_host(1, repeats=1))
    assert host.memory_bytes.value == psutil.virtual_memory().total and host.cores == usable_cores()
    assert {host.memory_bytes.origin, host.link_Bps.origin, host.update_Bps.origin} == {"measured"}
    assert host.scratch_Bps is None
