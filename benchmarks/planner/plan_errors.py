"""Writes the errors that `motet plan` states, from files of published measurements.

Give the files of steps: `python benchmarks/planner/plan_errors.py steps.csv benchmarks/planner/published_steps.csv`.
Rows of quality A and B count.
"""

import sys
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from planner.published_files import read_published_file

from motet.cluster.device_specs import find_planned_device
from motet.plan.validation.expected_errors import EXPERTS, SIZES, size_class
from motet.plan.validation.predictions import memory_comparison, predict_rows, quantile

TARGET = Path(__file__).parents[2] / "src/motet/plan/errors/by-device.toml"
_FEWEST_ROWS = 3


def main(paths: list[str]) -> None:
    """Write the table."""
    times, memories = defaultdict[str, dict[str, float]](dict), defaultdict[str, dict[str, float]](dict)
    with_experts = defaultdict[str, list[float]](list)
    devices = dict[str, int]()
    for path in paths:
        rows = [row for row in read_published_file(Path(path)).rows if row.quality in ("A", "B")]
        devices |= {row.id: row.hardware.devices for row in rows}
        for each in predict_rows(rows):
            device = find_planned_device(each.measured.hardware.device).name
            if each.measured.step.has_experts:
                with_experts[device].append(abs(each.comparison.error))
            else:
                times[device][each.measured.id] = abs(each.comparison.error)
        for row in rows:
            memory = memory_comparison(row)
            if memory is not None:
                memories[find_planned_device(row.hardware.device).name][row.id] = abs(memory.error)
    lines = [
        "# Made by benchmarks/planner/plan_errors.py: 90th percentiles of the errors of published steps, by device.",
        f"# Those of times are of models without experts, also by number of devices; sections `{EXPERTS}` of others.",
    ]
    for name in sorted(set(times) | set(with_experts) | set(memories)):
        path = f'devices."{name}"'
        all_entries = [*_entries("time", times[name].values()), *_entries("memory", memories[name].values())]
        sections = {path: all_entries, f'{path}."{EXPERTS}"': _entries("time", with_experts[name])}
        for size in SIZES:
            members = [error for id_, error in times[name].items() if size_class(devices[id_]) == size]
            sections[f'{path}."{size}"'] = _entries("time", members)
        for section, entries in sections.items():
            lines += ["", f"[{section}]", *entries] if entries else []
    TARGET.write_text("\n".join(lines) + "\n")


def _entries(quantity: str, errors: Collection[float]) -> list[str]:
    if len(errors) < _FEWEST_ROWS:
        return []
    return [f"{quantity}_rows = {len(errors)}", f"{quantity}_p90 = {quantile([*errors], 0.9):.3f}"]


if __name__ == "__main__":
    main(sys.argv[1:])
