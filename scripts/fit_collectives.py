"""Fits the constants of vendor libraries to published times, and predicts curves that the fit left out.

python scripts/fit_collectives.py collectives.csv                    # prints constants, and changes no file
python scripts/fit_collectives.py collectives.csv --hold-out source  # or gpu: each in turn is left out; minutes

The sum of absolute log errors is minimised with priors, so that a class without rows keeps a plausible value. A curve
counts alike; rows of quality B count less, and rows of quality C and marked outliers not at all.
"""

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from motet.collectives.cost.cluster_fabric import FabricSpec, VendorCosts
from motet.collectives.cost.group_shapes import LIBRARY, LINK_CLASSES, PROTOCOLS
from motet.collectives.cost.published_curves import GROUPS, question_of, read_published_curves, read_rows

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
_WEIGHTS = {"A": 1.0, "B": 0.1}
_SIZE_WEIGHTS = {"large": 1.6, "middle": 1.0, "small": 0.8}
# Small messages take twice the time of equal hosts, as if one process drove all devices; no source states this.
_STARTED_OTHERWISE = ("h800x8_bc", "v100sxm3x12_bc")
_PRIOR_WEIGHT, _LEAST_ERROR, _ROUNDS = 0.3, 0.03, 25
_DAMPING = 0.01
# The start-up of a hop, in seconds, and the uncertainty of its logarithm
_HOPS = {
    "NVLink4": 0.8e-6,
    "NVLink5": 0.8e-6,
    "RDMA": 5e-6,
    "RDMA400": 5e-6,
    "EFA": 60e-6,
    "TCPXO": 25e-6,
    "TCPX": 1e-4,
}
_FIXED = ("xGMI", "EFA400", "Slingshot", "Socket")  # Links of one noisy run, or of none
_IN_SWITCH = {"NVLink4": 0.66, "NVLink5": 0.62}
_LIBRARY = {
    "launch": (8e-6, 0.3), "launch in turn": (2.2e-6, 0.3), "message in turn": (1.1e-6, 0.3), "piece": (0.2e-6, 0.7),
    "tree share": (0.85, 0.05), "in-switch tree share": (0.92, 0.04), "in-switch start-up": (25e-6, 0.7),
    "in-network share": (0.55, 0.05), "fewest channels": (1 / 8, 0.3), "channels double": (0.9e-3, 0.3),
}  # fmt: skip
_PROTOCOLS = {
    ("LL", "rate"): (0.3, 0.3), ("LL128", "rate"): (0.8, 0.1), ("LL128", "inside"): (2.2, 0.3),
    ("LL128", "between"): (1.6, 0.3), ("Simple", "inside"): (3.8, 0.3), ("Simple", "between"): (3.2, 0.4),
}  # fmt: skip


class Constant(NamedTuple):
    """A fitted constant with its prior, and the function that sets it in the tables."""

    name: str
    prior: float
    spread: float
    assign: Callable[[float], None]


def constants() -> list[Constant]:
    """All fitted constants."""
    fitted = []
    for name in LINK_CLASSES:
        if name in _FIXED:
            continue
        is_network = name in ("RDMA", "RDMA400", "EFA", "TCPXO", "TCPX")
        efficiency = {"TCPX": 0.7, "PCIe": 0.7, "EFA": 0.85}.get(name, 0.92 if is_network else 0.8)
        fitted.append(_link_constant(name, "efficiency", efficiency, 0.02 if is_network else 0.05))
        fitted.append(_link_constant(name, "hop_s", _HOPS.get(name, 1e-6), 0.4))
        if name in _IN_SWITCH:
            fitted.append(_link_constant(name, "in_switch_efficiency", _IN_SWITCH[name], 0.06))
    fitted.append(_link_constant("RDMA400", "one_way_efficiency", 0.8, 0.08))
    for (name, field), prior in _PROTOCOLS.items():
        fitted.append(
            Constant(f"{name} {field}", *prior, lambda value, n=name, f=field: _replace(PROTOCOLS, n, f, value))
        )
    for name, prior in _LIBRARY.items():
        fitted.append(Constant(name, *prior, lambda value, n=name: _replace(LIBRARY, n, "value", value)))
    return fitted


def _link_constant(name: str, field: str, prior: float, spread: float) -> Constant:
    return Constant(f"{name} {field}", prior, spread, lambda value: _replace(LINK_CLASSES, name, field, value))


def _replace(table: dict, name: str, field: str, value: float) -> None:
    table[name] = table[name]._replace(**{field: value})


class Fit:
    """Constants, and the rows that they are fitted to."""

    def __init__(self, path: Path) -> None:
        self.constants = constants()
        self.times = read_published_curves(path).times
        rows = {(row["id"], row["bytes"], row["time_us"]): row for row in read_rows(path)}
        sizes = Counter((time.curve, time.size_class) for time in self.times)
        by_time = {(key[0], float(key[1]), float(key[2]) * 1e-6): row for key, row in rows.items() if key[1] and key[2]}
        matched = [by_time[time.curve, time.size_bytes, time.measured_s] for time in self.times]
        self.questions = [question_of(row) for row in matched]
        outliers = [
            "OUTLIER" in row.get("notes", "") or (time.curve in _STARTED_OTHERWISE and time.size_class == "small")
            for row, time in zip(matched, self.times, strict=True)
        ]
        kinds = [(t.curve, t.size_class) for t in self.times]
        weights = [_WEIGHTS.get(t.quality, 0.0) * _SIZE_WEIGHTS[t.size_class] for t in self.times]
        shares = [weight * sizes[kind] ** -0.5 for weight, kind in zip(weights, kinds, strict=True)]
        self.weights = np.where(outliers, 0.0, shares)
        self.measured = np.log([time.measured_s for time in self.times])

    def errors(self, rows: Sequence[int]) -> FloatArray:
        """Logarithms of predicted over measured times with the constants of the tables."""
        costs: dict[FabricSpec, VendorCosts] = {}
        return np.log([self.questions[row].seconds(costs) for row in rows]) - self.measured[rows]

    def fit(self, rows: IntArray) -> FloatArray:
        """Logarithms of the constants, by damped Gauss-Newton steps for least absolute errors."""
        priors = np.log([each.prior for each in self.constants])
        spreads = np.array([each.spread for each in self.constants])
        point, weights, damping = priors.copy(), self.weights[rows], _DAMPING
        errors, loss = self._loss(point, priors, spreads=spreads, rows=rows)
        for _ in range(_ROUNDS):
            slopes = self._slopes(point, errors, rows)
            scaled = weights / np.hypot(errors, _LEAST_ERROR)
            matrix = slopes.T @ (scaled[:, None] * slopes) + np.diag(_PRIOR_WEIGHT / spreads**2)
            vector = slopes.T @ (scaled * errors) + _PRIOR_WEIGHT * (point - priors) / spreads**2
            for _ in range(6):
                step = np.linalg.solve(matrix + damping * np.diag(np.diag(matrix)), -vector)
                proposal = point + np.clip(step, -0.3, 0.3)
                proposed_errors, proposed = self._loss(proposal, priors, spreads=spreads, rows=rows)
                if proposed < loss:
                    break
                damping *= 4
            if proposed >= loss * (1 - 1e-4):
                break
            point, errors, loss, damping = proposal, proposed_errors, proposed, damping / 4
        return point

    def assign(self, point: FloatArray) -> None:
        """Set the constants of the tables."""
        for each, value in zip(self.constants, np.exp(point), strict=True):
            each.assign(float(value))

    def _loss(
        self, point: FloatArray, priors: FloatArray, *, spreads: FloatArray, rows: IntArray
    ) -> tuple[FloatArray, float]:
        self.assign(point)
        errors = self.errors(rows)
        loss = float(np.sum(self.weights[rows] * np.hypot(errors, _LEAST_ERROR)))
        return errors, loss + _PRIOR_WEIGHT / 2 * float(np.sum(((point - priors) / spreads) ** 2))

    def _slopes(self, point: FloatArray, errors: FloatArray, rows: IntArray) -> FloatArray:
        """Derivatives by differences; a constant of a class changes the rows of that class alone."""
        slopes = np.zeros((len(rows), len(point)))
        links = [(self.questions[row].fabric.intra_link, self.questions[row].fabric.inter_link) for row in rows]
        for column, each in enumerate(self.constants):
            name = each.name.split(" ")[0]
            touched = [n for n, pair in enumerate(links) if name not in LINK_CLASSES or name in pair]
            if touched:
                each.assign(float(np.exp(point[column] + 1e-3)))
                slopes[touched, column] = (self.errors(rows[touched]) - errors[touched]) / 1e-3
                each.assign(float(np.exp(point[column])))
        return slopes


def main(path: Path, hold_out: str | None) -> None:
    """Print the constants and the errors of all rows or of rows that are left out."""
    fit = Fit(path)
    rows = np.arange(len(fit.times))
    if hold_out is None:
        fit.assign(fit.fit(rows))
        tables = {**LINK_CLASSES, **PROTOCOLS, **LIBRARY}
        print(*(f"{name}: {tuple(value)}" for name, value in tables.items()), sep="\n")
        _print_errors("fitted", fit, np.expm1(fit.errors(rows)))
        return
    groups = np.array([GROUPS[hold_out](time) for time in fit.times])
    errors = np.full(len(rows), np.nan)
    for group in sorted({groups[n] for n, time in enumerate(fit.times) if time.quality == "A"}):
        fit.assign(fit.fit(rows[groups != group]))
        errors[groups == group] = np.expm1(fit.errors(rows[groups == group]))
        print(f"{group[:60]}: median error {np.median(np.abs(errors[groups == group])):.1%}", flush=True)
    _print_errors(f"each {hold_out} left out", fit, errors)


def _print_errors(name: str, fit: Fit, errors: FloatArray) -> None:
    for size in ("large", "middle", "small"):
        chosen = [abs(e) for e, t in zip(errors, fit.times, strict=True) if (t.quality, t.size_class) == ("A", size)]
        print(f"{name}, {size}: {len(chosen)} rows of quality A, median error {median(chosen):.1%}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[3] if sys.argv[2:3] == ["--hold-out"] else None)
