"""The rates that kernels reach on a device: datasheets, and a table of shares by generation.

The shares are constants of device generations and kinds of kernels. docs/reference/planning.md says how they
were found.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from motet.cluster.device_specs import DeviceSpec
from motet.plan.time.kernel_times import DeviceRates


@dataclass(frozen=True)
class GenerationShares:
    """The shares of the datasheet's numbers that kernels reach."""

    products: Mapping[str, float]  # Of large matrix products by bits of their inputs
    attention: Mapping[str, float]  # Of fused attention in a forward by kind of kernel, of the peak of 16 bits
    attention_backward: Mapping[str, float]
    memory: float = 0.88  # Of streaming kernels
    launch_s: float = 6e-6
    origin: str = "fitted to published steps of this generation"


_FITTED = "fitted to the published steps of this generation"
_BACKWARD_SHARE = 0.8  # Of the rate of fused attention in a forward


def _shares(*, products: tuple[float, ...], attention: tuple[float, float], origin: str) -> GenerationShares:
    """Shares of products of 16, 8, 4 and 32 bits, and of fused attention of two kinds."""
    kinds = dict(zip(("flash-2", "flash-3"), attention, strict=True))
    backward = {kind: _BACKWARD_SHARE * share for kind, share in kinds.items()}
    return GenerationShares(dict(zip(("16", "8", "4", "32"), products, strict=True)), kinds, backward, origin=origin)


_VOLTA = _shares(products=(0.75, 0.75, 0.75, 0.9), attention=(0.4, 0.4), origin="assumed: like Ampere, less 10 %")
_AMPERE = _shares(products=(0.77, 0.77, 0.77, 0.85), attention=(0.66, 0.66), origin=_FITTED)
_HOPPER = _shares(products=(0.69, 0.80, 0.80, 0.7), attention=(0.38, 0.35), origin=_FITTED)
_HOPPER_500W = _shares(products=(0.62, 0.80, 0.80, 0.6), attention=(0.25, 0.42), origin=_FITTED)
_BLACKWELL = _shares(products=(0.55, 0.62, 0.74, 0.7), attention=(0.36, 0.315), origin=_FITTED)
_CDNA = _shares(
    products=(0.55, 0.5, 0.5, 0.7), attention=(0.35, 0.35), origin="assumed: no published step is of this generation"
)
_CPU = _shares(
    products=(0.5, 0.5, 0.5, 0.8), attention=(0.4, 0.4), origin="assumed; the rates of a processor differ widely"
)

_GENERATIONS: tuple[tuple[str, GenerationShares], ...] = (
    (r"P100|V100|^T4", _VOLTA),
    (r"A100|A800|A10|A30|A40|RTX 30", _AMPERE),
    (r"500W", _HOPPER_500W),
    (r"H100|H200|H800|H20|L4|L40|RTX 40", _HOPPER),
    (r"B200|B300|GB10|RTX 50|RTX PRO", _BLACKWELL),
    (r"MI\d+|TPU", _CDNA),
)


def shares_of(name: str) -> GenerationShares:
    """The shares of a device's generation."""
    return next((shares for pattern, shares in _GENERATIONS if re.search(pattern, name)), _CPU)


def rates_of(device: DeviceSpec, shares: GenerationShares | None = None) -> DeviceRates:
    """The rates of a device. A dtype without matrix units is multiplied like the next wider one."""
    shares = shares or shares_of(device.name)
    peaks = {name: number.value for name, number in device.peak_flops.items()}
    sixteen = peaks.get("bfloat16") or peaks.get("float16") or peaks.get("float32", 1e12)
    eight = peaks.get("float8", sixteen)
    single = peaks.get("float32", sixteen / 2)
    products = {
        "bfloat16": peaks.get("bfloat16", sixteen) * shares.products["16"],
        "float16": peaks.get("float16", sixteen) * shares.products["16"],
        "float8": eight * shares.products["8"],
        "float4": peaks.get("float4", eight) * shares.products["4"],
        "float32": single * shares.products["32"],
        "tfloat32": peaks.get("tfloat32", single) * shares.products["32"],
        "float64": peaks.get("float64", single / 2) * shares.products["32"],
    }
    attention = {kind: share * sixteen for kind, share in shares.attention.items()}
    backward = {kind: share * sixteen for kind, share in shares.attention_backward.items()}
    return DeviceRates(products, attention, backward, device.bandwidth_Bps.value * shares.memory, shares.launch_s)
