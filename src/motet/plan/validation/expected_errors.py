"""The errors to expect of a prediction: the 90th percentile of validation rows of the same device."""

from functools import cache

from motet.core.config_loading import builtin_texts
from motet.core.text_formats import parse_toml


@cache
def _table() -> dict[str, dict[str, float]]:
    text = builtin_texts("motet.plan", "errors")["by-device"]
    devices: dict[str, dict[str, float]] = parse_toml(text)["devices"]
    return devices


def errors_on_device(device: str) -> tuple[float | None, float | None]:
    """(Error of the time, error of the memory) on a device; None without a row of it."""
    row = _table().get(device, {})
    return row.get("time_p90"), row.get("memory_p90")
