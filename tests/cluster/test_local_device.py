"""This machine: its name, its memory, and a peak that is measured once or looked up."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from motet.cluster import local_device as module
from motet.cluster.device_specs import HardwareNumberWithOrigin
from motet.cluster.local_device import LocalDevice, bfloat16_warnings, discover_device, memory_bytes, peak_memory_bytes


@pytest.fixture
def gpu(monkeypatch):
    """A machine whose CUDA device has this name; measuring on it gives 7."""

    def pretend(name):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80 * 1024**3)
        )
        monkeypatch.setattr(module, "_measured_flops", lambda device, dtype, threads: 7.0)

    return pretend


def test_a_cpu_is_measured_for_each_dtype_asked_for():
    this = discover_device("cpu", ["float32", "float64", "bfloat16"])
    assert (this.kind, this.threads) == ("cpu", torch.get_num_threads())
    assert this.name
    assert list(this.peak_flops) == ["float32", "float64", "bfloat16"]
    for figure in this.peak_flops.values():
        assert figure.origin == "measured"
        assert 1e8 < figure.value < 1e15
    assert this.memory_bytes == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_a_measurement_is_remembered(monkeypatch):
    first = discover_device("cpu").peak_flops["float32"]
    monkeypatch.setattr(module, "_matmul_s", lambda *_: pytest.fail("measured again"))
    assert discover_device(torch.device("cpu")).peak_flops["float32"] == first


def test_a_known_device_has_its_datasheet(gpu):
    gpu("NVIDIA H100 80GB HBM3")
    this = discover_device("cuda:0", ["bfloat16", "float32"])
    assert (this.name, this.kind, this.memory_bytes) == ("NVIDIA H100 80GB HBM3", "cuda", 80 * 1024**3)
    assert this.peak_flops == {
        "bfloat16": HardwareNumberWithOrigin(989.4e12, "datasheet"),
        "float32": HardwareNumberWithOrigin(67e12, "datasheet"),
    }


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


@pytest.mark.parametrize(("name", "dtype"), [("NVIDIA Unheard-Of", "float32"), ("Tesla V100-SXM2-16GB", "bfloat16")])
def test_what_no_datasheet_says_is_measured(gpu, name, dtype):
    gpu(name)
    assert discover_device("cuda", [dtype]).peak_flops[dtype] == HardwareNumberWithOrigin(7.0, "measured")


def test_memory_is_what_this_process_holds_and_not_what_its_parent_held():
    before = memory_bytes("cpu")
    block = torch.ones(64 * 1024**2 // 4)
    assert memory_bytes("cpu") - before > 32 * 1024**2
    assert peak_memory_bytes("cpu") >= memory_bytes("cpu") - 1024**2
    assert block[0] == 1
    block = bytearray(os.urandom(1) * (256 * 1024**2))
    code = "from motet.cluster.local_device import peak_memory_bytes; print(peak_memory_bytes('cpu'))"
    hungry = peak_memory_bytes("cpu")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert int(done.stdout) < hungry
    assert len(block) == 256 * 1024**2


def test_cuda_is_asked_where_the_device_is_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 5)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 9)
    assert (memory_bytes("cuda:1"), peak_memory_bytes(torch.device("cuda"))) == (5, 9)


def test_a_machine_without_proc_is_described_by_the_standard_library(monkeypatch):
    monkeypatch.setattr(module, "Path", lambda _: SimpleNamespace(exists=lambda: False))
    assert discover_device("cpu").name
    assert peak_memory_bytes("cpu") > 10 * 1024**2


@pytest.mark.parametrize(("bfloat16", "warned"), [(1e9, True), (49e9, True), (50e9, False), (500e9, False)])
def test_bfloat16_without_instructions_for_it_is_told(bfloat16, warned):
    peaks = {
        "bfloat16": HardwareNumberWithOrigin(bfloat16, "measured"),
        "float32": HardwareNumberWithOrigin(50e9, "measured"),
    }
    texts = bfloat16_warnings(LocalDevice("old CPU", "cpu", peaks, 1, 1))
    assert bool(texts) == warned
    if bfloat16 == 1e9:
        assert "50 times slower than float32" in texts[0] and "precision.recipe=fp32" in texts[0]
    assert bfloat16_warnings(LocalDevice("old CPU", "cpu", {"float32": peaks["float32"]}, 1, 1)) == []
