"""The devices of the table of datasheets, found by the names that drivers, plans and publications use.

A number carries its origin. A device that no name matches is an error that names near ones.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from math import inf
from typing import NamedTuple

from motet.cluster.devices import datasheets
from motet.cluster.devices.datasheets import Origin
from motet.cluster.devices.device_names import DeviceName, is_same_model, parse_device_name
from motet.core.errors import InputError

UNKNOWN_GENERATION = "other"  # Of a device that the table does not have


@dataclass(frozen=True, slots=True)
class HardwareNumberWithOrigin:
    """A number and its source."""

    value: float
    origin: Origin
    source: str = ""  # Who measured it, or on what ground it is assumed


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """A device model. `peak_flops` is by dtype, with `tfloat32` for float32 matrices that may be rounded."""

    name: str
    peak_flops: Mapping[str, HardwareNumberWithOrigin]
    memory_bytes: HardwareNumberWithOrigin
    bandwidth_Bps: HardwareNumberWithOrigin  # noqa: N815 - a unit
    usable_share: HardwareNumberWithOrigin  # Of the memory, for a process
    power_W: HardwareNumberWithOrigin | None = None  # noqa: N815 - a unit; the limit, without the host
    price_per_hour: HardwareNumberWithOrigin | None = None  # USD
    link: str = "PCIe"  # The class of the links inside of a host
    link_Bps: HardwareNumberWithOrigin | None = None  # noqa: N815 - a unit; in one direction
    units: int = 1  # That compute tiles of a product, each its own: streaming multiprocessors, compute units
    generation: str = UNKNOWN_GENERATION

    @property
    def usable_bytes(self) -> float:
        """The memory that a process can allocate."""
        return self.usable_share.value * self.memory_bytes.value


def usable_share(name: str) -> HardwareNumberWithOrigin:
    """The share of the memory of a device that a process can allocate."""
    rows = datasheets.USABLE_SHARES
    return next(
        HardwareNumberWithOrigin(v, origin, source) for v, start, origin, source in rows if re.match(start, name)
    )


def _spec_from_row(generation: str, row: datasheets.Row, origin: Origin) -> DeviceSpec:
    names, sizes, bandwidth, power, price, (link, link_bandwidth), units, teraflops = row
    peaks = zip(datasheets.DTYPES, teraflops, strict=False)
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
        HardwareNumberWithOrigin(price, "assumed", datasheets.PRICE_SOURCE) if price else None,
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


def _known_names(table: Mapping[str, tuple[datasheets.Row, ...]], origin: Origin) -> Iterator[_KnownName]:
    for generation, row in ((generation, row) for generation, rows in table.items() for row in rows):
        device = _spec_from_row(generation, row, origin)
        for name in row[0].split(" | "):
            words = parse_device_name(name)
            form = words.form or ("pcie" if device.link == "PCIe" else "sxm")
            yield _KnownName(name, words._replace(form=form), row[1], device)


_OF_DATASHEETS = tuple(_known_names(datasheets.DATASHEETS, "datasheet"))
_KNOWN = (*_OF_DATASHEETS, *_known_names(datasheets.ASSUMED, "assumed"))
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
