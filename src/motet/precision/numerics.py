"""The numerics of a run: what holds for all that a process computes while it trains by a recipe."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from motet.core.errors import check_input
from motet.precision.float64_mode import use_float64
from motet.precision.matmul_emulation import float32_products
from motet.precision.recipe import PrecisionSettings

_TF32_CAPABILITY = 8  # Of NVIDIA GPUs from Ampere on


def precision_numerics(settings: PrecisionSettings, device: torch.device) -> AbstractContextManager[None]:
    """Inside, everything on the device is computed in the precision of the recipe."""
    if settings.recipe == "fp64":
        return use_float64()
    if settings.recipe == "tf32" and has_tf32(device):
        return _tf32_products()
    if settings.emulate:
        check_input(
            device.type == "cpu",
            f"precision.emulate = true is for processors, but run.device is {device.type}, which multiplies "
            f"{settings.resolved.compute} itself; leave precision.emulate out, or set run.device=cpu",
        )
        return float32_products(getattr(torch, settings.resolved.compute))
    return nullcontext()


def has_tf32(device: torch.device) -> bool:
    """Whether the device has matmuls of TF32."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= _TF32_CAPABILITY


def numerics_remark(settings: PrecisionSettings, device: torch.device) -> str | None:
    """A sentence where a run computes in another way than the name of its recipe says."""
    compute = settings.resolved.compute
    if settings.recipe == "tf32" and not has_tf32(device):
        missing = "its compute capability is below 8.0" if device.type == "cuda" else "only NVIDIA GPUs have TF32"
        return f"precision.recipe = 'tf32' computes in float32 on this device ({device.type}): {missing}"
    if settings.emulate:
        return f"precision.emulate = true multiplies in float32 and rounds each result to {compute}"
    return None


@contextmanager
def _tf32_products() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
