"""The `motet` command itself: help, version, and how errors end it."""

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from motet import __version__
from motet.cli.main import app

Motet = Callable[..., subprocess.CompletedProcess[str]]


def answer(done: subprocess.CompletedProcess[str]) -> tuple[int, str, str]:
    return done.returncode, done.stdout, done.stderr


def test_help_names_every_command_and_the_version_is_told(motet: Motet) -> None:
    code, out, _ = answer(motet("--help"))
    assert code == 0 and all(f"\n  {name} " in out for name in ("train", "data", "show")) and motet("-h").stdout == out
    assert answer(motet("--version")) == (0, f"motet {__version__}\n", "")


GROUPS = ["", "plan", "show", "collectives", "data", "checkpoint"]


@pytest.mark.parametrize("group", GROUPS)
def test_help_cuts_no_description(monkeypatch: pytest.MonkeyPatch, group: str) -> None:
    """A terminal of 80 columns shows each command's first sentence whole."""
    monkeypatch.setenv("COLUMNS", "80")
    command = typer.main.get_command(app)
    command = command.commands[group] if group else command
    said = " ".join(CliRunner().invoke(app, [*group.split(), "--help"]).stdout.split())
    for name, inner in command.commands.items():
        sentence = " ".join((inner.help or "").split()).partition(". ")[0]
        assert f"{name} {sentence}" in said, name


def test_help_has_the_commands_in_the_order_of_use_and_two_examples_that_run() -> None:
    said = CliRunner().invoke(app, ["--help"]).stdout
    names = re.findall(r"^  (\w+)  +\w", said.partition("Commands:\n")[2].partition("Examples:")[0], re.MULTILINE)
    assert names == ["train", "plan", "verify", "show", "collectives", "data", "checkpoint", "generate"]
    examples = re.findall(r"^ +motet (.*?)  +#", said, re.MULTILINE)
    assert [example.split()[0] for example in examples] == ["train", "plan"]
    planned = CliRunner().invoke(app, [*examples[1].split(), "--layout", "dp=8 zero=3"])  # One layout is quick
    assert planned.exit_code == 0 and "dp=8 zero=3" in planned.stdout


@pytest.mark.parametrize("words", ["nothing", "train --nothing", "train --ranks 0", "train --ranks x"])
def test_wrong_usage_ends_with_2(motet: Motet, words: str) -> None:
    code, out, err = answer(motet(*words.split()))
    assert (code, out) == (2, "") and "Traceback" not in err


def test_an_error_for_the_user_is_one_sentence(motet: Motet) -> None:
    code, out, err = answer(motet("train", "tinny"))
    assert (code, out, err.count("\n")) == (2, "", 1) and err.startswith("motet: no job 'tinny': did you mean 'tiny'? ")


@pytest.mark.parametrize("variable", ["LOCAL_RANK", "SLURM_LOCALID"])
def test_one_rank_on_each_machine_complains(motet: Motet, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "1")
    assert answer(motet("train", "tinny")) == (2, "", "")
    monkeypatch.setenv(variable, "0")
    assert motet("train", "tinny").stderr != ""


def test_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "motet", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"motet {__version__}\n"


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("trian tiny", "motet has no command 'trian'; did you mean 'train'?"),
        ("tiny", "motet has no command 'tiny'; write `motet train tiny`"),
        ("allreduce", "motet has no command 'allreduce'; write `motet show collective all-reduce`"),
        ("collectives bench", "motet collectives has no command 'bench'; its commands are list, draw, prove, cost, "),
        ("train --layout dp2", "motet train has no option --layout; write the layout as settings: layout.dp=2\n"),
        (
            "train --lr 1e-3",
            "no option --lr; settings of the job are written without dashes: optimizer.learning_rate=1e-3",
        ),
        (
            "train --deepspeed ds.json",
            "motet train has no option --deepspeed; settings of the job are written without ",
        ),
        ("plan tiny --cluster h100 --num-gpus 8", "has no option --num-gpus; did you mean '--gpus'?"),
    ],
)
def test_a_word_of_another_program_gets_that_of_motet(motet: Motet, words: str, hint: str) -> None:
    code, out, err = answer(motet(*words.split()))
    assert (code, out, err.count("\n")) == (2, "", 1) and hint in err


LLAMA = """{
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 4, "max_position_embeddings": 32, "vocab_size": 300
}"""


def test_a_config_is_a_job(motet: Motet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small llama").mkdir()
    (tmp_path / "small llama/config.json").write_text(LLAMA)
    code, out, _ = answer(motet("train", "hf:small llama", "run.steps=7", "--print-job"))
    job = tomllib.loads(out)
    assert code == 0 and job["name"] == "smallllama" and job["model"]["factory"] == "hf:small llama"
    assert job["data"]["sequence_length"] == 32 and job["run"]["steps"] == 7 and job["data"]["tokenizer"] == "bpe:4096"
    (tmp_path / "small llama/tokenizer.json").write_text("{}")
    _, out, _ = answer(motet("train", "small llama/config.json", "--print-job", "--json"))
    assert json.loads(out)["data"]["tokenizer"] == "small llama" and json.loads(out)["name"] == "smallllama"


@pytest.mark.proof
def test_a_config_is_trained(motet: Motet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama/config.json").write_text(LLAMA)
    settings = ("data.tokenizer=bytes", "run.steps=2", "run.folder=run", "run.ranks=2", "layout.zero=3")
    code, out, err = answer(motet("train", "hf:llama", *settings))
    assert code == 0, err
    assert json.loads((tmp_path / "run/summary.json").read_text())["steps"] == 2 and "(dp=2 zero=3)" in out


def test_a_layout_without_dp_takes_the_ranks_that_are_left(motet: Motet) -> None:
    for words, layout in (("zero=1 --ranks 4", "dp=4 zero=1"), ("tp=2 model.layers=1", "dp=1 tp=2")):
        code, out, err = answer(motet("show", "layout", *words.split()))
        assert code == 0 and f"layout '{layout}'" in err and "Proven" in out


def test_a_wrong_layout_is_refused_before_torch_is_loaded() -> None:
    command = (
        "import sys, motet.cli.main as m; sys.argv = ['motet', 'verify', 'tiny', '--layout', 'dp2']\ntry: m.main()\n"
    )
    command += "except SystemExit as error: print(error.code, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout == "2 False\n" and "write dp=2" in done.stderr


def test_alternating_blocks_have_one_row_for_each_kind(motet: Motet, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt_oss", "num_hidden_layers": 36}')
    _, out, _ = answer(motet("show", "model", str(tmp_path)))
    rows = [re.split(r"  +", line) for line in out.splitlines()[2:7]]
    assert [row[:2] for row in rows[:4]] == [
        ["embedding", "1"],
        ["expert block", "18"],
        ["full expert block", "18"],
        ["head", "1"],
    ]
    assert rows[4][:2] == ["model", "116,829,156,672"]  # The total is whole in a pipe
