"""Predictions of published memory, and of whether a step fits."""

from collections.abc import Sequence
from typing import Any

from motet.cluster.device_specs import find_planned_device
from motet.plan.memory.rank_memory import PlannedMemory, fits
from motet.plan.memory.step_memory import estimate_memory
from motet.plan.validation.error_statistics import PredictionError, error_summary
from motet.plan.validation.step_rows import MeasuredStep


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
    """How often it is predicted correctly whether a step fits; and the rows of wrong predictions."""
    wrong = [row.id for row in rows if (fit_error(row) is not None) != (row.outcome == "OOM")]
    missed = [row.id for row in rows if row.outcome == "OOM" and row.id in wrong]
    return {"right": len(rows) - len(wrong), "wrong": len(wrong), "rows": wrong, "missed_out_of_memory": missed}
