"""The device of this process and its peak: from the datasheet, or measured without one.

The peak of a CPU is the fastest matrix product of this process with its threads, measured in a fraction of a second. A
fraction of the peak of N ranks on one machine assumes N processes that do not slow each other down, and is too high if
the machine is busy during the measurement.
"""

import functools
import platform
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from motet.cluster.device_specs import HardwareNumberWithOrigin, find_device

_MEASURE_BUDGET_S = 0.2
_MATMUL_SIZES = (256, 512, 1024, 2048, 4096, 8192, 16384)


@dataclass(frozen=True, slots=True)
class LocalDevice:
    """The device of one rank. `peak_flops` is by dtype."""

    name: str
    peak_flops: Mapping[str, HardwareNumberWithOrigin]


def discover_device(device: torch.device | str, dtypes: Sequence[str] = ("float32",)) -> LocalDevice:
    """The device of this process, with the peak for each of `dtypes`."""
    device = torch.device(device)
    name = device_name(device)
    return LocalDevice(name, {dtype: _peak_flops(name, device, dtype) for dtype in dtypes})


def device_name(device: torch.device) -> str:
    """The maker's name of the device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return _proc_entry("/proc/cpuinfo", "model name") or platform.processor() or platform.machine()


def slow_matmul_warnings(device: LocalDevice) -> list[str]:
    """A warning for each 16-bit dtype that the device has no instructions for, and therefore multiplies slowly."""
    peaks, recipes = device.peak_flops, {"bfloat16": "bf16", "float16": "fp16"}
    warnings = []
    for dtype in recipes:
        if dtype in peaks and "float32" in peaks and peaks[dtype].value < peaks["float32"].value:
            slowdown = f"{peaks['float32'].value / peaks[dtype].value:.3g} times slower than float32 ones"
            warnings.append(
                f"{device.name} multiplies {dtype} matrices {slowdown}; precision.recipe=fp32 is quicker here, and "
                f"precision.emulate=true studies {recipes[dtype]} with products in float32"
            )
    return warnings


def peak_memory_bytes(device: torch.device | str) -> int:
    """The peak memory of this process: allocated on a CUDA device, resident on the CPU."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # On Linux the peak of getrusage includes that of the parent process.
    if peak_text := _proc_entry("/proc/self/status", "VmHWM"):
        return int(peak_text.split()[0]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _peak_flops(name: str, device: torch.device, dtype: str) -> HardwareNumberWithOrigin:
    spec = find_device(name) if device.type == "cuda" else None
    peaks = spec.peak_flops if spec else {}
    uses_tfloat32 = dtype == "float32" and torch.get_float32_matmul_precision() != "highest"
    peak = peaks.get("tfloat32" if uses_tfloat32 else dtype) or peaks.get(dtype)
    return peak or HardwareNumberWithOrigin(_measured_flops(device, dtype, torch.get_num_threads()), "measured")


@functools.cache
def _measured_flops(device: torch.device, dtype: str, threads: int) -> float:
    """The fastest square matrix product; `threads` is only a key of the cache."""
    end_s, best = time.perf_counter() + _MEASURE_BUDGET_S, 0.0
    for size in _MATMUL_SIZES:
        left, right = (torch.ones(size, size, dtype=getattr(torch, dtype), device=device) for _ in range(2))
        result = torch.empty_like(left)
        for _ in range(3):
            best = max(best, 2 * size**3 / _matmul_s(left, right, result))
        # The next size is eight times the work, three times, and has to fit into the rest of the budget.
        if time.perf_counter() + 3 * 8 * 2 * size**3 / best > end_s:
            break
    while time.perf_counter() < end_s:
        best = max(best, 2 * size**3 / _matmul_s(left, right, result))
    return best


def _matmul_s(left: torch.Tensor, right: torch.Tensor, result: torch.Tensor) -> float:
    start_s = time.perf_counter()
    torch.mm(left, right, out=result)
    if left.is_cuda:
        torch.cuda.synchronize(left.device)
    return time.perf_counter() - start_s


def _proc_entry(path: str, key: str) -> str | None:
    lines = Path(path).read_text().splitlines() if Path(path).exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), None)
