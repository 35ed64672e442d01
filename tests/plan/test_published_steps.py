"""Predictions held to published measurements, where these are at hand."""

from pathlib import Path

import pytest
from planner.convert import converted_rows, write_rows
from planner.published_files import read_published_file

from motet.plan.validation.expected_errors import errors_on_device
from motet.plan.validation.predictions import (
    PredictionError,
    fit_report,
    memory_report,
    predict_rows,
    quantile,
    ranking_summary,
    spearman,
    time_report,
)
from motet.plan.validation.step_rows import NEEDED_COLUMNS, read_measured_steps

OWN_FILE = Path(__file__).parents[2] / "benchmarks/planner/published_steps.csv"
FOLDER = Path(__file__).parents[3] / "shared" / "validation"
needs_files = pytest.mark.skipif(not FOLDER.is_dir(), reason=f"no published measurements in {FOLDER}")


@needs_files
def test_steps() -> None:
    rows = read_published_file(FOLDER / "steps.csv").rows
    report = time_report(predict_rows(rows))
    assert report["quality"]["A"]["mape"] < 0.1 and report["mape"] < 0.1
    assert report["spearman"] > 0.95 and report["regret"] < 0.03
    assert memory_report(rows)["mape"] < 0.08
    fit = fit_report(rows)
    assert fit["wrong"] <= 8 and len(fit["missed_out_of_memory"]) <= 1


@needs_files
def test_memory_of_small_models() -> None:
    report = memory_report(read_published_file(FOLDER / "memory_small_models.csv").rows)
    assert report["rows"] == 94 and report["mape"] < 0.1


def test_the_steps_that_the_project_has() -> None:
    rows, skipped = read_measured_steps(OWN_FILE)
    assert not skipped
    report = time_report(predict_rows(rows))
    assert report["rows"] == 419 and report["mape"] < 0.055 and report["quality"]["A"]["mape"] < 0.035
    assert report["spearman"] > 0.97 and report["regret"] < 0.02 and report["pairs_right"] > 0.75
    assert memory_report(rows)["quality"]["B"]["mape"] < 0.05 and memory_report(rows)["quality"]["A"]["mape"] < 0.04
    # What these recompute or offload was not published
    unknown = {row.id for row in rows if row.model == "LLAMA3_70B" and row.step.layout.zero == 3}
    wrong = set(fit_report(rows)["rows"]) - unknown
    assert len(wrong) <= 5 and len(rows) == 421
    assert all("GPT OSS" in row.model for row in rows if row.id in wrong)


@needs_files
def test_published_rows_are_expressed_in_the_columns_of_the_planner(tmp_path: Path) -> None:
    """All but one, whose recomputation is no word of a layout; the predictions are those of the published columns."""
    rows, skipped = converted_rows(FOLDER / "steps.csv")
    assert len(rows) == 159 and all(set(NEEDED_COLUMNS) <= row.keys() for row in rows)
    ((line, reason),) = skipped
    assert line == 161 and reason.startswith("row dsv3-001: layout 'dp=128 zero=1 pp=16 chunks=2")
    path = tmp_path / "rows.csv"
    with path.open("w", newline="") as file:
        write_rows(rows, file)
    own, published = read_measured_steps(path)[0], read_published_file(FOLDER / "steps.csv").rows
    times = [[each.time.seconds for each in predict_rows(steps)] for steps in (own, published[:-1])]
    assert times[0] == times[1] and own[0].hardware == published[0].hardware


def test_errors_are_those_of_steps_like_a_plan() -> None:
    dense = [errors_on_device("GB200", count, has_experts=False)[0] for count in (8, 64, 1024)]
    assert None not in dense and len(set(dense)) == 3  # Of one host, of up to 256, and of all
    assert errors_on_device("GB200", 64, has_experts=True)[0] not in (*dense, None)
    assert errors_on_device("B300", 64, has_experts=False) == (None, None)
    assert errors_on_device("A100-SXM4-40GB", 8, has_experts=True)[0] is None
    memory_errors = [errors_on_device("A100-SXM4-80GB", 8, has_experts=experts)[1] for experts in (False, True)]
    assert memory_errors[0] == memory_errors[1] is not None


def test_statistics() -> None:
    assert spearman([1, 2, 3, 4], [10, 20, 30, 40]) == 1 and spearman([1, 2, 3], [3, 2, 1]) == -1
    assert spearman([1, 2], [1, 2]) is None and spearman([1, 1, 1], [1, 2, 3]) is None
    assert quantile([1, 2, 3, 4, 5], 0.5) == 3 and quantile([], 0.5) is None and quantile([1, 2], 0.9) == 1.9
    rows = [
        PredictionError("a", 1.0, 2.0, "p"),
        PredictionError("b", 2.0, 1.6, "p"),
        PredictionError("c", 3.0, 3.0, "p"),
        PredictionError("alone", 9.0, 9.0, "q"),
    ]
    summary = ranking_summary(rows)
    assert summary["problems"] == 1 and summary["regret"] == pytest.approx(2.0 / 1.6 - 1)
    assert summary["pairs"] == 3 and summary["pairs_right"] == pytest.approx(2 / 3)
