"""`motet data`: what it prints, and what it refuses."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from motet.cli.data import data_app as app
from motet.core.errors import InputError
from refusals import refused

SMALL = Path(__file__).parents[1] / "data" / "small.txt"


def run(*arguments: str | Path) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def test_build_and_show(tmp_path: Path) -> None:
    out = tmp_path / "out"
    built = json.loads(run("build", SMALL, "--out", out, "--tokenizer", "bytes", "--workers", "1", "--json"))
    assert built == json.loads((out / "manifest.json").read_text()) and built["documents"] == 1
    assert built["tokens"] == SMALL.stat().st_size + 1
    assert json.loads(run("show", out, "--json", "--verify")) == {**built, "sample": SMALL.read_text()[:100]}
    text = run("show", out)
    assert "vocab_size  259\n" in text and "The Clock at the Weir" in text
    again = run("build", SMALL, "--out", out, "--tokenizer", "bytes")
    assert f"out: 1 documents, 3.87 K tokens of a vocabulary of 259; corpus hash {built['corpus_hash']}" in again


def test_options_name_the_fields(tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    source.write_text('{"body": "x", "class": 2}\n')
    fields = ["text_field=body", "label_field=class", "objective=classify"]
    built = json.loads(run("build", source, "--out", tmp_path / "out", "--tokenizer", "bytes", "--json", *fields))
    assert (built["classes"], built["documents"]) == (3, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["text_feild=x"], r"option 'text_feild=x' is not KEY=VALUE with a known key; did you mean 'text_field'\?"),
        (["zzz"], "option 'zzz' is not KEY=VALUE with a known key; known are objective, text_field"),
        (["objective=poetry"], "objective=poetry is unknown; give one of causal, masked, spans, classify"),
    ],
)
def test_refused_options(tmp_path: Path, options: list[str], message: str) -> None:
    refused(message, run, "build", SMALL, "--out", tmp_path / "out", *options)


def test_show_what_is_not_there_or_damaged(tmp_path: Path) -> None:
    refused("holds no corpus built by `motet data build`", run, "show", tmp_path)
    run("build", SMALL, "--out", tmp_path / "out", "--tokenizer", "bytes")
    tokens = tmp_path / "out" / "00000.bin"
    tokens.write_bytes(b"x" * tokens.stat().st_size)
    assert "xxx" not in run("show", tmp_path / "out").splitlines()[0]
    with pytest.raises(InputError, match=r"00000\.bin or its \.docs has changed; build the corpus again"):
        run("show", tmp_path / "out", "--verify")


def test_show_marks_the_tokens_that_count(tmp_path: Path) -> None:
    source, out = tmp_path / "a.jsonl", tmp_path / "out"
    source.write_text('{"prompt": "2 + 2 =", "answer": " 4"}\n')
    run("build", source, "--out", out, "--tokenizer", "bytes")
    assert "those in {+ +} count in the loss:\n\n2 + 2 ={+ 4<|end|>+}" in run("show", out)
    parts = json.loads(run("show", out, "--json"))["sample_parts"]
    assert parts == [{"text": "2 + 2 =", "target": False}, {"text": " 4<|end|>", "target": True}]
