"""Datasheets of devices, by the name that CUDA reports: peak arithmetic, memory and its bandwidth.

The peaks are for dense arithmetic without structured sparsity, with products summed in float32 if there is a choice, on
the matrix units if a matrix product of that dtype runs on them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal

from motet.core.errors import InputError

Origin = Literal["datasheet", "measured", "assumed"]


@dataclass(frozen=True, slots=True)
class HardwareNumberWithOrigin:
    """A number and its source."""

    value: float
    origin: Origin


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """A device model. `peak_flops` is by dtype, with `tfloat32` for float32 matrices that may be rounded."""

    name: str
    peak_flops: Mapping[str, HardwareNumberWithOrigin]
    memory_bytes: HardwareNumberWithOrigin
    bandwidth_Bps: HardwareNumberWithOrigin  # noqa: N815 - a unit


_DTYPES = ("float64", "float32", "tfloat32", "bfloat16", "float16", "float8", "float4")

# Names as the driver reports them, without the maker; memory in GB; bandwidth in GB/s; TFLOP/s by dtype, or 0 if the
# device has no such unit or its datasheet no such line.
_DATASHEETS = (
    #                                                     GB  GB/s  fp64  fp32   tf32    bf16    fp16    fp8  (fp4)
    ("P100-SXM2-16GB",                                    16,  732,   5.3, 10.6,     0,      0,   21.2,      0),
    ("V100-SXM2-16GB",                                    16,  900,   7.8, 15.7,     0,      0,    125,      0),
    ("V100-SXM2-32GB",                                    32,  900,   7.8, 15.7,     0,      0,    125,      0),
    ("V100-PCIE-16GB",                                    16,  900,     7,   14,     0,      0,    112,      0),
    ("V100-PCIE-32GB",                                    32,  900,     7,   14,     0,      0,    112,      0),
    ("T4",                                                16,  320,     0,  8.1,     0,      0,     65,      0),
    ("A100-SXM4-40GB",                                    40, 1555,  19.5, 19.5,   156,    312,    312,      0),
    ("A100-SXM4-80GB",                                    80, 2039,  19.5, 19.5,   156,    312,    312,      0),
    ("A800-SXM4-80GB",                                    80, 2039,  19.5, 19.5,   156,    312,    312,      0),
    ("A100-PCIE-40GB",                                    40, 1555,  19.5, 19.5,   156,    312,    312,      0),
    ("A100 80GB PCIe",                                    80, 1935,  19.5, 19.5,   156,    312,    312,      0),
    ("A10",                                               24,  600,     0, 31.2,  62.5,    125,    125,      0),
    ("A30",                                               24,  933,  10.3, 10.3,    82,    165,    165,      0),
    ("A40",                                               48,  696,     0, 37.4,  74.8,  149.7,  149.7,      0),
    ("L4",                                                24,  300,     0, 30.3,    60,    121,    121,  242.5),
    ("L40",                                               48,  864,     0, 90.5,  90.5,    181,    181,    362),
    ("L40S",                                              48,  864,     0, 91.6,   183,    362,    362,    733),
    ("RTX 3090",                                          24,  936,     0, 35.6,  35.6,     71,     71,      0),
    ("RTX 4090",                                          24, 1008,     0, 82.6,  82.6,  165.2,  165.2,  330.3),
    ("RTX 5090",                                          32, 1792,     0, 104.8, 104.8, 209.5,  209.5,    419),
    ("H100 SXM | H100 80GB HBM3",                         80, 3350,    67,   67, 494.7,  989.4,  989.4, 1978.9),
    ("H800 SXM | H800 80GB HBM3",                         80, 3350,     1,   67, 494.7,  989.4,  989.4, 1978.9),
    # Of Meta's Grand Teton hosts, with a limit of 500 W
    ("H100 SXM 96GB HBM2e 500W",                          96, 2400,    67,   67, 494.7,  989.4,  989.4, 1978.9),
    ("H100 PCIe",                                         80, 2000,    51,   51,   378,    756,    756,   1513),
    ("H100 NVL",                                          94, 3900,    60,   60, 417.5,  835.5,  835.5,   1671),
    ("H20",                                               96, 4000,     1,   44,    74,    148,    148,    296),
    ("H200",                                             141, 4800,    67,   67, 494.7,  989.4,  989.4, 1978.9),
    ("H200 NVL",                                         141, 4800,    60,   60, 417.5,  835.5,  835.5,   1671),
    ("RTX PRO 6000",                                      96, 1792,     0,  125,   252,    504,    504,   1008, 2015),
    ("B200",                                             180, 7700,    37,   75,  1100,   2250,   2250,   4500, 9000),
    ("GB200",                                            186, 8000,    40,   80,  1250,   2500,   2500,   5000, 10000),
    ("B300",                                             288, 7700,   1.2,   75,  1100,   2250,   2250,   4500, 13500),
    ("GB300",                                            288, 8000,   1.3,   80,  1250,   2500,   2500,   5000, 15000),
    ("GB10",                                             128,  273,     0,   31,    62,    125,    125,    250, 500),
    # One of its two dies, which the driver shows as two devices.
    ("MI250X",                                            64, 1638,  47.9, 47.9,     0,  191.5,  191.5,      0),
    ("MI300X",                                           192, 5300, 163.4, 163.4, 653.7, 1307.4, 1307.4, 2614.9),
    ("MI350X",                                           288, 8000,  72.1, 144.2,    0, 2306.9, 2306.9, 4613.8, 9227.5),
    ("MI325X",                                           256, 6000, 163.4, 163.4, 653.7, 1307.4, 1307.4, 2614.9),
    ("TPU v4",                                            32, 1200,     0,    0,     0,    275,      0,      0),
    ("TPU v5e",                                           16,  819,     0,    0,     0,    197,      0,      0),
    ("TPU v5p",                                           95, 2765,     0,    0,     0,    459,      0,      0),
)  # fmt: skip

_MAKERS = ("nvidia", "amd", "tesla", "geforce", "instinct", "oam")


def _spec_from_row(names: str, gigabytes: float, gigabytes_per_s: float, *teraflops: float) -> DeviceSpec:
    peaks = zip(_DTYPES, teraflops, strict=False)
    peak_flops = {dtype: HardwareNumberWithOrigin(value * 1e12, "datasheet") for dtype, value in peaks if value}
    memory, bandwidth = (HardwareNumberWithOrigin(value * 1e9, "datasheet") for value in (gigabytes, gigabytes_per_s))
    return DeviceSpec(names.split(" | ")[0], peak_flops, memory, bandwidth)


def _normalized_name(name: str) -> str:
    return " ".join(word for word in name.lower().replace("-", " ").split() if word not in _MAKERS)


DEVICES: tuple[DeviceSpec, ...] = tuple(_spec_from_row(*row) for row in _DATASHEETS)
_ROWS = zip(_DATASHEETS, DEVICES, strict=True)
_BY_NAME = {_normalized_name(name): device for row, device in _ROWS for name in str(row[0]).split(" | ")}


def find_device(name: str) -> DeviceSpec | None:
    """The device of this exact name, as CUDA or ROCm reports it; a similar one (a laptop's chip, a slice) is None."""
    return _BY_NAME.get(_normalized_name(name))


# Names that planners and publications use for a device of the table, normalized.
_ALIASES = {
    "p100": "P100-SXM2-16GB",
    "v100": "V100-SXM2-32GB",
    "a100": "A100-SXM4-80GB",
    "a100 sxm 80gb": "A100-SXM4-80GB",
    "a100 sxm 40gb": "A100-SXM4-40GB",
    "a100 pcie": "A100 80GB PCIe",
    "a100 pcie 80gb": "A100 80GB PCIe",
    "a100 40gb": "A100-SXM4-40GB",
    "a100 80gb": "A100-SXM4-80GB",
    "a800": "A800-SXM4-80GB",
    "a800 sxm 80gb": "A800-SXM4-80GB",
    "h100": "H100 SXM",
    "h100 sxm 80gb": "H100 SXM",
    "h100 sxm5 80gb": "H100 SXM",
    "h100 sxm5": "H100 SXM",
    "h100 pcie 80gb": "H100 PCIe",
    "h100 500w": "H100 SXM 96GB HBM2e 500W",
    "h800": "H800 SXM",
    "h800 sxm 80gb": "H800 SXM",
    "h200 sxm 141gb": "H200",
    "h200 sxm": "H200",
    "b200 sxm 180gb": "B200",
    "b200 sxm": "B200",
    "b300 sxm 288gb": "B300",
    "b300 sxm": "B300",
    "rtx pro 6000 blackwell": "RTX PRO 6000",
}


def find_planned_device(name: str) -> DeviceSpec:
    """The device that a plan or a publication calls by this name; an error if there is none."""
    normalized = _normalized_name(name)
    normalized = " ".join(word for word in normalized.split() if word not in ("gpu", "tensor", "core"))
    device = find_device(name) or find_device(_ALIASES.get(normalized, normalized))
    known = [spec.name for spec in DEVICES]
    if device is None:
        close = get_close_matches(name, known, 3, 0.4) or known[:3]
        raise InputError(
            f"device {name!r} is not in the table of devices; use one of it, such as {', '.join(close)}, or describe "
            "the device in a cluster file"
        )
    return device
