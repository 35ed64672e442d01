"""`motet show memory`: the text, the JSON and the picture, of ranks that are measured and of predictions."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import Result
from typer.testing import CliRunner

from motet.cli.show.show_commands import show_app as app
from motet.core.errors import InputError
from motet.memory.memory_timeline import MemoryTimeline, StepPhase, StorageLife, draw_text
from motet.models.spec.layer_specs import MicroBatchShape
from motet.models.spec.model_spec import spec_from_settings
from motet.monitor import stdout_stderr
from motet.train.job import load_job
from motet.train.memory_check import measure_ranks

TEXT = Path(__file__).parent.parent / "data" / "small.txt"
LARGE = ["llama3-8b", "layout.zero=3", "data.batch_sequences=16", "--ranks", "16"]


def run(*arguments: str) -> Result:
    stdout_stderr._make_console.cache_clear()
    try:
        return CliRunner().invoke(app, ["memory", *arguments], env={"COLUMNS": "400"})
    finally:
        stdout_stderr._make_console.cache_clear()


def answer(*arguments: str) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, (result.output, result.exception)
    values: dict[str, Any] = json.loads(result.stdout)
    return values


def small(folder: Path) -> list[str]:
    return [
        *("tiny", "model.layers=2", "model.hidden=32", "model.heads=4", "model.kv_heads=2", "model.ffn_hidden=48"),
        *("model.vocab_size=260", "model.context=32", "data.sequence_length=32", "data.batch_sequences=4"),
        *("data.tokenizer=bytes", f"data.source={TEXT}", f"data.cache={folder}", "run.ranks=1"),
    ]


def test_a_job_for_more_ranks_than_cores_is_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_ranks, "usable_cores", lambda: 2)
    values = answer(*LARGE)
    assert not values["is_measured"] and values["remark"].startswith("16 ranks are more than the")
    rank = values["memory"][15]
    peaks = {each["name"]: each["predicted"] for each in rank["comparison"]}
    spec, job = spec_from_settings(load_job("llama3-8b").model), load_job("llama3-8b")
    shape = MicroBatchShape(1, job.data.sequence_length)
    assert peaks["saved activations"] == spec.saved_bytes(shape, "bfloat16")
    assert peaks["master parameters"] * 16 == pytest.approx(4 * spec.parameter_count, rel=1e-3)
    assert rank["measured"] is None and rank["predicted"]["peak_bytes"] == max(
        sum(column["bytes"].values()) for column in rank["predicted"]["timeline"]
    )


def test_a_pipeline_holds_as_many_micro_batches_as_its_schedule_says(tmp_path: Path) -> None:
    how = ["layout.pp=2", "--ranks", "2", "--predict", "layout.microbatches=4"]
    saved = {}
    for schedule in ("gpipe", "1f1b"):
        ranks = answer(*small(tmp_path), *how, f"layout.schedule={schedule}")["memory"]
        saved[schedule] = [rank["predicted"]["saved_activations_by_operator"]["attention.qkv"] for rank in ranks]
    assert saved["gpipe"][0] == 2 * saved["1f1b"][0] == saved["gpipe"][1] == 4 * saved["1f1b"][1]


def test_ranks_are_measured_and_drawn(tmp_path: Path) -> None:
    picture = tmp_path / "memory.svg"
    values = answer(*small(tmp_path), "--svg", str(picture), "--budget", "2MiB")
    compared = {each["name"]: each for each in values["memory"][0]["comparison"]}
    assert values["is_measured"] and values["budget"] == 2 << 20
    assert compared["gradients"]["difference"] == 0 and abs(compared["saved activations"]["difference"]) < 0.02
    root = ElementTree.fromstring(picture.read_text())
    hints = {(each.text or "").partition(",")[0] for each in root.iter("{http://www.w3.org/2000/svg}title")}
    assert {"parameters", "gradients", "moments", "saved activations", "workspace", "backward 0"} <= hints
    texts = [each.text for each in root.iter() if each.text]
    assert "rank 0, measured" in texts and "rank 0, predicted, without workspace" in texts and "budget 2 MiB" in texts


def test_the_text_of_a_timeline() -> None:
    lives = (StorageLife("parameters", 40, 0, None), StorageLife("saved activations", 120, 2, 5, "mm"))
    timeline = MemoryTimeline(lives, (StepPhase("forward", 0, 4), StepPhase("backward", 4, 7)), 7)
    *rows, phases, _, legend = draw_text(timeline, {"budget": 160})
    assert [row.partition("|")[2].count("a") for row in rows] == [3] * 12 + [0] * 4
    assert [row.partition("|")[2].count("P") for row in rows] == [0] * 12 + [8] * 4
    assert rows[0] == "   budget |--aaa---" and phases == "    phase |ffffbbb."
    assert legend == "(P parameters, a saved activations)"
    assert (
        timeline.peak == 160 and timeline.peak_moment == 2 and timeline.by_operator("saved activations") == {"mm": 120}
    )


def test_text_and_budget() -> None:
    text = run(*LARGE, "--budget", "1GiB").output
    assert "live bytes of a step" in text and "budget |" in text
    assert "more than the budget of 1 GiB." in text and "Saved activations by name: " in text


def test_the_limit_of_the_device_is_drawn_as_the_budget_is(tmp_path: Path) -> None:
    picture = tmp_path / "memory.svg"
    limited = [*LARGE, "memory.device_limit=20GiB", "--budget", "1GiB"]
    text = run(*limited).output
    assert "budget |" in text and "limit |" in text
    assert "more than the budget of 1 GiB." in text and "more than the limit of 20 GiB." in text
    values = answer(*limited, "--svg", str(picture))
    assert (values["budget"], values["device_limit"]) == (1 << 30, 20 << 30)
    assert "budget 1 GiB, limit 20 GiB" in picture.read_text() and picture.read_text().count('class="limit"') == 8


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["tiny", "--budget", "much"], "is not a number of bytes"),
        (["tiny", "layout.data=parameter_server"], "leave layout.data out"),
        (["tiny", "--ranks", "3"], "cannot be cut evenly over 3 ranks"),
        (["tiny", "--predict", "model={factory='builtins:print'}"], "can be measured but not predicted"),
    ],
)
def test_bad_input(arguments: list[str], words: str) -> None:
    result = run(*arguments)
    assert isinstance(result.exception, InputError) and words in str(result.exception)


def test_a_prediction_loads_no_torch() -> None:
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom motet.cli.show.show_commands import show_app as app\n"
        "assert CliRunner().invoke(app, ['memory', 'tiny', '--predict']).exit_code == 0\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
