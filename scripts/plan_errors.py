"""Writes the errors that `motet plan` states, from files of published measurements.

Give the files of steps: `python scripts/plan_errors.py steps.csv`. Rows of quality A and B count.
"""

import sys
from collections import defaultdict
from pathlib import Path

from motet.cluster.device_specs import find_planned_device
from motet.plan.validation.error_statistics import quantile
from motet.plan.validation.memory_predictions import memory_comparison
from motet.plan.validation.predictions import predict_rows
from motet.plan.validation.step_rows import read_measured_steps

TARGET = Path(__file__).parents[1] / "src/motet/plan/errors/by-device.toml"
_FEWEST_ROWS = 3


def main(paths: list[str]) -> None:
    """Write the table."""
    times, memories = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    for path in paths:
        rows = [row for row in read_measured_steps(Path(path)) if row.quality in ("A", "B")]
        for each in predict_rows(rows):
            times[find_planned_device(each.measured.hardware.device).name].append(abs(each.comparison.error))
        for row in rows:
            memory = memory_comparison(row)
            if memory is not None:
                memories[find_planned_device(row.hardware.device).name].append(abs(memory.error))
    lines = ["# 90th percentiles of the errors of published steps by device; made by scripts/plan_errors.py."]
    for name in sorted(set(times) | set(memories)):
        lines += ["", f'[devices."{name}"]']
        for key, values in (("time", times[name]), ("memory", memories[name])):
            if len(values) >= _FEWEST_ROWS:
                lines += [f"{key}_rows = {len(values)}", f"{key}_p90 = {quantile(values, 0.9):.3f}"]
    TARGET.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
