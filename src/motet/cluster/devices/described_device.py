"""The device of a cluster file: a row of the table of devices, with the numbers of the file's section [datasheet]."""

from dataclasses import replace

from motet.cluster.cluster_settings import ClusterSettings, DatasheetFlopsSettings, DatasheetSettings
from motet.cluster.device_specs import (
    DeviceSpec,
    HardwareNumberWithOrigin,
    find_planned_device,
    match_device,
    usable_share,
)
from motet.cluster.devices.datasheets import GENERATIONS
from motet.core.errors import InputError, check_input

_MOST_FLOP_PER_BYTE = 1e5  # Of the memory; the table's devices have up to 2000
_NEEDED_FLOPS = ("bfloat16", "float16", "float32")


def device_of_cluster(settings: ClusterSettings) -> DeviceSpec:
    """The device that a cluster file names or describes; an error if its numbers are incomplete or contradictory."""
    sheet = settings.datasheet
    if sheet is None:
        return find_planned_device(settings.device)
    known = match_device(settings.device)
    device = _with_numbers(known or _new_device(settings.device, sheet), sheet)
    if known and replace(device, power_W=known.power_W, price_per_hour=known.price_per_hour) != known:
        # Errors of published steps are those of the table's device, which this is no longer
        device = replace(device, name=f"{known.name} of the cluster file")
    names = ", ".join(GENERATIONS)
    check_input(
        not sheet.generation or sheet.generation in GENERATIONS,
        f"datasheet.generation = {sheet.generation!r} is not in the table of devices; give one of {names}",
    )
    for dtype, flops in device.peak_flops.items():
        ratio = flops.value / device.bandwidth_Bps.value
        check_input(
            ratio <= _MOST_FLOP_PER_BYTE,
            f"datasheet.flops.{dtype} = {flops.value:g} FLOP/s and bandwidth_Bps = {device.bandwidth_Bps.value:g} are "
            f"{ratio:.2g} FLOP for each byte of memory, more than {_MOST_FLOP_PER_BYTE:g}; correct one of them",
        )
    return device


def _new_device(name: str, sheet: DatasheetSettings) -> DeviceSpec:
    """A device that the table does not have, from the numbers without which nothing can be planned."""
    flops = _peak_flops(sheet.flops)
    missing = [key for key in ("memory_bytes", "bandwidth_Bps") if getattr(sheet, key) is None]
    missing += [] if any(dtype in flops for dtype in _NEEDED_FLOPS) else ["flops.bfloat16"]
    if missing or sheet.memory_bytes is None or sheet.bandwidth_Bps is None:
        raise InputError(
            f"device = {name!r} is not in the table of devices, and section [datasheet] does not give "
            f"{', '.join(missing)}; add it, or name a device of the table"
        )
    memory, bandwidth = sheet.memory_bytes.with_origin, sheet.bandwidth_Bps.with_origin
    return DeviceSpec(name or "device", flops, memory, bandwidth, usable_share(name))


def _with_numbers(device: DeviceSpec, sheet: DatasheetSettings) -> DeviceSpec:
    return replace(
        device,
        peak_flops={**device.peak_flops, **_peak_flops(sheet.flops)},
        memory_bytes=sheet.memory_bytes.with_origin if sheet.memory_bytes else device.memory_bytes,
        bandwidth_Bps=sheet.bandwidth_Bps.with_origin if sheet.bandwidth_Bps else device.bandwidth_Bps,
        usable_share=sheet.usable_memory.with_origin if sheet.usable_memory else device.usable_share,
        power_W=sheet.power_W.with_origin if sheet.power_W else device.power_W,
        price_per_hour=sheet.price_per_hour.with_origin if sheet.price_per_hour else device.price_per_hour,
        units=sheet.units or device.units,
        generation=sheet.generation or device.generation,
    )


def _peak_flops(flops: DatasheetFlopsSettings) -> dict[str, HardwareNumberWithOrigin]:
    numbers = {
        "float64": flops.float64,
        "float32": flops.float32,
        "tfloat32": flops.tfloat32,
        "bfloat16": flops.bfloat16,
        "float16": flops.float16,
        "float8": flops.float8,
        "float4": flops.float4,
    }
    return {dtype: number.with_origin for dtype, number in numbers.items() if number is not None}
