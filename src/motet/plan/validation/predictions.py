"""Predictions of published steps, and the report of their errors.

Predictions of published memory, and of whether a step fits.

Distances of predictions from measurements: errors, ranks, and the cost of choosing by prediction.
"""

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import mean, median
from typing import Any

from motet.cluster.device_specs import find_planned_device
from motet.collectives.cost.cluster_fabric import FabricSpec, VendorCosts, fabric_of_device
from motet.core.errors import InputError
from motet.plan.memory.step_memory import PlannedMemory, estimate_memory, fits
from motet.plan.planned_cluster import rates_of
from motet.plan.time.step_time import StepTime, StepTimes
from motet.plan.validation.step_rows import MeasuredHardware, MeasuredStep

_DISTINCT = 1.05  # Pairs of measured times count if they differ by more


@dataclass(frozen=True)
class PredictionError:
    """A prediction and a measurement, of which less is better."""

    id: str
    predicted: float
    measured: float
    problem: Hashable = None  # Equal for layouts of the same problem
    layout: Hashable = None  # Rows of a problem with equal layouts count as one
    quality: str = "A"

    @property
    def error(self) -> float:
        """The relative error with its sign."""
        return self.predicted / self.measured - 1


def quantile(values: Sequence[float], share: float) -> float | None:
    """The value below which a share of the values lies, interpolated; None without values."""
    if not values:
        return None
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (position - low) * (ordered[high] - ordered[low])


def error_summary(rows: Sequence[PredictionError]) -> dict[str, float | int | None]:
    """Mean, median, 90th percentile and maximum of the absolute errors."""
    errors = [abs(row.error) for row in rows]
    if not errors:
        return {"rows": 0, "mape": None, "median": None, "p90": None, "max": None}
    return {
        "rows": len(errors),
        "mape": mean(errors),
        "median": median(errors),
        "p90": quantile(errors, 0.9),
        "max": max(errors),
    }


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0.0] * len(values)
    first = 0
    while first < len(order):
        last = first
        while last + 1 < len(order) and values[order[last + 1]] == values[order[first]]:
            last += 1
        for index in order[first : last + 1]:
            ranks[index] = (first + last) / 2
        first = last + 1
    return ranks


def spearman(left: Sequence[float], right: Sequence[float]) -> float | None:
    """The rank correlation; equal values share their ranks. None for less than three pairs."""
    if len(left) < 3:
        return None
    a, b = _ranks(left), _ranks(right)
    mean_a, mean_b = mean(a), mean(b)
    covariance = sum((x - mean_a) * (y - mean_b) for x, y in zip(a, b, strict=True))
    variances = sum((x - mean_a) ** 2 for x in a) * sum((y - mean_b) ** 2 for y in b)
    return covariance / variances**0.5 if variances else None


def ranking_summary(rows: Sequence[PredictionError]) -> dict[str, float | int | None]:
    """Per problem with at least two layouts: the regret of taking the layout that is predicted to be the best, and the
    share of pairs in the right order, if they differ by over 5 %."""
    problems = defaultdict[Hashable, list[PredictionError]](list)
    for row in rows:
        problems[row.problem].append(row)
    regrets, right, pairs = list[float](), 0, 0
    for members in problems.values():
        layouts = _means_of_layouts(members)
        if len(layouts) < 2:
            continue
        chosen = min(layouts, key=lambda row: row.predicted)
        regrets.append(chosen.measured / min(row.measured for row in layouts) - 1)
        for a, b in combinations(layouts, 2):
            if max(a.measured, b.measured) > _DISTINCT * min(a.measured, b.measured):
                pairs += 1
                right += (a.measured < b.measured) == (a.predicted < b.predicted) and a.predicted != b.predicted
    return {
        "problems": len(regrets),
        "regret": mean(regrets) if regrets else None,
        "pairs": pairs,
        "pairs_right": right / pairs if pairs else None,
    }


def _means_of_layouts(rows: Sequence[PredictionError]) -> list[PredictionError]:
    """One row for each layout, with the means of its rows."""
    layouts = defaultdict[Hashable, list[PredictionError]](list)
    for row in rows:
        layouts[row.id if row.layout is None else row.layout].append(row)
    return [
        replace(same[0], predicted=mean(row.predicted for row in same), measured=mean(row.measured for row in same))
        for same in layouts.values()
    ]


# Assumed for rows without links: a NIC for each device, faster ones for these generations
_FAST_NIC_GENERATIONS = ("Hopper", "Hopper at 500 W", "Blackwell", "Blackwell at 1400 W", "CDNA")
_RACK = 72  # Devices of GB200 and GB300 that NVLink joins


@dataclass(frozen=True)
class PredictedStep:
    """A published step and its prediction."""

    measured: MeasuredStep
    time: StepTime

    @property
    def comparison(self) -> PredictionError:
        """Seconds predicted and measured."""
        row = self.measured
        assert row.seconds is not None
        return PredictionError(row.id, self.time.seconds, row.seconds, row.problem, row.step.layout_text, row.quality)


def step_times(hardware: MeasuredHardware) -> StepTimes:
    """The predictor for the hardware of a row."""
    fabric = fabric_of_row(hardware)
    return StepTimes(rates_of(find_planned_device(hardware.device)), fabric.devices_per_host, VendorCosts(fabric))


def fabric_of_row(hardware: MeasuredHardware) -> FabricSpec:
    """The links of the hardware of a row."""
    device = find_planned_device(hardware.device)
    assert device.link_Bps is not None
    inside = hardware.inside_Bps or device.link_Bps.value
    between = hardware.between_Bps or (50e9 if device.generation in _FAST_NIC_GENERATIONS else 25e9)
    reach = min(_RACK, hardware.devices) if device.name in ("GB200", "GB300") else hardware.devices_per_host
    return fabric_of_device(device.name, reach, intra_Bps=inside, inter_Bps=between)


def predict_rows(rows: Sequence[MeasuredStep]) -> list[PredictedStep]:
    """Predictions of all rows with a measured time."""
    predicted = []
    for row in rows:
        if row.seconds is None:
            continue
        try:
            predicted.append(PredictedStep(row, step_times(row.hardware).predict(row.step)))
        except InputError as error:
            raise InputError(f"row {row.id}: {error}") from error
    return predicted


def time_report(predicted: Sequence[PredictedStep]) -> dict[str, Any]:
    """Errors of times: of rows of quality A and B together, and of each quality."""
    gated = [each for each in predicted if each.measured.quality in ("A", "B")] or list(predicted)
    comparisons = [each.comparison for each in gated]
    summary: dict[str, Any] = error_summary(comparisons) | {"spearman": _spearman_within_devices(gated)}
    summary |= ranking_summary(comparisons)
    by_quality = defaultdict[str, list[PredictionError]](list)
    for each in predicted:
        by_quality[each.measured.quality].append(each.comparison)
    return summary | {"quality": {name: error_summary(rows) for name, rows in sorted(by_quality.items())}}


def errors_by(predicted: Sequence[PredictedStep], key: str) -> Mapping[str, dict[str, Any]]:
    """Errors by the source, the device or the framework of the rows."""
    groups = defaultdict[str, list[PredictionError]](list)
    for each in predicted:
        row = each.measured
        name = {"source": row.source, "device": row.hardware.device, "software": row.step.stack.name}[key]
        groups[name].append(each.comparison)
    return {name: error_summary(rows) for name, rows in sorted(groups.items())}


def _spearman_within_devices(predicted: Sequence[PredictedStep]) -> float | None:
    """The rank correlation of tokens/s for each device, weighted by rows."""
    groups = defaultdict[str, list[tuple[float, float]]](list)
    for each in predicted:
        row = each.measured
        if row.seconds is None:
            continue
        tokens = row.step.tokens / row.hardware.devices
        groups[row.hardware.device].append((tokens / each.time.seconds, tokens / row.seconds))
    values = [(len(pairs), spearman(*zip(*pairs, strict=True))) for pairs in groups.values()]
    known = [(count, value) for count, value in values if value is not None]
    return sum(count * value for count, value in known) / sum(count for count, _ in known) if known else None


def memory_comparison(row: MeasuredStep) -> PredictionError | None:
    """Predicted and published bytes of a row, of the kind that it publishes."""
    if row.memory_bytes is None:
        return None
    memory = estimate_memory(row.step).on_device(find_planned_device(row.hardware.device).usable_bytes)
    return PredictionError(row.id, _published_kind(row, memory), row.memory_bytes, quality=row.quality)


def _published_kind(row: MeasuredStep, memory: PlannedMemory) -> float:
    if row.memory_kind == "allocated last":
        return memory.ranks[-1].allocated
    worst = memory.worst
    return {"allocated": worst.allocated, "reserved": worst.reserved, "outside": worst.outside}[row.memory_kind]


def fit_error(row: MeasuredStep) -> str | None:
    """Why the step is predicted not to fit on its device, or None."""
    device = find_planned_device(row.hardware.device)
    return fits(estimate_memory(row.step), device.usable_bytes)


def memory_report(rows: Sequence[MeasuredStep]) -> dict[str, Any]:
    """Errors of memory: of quality A, and of each quality."""
    comparisons = [each for each in map(memory_comparison, rows) if each is not None]
    gated = [each for each in comparisons if each.quality == "A"] or comparisons
    qualities = sorted({each.quality for each in comparisons})
    by_quality = {name: error_summary([e for e in comparisons if e.quality == name]) for name in qualities}
    return error_summary(gated) | {"quality": by_quality}


def fit_report(rows: Sequence[MeasuredStep]) -> dict[str, Any]:
    """The counts of right and wrong predictions of whether a step fits, and the rows of wrong ones."""
    wrong = [row.id for row in rows if (fit_error(row) is not None) != (row.outcome == "OOM")]
    missed = [row.id for row in rows if row.outcome == "OOM" and row.id in wrong]
    return {"right": len(rows) - len(wrong), "wrong": len(wrong), "rows": wrong, "missed_out_of_memory": missed}
