"""Predictions of published steps, and the report of their errors."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from motet.cluster.device_specs import find_planned_device
from motet.collectives.cost.vendor_library import FabricSpec, VendorCosts, fabric_of_device
from motet.core.errors import InputError
from motet.plan.device_rates import rates_of
from motet.plan.time.step_time import StepTime, StepTimes
from motet.plan.validation.error_statistics import PredictionError, error_summary, ranking_summary, spearman
from motet.plan.validation.step_rows import MeasuredHardware, MeasuredStep

# Where a row does not say: a NIC for each device, faster ones for these generations
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
