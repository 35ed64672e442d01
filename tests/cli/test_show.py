"""`motet show model`: the table and the JSON of a job and of a config, and what is refused."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from motet.cli.show.show_commands import show_app as app
from motet.core.errors import InputError
from motet.data.samples.span_corruption import span_corruption_lengths


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["model", *arguments], env={"COLUMNS": "120"})


def answer(*arguments: str) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.output)
    return found


def test_the_table_names_blocks_and_totals() -> None:
    result = run("mixtral-8x7b")
    assert result.exit_code == 0
    rows = {line.split("│")[1].strip(): line for line in result.output.splitlines() if line.startswith("│")}
    assert list(rows) == ["embedding", "expert block", "head", "model"]
    assert "32" in rows["expert block"] and "1,451,270,144" in rows["expert block"]
    assert "46,702,792,704" in rows["model"]
    assert "A token goes through 12,879,925,248 parameters." in result.output


def test_a_dense_model_has_no_active_parameters_to_speak_of() -> None:
    assert "A token goes through" not in run("tiny").output


def test_json_adds_up() -> None:
    found = answer("llama3-8b")
    assert (found["sequence_length"], found["dtype"], found["attention"]) == (8192, "bfloat16", "causal")
    for key in (
        "parameters",
        "active_parameters",
        "training_flops_per_token",
        "saved_bytes_per_token",
        "saved_bytes_per_sequence",
    ):
        assert found[key] == sum(block[key] * block["repeat"] for block in found["blocks"])
    assert found["parameters"] == 8_030_261_248
    assert found["training_flops_per_token"] == 3 * found["forward_flops_per_token"]


def test_attention_and_length_are_choices() -> None:
    causal, full = answer("llama3-8b"), answer("llama3-8b", "--attention", "full")
    pairs = 32 * 4096 * 8192  # of one token, all layers and heads
    assert full["training_flops_per_token"] - causal["training_flops_per_token"] == 6 * pairs
    short = answer("llama3-8b", "--sequence-length", "4096", "--attention", "full")
    assert full["training_flops_per_token"] - short["training_flops_per_token"] == 6 * pairs


def test_settings_of_a_job_are_replaced() -> None:
    found = answer("tiny", "model.layers=2", "precision.recipe=fp32")
    assert found["blocks"][1]["repeat"] == 2
    assert found["dtype"] == "float32"


@pytest.mark.parametrize("form", ["{folder}", "hf:{folder}", "{folder}/config.json", "hf:{folder}/config.json"])
def test_a_config_is_shown_however_it_is_named(tmp_path: Path, form: str) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    found = answer(form.format(folder=tmp_path))
    assert (found["parameters"], found["sequence_length"]) == (124_439_808, 1024)


def test_a_config_is_trained_as_its_kind_is(tmp_path: Path) -> None:
    """An encoder-decoder on spans, whose source and targets both are tokens; an encoder on masked tokens."""
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    assert (
        answer(str(tmp_path), "--sequence-length", "100")["tokens_per_sequence"]
        == 100 + span_corruption_lengths(100, 0.15, 100).target_tokens
    )
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    head = answer(str(tmp_path), "--sequence-length", "100")["blocks"][-1]
    assert head["forward_flops_per_token"] == 2 * (768 * 768 + 768 * 30522) * 15 / 100


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["lama3-8b"], "did you mean 'llama3-8b'"),
        (["tiny", "--sequence-length", "257"], "model.context = 256"),
        (["hf:/nowhere"], "cannot read /nowhere"),
        (["hf:/nowhere", "model.layers=2"], "only jobs"),
    ],
)
def test_what_cannot_be_shown_is_told(arguments: list[str], words: str) -> None:
    result = run(*arguments)
    assert isinstance(result.exception, InputError)
    assert words in str(result.exception)


def test_no_torch_is_loaded() -> None:
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom motet.cli.show.show_commands import show_app as app\n"
        "assert CliRunner().invoke(app, ['model', 'tiny']).exit_code == 0\nassert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
