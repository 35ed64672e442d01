"""The output of `motet plan calibrate`: constants, and the errors of rows that they were not fitted on."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from motet.cli.output import print_lines
from motet.cli.plan.validate_report import error_words, log_skipped_rows
from motet.core.errors import check_input
from motet.monitor.stdout_stderr import print_json
from motet.plan.validation.calibration import (
    CONSTANTS,
    UNCALIBRATED,
    errors_of,
    held_out_report,
    small_sample_report,
)
from motet.plan.validation.error_statistics import error_summary
from motet.plan.validation.step_rows import read_measured_steps


def calibrate_plan(path: Path, *, hold_out: str, share: float | None, json: bool) -> None:
    """Print the factors of the constants and the errors."""
    rows, skipped = read_measured_steps(path)
    log_skipped_rows(path, skipped)
    check_input(share is None or 0 < share < 1, f"--share {share}: give a number above 0 and below 1, such as 0.05")
    rows = [row for row in rows if row.seconds]
    report: dict[str, Any] = {"uncalibrated": error_summary(errors_of(UNCALIBRATED, rows))}
    if share is not None:
        report |= small_sample_report(rows, share)
    else:
        report |= held_out_report(rows, hold_out)
    if json:
        print_json(report)
    else:
        print_lines(*_lines(report))


def _lines(report: Mapping[str, Any]) -> Iterator[str]:
    yield f"without calibration:{error_words(report['uncalibrated'])}"
    if "fitted_on" in report:
        yield f"fitted on {report['fitted_on']} rows, all others:{error_words(report['held_out'])}"
    else:
        yield f"each group left out in turn:{error_words(report['held_out'])}"
        yield from (f"  {name}:{error_words(errors)}" for name, errors in report["groups"].items())
        yield f"fitted on all rows:{error_words(report['fitted'])}"
    yield "factors on the tables:"
    yield from (f"  {name} {factor:.3g}: {CONSTANTS[name]}" for name, factor in report["factors"].items())
