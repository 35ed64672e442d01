"""The file of measured rows of kernels, which runs on a GPU of the same name read first."""

from pathlib import Path
from typing import Any, NamedTuple


class MeasuredRow(NamedTuple):
    """The fastest implementation from a number of elements on."""

    kernel: Any
    dtype: str
    least_elements: int
    implementation: Any


def write_measured_rows(device_name: str, rows: list[MeasuredRow]) -> Path | None:
    """Keep the rows of a GPU, of which the first that matches decides; returns the file, or None for a user without a
    cache folder."""
    from motet.core.text_files import write_file_atomically
    from motet.models.kernels import choice

    path = choice.measured_path()
    if path is None:
        return None
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    kept = [
        choice.KernelRow(row.kernel, "cuda", row.implementation, "measured", (row.dtype,), row.least_elements)
        for row in sorted(rows, key=lambda row: -row.least_elements)
    ]
    devices = {**choice.read_measured_rows(), device_name: kept}
    write_file_atomically(path, choice.MEASURED.dump_json(devices, indent=1))
    choice._matching_rows.cache_clear()
    return path
