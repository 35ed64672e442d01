"""The devices of the table of datasheets, found by the names that drivers, plans and publications use.

A number carries its origin. A device that no name matches is an error that names near ones.

The numbers of device models as their makers print them, with assumed prices.

The peaks are for dense arithmetic without structured sparsity, with products summed in float32 if there is a choice, on
the matrix units if a matrix product of that dtype runs on them. A 0 stands for a number that was not published.

The words of a device's name: model, form, memory size and power limit, in whatever order and spelling.

`NVIDIA A100-SXM4-80GB`, `A100 SXM 80GB` and `a100_80gb` name one device. A word that is none of these belongs to the
model, so that `RTX 4090 Laptop GPU` is another device than `RTX 4090`.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from math import inf
from typing import Literal, NamedTuple

from motet.core.errors import InputError

Origin = Literal["datasheet", "measured", "assumed"]
DTYPES = ("float64", "float32", "tfloat32", "bfloat16", "float16", "float8", "float4")

# Generation -> rows: names as drivers report them, without the maker; sizes in GB that names state, the first of which
# is the memory of the device (a maker's GB is a GiB); memory GB/s; W; assumed USD per hour; class of the links inside
# of a host, and their GB/s of a device in one direction; units that compute tiles of products (streaming
# multiprocessors, compute units); TFLOP/s by dtype.
Row = tuple[str, tuple[float, ...], float, float, float, tuple[str, float], int, tuple[float, ...]]
DATASHEETS: dict[str, tuple[Row, ...]] = {
    #   names, GB, GB/s, W, USD, links, units, (fp64, fp32, tf32, bf16, fp16, fp8, fp4)
    "Pascal": (
        ("P100-SXM2-16GB", (16,), 732, 300, 1, ("NVLink2", 80), 56, (5.3, 10.6, 0, 0, 21.2)),
        ("P100-PCIE-16GB", (16,), 732, 250, 1, ("PCIe", 16), 56, (4.7, 9.3, 0, 0, 18.7)),
    ),
    "Volta": (
        ("V100-SXM2-32GB", (32,), 900, 300, 2, ("NVLink2", 150), 80, (7.8, 15.7, 0, 0, 125)),
        ("V100-SXM2-16GB", (16,), 900, 300, 2, ("NVLink2", 150), 80, (7.8, 15.7, 0, 0, 125)),
        ("V100-SXM3-32GB", (32,), 900, 350, 2, ("NVLink2", 150), 80, (7.8, 15.7, 0, 0, 125)),
        ("V100-PCIE-32GB", (32,), 900, 250, 2, ("PCIe", 16), 80, (7, 14, 0, 0, 112)),
        ("V100-PCIE-16GB", (16,), 900, 250, 2, ("PCIe", 16), 80, (7, 14, 0, 0, 112)),
    ),
    "Turing": (
        ("T4", (16,), 320, 70, 0.5, ("PCIe", 16), 40, (0, 8.1, 0, 0, 65)),
        ("RTX 2080 Ti", (11,), 616, 250, 0, ("PCIe", 16), 68, (0, 13.4, 0, 0, 53.8)),
    ),
    "Ampere": (
        ("A100-SXM4-80GB", (80,), 2039, 400, 2, ("NVLink3", 300), 108, (19.5, 19.5, 156, 312, 312)),
        ("A100-SXM4-40GB", (40,), 1555, 400, 2, ("NVLink3", 300), 108, (19.5, 19.5, 156, 312, 312)),
        ("A100 80GB PCIe", (80,), 1935, 300, 2, ("PCIe", 32), 108, (19.5, 19.5, 156, 312, 312)),
        ("A100-PCIE-40GB", (40,), 1555, 250, 2, ("PCIe", 32), 108, (19.5, 19.5, 156, 312, 312)),
        ("A800-SXM4-80GB", (80,), 2039, 400, 2, ("NVLink3", 200), 108, (19.5, 19.5, 156, 312, 312)),
        ("A800 80GB PCIe", (80,), 1935, 300, 2, ("PCIe", 32), 108, (19.5, 19.5, 156, 312, 312)),
        ("A10", (24,), 600, 150, 1, ("PCIe", 32), 72, (0, 31.2, 62.5, 125, 125)),
        ("A10G", (24,), 600, 300, 1, ("PCIe", 32), 80, (0, 35, 35, 70, 70)),
        ("A30", (24,), 933, 165, 1, ("PCIe", 32), 56, (10.3, 10.3, 82, 165, 165)),
        ("A40", (48,), 696, 300, 1, ("PCIe", 32), 84, (0, 37.4, 74.8, 149.7, 149.7)),
        ("RTX 3090", (24,), 936, 350, 0, ("PCIe", 32), 82, (0, 35.6, 35.6, 71, 71)),
        ("RTX A6000", (48,), 768, 300, 1, ("PCIe", 32), 84, (0, 38.7, 77.4, 154.8, 154.8)),
    ),
    "Ada": (
        ("L4", (24,), 300, 72, 0.8, ("PCIe", 32), 58, (0, 30.3, 60, 121, 121, 242.5)),
        ("L20", (48,), 864, 275, 0, ("PCIe", 32), 92, (0, 59.8, 59.8, 119.5, 119.5, 239)),
        ("L40", (48,), 864, 300, 1, ("PCIe", 32), 142, (0, 90.5, 90.5, 181, 181, 362)),
        ("L40S", (48,), 864, 350, 1.5, ("PCIe", 32), 142, (0, 91.6, 183, 362, 362, 733)),
        ("RTX 4090", (24,), 1008, 450, 0, ("PCIe", 32), 128, (0, 82.6, 82.6, 165.2, 165.2, 330.3)),
        ("RTX 6000 Ada Generation", (48,), 960, 300, 1, ("PCIe", 32), 142, (0, 91.1, 182.1, 364.2, 364.2, 728.5)),
    ),
    "Hopper": (
        (
            "H100 SXM | H100 80GB HBM3",
            (80,),
            3350,
            700,
            3,
            ("NVLink4", 450),
            132,
            (67, 67, 494.7, 989.4, 989.4, 1978.9),
        ),
        ("H100 PCIe", (80,), 2000, 350, 2.5, ("PCIe", 64), 114, (51, 51, 378, 756, 756, 1513)),
        ("H100 NVL", (94,), 3900, 400, 2.5, ("PCIe", 64), 132, (60, 60, 417.5, 835.5, 835.5, 1671)),
        ("H800 SXM | H800 80GB HBM3", (80,), 3350, 700, 3, ("NVLink4", 200), 132, (1, 67, 494.7, 989.4, 989.4, 1978.9)),
        ("H800 PCIe", (80,), 2000, 350, 2.5, ("PCIe", 64), 114, (0.8, 51, 378, 756, 756, 1513)),
        ("H20", (96,), 4000, 400, 1.5, ("NVLink4", 450), 78, (1, 44, 74, 148, 148, 296)),
        ("H200", (141,), 4800, 700, 3.5, ("NVLink4", 450), 132, (67, 67, 494.7, 989.4, 989.4, 1978.9)),
        ("H200 NVL", (141,), 4800, 600, 3.5, ("PCIe", 64), 132, (60, 60, 417.5, 835.5, 835.5, 1671)),
        # The driver names the size of the processor's memory, 480 GB; W are of both chips.
        ("GH200 480GB", (96, 480), 4000, 1000, 3, ("NVLink4", 450), 132, (67, 67, 494.7, 989.4, 989.4, 1978.9)),
        ("GH200 144G HBM3e", (144,), 4900, 1000, 3, ("NVLink4", 450), 132, (67, 67, 494.7, 989.4, 989.4, 1978.9)),
    ),
    # In the Grand Teton hosts of Meta
    "Hopper at 500 W": (
        ("H100 SXM 96GB HBM2e 500W", (96,), 2400, 500, 3, ("NVLink4", 450), 132, (67, 67, 494.7, 989.4, 989.4, 1978.9)),
    ),
    "Blackwell": (
        ("B100", (180, 192), 7700, 700, 5, ("NVLink5", 900), 148, (30, 60, 900, 1750, 1750, 3500, 7000)),
        ("B200", (180, 192), 7700, 1000, 5, ("NVLink5", 900), 148, (37, 75, 1100, 2250, 2250, 4500, 9000)),
        ("GB200", (186, 192), 8000, 1200, 6, ("NVLink5", 900), 148, (40, 80, 1250, 2500, 2500, 5000, 10000)),
        ("B300", (288, 270), 7700, 1100, 6, ("NVLink5", 900), 148, (1.2, 75, 1100, 2250, 2250, 4500, 13500)),
        ("GB10 | Spark", (128,), 273, 140, 0, ("PCIe", 32), 48, (0, 31, 62, 125, 125, 250, 500)),
        ("RTX PRO 6000", (96,), 1792, 600, 2, ("PCIe", 64), 188, (0, 125, 252, 504, 504, 1008, 2015)),
        ("RTX 5090", (32,), 1792, 575, 0, ("PCIe", 64), 170, (0, 104.8, 104.8, 209.5, 209.5, 419)),
    ),
    "Blackwell at 1400 W": (
        ("GB300", (288, 279), 8000, 1400, 7, ("NVLink5", 900), 148, (1.3, 80, 1250, 2500, 2500, 5000, 15000)),
    ),
    "CDNA": (
        # The first three have two dies, which the driver shows as two devices: the numbers are of one.
        ("MI250", (64, 128), 1638, 280, 1, ("xGMI", 200), 104, (45.3, 45.3, 0, 181, 181)),
        ("MI250X", (64, 128), 1638, 280, 1, ("xGMI", 200), 110, (47.9, 47.9, 0, 191.5, 191.5)),
        ("MI210", (64,), 1638, 300, 1, ("PCIe", 32), 104, (45.3, 45.3, 0, 181, 181)),
        ("MI300A", (128,), 5300, 550, 3, ("xGMI", 384), 228, (122.6, 122.6, 490.3, 980.6, 980.6, 1961.2)),
        ("MI300X", (192,), 5300, 750, 3, ("xGMI", 448), 304, (163.4, 163.4, 653.7, 1307.4, 1307.4, 2614.9)),
        ("MI325X", (256,), 6000, 1000, 3.5, ("xGMI", 448), 304, (163.4, 163.4, 653.7, 1307.4, 1307.4, 2614.9)),
        ("MI350X", (288,), 8000, 1000, 4, ("xGMI", 537.6), 256, (72.1, 144.2, 0, 2306.9, 2306.9, 4613.8, 9227.5)),
        ("MI355X", (288,), 8000, 1400, 4, ("xGMI", 537.6), 256, (78.6, 157.3, 0, 2516.6, 2516.6, 5033.2, 10066.3)),
    ),
    "Gaudi": (
        ("Gaudi2", (96,), 2450, 600, 1.5, ("RDMA", 262.5), 1, (0, 0, 0, 432, 432, 865)),
        ("Gaudi3", (128,), 3700, 900, 2.5, ("RDMA", 525), 1, (0, 0, 0, 1835, 1835, 1835)),
    ),
    "TPU": (
        # The makers of other chips print a limit of the power; of TPU v4 the largest measured power was published.
        ("TPU v3", (32,), 900, 450, 2, ("ICI", 328), 8, (0, 0, 0, 123)),
        ("TPU v4", (32,), 1200, 192, 3.2, ("ICI", 300), 8, (0, 0, 0, 275)),
        ("TPU v5e | TPU v5 lite", (16,), 819, 0, 1.2, ("ICI", 200), 8, (0, 0, 0, 197)),
        ("TPU v5p", (95,), 2765, 0, 4.2, ("ICI", 600), 8, (0, 0, 0, 459)),
        ("TPU v6e | Trillium", (32,), 1640, 0, 2.7, ("ICI", 400), 8, (0, 0, 0, 918)),
    ),
}

# Rows of which no datasheet is public, in the same columns: press reports, and orders of magnitude of a processor core.
ASSUMED: dict[str, tuple[Row, ...]] = {
    "Blackwell": (("RTX 6000D", (84,), 1398, 0, 0, ("PCIe", 64), 156, (0, 97, 195, 390, 390, 780, 1560)),),
    "CPU": (("CPU", (8,), 10, 0, 0, ("PCIe", 8), 1, (0.05, 0.1, 0.1, 0.1, 0.1)),),
}

PRICE_SOURCE = "rounded list prices of on-demand clouds"
# Generations whose kernels a described device may resemble
GENERATIONS = (*DATASHEETS, "CPU")

# The part of the memory that a process can allocate -> how names of such devices begin, and whose measurement it is.
USABLE_SHARES: tuple[tuple[float, str, Origin, str], ...] = (
    (0.935, r"B300|GB300", "measured", "memory that nvidia-smi prints; less of 288 GB is enabled"),
    (0.935, r"T4|A10$|A40|L4|L20", "measured", "memory that nvidia-smi prints, with ECC on"),
    (0.93, r"GB10", "measured", "memory that CUDA reports; the processor shares it"),
    (0.99, r"P100|V100|A100|H100|H200|B200|GB200", "measured", "memory that CUDA reports"),
    (1.0, r"MI2|MI300X", "measured", "memory that ROCm reports"),
    (1.0, r"MI", "assumed", "like MI300X"),
    (1.0, r"CPU", "assumed", "all of its part of the host's memory"),
    (0.99, r"", "assumed", "like A100 and H100"),
)


_FILLERS = re.compile(
    "nvidia|amd|google|intel|habana|cloud|tesla|geforce|instinct|oam|hgx|dgx|gpu|tensor|core|accelerator|gcd|blackwell|"
    "hopper|grace|superchip|generation|server|edition|workstation|hbm[0-9]*e?|nvl[0-9]+"
)
_SPLIT = re.compile(r"(?<=[0-9a-z])(?=sxm|pcie|hbm)")  # A100SXM4 is A100 SXM4


class DeviceName(NamedTuple):
    """The meaning of a name, with an empty text or None where it says nothing."""

    model: str
    form: str = ""  # sxm, pcie or nvl
    gigabytes: float | None = None
    watts: float | None = None


def parse_device_name(name: str) -> DeviceName:
    """Find the words of a name. The last of several sizes counts."""
    text = re.sub(r"([0-9]+) +(gi?b|w)\b", r"\1\2", re.sub(r"[^0-9a-z.]+", " ", name.lower()))
    model, form, gigabytes, watts = "", "", None, None
    for word in _SPLIT.sub(" ", text).split():
        if size := re.fullmatch(r"([0-9]+)gi?b?", word):
            gigabytes = float(size[1])
        elif limit := re.fullmatch(r"([0-9]+)w", word):
            watts = float(limit[1])
        elif kind := re.fullmatch(r"(sxm[0-9]?|pcie|nvl)", word):
            form = kind[1][:4].rstrip("0123456789")
        elif not _FILLERS.fullmatch(word):
            model += word
    return DeviceName(model, form, gigabytes, watts)


def is_same_model(asked: str, model: str) -> bool:
    """Whether two names are of one model; the first may leave out the product line, as `A6000` and `v5e` do."""
    return asked in (model, model.removeprefix("rtx"), model.removeprefix("tpu"))


UNKNOWN_GENERATION = "other"  # Generation of a device that the table does not have


@dataclass(frozen=True, slots=True)
class HardwareNumberWithOrigin:
    """A number and its source."""

    value: float
    origin: Origin
    source: str = ""  # The origin of a measurement, or the ground of an assumption


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """A device model. `peak_flops` is by dtype, with `tfloat32` for float32 matrices that may be rounded."""

    name: str
    peak_flops: Mapping[str, HardwareNumberWithOrigin]
    memory_bytes: HardwareNumberWithOrigin
    bandwidth_Bps: HardwareNumberWithOrigin  # noqa: N815 - a unit
    usable_share: HardwareNumberWithOrigin  # Share of the memory for a process
    power_W: HardwareNumberWithOrigin | None = None  # noqa: N815 - a unit; the limit, without the host
    price_per_hour: HardwareNumberWithOrigin | None = None  # USD
    link: str = "PCIe"  # The class of the links inside of a host
    link_Bps: HardwareNumberWithOrigin | None = None  # noqa: N815 - a unit; in one direction
    units: int = 1  # Units that each compute tiles of a product: streaming multiprocessors, compute units
    generation: str = UNKNOWN_GENERATION

    @property
    def usable_bytes(self) -> float:
        """The memory that a process can allocate."""
        return self.usable_share.value * self.memory_bytes.value


def usable_share(name: str) -> HardwareNumberWithOrigin:
    """The share of the memory of a device that a process can allocate."""
    rows = USABLE_SHARES
    return next(
        HardwareNumberWithOrigin(v, origin, source) for v, start, origin, source in rows if re.match(start, name)
    )


def _spec_from_row(generation: str, row: Row, origin: Origin) -> DeviceSpec:
    names, sizes, bandwidth, power, price, (link, link_bandwidth), units, teraflops = row
    peaks = zip(DTYPES, teraflops, strict=False)
    name = names.split(" | ")[0]

    def number(value: float, unit: float = 1) -> HardwareNumberWithOrigin:
        return HardwareNumberWithOrigin(value * unit, origin)

    return DeviceSpec(
        name,
        {dtype: number(value, 1e12) for dtype, value in peaks if value},
        number(sizes[0], 2**30),
        number(bandwidth, 1e9),
        usable_share(name),
        number(power) if power else None,
        HardwareNumberWithOrigin(price, "assumed", PRICE_SOURCE) if price else None,
        link,
        number(link_bandwidth, 1e9),
        units,
        generation,
    )


class _KnownName(NamedTuple):
    """A name of the table, and the sizes in GB that other names of the device may state."""

    text: str
    words: DeviceName
    gigabytes: tuple[float, ...]
    device: DeviceSpec


def _known_names(table: Mapping[str, tuple[Row, ...]], origin: Origin) -> Iterator[_KnownName]:
    for generation, row in ((generation, row) for generation, rows in table.items() for row in rows):
        device = _spec_from_row(generation, row, origin)
        for name in row[0].split(" | "):
            words = parse_device_name(name)
            form = words.form or ("pcie" if device.link == "PCIe" else "sxm")
            yield _KnownName(name, words._replace(form=form), row[1], device)


_OF_DATASHEETS = tuple(_known_names(DATASHEETS, "datasheet"))
_KNOWN = (*_OF_DATASHEETS, *_known_names(ASSUMED, "assumed"))
DEVICES: tuple[DeviceSpec, ...] = tuple({known.device.name: known.device for known in _KNOWN}.values())
_MAKERS = ("nvidia", "amd", "tesla", "geforce", "instinct", "oam")
_SIZE_TOLERANCE = 0.02  # Drivers print a little less than the nominal size


def _normalized_name(name: str) -> str:
    return " ".join(word for word in name.lower().replace("-", " ").split() if word not in _MAKERS)


_BY_NAME = {_normalized_name(known.text): known.device for known in _OF_DATASHEETS}


def find_device(name: str) -> DeviceSpec | None:
    """The device of this exact name, as CUDA or ROCm reports it; a similar one (a laptop's chip, a slice) is None."""
    return _BY_NAME.get(_normalized_name(name))


def match_device(name: str) -> DeviceSpec | None:
    """The device that a plan or a publication calls by this name. A size or form in the name must be the device's."""
    if exact := find_device(name):
        return exact
    asked = parse_device_name(name)
    distances = [(_size_distance(asked, known), index) for index, known in enumerate(_KNOWN) if _agree(asked, known)]
    distance, index = min(distances, default=(inf, 0))
    return _KNOWN[index].device if distance <= _SIZE_TOLERANCE else None


def _agree(asked: DeviceName, known: _KnownName) -> bool:
    power = known.device.power_W
    has_power = asked.watts is None or (power is not None and power.value == asked.watts)
    return has_power and asked.form in ("", known.words.form) and is_same_model(asked.model, known.words.model)


def _size_distance(asked: DeviceName, known: _KnownName) -> float:
    return min(abs(asked.gigabytes / size - 1) for size in known.gigabytes) if asked.gigabytes is not None else 0.0


def find_planned_device(name: str) -> DeviceSpec:
    """The device that a plan or a publication calls by this name; an error if there is none."""
    device = match_device(name)
    if device is None:
        names, model = [spec.name for spec in DEVICES], parse_device_name(name).model
        same = [known.device.name for known in _KNOWN if is_same_model(model, known.words.model)]
        near = [*dict.fromkeys(same)][:5] or get_close_matches(name, names, 3, 0.4) or names[:3]
        raise InputError(
            f"device {name!r} is not in the table of devices; use one of it, such as {', '.join(near)}, or describe "
            "the device in a cluster file, section [datasheet]"
        )
    return device
