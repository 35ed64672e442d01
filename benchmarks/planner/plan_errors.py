"""Writes the errors that `motet plan` states, from files of published measurements.

`python benchmarks/planner/plan_errors.py steps.csv a100_single_node.csv benchmarks/planner/published_steps.csv`: each
source of steps is predicted with constants that were fitted to the other sources. Rows of quality A and B count. The
planner's memory has no fitted constants.
"""

import sys
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from pages.planning_constants import HeldOutErrors, read_rows
from planner.published_files import read_published_file

from motet.cluster.device_specs import find_planned_device
from motet.plan.validation.expected_errors import EXPERTS, SIZES, size_class
from motet.plan.validation.predictions import memory_comparison, quantile

TARGET = Path(__file__).parents[2] / "src/motet/plan/errors/by-device.toml"
_FEWEST_ROWS = 3


def main(paths: list[str]) -> None:
    """Write the table."""
    if not paths:
        sys.exit(__doc__)
    times, memories = defaultdict[str, list[tuple[str, float]]](list), defaultdict[str, list[float]](list)
    held_out = HeldOutErrors([*read_rows(paths)])
    for row, error in zip(held_out.rows, held_out.errors(), strict=True):
        if row.quality in ("A", "B"):
            group = EXPERTS if row.step.has_experts else size_class(row.hardware.devices)
            times[find_planned_device(row.hardware.device).name].append((group, error))
    for path in paths:
        for row in read_published_file(Path(path)).rows:
            memory = memory_comparison(row) if row.quality in ("A", "B") else None
            if memory is not None:
                memories[find_planned_device(row.hardware.device).name].append(abs(memory.error))
    lines = [
        "# Made by benchmarks/planner/plan_errors.py: 90th percentiles of errors by device. Errors of times are",
        "# those of published steps whose source was left out of the fit.",
        f"# Those of times are of models without experts, also by number of devices; sections `{EXPERTS}` of others.",
    ]
    for name in sorted({*times, *memories}):
        path, groups = f'devices."{name}"', (EXPERTS, *SIZES)
        members = {group: [error for each, error in times[name] if each == group] for group in groups}
        dense = [error for size in SIZES for error in members[size]]
        sections = {path: [*_entries("time", dense), *_entries("memory", memories[name])]}
        sections |= {f'{path}."{group}"': _entries("time", members[group]) for group in groups}
        for section, entries in sections.items():
            lines += ["", f"[{section}]", *entries] if entries else []
    TARGET.write_text("\n".join(lines) + "\n")


def _entries(quantity: str, errors: Collection[float]) -> list[str]:
    if len(errors) < _FEWEST_ROWS:
        return []
    return [f"{quantity}_rows = {len(errors)}", f"{quantity}_p90 = {quantile([*errors], 0.9):.3f}"]


if __name__ == "__main__":
    main(sys.argv[1:])
