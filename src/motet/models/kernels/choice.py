"""The table of implementations: which one runs for a kernel, a type of device, a dtype and a number of elements.

A kernel has a plain definition in ordinary operations of torch, which a compiler fuses, and others that equal it:

| implementation | what it is |
|---|---|
| `plain` | the definition; inside of `torch.compile` always this one |
| `cpu` | few passes over memory with a backward for a CPU |
| `torch` | operators of torch that take few kernels on any device |
| `triton` | a kernel in Triton, forward and backward |

The first row that matches decides. Rows of a GPU are assumed until `scripts/gpu.py` has measured them on a device of
that name: then the rows of its file come first.
"""

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

from motet.core.text_files import write_file_atomically
from motet.core.units import dtype_name
from motet.core.user_cache import user_cache_folder

KernelName = Literal["rms_norm", "add_rms_norm", "rotary", "gated_activation", "dropout", "cross_entropy", "adamw"]
Implementation = Literal["plain", "cpu", "torch", "triton"]


@dataclass(frozen=True)
class KernelRow:
    """The implementation of a kernel for tensors of at least some elements."""

    kernel: KernelName
    device: str  # A type of device, or "any"
    implementation: Implementation
    origin: str
    dtypes: tuple[str, ...] = ()  # Any dtype where it is empty
    least_elements: int = 0


_CPU_NORM = "measured: 4096 x 256, one thread: 1.5 ms instead of 7.7 in float32, 3.0 instead of 10.2 in bfloat16"
_CPU_GATE = "measured: 4096 x 688 float32, one thread: 12 ms instead of 19-33 by autograd"
_ONE_PRODUCT = "one complex product in place of six kernels"
_LAUNCHES = "assumed: with fewer elements a launch takes longer than the traffic that it saves; no GPU has run it"
_NARROW = ("float32", "bfloat16", "float16")  # float64 is for comparisons: there a kernel does not change bits
_ROWS: tuple[KernelRow, ...] = (
    *(KernelRow(kernel, "cuda", "triton", _LAUNCHES, _NARROW, 2**16) for kernel in get_args(KernelName)),
    KernelRow("rms_norm", "cpu", "cpu", _CPU_NORM),
    KernelRow("rms_norm", "any", "torch", "a fused kernel of torch"),
    KernelRow("gated_activation", "any", "cpu", _CPU_GATE),
    KernelRow("rotary", "any", "torch", _ONE_PRODUCT),
    KernelRow("add_rms_norm", "any", "plain", "an addition, and the norm by its own row"),
    KernelRow("dropout", "any", "plain", "the mask is drawn, and kept for backward"),
    KernelRow("cross_entropy", "any", "plain", "a softmax over chunks of rows, which overwrites the logits"),
    KernelRow("adamw", "any", "torch", "a fused kernel of torch, after a cast and a product, and before another cast"),
)

_forced: Mapping[KernelName, Implementation] = {}


def kernel_device(x: Tensor) -> str:
    """The type of the device whose kernels compute x; for the meta device, in a step of shapes, that of a CPU."""
    return "cpu" if x.is_meta else x.device.type


def chosen(kernel: KernelName, x: Tensor) -> Implementation:
    """The implementation of a kernel for this input."""
    if torch.compiler.is_compiling():
        return "plain"
    if kernel in _forced:
        return _forced[kernel]
    device = kernel_device(x)
    name, elements = _device_name(x.device) if device == "cuda" else "", x.numel()
    rows = _matching_rows(kernel, device, dtype_name(x.dtype), name=name)
    return next(implementation for least, implementation in rows if elements >= least)


def in_triton(module: str, name: str) -> Callable[..., Any]:
    """A function of a file with kernels in Triton, which is imported when the function is called."""

    def call(*arguments: Any, **named: Any) -> Any:
        return getattr(import_module(f"motet.models.kernels.{module}"), name)(*arguments, **named)

    return call


@contextmanager
def kernels_forced(forced: Literal["plain", "triton"] | Mapping[KernelName, Implementation]) -> Iterator[None]:
    """Run this implementation of every kernel, or of each that is named, in all threads: for tests and measurements."""
    global _forced
    before = _forced
    _forced = dict.fromkeys(get_args(KernelName), forced) if isinstance(forced, str) else forced
    try:
        yield
    finally:
        _forced = before


@cache
def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device)


@cache
def _matching_rows(kernel: KernelName, device: str, dtype: str, *, name: str) -> list[tuple[int, Implementation]]:
    rows = [*(read_measured_rows(name) if name else ()), *_ROWS]
    return [
        (row.least_elements, row.implementation)
        for row in rows
        if row.kernel == kernel and row.device in (device, "any") and (not row.dtypes or dtype in row.dtypes)
        if row.implementation != "triton" or has_triton()
    ]


@cache
def has_triton() -> bool:
    """Whether Triton is installed, which CUDA builds of torch bring, and the C compiler that its first launch calls."""
    names = [os.environ.get("CC")] if "CC" in os.environ else ["gcc", "clang"]  # noqa: TID251  (Triton reads CC too)
    return find_spec("triton") is not None and any(name and shutil.which(name) for name in names)


def rows_before_measurements() -> Sequence[KernelRow]:
    """The table without the rows of a file, in the order in which they are tried."""
    return _ROWS


# --- measured rows -----------------------------------------------------------------------------------


class MeasuredRow(BaseModel):
    """A row of the file: the fastest implementation from a number of elements on."""

    model_config = ConfigDict(extra="forbid")

    kernel: KernelName
    dtype: str
    least_elements: int
    implementation: Implementation


class _MeasuredFile(BaseModel):
    model_config = ConfigDict(extra="forbid")

    devices: dict[str, list[MeasuredRow]] = {}  # By the name that CUDA gives a device


def _measured_path() -> Path | None:
    folder = user_cache_folder()
    return None if folder is None else folder / "kernels.json"


def _read_file(path: Path) -> _MeasuredFile:
    """The content; a file that is absent, damaged or another user's counts as empty."""
    try:
        if path.stat().st_uid == os.getuid():
            return _MeasuredFile.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        pass
    return _MeasuredFile()


def read_measured_rows(device_name: str) -> list[KernelRow]:
    """The rows that were measured on a GPU of this name; those of more elements come first."""
    path = _measured_path()
    measured = [] if path is None else _read_file(path).devices.get(device_name, [])
    return [
        KernelRow(row.kernel, "cuda", row.implementation, "measured", (row.dtype,), row.least_elements)
        for row in sorted(measured, key=lambda row: -row.least_elements)
    ]


def write_measured_rows(device_name: str, rows: list[MeasuredRow]) -> Path | None:
    """Keep the rows of a GPU; returns the file, or None for a user without a cache folder."""
    path = _measured_path()
    if path is None:
        return None
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    content = _read_file(path)
    content.devices[device_name] = rows
    write_file_atomically(path, content.model_dump_json(indent=1).encode())
    _matching_rows.cache_clear()
    return path
