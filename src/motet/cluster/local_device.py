"""The device of this process: its peak FLOP/s, from the datasheet or measured, and the peak of its memory.

The peak of a CPU is the fastest matrix product of this process with its threads, measured in a fraction of a second. A
fraction of the peak of N ranks on one machine assumes N processes that do not slow each other down, and is too high if
the machine is busy during the measurement.

The rates of kernels on this processor, measured in a fraction of a second, as the section [rates] of a cluster file.

Sizes are those of small models: activations that fit into the cache, and products that take milliseconds.
"""

import functools
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.nn.functional as F

from motet.cluster.cluster_settings import measured
from motet.cluster.device_specs import HardwareNumberWithOrigin, find_device
from motet.cluster.host_limits import usable_cores

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


_PRODUCTS = ((1024, 256, 768), (1024, 768, 256), (256, 1024, 768), (512, 512, 1024), (1024, 320, 960))
_NARROW_PRODUCTS = tuple((rows // 8, inner, columns) for rows, inner, columns in _PRODUCTS)
_MOST_EDGE = 512.0
_ATTENTION = (4, 4, 256)  # Rows, heads, tokens
_FEATURES = (32, 128)  # Features of a head
_ATTENTION_KERNELS = "attention", "attention and backward"
_STREAMED = 1 << 19  # Elements of an activation
_LAUNCHES = 200
_UPDATED = 1 << 22  # Elements of an update, whose states no cache holds
_STATES_OF_ADAMW = 12  # Bytes of a master and two moments
_BACKWARD_FLOPS = 2.5  # FLOPs of a backward of attention over its forward: scores are computed again

_Sizes = tuple[tuple[int, int, int], ...]  # Rows, inner dimension, columns


def measure_rates(dtype: str = "float32", repeats: int = 7) -> dict[str, Any]:
    """The rates that one rank with its threads reaches now. Calls are interleaved, and medians count: other programs
    interrupt steps as well."""
    kind = getattr(torch, dtype)
    kernels = rate_kernels(kind)
    seconds = {name: list[float]() for name in kernels}
    for _ in range(repeats + 1):
        for name, kernel in kernels.items():
            seconds[name].append(_seconds(kernel))
    median = {name: statistics.median(times[1:]) for name, times in seconds.items()}
    launch_s = median["launch"] / _LAUNCHES
    streamed = 3 * _STREAMED * kind.itemsize
    memory_Bps = streamed / (median["stream"] - launch_s)  # noqa: N806 - a unit
    wide_s, narrow_s = (
        median[name] - len(sizes) * launch_s - _moved(sizes, kind.itemsize) / memory_Bps
        for name, sizes in (("products", _PRODUCTS), ("narrow products", _NARROW_PRODUCTS))
    )
    edge = _edge(narrow_s / wide_s)
    rows, heads, tokens = _ATTENTION
    narrow, wide = _FEATURES
    attention_flops = 4.0 * rows * heads * tokens * tokens * wide  # Two products
    attention_s, both_s = (median[f"{name} of {wide} features"] for name in _ATTENTION_KERNELS)
    narrow_s = median[f"{_ATTENTION_KERNELS[1]} of {narrow} features"]
    return {
        "products": {dtype: measured(_flops(_PRODUCTS, edge) / wide_s)},
        "product_edge": edge,
        "attention": measured(attention_flops / attention_s),
        "attention_backward": measured(_BACKWARD_FLOPS * attention_flops / max(both_s - attention_s, 1e-9)),
        # Seconds are proportional to the features and the overhead together.
        "attention_overhead": min(max(0.0, narrow_s * wide - both_s * narrow) / max(both_s - narrow_s, 1e-9), wide),
        "memory_Bps": measured(memory_Bps),
        "launch_s": measured(launch_s),
        "cores": usable_cores(),
    }


def rate_kernels(dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    """The kernels that are measured, by name."""
    wide, narrow = (
        [(torch.randn(a, b, dtype=dtype), torch.randn(b, c, dtype=dtype)) for a, b, c in sizes]
        for sizes in (_PRODUCTS, _NARROW_PRODUCTS)
    )
    left, right, total = (torch.randn(_STREAMED, dtype=dtype) for _ in range(3))
    small = torch.randn(16, dtype=dtype, requires_grad=True)

    attention = dict[str, Callable[[], object]]()
    for features in _FEATURES:
        for name, kernel in zip(_ATTENTION_KERNELS, _attention_kernels(features, dtype), strict=True):
            attention[f"{name} of {features} features"] = kernel
    return {
        "products": lambda: [torch.mm(a, b) for a, b in wide],
        "narrow products": lambda: [torch.mm(a, b) for a, b in narrow],
        **attention,
        "stream": lambda: torch.add(left, right, out=total),
        "launch": lambda: [small * 2.0 for _ in range(_LAUNCHES)],
    }


def measure_host(ranks: int, repeats: int = 3, *, device: torch.device | None = None) -> dict[str, Any]:
    """The section [host] of a cluster file for ranks of this machine, without its disk. More ranks than cores share the
    cores. The link is that of `device`, from pinned memory; by default ranks are processors."""
    parameter = torch.zeros(_UPDATED, requires_grad=True)
    parameter.grad = torch.ones(_UPDATED)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    is_cuda = device is not None and device.type == "cuda"
    source, target = torch.zeros(_UPDATED, pin_memory=is_cuda), torch.zeros(_UPDATED, device=device)

    def copy() -> None:
        target.copy_(source, non_blocking=True)
        if is_cuda:
            torch.cuda.synchronize(device)

    kernels: tuple[Callable[[], object], ...] = (optimizer.step, copy)
    update_s, copy_s = (statistics.median([_seconds(kernel) for _ in range(repeats + 1)][1:]) for kernel in kernels)
    cores = usable_cores()
    return {
        "memory_bytes": measured(psutil.virtual_memory().total),
        "link_Bps": measured(4 * _UPDATED / copy_s),
        "update_Bps": measured(min(ranks, cores) * _STATES_OF_ADAMW * _UPDATED / update_s),
        "cores": cores,
    }


def _attention_kernels(features: int, dtype: torch.dtype) -> tuple[Callable[[], object], Callable[[], object]]:
    query = torch.randn(*_ATTENTION, features, dtype=dtype, requires_grad=True)
    gradient = torch.randn(*_ATTENTION, features, dtype=dtype)

    def attend() -> torch.Tensor:
        return F.scaled_dot_product_attention(query, query, query)

    def attend_and_return() -> None:
        attend().backward(gradient)
        query.grad = None

    return attend, attend_and_return


def _flops(sizes: _Sizes, edge: float) -> float:
    """FLOPs of products whose dimensions are longer by an edge."""
    return 2.0 * sum((rows + edge) * (inner + edge) * (columns + edge) for rows, inner, columns in sizes)


def _moved(sizes: _Sizes, width: int) -> float:
    return float(width * sum(rows * inner + inner * columns + rows * columns for rows, inner, columns in sizes))


def _edge(ratio: float) -> float:
    """The edge with which narrow products take `ratio` of the time of wide ones; 0 if none does."""
    low, high = 0.0, _MOST_EDGE
    for _ in range(40):
        middle = (low + high) / 2
        is_less = _flops(_NARROW_PRODUCTS, middle) / _flops(_PRODUCTS, middle) < ratio
        low, high = (middle, high) if is_less else (low, middle)
    return low


def _seconds(kernel: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    kernel()
    return time.perf_counter() - start_s
