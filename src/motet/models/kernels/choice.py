"""The table of implementations: which one runs for a kernel, a type of device, a dtype and a number of elements.

A kernel has a plain definition in ordinary operations of torch, which a compiler fuses, and others that equal it;
docs/reference/kernels.md describes them. The first row that matches decides. Rows of a GPU are assumed until
`scripts/gpu.py` has measured them on a device of that name: then the rows of its file come first.
"""

import os
import shutil
import warnings
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass
from torch import Tensor

from motet.core.units import dtype_name
from motet.core.user_cache import user_cache_folder

KernelName = Literal["rms_norm", "add_rms_norm", "rotary", "gated_activation", "dropout", "cross_entropy", "adamw"]
Implementation = Literal["plain", "cpu", "torch", "triton"]


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
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
_LAUNCHES = "assumed: with fewer elements a launch takes longer than the traffic that it saves; no GPU has run it"
_NARROW = ("float32", "bfloat16", "float16")  # float64 is for comparisons: there a kernel does not change bits
# The table without the rows of a file, in the order in which they are tried.
ROWS: tuple[KernelRow, ...] = (
    *(KernelRow(kernel, "cuda", "triton", _LAUNCHES, _NARROW, 2**16) for kernel in get_args(KernelName)),
    KernelRow("rms_norm", "cpu", "cpu", _CPU_NORM),
    KernelRow("rms_norm", "any", "torch", "a fused kernel of torch"),
    KernelRow("gated_activation", "any", "cpu", _CPU_GATE),
    KernelRow("rotary", "any", "torch", "one complex product in place of six kernels"),
    KernelRow("add_rms_norm", "any", "plain", "an addition, and the norm by its own row"),
    KernelRow("dropout", "any", "plain", "the mask is drawn, and kept for backward"),
    KernelRow("cross_entropy", "any", "plain", "a softmax over chunks of rows, which overwrites the logits"),
    KernelRow("adamw", "any", "torch", "a fused kernel of torch, after a cast and a product, and before another cast"),
)


def kernel_device(x: Tensor) -> str:
    """The type of the device whose kernels compute x; for the meta device, in a step of shapes, that of a CPU."""
    return "cpu" if x.is_meta else x.device.type


def chosen(kernel: KernelName, x: Tensor) -> Implementation:
    """The implementation of a kernel for this input."""
    if torch.compiler.is_compiling():
        return "plain"
    device = kernel_device(x)
    name, elements = _device_name(x.device) if device == "cuda" else "", x.numel()
    rows = _matching_rows(kernel, device, dtype_name(x.dtype), name=name)
    return next(implementation for least, implementation in rows if elements >= least)


def in_triton(module: str, name: str) -> Callable[..., Any]:
    """A function of a file with kernels in Triton, which is imported when the function is called."""

    def call(*arguments: Any, **named: Any) -> Any:
        return getattr(import_module(f"motet.models.kernels.{module}"), name)(*arguments, **named)

    return call


@cache
def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device)


@cache
def _matching_rows(kernel: KernelName, device: str, dtype: str, *, name: str) -> list[tuple[int, Implementation]]:
    rows = [*(read_measured_rows().get(name, ()) if name else ()), *ROWS]
    return [
        (row.least_elements, row.implementation)
        for row in rows
        if row.kernel == kernel and row.device in (device, "any") and (not row.dtypes or dtype in row.dtypes)
        if row.implementation != "triton" or has_triton()
    ]


@cache
def has_triton() -> bool:
    """Whether Triton is installed, which CUDA builds of torch bring, and the C compiler that its first launch calls.
    On a GPU also whether this compiler makes its driver, which needs the headers of Python and the library of CUDA."""
    names = [os.environ.get("CC")] if "CC" in os.environ else ["gcc", "clang"]  # noqa: TID251  (Triton reads CC too)
    if find_spec("triton") is None or not any(name and shutil.which(name) for name in names):
        return False
    try:
        return not torch.cuda.is_available() or bool(import_module("triton.runtime").driver.active.utils)
    except Exception as error:  # noqa: BLE001  # Triton raises errors of many kinds
        warnings.warn(f"Triton's kernels are left out, as its driver cannot be made: {error}", stacklevel=2)
        return False


# --- measured rows -----------------------------------------------------------------------------------

MEASURED = TypeAdapter(dict[str, list[KernelRow]])  # The content of the file: rows by the name that CUDA gives a device


def measured_path() -> Path | None:
    """The file of measured rows, which may not exist; None for a user without a cache folder."""
    folder = user_cache_folder()
    return None if folder is None else folder / "kernels.json"


def read_measured_rows() -> dict[str, list[KernelRow]]:
    """The measured rows of each device; a file that is absent, damaged or another user's counts as empty. The first
    row that matches decides."""
    path = measured_path()
    try:
        if path is not None and path.stat().st_uid == os.getuid():
            return MEASURED.validate_json(path.read_bytes())
    except (OSError, ValidationError):
        pass
    return {}
