"""The output of `motet plan validate`: the errors of predictions of published measurements.

The output of `motet plan calibrate`: constants, and the errors of rows that they were not fitted on.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from motet.cli.output import log, print_lines
from motet.core.errors import check_input
from motet.core.trace import log_if_slow
from motet.monitor.stdout_stderr import print_json
from motet.plan.validation.calibration import (
    CONSTANTS,
    UNCALIBRATED,
    errors_of,
    held_out_report,
    small_sample_report,
)
from motet.plan.validation.predictions import (
    PredictedStep,
    error_summary,
    errors_by,
    fit_report,
    memory_comparison,
    memory_report,
    predict_rows,
    time_report,
)
from motet.plan.validation.step_rows import MeasuredStep, SkippedRow, read_measured_steps


def validate_plan(path: Path, *, json: bool, by: str) -> None:
    """Predict all rows of a file, and print the errors and the rows that cannot be read."""
    rows, skipped = read_measured_steps(path)
    check_input(
        any(row.seconds or row.memory_bytes or row.outcome == "OOM" for row in rows),
        f"{path} has no row with step_time_s, peak_memory_bytes or the outcome OOM; give at least one",
    )
    with log_if_slow(log, f"predicting {len(rows)} steps ..."):
        predicted = predict_rows(rows)
    report = validation_report(rows, predicted) | {"skipped": [each._asdict() for each in skipped]}
    log_skipped_rows(path, skipped)
    if json:
        print_json(report)
    else:
        print_lines(*validation_lines(report, predicted, by), *_skipped_lines(rows, skipped))


def _skipped_lines(rows: Sequence[MeasuredStep], skipped: Sequence[SkippedRow]) -> Iterator[str]:
    if skipped:
        yield f"Left out: {len(skipped)} of {len(rows) + len(skipped)} rows, whose reasons are on stderr"


def log_skipped_rows(path: Path, skipped: Sequence[SkippedRow]) -> None:
    """Log the rows of a file that are left out, with the reasons."""
    for row in skipped:
        log(f"{path}, line {row.line} is left out: {row.reason}")


def validation_report(rows: Sequence[MeasuredStep], predicted: Sequence[PredictedStep]) -> dict[str, Any]:
    """The errors of predictions, and those of each row."""
    has_memory = any(row.outcome == "OOM" or row.memory_bytes for row in rows)
    return {
        "time": time_report(predicted) if predicted else error_summary([]),
        "memory": memory_report(rows),
        "fit": fit_report(rows) if has_memory else {"right": 0, "wrong": 0},
        "rows": [*_row_reports(rows, predicted)],
    }


def _row_reports(rows: Sequence[MeasuredStep], predicted: Sequence[PredictedStep]) -> Iterator[dict[str, Any]]:
    times = {id(each.measured): each for each in predicted}
    for row in rows:
        memory, time = memory_comparison(row), times.get(id(row))
        yield {
            "id": row.id,
            "source": row.source,
            "model": row.model,
            "device": row.hardware.device,
            "gpus": row.hardware.devices,
            "quality": row.quality,
            "software": row.step.stack.name,
            "layout": str(row.step.layout),
            "outcome": row.outcome,
            "step_time_s": time and time.time.seconds,
            "measured_step_time_s": row.seconds,
            "time_error": time and time.comparison.error,
            "time_s": time and dict(time.time.parts),
            "memory_bytes": memory and memory.predicted,
            "measured_memory_bytes": row.memory_bytes,
            "memory_error": memory and memory.error,
        }


def validation_lines(report: Mapping[str, Any], predicted: Sequence[PredictedStep], by: str) -> Iterator[str]:
    """The report for people."""
    time, memory, fit = report["time"], report["memory"], report["fit"]
    if time["rows"]:
        are_good = any(name in ("A", "B") for name in time["quality"])
        yield f"Step time, {'quality A and B' if are_good else 'all qualities'}:{error_words(time)}"
        for name, errors in time["quality"].items():
            yield f"  quality {name or '?'}:{error_words(errors)}"
        if time["spearman"] is not None:
            yield f"  rank correlation of tokens/s within a device: {time['spearman']:.3f}"
        if time["problems"]:
            pairs = f"{time['pairs_right']:.1%} of {time['pairs']} pairs in the right order" if time["pairs"] else ""
            text = f"{time['problems']} problems with several layouts: regret {time['regret']:.2%}"
            yield f"  {text}, {pairs or 'no pairs that differ by over 5 %'}"
        yield f"  by {by}:"
        for name, errors in errors_by(predicted, by).items():
            yield f"    {name[:90]}:{error_words(errors)}"
    if memory["rows"]:
        yield f"Memory, {'quality A' if 'A' in memory['quality'] else 'all qualities'}:{error_words(memory)}"
        for name, errors in memory["quality"].items():
            yield f"  quality {name}:{error_words(errors)}"
    if fit["right"] + fit["wrong"]:
        wrong = f" (wrong: {', '.join(fit['rows'])})" if fit["rows"] else ""
        yield f"Fits or not: {fit['right']} right, {fit['wrong']} wrong{wrong}"


def error_words(errors: Mapping[str, Any]) -> str:
    """The errors as the end of a line."""
    if not errors["rows"]:
        return " no rows"
    words = f"mean {errors['mape']:.1%}, median {errors['median']:.1%}, p90 {errors['p90']:.1%}"
    return f" {errors['rows']} rows, error {words}, largest {errors['max']:.1%}"


def calibrate_plan(path: Path, *, hold_out: str, share: float | None, json: bool) -> None:
    """Print the factors of the constants and the errors."""
    rows, skipped = read_measured_steps(path)
    log_skipped_rows(path, skipped)
    check_input(share is None or 0 < share < 1, f"--share {share}: give a number above 0 and below 1, such as 0.05")
    left_out = [*_skipped_lines(rows, skipped)]
    rows = [row for row in rows if row.seconds]
    with log_if_slow(log, f"fitting {len(CONSTANTS)} constants to {len(rows)} steps ..."):
        report: dict[str, Any] = {"uncalibrated": error_summary(errors_of(UNCALIBRATED, rows))}
        report |= held_out_report(rows, hold_out) if share is None else small_sample_report(rows, share)
    if json:
        print_json(report)
    else:
        print_lines(*_calibration_lines(report), *left_out)


def _calibration_lines(report: Mapping[str, Any]) -> Iterator[str]:
    yield f"without calibration:{error_words(report['uncalibrated'])}"
    if "fitted_on" in report:
        yield f"fitted on {report['fitted_on']} rows, all others:{error_words(report['held_out'])}"
    else:
        yield f"each group left out in turn:{error_words(report['held_out'])}"
        yield from (f"  {name}:{error_words(errors)}" for name, errors in report["groups"].items())
        yield f"fitted on all rows:{error_words(report['fitted'])}"
    yield "factors on the tables:"
    yield from (f"  {name} {factor:.3g}: {CONSTANTS[name]}" for name, factor in report["factors"].items())
