"""Fits a few constants of a device, its links and a framework to measured steps, and holds them to rows left out.

The constants are factors on the rates of the tables, so 1 is what the tables say. The fit goes down one coordinate
after the other, with steps that shrink; it minimises the mean absolute logarithm of predicted over measured time, and
a small penalty keeps constants that the rows do not determine near 1.
"""

import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log
from typing import Any

from motet.collectives.cost.vendor_library import VendorCosts
from motet.core.errors import check_input
from motet.plan.planned_step import PlannedStep
from motet.plan.time.step_time import StepTimes
from motet.plan.validation.error_statistics import PredictionError, error_summary
from motet.plan.validation.predictions import fabric_of_row, step_times
from motet.plan.validation.step_rows import MeasuredStep

# Factor -> its meaning
CONSTANTS: dict[str, str] = {
    "products": "rate of matrix products",
    "memory": "memory bandwidth of streaming kernels",
    "launch": "time from one kernel to the next",
    "kernels": "kernels of a block, launched one after the other",
    "passes": "times that activations move through memory",
    "inside": "bandwidth of links inside of a host",
    "startup": "start-up of a collective",
    "block": "seconds of a block and micro-batch that nothing hides, in units of 0.1 ms",
    "step": "seconds of a step that nothing hides, in units of 10 ms",
}
_ROUNDS = (0.35, 0.15, 0.06, 0.025)  # Steps of the logarithms of the constants
_PENALTY = 0.001
_MOST_ROWS = 160  # Rows that a fit reads: more only take time


@dataclass(frozen=True)
class Calibration:
    """Factors by name."""

    factors: Mapping[str, float]

    def times(self, row: MeasuredStep) -> StepTimes:
        """The predictor for the hardware of a row."""
        tables, f = step_times(row.hardware), self.factors
        rates = tables.rates
        fabric = fabric_of_row(row.hardware)
        fabric = replace(fabric, intra_Bps=fabric.intra_Bps * f["inside"], startup_factor=f["startup"])
        rates = replace(
            rates,
            product_flops={dtype: rate * f["products"] for dtype, rate in rates.product_flops.items()},
            attention_flops={kind: rate * f["products"] for kind, rate in rates.attention_flops.items()},
            attention_backward_flops={k: rate * f["products"] for k, rate in rates.attention_backward_flops.items()},
            memory_Bps=rates.memory_Bps * f["memory"],
            launch_s=rates.launch_s * f["launch"],
        )
        return replace(tables, rates=rates, costs=VendorCosts(fabric))

    def step(self, row: MeasuredStep) -> PlannedStep:
        """The step of a row with the constants of its framework."""
        step, f = row.step, self.factors
        stack = replace(
            step.stack,
            kernels_per_block=step.stack.kernels_per_block * f["kernels"],
            elementwise_passes=step.stack.elementwise_passes * f["passes"],
            block_overhead_s=1e-4 * (f["block"] - 1),
            step_overhead_s=step.stack.step_overhead_s * f["step"],
        )
        return replace(step, stack=stack)

    def seconds(self, row: MeasuredStep) -> float:
        """The predicted time of a row."""
        return self.times(row).predict(self.step(row)).seconds


UNCALIBRATED = Calibration(dict.fromkeys(CONSTANTS, 1.0))


def fit(rows: Sequence[MeasuredStep]) -> Calibration:
    """The constants that fit the rows best."""
    rows = [row for row in rows if row.seconds]
    check_input(len(rows) >= 2, f"{len(rows)} rows with a time cannot fix {len(CONSTANTS)} constants; give more rows")
    if len(rows) > _MOST_ROWS:
        rows = random.Random(0).sample(rows, _MOST_ROWS)
    logs = dict.fromkeys(CONSTANTS, 0.0)

    def loss() -> float:
        calibration = Calibration({name: exp(value) for name, value in logs.items()})
        errors = (abs(log(calibration.seconds(row) / row.seconds)) for row in rows if row.seconds)
        return sum(errors) / len(rows) + _PENALTY * sum(value * value for value in logs.values())

    best = loss()
    for size in _ROUNDS:
        is_better = True
        while is_better:
            is_better = False
            for name in CONSTANTS:
                for step in (size, -size):
                    logs[name] += step
                    new_loss = loss()
                    if new_loss < best - 1e-6:
                        best, is_better = new_loss, True
                        break
                    logs[name] -= step
    return Calibration({name: exp(value) for name, value in logs.items()})


def errors_of(calibration: Calibration, rows: Sequence[MeasuredStep]) -> list[PredictionError]:
    """Predicted and measured times of rows."""
    return [
        PredictionError(row.id, calibration.seconds(row), row.seconds, row.problem, row.step.layout, row.quality)
        for row in rows
        if row.seconds
    ]


GROUPS: dict[str, Callable[[MeasuredStep], object]] = {
    "model": lambda row: row.model,
    "source": lambda row: row.source,
    "layers": lambda row: row.step.model.layers,
    "degrees": lambda row: (row.step.layout.tp, row.step.layout.pp),
    "layout": lambda row: (row.step.layout.tp, row.step.layout.pp, row.step.layout.dp),
}


def held_out_report(rows: Sequence[MeasuredStep], by: str) -> dict[str, Any]:
    """Errors of each group of rows, with constants that were fitted on all others."""
    groups = defaultdict[object, list[MeasuredStep]](list)
    for row in rows:
        groups[GROUPS[by](row)].append(row)
    check_input(len(groups) > 1, f"--hold-out {by}: all rows are of one group; choose another of {', '.join(GROUPS)}")
    errors, parts = list[PredictionError](), dict[str, Any]()
    for name, members in sorted(groups.items(), key=lambda item: str(item[0])):
        others = [row for row in rows if GROUPS[by](row) != name]
        predicted = errors_of(fit(others), members)
        errors += predicted
        parts[str(name)] = error_summary(predicted)
    return {"held_out": error_summary(errors), "groups": parts}


def small_sample_report(rows: Sequence[MeasuredStep], share: float) -> dict[str, Any]:
    """Errors of all other rows, with constants fitted on a share of the rows: as many of each group of layouts."""
    groups = defaultdict[object, list[MeasuredStep]](list)
    for row in rows:
        groups[GROUPS["layout"](row)].append(row)
    count = max(2, int(share * len(rows)))
    generator, sample = random.Random(0), list[MeasuredStep]()
    queues = [generator.sample(members, len(members)) for _, members in sorted(groups.items(), key=lambda g: str(g[0]))]
    while len(sample) < count and any(queues):
        for queue in queues:
            if queue and len(sample) < count:
                sample.append(queue.pop())
    chosen = {row.id for row in sample}
    calibration = fit(sample)
    others = [row for row in rows if row.id not in chosen]
    return {
        "fitted_on": len(sample),
        "held_out": error_summary(errors_of(calibration, others)),
        "factors": dict(calibration.factors),
    }
