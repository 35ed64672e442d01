"""The errors to expect of a prediction: 90th percentiles of steps of the same device that the fit has not seen.

For models without experts the rows have a similar number of devices, if there are enough of them.
"""

from functools import cache
from typing import Any

from motet.core.config_loading import builtin_texts
from motet.core.text_files import parse_toml

EXPERTS = "experts"  # The class of models with experts
SIZES = ("one host", "up to 256", "more")  # Numbers of devices


def size_class(devices: int) -> str:
    """The class of a number of devices."""
    return SIZES[0] if devices <= 8 else SIZES[1] if devices <= 256 else SIZES[2]


@cache
def _table() -> dict[str, dict[str, Any]]:
    text = builtin_texts("motet.plan", "errors")["by-device"]
    devices: dict[str, dict[str, Any]] = parse_toml(text)["devices"]
    return devices


def errors_on_device(device: str, devices: int, *, has_experts: bool) -> tuple[float | None, float | None]:
    """(Error of the time, error of the memory) on a number of devices; None without rows of such models."""
    row = _table().get(device, {})
    like: dict[str, float] = row.get(EXPERTS, {}) if has_experts else row.get(size_class(devices), row)
    return like.get("time_p90"), row.get("memory_p90")
