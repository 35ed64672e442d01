"""The fit of the planner's constants, compared with a search over a grid for the minimum of its objective."""

import numpy as np
import pytest

from motet.plan.validation.calibration import FitSettings, LinearModel, fit_constants

NOISE = 0.02


def objective(constant: np.ndarray, rows: list[tuple[float, float]], center: float, spread: float) -> np.ndarray:
    """Huber's loss of rows (measured, weight), in units of the noise, and the distance from what is plausible."""
    total = (constant - center) ** 2 / (2 * spread**2)
    for measured, weight in rows:
        error = np.abs(measured - constant) / NOISE
        total = total + weight * np.where(error < 1, error**2 / 4, (2 * error - 1) / 4)
    return total


@pytest.mark.parametrize(
    ("rows", "center", "spread"),
    [
        ([(0.01, 1.0)], 0.0, 0.02),
        ([(0.01, 1.0)], 0.0, 0.002),
        ([(0.01, 1.0), (0.012, 2.0), (0.3, 1.0)], 0.02, 0.1),  # One row far from the others
        ([(0.05, 0.1)], -0.02, 0.03),
    ],
)
def test_a_constant_is_where_rows_and_what_is_plausible_agree(
    rows: list[tuple[float, float]], center: float, spread: float
) -> None:
    measured, weights = (np.array(values) for values in zip(*rows, strict=True))
    model = LinearModel(point=np.zeros(1), base=np.zeros(len(rows)), jacobian=np.ones((len(rows), 1)))
    fitted = fit_constants(model, measured, FitSettings(weights, np.array([center]), np.array([spread]), NOISE))
    grid = np.linspace(-0.1, 0.4, 500_001)
    assert fitted[0] == pytest.approx(grid[np.argmin(objective(grid, rows, center, spread))], abs=2e-5)


def test_a_constant_that_no_row_shows_is_what_is_plausible() -> None:
    model = LinearModel(point=np.array([0.0, 2.0]), base=np.zeros(1), jacobian=np.array([[1.0, 0.0]]))
    settings = FitSettings(np.ones(1), np.array([0.0, 2.1]), np.array([0.1, 0.2]))
    assert fit_constants(model, np.zeros(1), settings) == pytest.approx([0.0, 2.1])
