"""`motet show model` and `motet show layout`: what is printed, the JSON, and what is refused."""

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
from motet.parallel.layout import parse_layout, resolve_layout
from motet.parallel.step_plan.check import InvalidStepPlanError


def run(*arguments: str, command: str = "model") -> Result:
    return CliRunner().invoke(app, [command, *arguments], env={"COLUMNS": "400"})


def shown(*arguments: str) -> str:
    result = run(*arguments, command="layout")
    assert result.exit_code == 0, result.output
    return result.output


def answer(*arguments: str, command: str = "model") -> dict[str, Any]:
    result = run(*arguments, "--json", command=command)
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.output)
    return found


def test_the_table_names_blocks_and_totals() -> None:
    result = run("mixtral-8x7b")
    assert result.exit_code == 0
    rows = {line.split("│")[1].strip(): line for line in result.output.splitlines() if line.startswith("│")}
    assert list(rows) == ["embedding", "expert block", "head", "model"]
    assert "32" in rows["expert block"] and "1,451,270,144" in rows["expert block"]
    assert "46,702,792,704" in rows["model"] and "A token goes through 12,879,925,248 parameters." in result.output


def test_a_dense_model_has_no_active_parameters_to_speak_of() -> None:
    assert "A token goes through" not in run("tiny").output


def test_json_adds_up() -> None:
    found = answer("llama3-8b")
    assert (found["sequence_length"], found["dtype"], found["attention"]) == (8192, "bfloat16", "causal")
    saved = ("saved_bytes_per_token", "saved_bytes_per_sequence")
    for key in ("parameters", "active_parameters", "training_flops_per_token", *saved):
        assert found[key] == sum(block[key] * block["repeat"] for block in found["blocks"])
    assert found["parameters"] == 8_030_261_248
    assert found["training_flops_per_token"] == 3 * found["forward_flops_per_token"]


def test_attention_and_length_are_choices() -> None:
    pairs = 32 * 4096 * 8192  # of one token, all layers and heads
    full = answer("llama3-8b", "--attention", "full")["training_flops_per_token"]
    short = answer("llama3-8b", "--sequence-length", "4096", "--attention", "full")["training_flops_per_token"]
    assert full - answer("llama3-8b")["training_flops_per_token"] == full - short == 6 * pairs


def test_settings_of_a_job_are_replaced() -> None:
    found = answer("tiny", "model.layers=2", "precision.recipe=fp32")
    assert (found["blocks"][1]["repeat"], found["dtype"]) == (2, "float32")


@pytest.mark.parametrize("form", ["{folder}", "hf:{folder}", "{folder}/config.json", "hf:{folder}/config.json"])
def test_a_config_is_shown_however_it_is_named(tmp_path: Path, form: str) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    found = answer(form.format(folder=tmp_path))
    assert (found["parameters"], found["sequence_length"]) == (124_439_808, 1024)


def test_a_config_is_trained_as_its_kind_is(tmp_path: Path) -> None:
    """An encoder-decoder on spans, whose source and targets both are tokens; an encoder on masked tokens."""
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    targets = span_corruption_lengths(100, 0.15, 100).target_tokens
    assert answer(str(tmp_path), "--sequence-length", "100")["tokens_per_sequence"] == 100 + targets
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
    assert isinstance(result.exception, InputError) and words in str(result.exception)


def test_no_torch_is_loaded() -> None:
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom motet.cli.show.show_commands import show_app as app\n"
        "assert CliRunner().invoke(app, ['model', 'tiny']).exit_code == 0\nassert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# --- layout ----------------------------------------------------------------------------------------
def test_it_says_who_does_what_and_that_it_is_proven() -> None:
    text = shown("dp=8 zero=3 shard_group=4", "communication.all_reduce=ring")
    assert "Gradients are summed, a shard to each, over ranks 0 1 2 3 | 4 5 6 7." in text
    assert "Shards are summed over ranks 0 4 | 1 5 | 2 6 | 3 7." in text
    assert "is updated once in 2 copies, with the gradients of 8 ranks x 1 micro-batch, each once" in text
    assert "each of 16 rows is read once" in text and "Proven, too: all-reduce/ring of 2 ranks." in text


def test_its_json_has_what_each_rank_updates_and_reads() -> None:
    found = answer("dp=4 zero=1 microbatches=2", command="layout")
    layout = resolve_layout(parse_layout("zero=1 microbatches=2"), 4, 16)
    assert sum(rank["updated_elements"] for rank in found["ranks"]) == found["proof"]["elements"]
    assert found["ranks"][3]["rows"] == [[12, 14], [14, 16]]
    groups = [list(ranks) for ranks in layout.sharding.shard_groups]
    assert found["schedule"][0] == {"kind": "reduce_scatter", "rank_groups": groups}
    placement = {"parameters": "replicated", "gradients": "replicated", "optimizer_states": "sharded"}
    assert found["state_placement"] == placement


def test_replicas_that_train_apart_and_owners_are_told() -> None:
    assert "Replicas take an outer step over ranks 0 2 | 1 3." in shown("dp=4 zero=2 shard_group=2", "outer.every=5")
    owners = shown("dp=4 data=parameter_server server.transport=collectives server.count=2")
    assert "the owner of a bucket all of it" in owners and "broadcast/tree of 4 ranks" in owners


def test_of_many_ranks_the_first_are_shown() -> None:
    text = shown("dp=64", "data.batch_sequences=64")
    assert "48 more" in text and "over ranks 0 1 2 3 4 5 6 7 ...." in text


def test_what_is_not_right_is_no_bad_input(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(plan: object) -> None:
        raise InvalidStepPlanError("nobody updates element 0 of w")

    monkeypatch.setattr("motet.cli.show.layout_report.prove_step_plan", wrong)
    assert isinstance(run("dp=2", command="layout").exception, AssertionError)
