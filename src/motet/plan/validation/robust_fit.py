"""Least absolute deviations of a linear model, by least squares whose weights are renewed.

The planner's time is close to linear in the logarithms of its constants: a few such steps fit them.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
_ITERATIONS = 40
_LONGEST_STEP = 0.6  # Of a logarithm: beyond it the model is not linear any more


@dataclass(frozen=True)
class LinearModel:
    """Logarithms of predictions of rows near a point: `base + jacobian @ (logarithms of constants - point)`."""

    point: Vector
    base: Vector
    jacobian: Vector

    def of_rows(self, rows: NDArray[np.int64]) -> "LinearModel":
        """The same of some rows."""
        return LinearModel(self.point, self.base[rows], self.jacobian[rows])

    def predict(self, constants: Vector) -> Vector:
        """Logarithms of the predictions."""
        result: Vector = self.base + self.jacobian @ (constants - self.point)
        return result


@dataclass(frozen=True)
class FitSettings:
    """How strongly rows and constants count. Errors below `noise` count quadratically, larger ones linearly."""

    row_weights: Vector
    centers: Vector  # Logarithms of the constants that are plausible without any row
    spreads: Vector  # How far from there they plausibly are
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
