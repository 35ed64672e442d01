"""Fits a few constants of a device, its links and a framework to measured steps, and tests them on rows left out.

The constants are factors on the rates of the tables, so 1 is the tables' value. The fit minimises the mean absolute
logarithm of predicted over measured time, and a small penalty keeps constants that the rows do not determine near 1.
The first step starts from the tables, and further ones from its result.

The method is least absolute deviations of a linear model, by iteratively reweighted least squares.

The planner's time is close to linear in the logarithms of its constants: a few such steps fit them.
"""

import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import log
from typing import Any

import numpy as np
from numpy.typing import NDArray

from motet.collectives.cost.cluster_fabric import VendorCosts
from motet.core.errors import check_input
from motet.plan.planned_step import PlannedStep
from motet.plan.time.step_time import StepTimes
from motet.plan.validation.predictions import PredictionError, error_summary, fabric_of_row, step_times
from motet.plan.validation.step_rows import MeasuredStep

Vector = NDArray[np.float64]
_ITERATIONS = 40
_LONGEST_STEP = 0.6  # Change of a logarithm: beyond it the model is not linear


@dataclass(frozen=True)
class LinearModel:
    """Logarithms of predictions of rows near a point: `base + jacobian @ (logarithms of constants - point)`."""

    point: Vector
    base: Vector
    jacobian: Vector

    def select_rows(self, rows: NDArray[np.int64]) -> "LinearModel":
        """The model of some rows."""
        return LinearModel(self.point, self.base[rows], self.jacobian[rows])

    def predict(self, constants: Vector) -> Vector:
        """Logarithms of the predictions."""
        result: Vector = self.base + self.jacobian @ (constants - self.point)
        return result


@dataclass(frozen=True)
class FitSettings:
    """Weights of rows and constants. Errors below `noise` count quadratically, larger ones linearly."""

    row_weights: Vector
    centers: Vector  # Logarithms of the constants that are plausible without any row
    spreads: Vector  # Plausible distances from the centers
    noise: float = 0.02


def fit_constants(model: LinearModel, measured: Vector, settings: FitSettings) -> Vector:
    """The logarithms of constants near the model's point that fit best."""
    residuals, jacobian = measured - model.base, model.jacobian
    step: Vector = np.zeros_like(model.point)
    prior = 0.5 / settings.spreads**2
    for _ in range(_ITERATIONS):
        errors = np.abs(residuals - jacobian @ step)
        weights = settings.row_weights / np.maximum(errors, settings.noise) / (4 * settings.noise)
        weighted = jacobian.T * weights
        curvature, slope = (
            weighted @ jacobian + np.diag(prior),
            weighted @ residuals - prior * (model.point - settings.centers),
        )
        step = np.asarray(np.linalg.solve(curvature, slope), dtype=np.float64)
    return model.point + np.clip(step, -_LONGEST_STEP, _LONGEST_STEP)


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
_SPREAD = 1.0  # Spread of the logarithms of factors that rows do not determine
_DIFFERENCE = 0.05  # Step of a logarithm, for derivatives
_STEPS = 5
_LEAST_ROWS = 3
_MOST_ROWS = 120  # Rows that steps after the first one read: more only take time


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


def _check_count(rows: Sequence[MeasuredStep]) -> None:
    """Check that there are rows to fit on, and others to predict."""
    message = f"{len(rows)} rows with a time are too few to fit {len(CONSTANTS)} constants and predict others"
    check_input(len(rows) >= _LEAST_ROWS, f"{message}; give {_LEAST_ROWS} or more")


UNCALIBRATED = Calibration(dict.fromkeys(CONSTANTS, 1.0))


class FactorFit:
    """Fits factors to some of the rows. The first step needs the derivatives of each row only once."""

    def __init__(self, rows: Sequence[MeasuredStep]) -> None:
        self.rows = [row for row in rows if row.seconds]
        self._index = {id(row): index for index, row in enumerate(self.rows)}
        self._at_tables = _linear_model(self.rows, np.zeros(len(CONSTANTS)))

    def fit(self, rows: Sequence[MeasuredStep] | None = None) -> Calibration:
        """The constants that fit the rows best, which are some of the constructor's."""
        chosen = [self._index[id(row)] for row in rows or self.rows if row.seconds]
        point = _step(self._at_tables.select_rows(np.array(chosen)), [self.rows[index] for index in chosen])
        sample = random.Random(0).sample(chosen, min(_MOST_ROWS, len(chosen)))
        members = [self.rows[index] for index in sorted(sample)]
        points = list[tuple[float, Vector]]()
        for _ in range(_STEPS):
            model = _linear_model(members, point)
            points.append((float(np.mean(np.abs(model.base - _log_measured(members)))), point))
            point = _step(model, members)
        best = min(points, key=lambda entry: entry[0])[1]
        return Calibration(dict(zip(CONSTANTS, np.exp(best).tolist(), strict=True)))


def _linear_model(rows: Sequence[MeasuredStep], point: Vector) -> LinearModel:
    def logs(at: Vector) -> Vector:
        calibration = Calibration(dict(zip(CONSTANTS, np.exp(at).tolist(), strict=True)))
        return np.array([log(calibration.seconds(row)) for row in rows])

    base = logs(point)
    columns = [(logs(point + _DIFFERENCE * unit) - base) / _DIFFERENCE for unit in np.eye(len(point))]
    return LinearModel(point, base, np.stack(columns, axis=1))


def _step(model: LinearModel, rows: Sequence[MeasuredStep]) -> Vector:
    weights = np.ones(len(rows)) / len(rows) ** 0.5
    return fit_constants(
        model, _log_measured(rows), FitSettings(weights, np.zeros(len(CONSTANTS)), np.full(len(CONSTANTS), _SPREAD))
    )


def _log_measured(rows: Sequence[MeasuredStep]) -> Vector:
    return np.array([log(row.seconds) for row in rows if row.seconds])


def errors_of(calibration: Calibration, rows: Sequence[MeasuredStep]) -> list[PredictionError]:
    """Predicted and measured times of rows."""
    return [
        PredictionError(row.id, calibration.seconds(row), row.seconds, row.problem, row.step.layout_text, row.quality)
        for row in rows
        if row.seconds
    ]


GROUPS: dict[str, Callable[[MeasuredStep], object]] = {
    "model": lambda row: row.model,
    "source": lambda row: row.source,
    "layers": lambda row: row.step.spec.policy_count,
    "degrees": lambda row: (row.step.layout.tp, row.step.layout.pp),
    "layout": lambda row: (row.step.layout.tp, row.step.layout.pp, row.step.layout.dp),
}


def held_out_report(rows: Sequence[MeasuredStep], by: str) -> dict[str, Any]:
    """Errors of each group of rows, with constants that were fitted on all others."""
    groups = defaultdict[object, list[MeasuredStep]](list)
    for row in rows:
        groups[GROUPS[by](row)].append(row)
    _check_count(rows)
    check_input(len(groups) > 1, f"--hold-out {by}: all rows are of one group; choose another of {', '.join(GROUPS)}")
    errors, parts, fits = list[PredictionError](), dict[str, Any](), FactorFit(rows)
    for name, members in sorted(groups.items(), key=lambda item: str(item[0])):
        others = [row for row in rows if GROUPS[by](row) != name]
        predicted = errors_of(fits.fit(others), members)
        errors += predicted
        parts[str(name)] = error_summary(predicted)
    calibration = fits.fit()
    return {
        "held_out": error_summary(errors),
        "groups": parts,
        "fitted": error_summary(errors_of(calibration, fits.rows)),
        "factors": dict(calibration.factors),
    }


def small_sample_report(rows: Sequence[MeasuredStep], share: float) -> dict[str, Any]:
    """Errors of all other rows, with constants fitted on a share of the rows: as many of each group of layouts."""
    _check_count(rows)
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
    chosen = set(map(id, sample))
    calibration = FactorFit(sample).fit()
    others = [row for row in rows if id(row) not in chosen]
    return {
        "fitted_on": len(sample),
        "held_out": error_summary(errors_of(calibration, others)),
        "factors": dict(calibration.factors),
    }
