"""Files of measured steps as people write them: encodings, columns, and rows that contradict themselves."""

import csv
import io
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from planner.published_files import read_published_file
from test_plan_command import ROW, refusal, run

from motet.collectives.cost.published_curves import read_rows
from motet.core.errors import InputError
from motet.plan.memory.step_memory import estimate_memory
from motet.plan.validation.predictions import fabric_of_row, memory_comparison, predict_rows, time_report
from motet.plan.validation.step_rows import NEEDED_COLUMNS, MeasuredStep, read_measured_steps

SINGLE = {
    "# GPUs": "8",
    "global batch": "32",
    "micro batch": "4",
    "hidden size": "1024",
    "attention heads": "16",
    "# layers": "24",
    "sequence length": "1024",
    "tensor parallelism": "2",
    "data parallelism": "2",
    "pipeline parallelism": "2",
    "iteration time (ms)": "219.7",
}
CURVE = {
    "id": "x",
    "source": "somebody",
    "collective": "all_reduce",
    "gpu": "A100-SXM4-80GB",
    "nodes": "1",
    "gpus_per_node": "8",
    "ranks": "8",
    "intra_link": "NVLink3",
    "inter_link": "",
    "nominal_inter_GBps_per_gpu": "",
    "algo": "",
    "bytes": "67108864",
    "time_us": "500",
    "busbw_GBps": "230",
    "quality": "A",
}


def text_of(*rows: Mapping[str, str], quotes_all: bool = False) -> str:
    file = io.StringIO(newline="")
    writer = csv.DictWriter(file, list(rows[0]), restval="", quoting=csv.QUOTE_ALL if quotes_all else csv.QUOTE_MINIMAL)
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def errors_of(path: Path) -> dict[str, object]:
    report: dict[str, object] = json.loads(run("plan", "validate", str(path), "--json").output)["time"]
    return report


def test_encodings_line_ends_quotes_and_order_do_not_matter(tmp_path: Path) -> None:
    path, plain = tmp_path / "steps.csv", text_of(ROW)
    path.write_text(plain, newline="")
    expected = errors_of(path)
    variants = (
        "\ufeff" + plain,
        "\ufeff" + text_of(ROW, quotes_all=True),
        plain.replace("\r\n", "\n"),
        plain.replace("\r\n", "\n\n"),
        text_of(dict(reversed(ROW.items())) | {"comment": "a, b", "model": "llama"}),
        plain.replace(",", " , "),
    )
    for text in variants:
        path.write_text(text, newline="")
        assert errors_of(path) == expected, text[:60]


def test_columns_that_may_be_empty_may_be_missing(tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    sizes = [name for name in ROW if name.startswith("model.") and name != "model.kv_heads"]
    path.write_text(text_of({name: ROW[name] for name in dict.fromkeys((*NEEDED_COLUMNS, *sizes, "step_time_s"))}))
    assert errors_of(path)["rows"] == 1
    assert "Step time, all qualities: 1 rows" in run("plan", "validate", str(path)).output
    for name in NEEDED_COLUMNS:
        path.write_text(text_of({key: value for key, value in ROW.items() if key != name}))
        assert f"has no column {name}; its columns are" in refusal("plan", "validate", str(path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step_time_s": "0"}, "row x-1: step_time_s = 0 must be at least 1e-09"),
        ({"peak_memory_bytes": "0"}, "row x-1: peak_memory_bytes = 0 must be at least 1e-09"),
        ({"memory_kind": "swapped"}, "row x-1: memory_kind = 'swapped' must be"),
        ({"layout": "dp=64 tp=2"}, "dp = 64 x tp = 2 x cp = 1 x pp = 1 = 128, but --gpus 64"),
        ({"model.layers": "1000000"}, "row x-1: model.layers = 1000000 must be at most 1024"),
        ({"model.heads": "3"}, "row x-1: model.hidden = 4096 is not a multiple of model.heads = 3"),
        ({"id": "", "model.heads": "x"}, "row 2: model.heads = 'x' must be a whole number"),
        ({"model.family": "module"}, "row x-1: model.family = 'module' must be one of"),
        ({"step_time_s": ""}, "has no row with step_time_s, peak_memory_bytes or the outcome OOM"),
    ],
)
def test_rows_that_contradict_themselves(tmp_path: Path, changes: dict[str, str], message: str) -> None:
    path = tmp_path / "steps.csv"
    path.write_text(text_of(ROW | changes))
    text = refusal("plan", "validate", str(path))
    assert message in text and "\n" not in text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layout": "pp=64"}, "row x-1: 64 stages cannot share 32 blocks; use 32 stages at most"),
        ({"model.frozen": '["head.*"]'}, "row x-1: model.frozen: 'head.*' matches no parameter"),
        ({"model.adapters.targets": '["*.gate"]'}, "row x-1: model.adapters.targets: '*.gate' matches no linear layer"),
        ({"layout": "data=parameter_server"}, "row x-1: layout 'data=parameter_server': data cannot be planned yet"),
    ],
)
def test_a_row_that_cannot_be_expressed_is_left_out_and_counted(
    tmp_path: Path, changes: dict[str, str], message: str
) -> None:
    path = tmp_path / "steps.csv"
    path.write_text(text_of({**dict.fromkeys(changes, ""), **ROW, "id": "good"}, ROW | changes))
    result = run("plan", "validate", str(path))
    assert "Step time, quality A and B: 1 rows" in result.stdout
    assert result.stdout.splitlines()[-1] == "Left out: 1 of 2 rows, whose reasons are on stderr"
    assert f"line 3 is left out: {message}" in result.stderr
    (skipped,) = json.loads(run("plan", "validate", str(path), "--json").stdout)["skipped"]
    assert skipped["line"] == 3 and skipped["reason"].startswith(message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden size": "8"}, "row 2: model.hidden = 8 is not a multiple of model.heads = 16"),
        ({"iteration time (ms)": "0"}, "row 2: iteration time (ms) = 0 is not a measurement"),
        ({"attention heads": ""}, "row 2: column attention heads is empty"),
    ],
)
def test_rows_of_one_host_that_cannot_be(tmp_path: Path, changes: dict[str, str], message: str) -> None:
    path = tmp_path / "single.csv"
    path.write_text(text_of(SINGLE | changes))
    (row,) = read_published_file(path).skipped
    assert (row.line, row.reason[: len(message)]) == (2, message)


def test_a_row_of_one_host_is_a_gpt_with_recomputation(tmp_path: Path) -> None:
    """Blocks of 12 h^2 weights and 13 h of biases and norms, as the models of this file have them."""
    path, layers, hidden = tmp_path / "rows.csv", 24, 1024
    path.write_text(text_of(SINGLE))
    ((row,), _, _) = read_published_file(path)
    vocabulary = 50257 + (-50257) % (128 * 8)
    numel = layers * (12 * hidden**2 + 13 * hidden) + (vocabulary + 1024) * hidden + 2 * hidden
    assert row.step.spec.parameter_count == numel
    layout = row.step.layout
    assert (layout.dp, layout.tp, layout.pp, layout.microbatches, row.step.recompute) == (2, 2, 2, 4, "full")
    assert row.seconds == pytest.approx(0.2197)


def test_files_that_are_no_table(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    cases = (
        (b"a,b\n1,2,3\n", "line 2: 3 values for 2 columns; quote values with commas"),
        (b"a,a\n1,2\n", "has the column a more than once"),
        (b"a\n\xe9\n", "is not UTF-8 text: it has the byte 0xe9; save it as UTF-8"),
        (b"a,b\n", "has no rows"),
    )
    for text, message in cases:
        path.write_bytes(text)
        with pytest.raises(InputError, match=message):
            read_rows(path)
    path.write_bytes(b"a,b\n1,2,,\n")
    assert read_rows(path) == [{"a": "1", "b": "2", "id": "2"}]


def test_rows_with_the_same_id_keep_their_own_predictions(tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    other = ROW | {"model.layers": "16"}
    path.write_text(text_of(ROW, other))
    rows = json.loads(run("plan", "validate", str(path), "--json").output)["rows"]
    assert rows[0]["step_time_s"] > 1.5 * rows[1]["step_time_s"]
    path.write_text(text_of(*[ROW, other] * 3))
    report = json.loads(run("plan", "calibrate", str(path), "--share", "0.5", "--json").output)
    assert report["fitted_on"] + report["held_out"]["rows"] == 6
    path.write_text(text_of(ROW, other))
    for words in ((), ("--share", "0.5")):
        assert "2 rows with a time are too few" in refusal("plan", "calibrate", str(path), *words)


def test_layouts_that_take_the_same_time_are_no_pairs(tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    path.write_text(text_of(ROW, ROW | {"id": "x-2", "layout": "tp=4 zero=1 microbatches=8"}))
    assert "no pairs that differ by over 5 %" in run("plan", "validate", str(path)).output


def test_curves_that_cannot_be_predicted(tmp_path: Path) -> None:
    path = tmp_path / "curves.csv"
    cases = (
        (CURVE | {"time_us": "0"}, "has no row that can be predicted (1 with a time or a size of 0)"),
        (CURVE | {"gpus_per_node": "1", "ranks": "1"}, "row x: ranks = 1 exchange nothing; give 2 or more"),
    )
    for row, message in cases:
        path.write_text(text_of(row))
        assert message in refusal("collectives", "validate", str(path))
    path.write_text(text_of(CURVE | {"quality": "B"}))
    assert "no row of quality A, so all rows: median error" in run("collectives", "validate", str(path)).output


# --- reports ---------------------------------------------------------------------------------------
def measured_steps(folder: Path, *changes: Mapping[str, str]) -> list[MeasuredStep]:
    path = folder / "steps.csv"
    path.write_text(text_of(*({**ROW, "id": f"x-{n}", **change} for n, change in enumerate(changes))), encoding="utf-8")
    rows, skipped = read_measured_steps(path)
    assert not skipped
    return rows


def test_rank_correlations_are_weighted_by_rows_and_rows_of_quality_c_do_not_count(tmp_path: Path) -> None:
    """Three rows of a device of which two neighbours are exchanged, four of another in the opposite order."""
    layouts = ["tp=1", "tp=2", "tp=4", "tp=8"]
    devices = ["H100-SXM-80GB"] * 3 + ["A100-SXM4-80GB"] * 4
    changes = [
        {"device": device, "layout": layout} for device, layout in zip(devices, layouts[:3] + layouts, strict=True)
    ]
    predicted = predict_rows(measured_steps(tmp_path, *changes, {"quality": "C", "step_time_s": "1000"}))
    seconds = [each.time.seconds for each in predicted]
    assert len({round(each, 6) for each in seconds}) > 4
    first, second, third = sorted(range(3), key=seconds.__getitem__)
    exchanged = {first: seconds[first], second: seconds[third], third: seconds[second]}
    measured = [*(exchanged[n] for n in range(3)), *(1 / each for each in seconds[3:7]), 1000.0]
    changed = [replace(p, measured=replace(p.measured, seconds=s)) for p, s in zip(predicted, measured, strict=True)]
    report = time_report(changed)
    assert report["spearman"] == pytest.approx((3 * 0.5 - 4) / 7) and report["rows"] == 7
    assert {quality: each["rows"] for quality, each in report["quality"].items()} == {"A": 7, "C": 1}


@pytest.mark.parametrize(("device", "between_bps"), [("H100-SXM-80GB", 50e9), ("A100-SXM4-80GB", 25e9)])
def test_links_that_a_row_does_not_name_are_those_of_the_time_of_its_device(
    tmp_path: Path, device: str, between_bps: float
) -> None:
    (row,) = measured_steps(tmp_path, {"device": device})
    assert row.hardware.between_Bps is None
    named = replace(row.hardware, between_Bps=between_bps)
    assert fabric_of_row(row.hardware) == fabric_of_row(named) != fabric_of_row(replace(named, between_Bps=1e9))


def test_the_memory_of_the_last_rank_is_compared_where_a_row_publishes_it(tmp_path: Path) -> None:
    change = {"layout": "pp=4 microbatches=8", "peak_memory_bytes": "4e10", "memory_kind": "allocated last"}
    (row,) = measured_steps(tmp_path, change)
    compared, ranks = memory_comparison(row), estimate_memory(row.step).ranks
    assert compared is not None and ranks[-1].allocated not in {each.allocated for each in ranks[:-1]}
    assert compared.predicted == ranks[-1].allocated and compared.measured == 4e10
