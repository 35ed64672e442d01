"""The output of `motet plan validate`: how far predictions are from published measurements."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from motet.cli.output import print_lines
from motet.collectives.cost.csv_rows import read_rows
from motet.core.errors import InputError, check_input
from motet.monitor.stdout_stderr import print_json
from motet.plan.validation.error_statistics import error_summary
from motet.plan.validation.memory_predictions import fit_report, memory_comparison, memory_report
from motet.plan.validation.memory_rows import COLUMNS as MEMORY_COLUMNS
from motet.plan.validation.memory_rows import read_memory_rows
from motet.plan.validation.predictions import PredictedStep, errors_by, predict_rows, time_report
from motet.plan.validation.single_node_rows import COLUMNS as SINGLE_NODE_COLUMNS
from motet.plan.validation.single_node_rows import read_single_node_steps
from motet.plan.validation.step_rows import NEEDED_STEP_COLUMNS, MeasuredStep, read_measured_steps


def validate_plan(path: Path, *, json: bool, by: str) -> None:
    """Predict all rows of a file, and print the errors."""
    rows, is_about_memory = read_steps(path)
    predicted = [] if is_about_memory else predict_rows(rows)
    check_input(
        any(row.seconds or row.memory_bytes or row.outcome == "OOM" for row in rows),
        f"{path} has no row with a measured time, peak memory or outcome OOM; give at least one",
    )
    report: dict[str, Any] = {
        "time": time_report(predicted) if predicted else error_summary([]),
        "memory": memory_report(rows),
        "fit": fit_report(rows) if not is_about_memory and _has_layout_columns(rows) else {"right": 0, "wrong": 0},
        "rows": [*_row_reports(rows, predicted)],
    }
    if json:
        print_json(report)
        return
    print_lines(*_lines(report, predicted, by))


def read_steps(path: Path) -> tuple[list[MeasuredStep], bool]:
    """The rows of one of three kinds of files, and whether they are about memory alone."""
    columns = set(read_rows(path)[0])
    kinds = ((NEEDED_STEP_COLUMNS, read_measured_steps), (SINGLE_NODE_COLUMNS, read_single_node_steps))
    for needed, read in kinds:
        if set(needed) <= columns:
            return read(path), False
    if set(MEMORY_COLUMNS) <= columns:
        return read_memory_rows(path), True
    closest = max(
        (NEEDED_STEP_COLUMNS, SINGLE_NODE_COLUMNS, MEMORY_COLUMNS),
        key=lambda names: len(columns & set(names)) / len(names),
    )
    missing = [name for name in closest if name not in columns]
    raise InputError(
        f"{path} has none of the three sets of columns that are known; of the most similar one it has no "
        f"{', '.join(missing[:6])}; docs/reference/planning-validation.md lists them"
    )


def _has_layout_columns(rows: Sequence[MeasuredStep]) -> bool:
    return any(row.outcome == "OOM" or row.memory_bytes for row in rows)


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
            "software": row.software,
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


def _lines(report: Mapping[str, Any], predicted: Sequence[PredictedStep], by: str) -> Iterator[str]:
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
