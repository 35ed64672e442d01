"""`motet plan JOB` and `motet plan validate`: what they print, and what they refuse."""

import csv
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from motet.cli.main import app
from motet.cli.plan.plan_report import parse_tokens
from motet.cluster.cluster import cluster_presets
from motet.core.errors import InputError
from motet.plan.planned_cluster import load_planned_cluster
from motet.plan.validation.calibration import UNCALIBRATED, Calibration
from motet.plan.validation.expected_errors import errors_on_device
from motet.plan.validation.step_rows import read_measured_steps
from motet.train.job import load_job

SMALL = ("plan", "llama3-8b", "data.batch_sequences=64", "--cluster", "h100", "--gpus", "16")
SHORT = ("data.batch_sequences=16", "data.sequence_length=4096")
RANKED = ("plan", "llama3-8b", *SHORT, "--cluster", "h100", "--gpus", "8")  # Fewer layouts
ROW = {
    "id": "x-1",
    "source": "somebody",
    "name": "llama-8b",
    "model.layers": "32",
    "model.hidden": "4096",
    "model.heads": "32",
    "model.kv_heads": "8",
    "model.ffn_hidden": "14336",
    "model.vocab_size": "128256",
    "model.context": "8192",
    "data.sequence_length": "8192",
    "data.batch_sequences": "128",
    "precision.recipe": "bf16",
    "layout": "tp=2 zero=1 microbatches=4",
    "stack": "megatron",
    "device": "H100-SXM-80GB",
    "gpus": "64",
    "gpus_per_host": "8",
    "step_time_s": "5.0",
    "quality": "A",
    "outcome": "ok",
}


def run(*words: str):
    return CliRunner().invoke(app, list(words))


def refusal(*words: str) -> str:
    result = run(*words)
    assert isinstance(result.exception, InputError), (result.exception, result.output)
    return str(result.exception)


@pytest.fixture(scope="module")
def ranking() -> dict[str, Any]:
    report: dict[str, Any] = json.loads(run(*RANKED, "--top", "40", "--rejected", "--tokens", "1T", "--json").stdout)
    return report


def test_the_ranking_as_json(ranking: dict[str, Any]) -> None:
    assert (ranking["cluster"], ranking["model"], ranking["gpus"]) == ("h100", "llama3-8b", 8)
    plans = ranking["plans"]
    kinds = [tuple(re.findall(r"(?:tp|pp|cp|ep|zero)=\d+", plan["layout"])) for plan in plans]
    assert len({*kinds}) == len(kinds) > 20 and all(plan["runs_today"] for plan in plans)
    others = [plan["step_time_s"] for plan in plans if not plan["equal"]]
    assert others == sorted(others) and max(p["step_time_s"] for p in plans if p["equal"]) < others[0]
    for plan in plans[:3]:
        assert plan["fits"] and plan["reason"] is None
        assert sum(plan["time_s"].values()) == pytest.approx(plan["step_time_s"])
        parts = sum(size for name, size in plan["memory_bytes"].items() if name != "total")
        assert parts == pytest.approx(plan["memory_bytes"]["total"])
        tokens = 16 * 4096 / plan["step_time_s"] / 8
        assert plan["tokens_per_s_per_gpu"] == pytest.approx(tokens) and 0.2 < plan["mfu"] < 0.7
        assert plan["gpu_hours"] == pytest.approx(1e12 / tokens / 3600)
        # 700 W and 3 USD for each hour of an H100
        assert plan["energy_kWh"] == pytest.approx(plan["gpu_hours"] * 0.7) and plan["usd"] == plan["gpu_hours"] * 3


def test_one_layout_that_does_not_fit_says_why() -> None:
    plan = json.loads(run(*SMALL, "--layout", "tp=1 microbatches=1", "--json").stdout)["plans"][0]
    assert not plan["fits"] and plan["reason"].startswith("stage 0: activations")
    assert plan["layout"].startswith("dp=16 zero=0")


def test_layouts_that_motet_trains_say_so() -> None:
    for words in ("zero=1 microbatches=4", "cp=2 microbatches=8", "cp=4 cp_kind=all-to-all zero=1", "pp=2 zero=1"):
        plan = json.loads(run(*SMALL, "--layout", words, "--json").stdout)["plans"][0]
        assert plan["runs_today"], words


def test_experts_are_planned_and_not_run_yet() -> None:
    words = ("plan", "mixtral-8x7b", "data.batch_sequences=16", "--cluster", "h100", "--gpus", "16")
    plan = json.loads(run(*words, "--layout", "zero=1 ep=8 microbatches=1", "--json").stdout)["plans"][0]
    assert not plan["runs_today"] and "ep=8" in plan["layout"]
    with_experts, dense = (errors_on_device("H100 SXM", 16, has_experts=answer)[0] for answer in (True, False))
    assert plan["step_time_error"] == with_experts is not None and with_experts != dense


def alone(plan: dict[str, Any]) -> dict[str, Any]:
    """The prediction without its place in a ranking."""
    return {name: value for name, value in plan.items() if name not in ("equal", "next_step_time_s")}


@pytest.mark.no_cover
def test_a_printed_layout_is_the_layout_that_it_names(ranking: dict[str, Any]) -> None:
    plans = ranking["plans"]
    for plan in [*plans[::8], *(plan for plan in plans if "chunks" in plan["layout"])][:8]:
        again = json.loads(run(*RANKED, "--tokens", "1T", "--layout", plan["layout"], "--json").stdout)["plans"][0]
        assert again == alone(plan)


def test_so_it_is_on_processors() -> None:
    words = ("plan", "tiny", "--cluster", "cpu", "--gpus", "4")
    for plan in json.loads(run(*words, "--top", "3", "--json").stdout)["plans"]:
        assert json.loads(run(*words, "--layout", plan["layout"], "--json").stdout)["plans"] == [alone(plan)]
    assert "layouts fit" in run(*words, "--top", "3").output


def test_a_config_of_hugging_face(tmp_path: Path) -> None:
    config = {"model_type": "llama", "num_hidden_layers": 4, "max_position_embeddings": 1024}
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ("plan", f"hf:{tmp_path}", "data.batch_sequences=16", "--cluster", "h100", "--gpus", "4", "--json")
    plan = json.loads(run(*words, "--layout", "zero=1").output)["plans"][0]
    assert plan["tokens_per_s_per_gpu"] * plan["step_time_s"] * 4 == pytest.approx(16 * 1024) and plan["runs_today"]


def test_chunks_without_a_pipeline_change_nothing() -> None:
    words = "zero=1 microbatches=1"
    plans = [
        json.loads(run(*SMALL, "--layout", words + more, "--json").stdout)["plans"][0]
        for more in ("", " chunks=4", " schedule=gpipe", " stages=0-15,16-31")
    ]
    assert all(plan == plans[0] for plan in plans)


def test_utilisation_is_that_of_the_dtype_of_products() -> None:
    """A device without products of float4 computes them as float8, whose peak is twice that of bfloat16."""
    words = (*SMALL, "--layout", "zero=1 microbatches=4", "--json")
    plain, narrow, narrower = (
        json.loads(run(*words, *more).stdout)["plans"][0]
        for more in ((), ("--matmul", "float8"), ("--matmul", "float4"))
    )
    assert narrow["mfu"] / plain["mfu"] == pytest.approx(plain["step_time_s"] / narrow["step_time_s"] / 2, rel=0.01)
    assert narrower["mfu"] * narrower["step_time_s"] == pytest.approx(narrow["mfu"] * narrow["step_time_s"])


def test_rejected_layouts_have_one_line_each(ranking: dict[str, Any]) -> None:
    reasons = {each["layout"]: each["reason"] for each in ranking["rejected"]}
    assert reasons["cp=8"].startswith("leaves a rank fewer") and all(reasons.values())
    shown = run(*RANKED, "--rejected").output
    assert all(f"{layout}: {reason}" in shown for layout, reason in reasons.items())


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("zero=3 shard_group=3", "shard_group = 3 does not divide 16 ranks"),
        ("pp=2 stages=0-3,4-7", "hold 8 blocks, but the model has 32"),
        ("ep=2", "leave ep out for a model without experts"),
        ("data=parameter_server", "data cannot be planned yet"),
        ("microbatches=3", "a global batch of 64 rows cannot be cut evenly"),
        ("foo=1", "unknown key 'foo'"),
    ],
)
def test_a_layout_that_is_impossible(layout: str, message: str) -> None:
    assert message in refusal(*SMALL, "--layout", layout)


@pytest.mark.no_cover
def test_no_torch_is_loaded() -> None:
    words = ["plan", "tiny", "--cluster", "h100", "--gpus", "4", "--top", "1"]
    code = (
        "import sys; from motet.cli.main import app\n"
        f"try: app({words!r})\nexcept SystemExit as end: assert not end.code, end.code\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0 and "layouts fit" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--gpus 0", "--gpus 0: give 1 or more"),
        ("--gpus 1000000", "--gpus 1000000 is more than the 131072 that a cluster may have"),
        (
            "--cluster cpu --gpus 16",
            "--gpus 16 needs 2 hosts, but cluster cpu has no section [between]; give 8 or fewer",
        ),
        ("--cluster tpu-v4 --gpus 100", "--gpus 100 is not a multiple of the 64 devices of a host of cluster tpu-v4"),
        ("--gpus 12", "--gpus 12 is not a multiple of the 8 devices of a host of cluster h100; give 8 or 16"),
        ("--cluster h10", "no cluster 'h10'"),
        ("--layout tp=3", "dp = 5 x tp = 3 x cp = 1 x pp = 1 = 15, but --gpus 16"),
        ("--layout dp=16,tp=1", "layout"),
        ("--layout recompute=some", "recompute = 'some' in a layout: use one of none, selective"),
        ("--tokens many", "--tokens 'many' is not a number of tokens; write it as 15.6T"),
        ("--stack nemo", "--stack 'nemo': use one of motet"),
        ("--stack motet-cpu", "--stack 'motet-cpu' is motet on processors, not on H100 SXM; leave it"),
        (
            "--stack motet-compiled --cluster cpu --gpus 8",
            "--stack 'motet-compiled' is motet on GPUs, not on CPU; leave",
        ),
        (
            "--stack motet-compiled run.compile=off",
            "--stack 'motet-compiled' does not go with run.compile = 'off'; leave",
        ),
        ("--top 0", "--top 0: give 1 or more"),
        (
            "--cluster v100 data.batch_sequences=8 --gpus 1",
            "llama3-8b fits nowhere on --gpus 1 of cluster v100; the nearest",
        ),
    ],
)
def test_bad_input(words: str, message: str) -> None:
    text = refusal(*SMALL, *words.split())
    assert message in text and "\n" not in text


def test_costs_whose_numbers_are_unknown_are_left_out() -> None:
    words = ("plan", "tiny", "--cluster", "tpu-v5p", "--gpus", "4", "--layout", "zero=1", "--tokens", "1T")
    plan = json.loads(run(*words, "--json").stdout)["plans"][0]
    assert plan["energy_kWh"] is None and plan["usd"] == pytest.approx(4.2 * plan["gpu_hours"])
    text = run(*words).output
    assert "MWh" not in text and "USD at 4.2 for each GPU-hour (assumed)" in text
    assert "MWh at 700 W for each device (datasheet)" in run(*SMALL, "--layout", "zero=1", "--tokens", "1T").output


@pytest.mark.parametrize("preset", cluster_presets())
def test_a_preset_plans_a_part_of_a_host_a_host_and_several(preset: str) -> None:
    per_host = load_planned_cluster(preset, 1).devices_per_host
    for size in {1, per_host} | (set() if preset in ("laptop", "cpu") else {3 * per_host}):
        assert load_planned_cluster(preset, size).devices == size
        batch = f"data.batch_sequences={size}"
        words = ("plan", "tiny", batch, "--cluster", preset, "--gpus", f"{size}", "--layout", f"dp={size} zero=1")
        assert json.loads(run(*words, "--json").stdout)["plans"][0]["fits"]


def test_a_torus_of_a_preset_grows() -> None:
    assert load_planned_cluster("tpu-v4", 3072).devices_per_host == 3072  # 12 x 16 x 16 chips
    assert load_planned_cluster("tpu-v5e", 512).devices_per_host == 256  # Slices that Ethernet joins


HOSTS = "hosts = 2\ndevices_per_host = 4\n"
INSIDE = '[inside]\nkind = "switch"\nalpha_s = 1e-6\nbandwidth_Bps = 450e9\n'
BETWEEN = '[between]\nkind = "switch"\nnics = 4\nalpha_s = 1e-6\nbandwidth_Bps = 50e9\n'
SHEET = "[datasheet]\nmemory_bytes = 40e9\nbandwidth_Bps = 2e12\npower_W = 500\nflops = { bfloat16 = 400e12 }\n"


def write_cluster(tmp_path: Path, device: str, *parts: str) -> str:
    path = tmp_path / "mine.toml"
    path.write_text(f'device = "{device}"\n{HOSTS}{"".join(parts or (INSIDE, BETWEEN))}')
    return str(path)


def test_a_cluster_file(tmp_path: Path) -> None:
    path = write_cluster(tmp_path, "H100-SXM5-80GB")
    assert load_planned_cluster(path, 8).devices_per_host == 4
    for wanted, message in ((16, "--gpus 16 is more than the 8 devices"), (6, "--gpus 6 is not a multiple of the 4")):
        with pytest.raises(InputError, match=message):
            load_planned_cluster(path, wanted)


def test_a_cluster_file_describes_a_device(tmp_path: Path) -> None:
    path = write_cluster(tmp_path, "X9000", SHEET, INSIDE, BETWEEN)
    words = (
        "plan",
        "tiny",
        "precision.recipe=bf16",
        "--cluster",
        path,
        "--gpus",
        "8",
        "--tokens",
        "1B",
        "--layout",
        "zero=1",
    )
    plan = json.loads(run(*words, "--json").stdout)["plans"][0]
    assert plan["energy_kWh"] == pytest.approx(0.5 * plan["gpu_hours"])
    assert plan["usd"] is None and plan["step_time_error"] is None and 0 < plan["mfu"] < 1
    assert "for X9000 with 36.9 GiB that a process can use (3% of it stay free), 4 on a host" in run(*words).output


@pytest.mark.parametrize(
    ("device", "parts", "message"),
    [
        ("H1000", (INSIDE, BETWEEN), "device 'H1000' is not in the table of devices"),
        ("", (INSIDE, BETWEEN), "device '' is not in the table of devices"),
        (
            "X9000",
            ("[datasheet]\nmemory_bytes = 1e11\n", INSIDE, BETWEEN),
            "does not give bandwidth_Bps, flops.bfloat16",
        ),
        ("H100", (INSIDE,), "has no section [between]; give 4 or fewer"),
        ("H100", (BETWEEN,), "inside is missing"),
        ("H100", (INSIDE.replace("450e9", "0"), BETWEEN), "inside.bandwidth_Bps.value = 0 must be at least 1.0"),
        ("H100", (INSIDE.replace("450e9", "-1"), BETWEEN), "inside.bandwidth_Bps.value = -1 must be at least 1.0"),
        ("H100", (INSIDE.replace("450e9", "1e30"), BETWEEN), "inside.bandwidth_Bps.value = 1e+30 must be at most"),
        ("H100", (INSIDE.replace("450e9", "1"), BETWEEN), "[inside] gives each device 1 byte/s, out of the range"),
        (
            "H100",
            (INSIDE, BETWEEN.replace("50e9", "1e13")),
            "[between] gives each device 1e+13 byte/s, out of the range",
        ),
        ("H100", (INSIDE, BETWEEN.replace("nics = 4", "nics = 3")), "nics = 3 cannot be shared evenly by 4 devices"),
        ("H100", (INSIDE + 'vendor = { link = "X" }\n', BETWEEN), "vendor.link = 'X' is not a class of links"),
        ("H100", (SHEET.replace("2e12", "2e8"), INSIDE, BETWEEN), "FLOP for each byte of memory"),
    ],
)
def test_a_wrong_cluster_file_is_one_sentence(
    tmp_path: Path, device: str, parts: tuple[str, ...], message: str
) -> None:
    with pytest.raises(InputError) as caught:
        load_planned_cluster(write_cluster(tmp_path, device, *parts), 8)
    text = str(caught.value)
    assert message in text and "mine.toml" in text and "\n" not in text


def test_numbers_of_tokens() -> None:
    assert [parse_tokens(text) for text in ("15.6T", "300B", "1e12", "5000")] == [15.6e12, 300e9, 1e12, 5000.0]


def write_rows(path: Path, *rows: dict[str, str]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(name for row in rows for name in row)), restval="")
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_validation_of_published_steps(tmp_path: Path) -> None:
    slower = ROW | {"id": "x-2", "layout": "tp=8 zero=1 microbatches=16", "step_time_s": "9.0"}
    too_large = {"model.layers": "320", "step_time_s": "", "outcome": "OOM", "layout": "zero=1 microbatches=2"}
    too_large = ROW | {"id": "x-3"} | too_large
    path = write_rows(tmp_path / "steps.csv", ROW, slower, too_large)
    report = json.loads(run("plan", "validate", str(path), "--json").stdout)
    rows = {row["id"]: row for row in report["rows"]}
    assert report["time"]["rows"] == 2 and set(rows) == {"x-1", "x-2", "x-3"}
    errors = [abs(rows[name]["step_time_s"] / seconds - 1) for name, seconds in (("x-1", 5.0), ("x-2", 9.0))]
    assert report["time"]["mape"] == pytest.approx(sum(errors) / 2) and report["time"]["max"] == max(errors)
    assert report["time"]["pairs"] == 1 and report["time"]["regret"] >= 0
    assert report["fit"]["right"] + report["fit"]["wrong"] == 3 and "x-3" not in report["fit"]["rows"]
    assert "quality A: 2 rows" in run("plan", "validate", str(path)).output


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": "H9000"}, "row x-1: device 'H9000' is not in the table of devices"),
        ({"model.layers": "many"}, "row x-1: model.layers = 'many' must be a whole number"),
        ({"model.hidden": "-4096"}, "row x-1: model.hidden = -4096 must be at least 1"),
        ({"model.hiden": "7"}, "row x-1: unknown key 'model.hiden'; did you mean 'hidden'?"),
        (
            {"modle.hidden": "7"},
            "row x-1: unknown key 'modle.hidden'; did you mean 'model.hidden' or 'model.experts.hidden'?",
        ),
        ({"model.variant.sink": "true"}, "row x-1: model.variant.sink = True is not a known field there"),
        ({"gpus": "0"}, "row x-1: gpus = 0 must be at least 1"),
        ({"data.batch_sequences": "7"}, "a global batch of 7 rows cannot be cut evenly over dp = 32"),
        ({"model.layers": "nan"}, "model.layers = nan must be a whole number"),
        ({"stack": "mega"}, "row x-1: stack = 'mega': use one of motet,"),
        ({"layout": "tp=3"}, "dp = 21 x tp = 3 x cp = 1 x pp = 1 = 63, but --gpus 64"),
        ({"matmul": "float7"}, "row x-1: matmul = 'float7'"),
    ],
)
def test_a_row_that_cannot_be_read(tmp_path: Path, changes: dict[str, str], message: str) -> None:
    """It is left out with the reason; a file with no other row is refused with the first reason."""
    path = write_rows(tmp_path / "steps.csv", ROW, ROW | {"id": "x-1"} | changes)
    result = run("plan", "validate", str(path), "--json")
    assert f"{path}, line 3 is left out: " in result.stderr.replace("\n", " ")
    report = json.loads(result.stdout)
    (skipped,) = report["skipped"]
    assert skipped["line"] == 3 and message in skipped["reason"] and report["time"]["rows"] == 1
    path = write_rows(tmp_path / "steps.csv", *[ROW] * 4, ROW | changes)
    assert "line 6 is left out" in run("plan", "calibrate", str(path), "--share", "0.5").stderr
    path = write_rows(tmp_path / "steps.csv", ROW | changes)
    text = refusal("plan", "validate", str(path))
    assert message in text and f"{path}, line 2: " in text and "no row of the file can be read" in text


def test_a_file_that_is_no_validation_file(tmp_path: Path) -> None:
    path = tmp_path / "other.csv"
    path.write_text("a,b\n1,2\n")
    assert "has no column model.layers, data.sequence_length," in refusal("plan", "validate", str(path))
    write_rows(path, ROW | {"model.layers.first": "7"})
    assert "column model.layers.first is a part of model.layers" in refusal("plan", "validate", str(path))
    path.write_text("")
    assert "has no rows" in refusal("plan", "validate", str(path))
    assert "cannot read" in refusal("plan", "validate", str(tmp_path / "none.csv"))


def test_calibration_finds_planted_factors(tmp_path: Path) -> None:
    """Steps of a machine with half the rate of products are predicted well by constants fitted on a part of them."""
    rows = []
    for index, (tp, layers, micro) in enumerate((t, n, m) for t in (1, 2, 4) for n in (16, 24, 32) for m in (1, 2)):
        values = ROW | {"id": f"c-{index}", "layout": f"tp={tp} zero=1 microbatches={2 * tp // micro}"}
        rows.append(values | {"name": f"llama-{layers}", "model.layers": str(layers)})
    measured, _ = read_measured_steps(write_rows(tmp_path / "a.csv", *rows))
    slow = Calibration(UNCALIBRATED.factors | {"products": 0.5, "memory": 0.7})
    timed = [values | {"step_time_s": f"{slow.seconds(row):.6f}"} for values, row in zip(rows, measured, strict=True)]
    path = write_rows(tmp_path / "b.csv", *timed)
    report = json.loads(run("plan", "calibrate", str(path), "--hold-out", "layers", "--json").stdout)
    assert report["uncalibrated"]["mape"] > 0.3 and report["held_out"]["mape"] < 0.03
    assert set(report["groups"]) == {"16", "24", "32"} and 0.4 < report["factors"]["products"] < 0.65
    assert "factors on the tables" in run("plan", "calibrate", str(path), "--share", "0.5").output
    assert "--share 2.0: give a number above 0" in refusal("plan", "calibrate", str(path), "--share", "2")
    assert "all rows are of one group" in refusal("plan", "calibrate", str(path), "--hold-out", "source")


def test_layouts_side_by_side(tmp_path: Path) -> None:
    """Stages of ZeRO send and keep what their definitions say, on a job whose states dominate."""
    words = ("plan", "tiny-wide", "--cluster", "cpu", "--gpus", "4", "--compare", "zero=0")
    picture = tmp_path / "compared.svg"
    layouts = ("zero=1", "dp=4 zero=2", "zero=3")
    plans = json.loads(run(*words, *layouts, "--svg", str(picture), "--json").stdout)["plans"]
    assert [plan["layout"] for plan in plans] == [f"dp=4 zero={stage}" for stage in range(4)]
    block = 1024 * (2 * 1024 + 2 * 256 + 3 * 2752 + 2)
    count = 4096 * 1024 + 3 * block + 1024  # Parameters, of 4 bytes
    assert plans[0]["memory_bytes"]["parameters"] == 4 * count
    assert [plan["memory_bytes"]["moments"] for plan in plans] == [8 * count / ranks for ranks in (1, 4, 4, 4)]
    assert plans[0]["sent_bytes"] == {"data parallelism, all-reduce": pytest.approx(2 * 4 * count * 3 / 4, rel=1e-3)}
    for plan in plans[1:3]:
        assert sum(plan["sent_bytes"].values()) == pytest.approx(2 * 4 * count * 3 / 4, rel=1e-3)
    assert sum(plans[3]["sent_bytes"].values()) > 1.4 * sum(plans[0]["sent_bytes"].values())
    table = run(*words, *layouts).stdout
    assert "layout 4: dp=4 zero=3" in table and "data parallelism, reduce-scatter" in table
    drawn = picture.read_text()
    assert drawn.startswith("<svg") and "moments 286 MiB" in drawn and "time of a step" in drawn


def test_the_chosen_layout_is_written_as_a_job(tmp_path: Path) -> None:
    path = tmp_path / "chosen.toml"
    plan = json.loads(run("plan", "tiny", "--cluster", "cpu", "--gpus", "4", "--write", str(path), "--json").stdout)
    chosen = plan["plans"][0]["layout"]
    job = load_job(str(path))
    assert job.run.ranks == 4 and str(job.layout_for(4)) == chosen and job.model == load_job("tiny").model
    again = json.loads(run("plan", str(path), "--cluster", "cpu", "--gpus", "4", "--layout", chosen, "--json").stdout)
    assert again["plans"][0]["step_time_s"] == plan["plans"][0]["step_time_s"]
    for words, part in (
        (("--svg", "x.svg"), "--svg draws a comparison"),
        (("--headroom", "120%"), "--headroom '120%': give a share"),
        (("--compare", "zero=1", "--layout", "zero=2"), "--compare names layouts; leave --layout"),
        (("--compare", "dp=3"), "but --gpus 4"),
    ):
        assert part in refusal("plan", "tiny", "--cluster", "cpu", "--gpus", "4", *words)
