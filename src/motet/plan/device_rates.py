"""The rates that kernels reach on a device: datasheets, and a table of shares by generation.

The shares are constants of device generations and kinds of kernels. docs/reference/planning-constants.md says how
they were found.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from motet.cluster.cluster_settings import KernelRatesSettings
from motet.cluster.device_specs import DeviceSpec
from motet.core.dtypes import DTYPE_BYTES
from motet.plan.time.kernel_times import DeviceRates


@dataclass(frozen=True)
class GenerationShares:
    """The shares of the datasheet's numbers that kernels reach."""

    generation: str
    products: Mapping[str, float]  # Of very large matrix products by bits of their inputs
    attention: Mapping[str, float]  # Of fused attention in a forward by kind of kernel, of the peak of 16 bits
    attention_ramp: float  # Tokens at which fused attention reaches half of its rate
    launch_s: float  # Of the host for each kernel, with framework and autograd
    origin: str
    attention_backward: float = 0.65  # Of the rate in a forward. This and all below: fitted to steps of all generations
    early_attention_ramp: float = 400.0  # Tokens at which `flash-1` reaches half of its rate
    memory: float = 0.84  # Of streaming kernels
    head_overhead: float = 95.0  # This and the next two: the constants of DeviceRates with these names
    tile_overhead: float = 145.0
    exposed_memory: float = 0.5


# Kernels of fused attention: FlashAttention 1 of 2022, FlashAttention 2 of 2023, and cuDNN's of 2024 and later
FUSED_ATTENTION = ("flash-1", "flash-2", "flash-3")
_FITTED = "fitted to the published steps of this generation, where these have such products and kernels"


_ATTENTION_TILE_OF_PROCESSORS = 512  # Keys of a tile of torch's fused attention

_PROCESSORS = "processors"
# Generation: shares of products of 16, 8, 4 and 32 bits, of each kind of fused attention, its ramp, launch_s, origin
_SHARES = {
    "Volta": (
        (0.62, 0.62, 0.62, 0.9),
        (0.3, 0.4, 0.4),
        500,
        10e-6,
        "products fitted to six published steps, the rest assumed",
    ),
    "Ampere": ((0.83, 0.83, 0.83, 0.9), (0.42, 0.55, 0.7), 500, 11e-6, _FITTED),
    "Hopper": ((0.69, 0.8, 0.8, 0.8), (0.235, 0.36, 0.475), 1150, 11e-6, _FITTED),
    "Hopper at 500 W": ((0.67, 0.7, 0.7, 0.6), (0.2, 0.25, 0.475), 1150, 8e-6, _FITTED),
    "Blackwell": ((0.62, 0.65, 0.635, 0.7), (0.08, 0.13, 0.5), 2400, 6.8e-6, _FITTED),
    "Blackwell at 1400 W": ((0.68, 0.83, 0.66, 0.7), (0.08, 0.13, 0.53), 2400, 6.8e-6, _FITTED),
    "CDNA": (
        (0.47, 0.45, 0.45, 0.7),
        (0.2, 0.3, 0.3),
        2700,
        10e-6,
        "assumed, products after published benchmarks of MI300X: no published step is of this generation",
    ),
    "TPU": (
        (0.85, 0.85, 0.85, 0.8),
        (0.5, 0.5, 0.5),
        1000,
        1e-6,  # A step is one compiled program
        "assumed, after published FLOP/s of MaxText: no published step is of this generation",
    ),
    _PROCESSORS: (
        (0.5, 0.5, 0.5, 0.8),
        (0.4, 0.4, 0.4),
        64,
        8e-6,
        "assumed; the rates of a processor differ widely",
    ),
}
_GENERATIONS = {
    generation: GenerationShares(
        generation,
        dict(zip(("16", "8", "4", "32"), products, strict=True)),
        dict(zip(FUSED_ATTENTION, attention, strict=True)),
        ramp,
        launch_s,
        origin,
    )
    for generation, (products, attention, ramp, launch_s, origin) in _SHARES.items()
}
_GENERATIONS |= {
    generation: replace(_GENERATIONS[like], origin=f"assumed: like {like}")
    for generation, like in (("Pascal", "Volta"), ("Turing", "Volta"), ("Ada", "Hopper"), ("Gaudi", "CDNA"))
}
_WIDE = ("bfloat16", "float16", "float32")


def shares_of(generation: str) -> GenerationShares:
    """The shares of a generation of the table of devices, or those of a processor for another."""
    return _GENERATIONS.get(generation, _GENERATIONS[_PROCESSORS])


def product_peak(device: DeviceSpec, dtype: str) -> float | None:
    """The peak of products of a dtype, or of the next wider one by which they are computed."""
    narrow = {"float4": ("float4", "float8")}.get(dtype, (dtype.removeprefix("mx"),))
    names = (name for name in (*narrow, *_WIDE) if name in device.peak_flops)
    return next((device.peak_flops[name].value for name in names), None)


def rates_of(device: DeviceSpec, shares: GenerationShares | None = None) -> DeviceRates:
    """The rates of a device. A dtype without matrix units is multiplied like the next wider one."""
    shares = shares or shares_of(device.generation)
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
    backward = {kind: rate * shares.attention_backward for kind, rate in attention.items()}
    products["mxfloat8"] = products["float8"]
    memory_Bps = device.bandwidth_Bps.value * shares.memory  # noqa: N806 - a unit
    return DeviceRates(
        products,
        device.units,
        attention,
        backward,
        shares.attention_ramp,
        shares.early_attention_ramp,
        shares.head_overhead,
        shares.tile_overhead,
        shares.exposed_memory,
        memory_Bps,
        shares.launch_s,
    )


def measured_rates(rates: KernelRatesSettings) -> DeviceRates:
    """The rates of a processor that were measured. A dtype that was not is multiplied like the first one."""
    first = next(iter(rates.products.values()))
    products = {name: rates.products.get(name, first).value for name in DTYPE_BYTES}
    products |= dict.fromkeys(("float8", "mxfloat8", "float4", "tfloat32"), first.value)
    return DeviceRates(
        products,
        0,
        dict.fromkeys(FUSED_ATTENTION, rates.attention.value),
        dict.fromkeys(FUSED_ATTENTION, rates.attention_backward.value),
        attention_ramp=0.0,
        early_attention_ramp=0.0,
        head_overhead=rates.attention_overhead,
        tile_overhead=rates.product_edge,
        exposed_memory=1.0,
        memory_Bps=rates.memory_Bps.value,
        launch_s=rates.launch_s.value,
        cores=rates.cores,
        attention_tile=_ATTENTION_TILE_OF_PROCESSORS,
        busy_factor=rates.busy_factor,
        busy_memory_factor=rates.busy_memory_factor,
    )
