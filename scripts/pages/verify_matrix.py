"""The page of `motet verify` on families of models: every layout for up to four ranks, and its worst figures."""

import csv
import json
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from motet.cli.environment_variables import read_environment
from motet.parity.candidate_layouts import layouts_up_to
from motet.parity.layout_verdict import LayoutVerdict
from motet.parity.verify_job import make_verification_plans, verify_job_layouts
from motet.train.job import Job, load_job
from pages import DOCS, commit, markdown_table

DATA = DOCS / "reference/verify-matrix.csv"
COLUMNS = ("family", "commit", "layout", "ok", "worst_relative", "worst_tensor", "worst_z", "first_difference", "cause")
RANKS = 4
OWN = "vocab_size=260, context=64, layers=2, hidden=32, heads=4, ffn_hidden=48"
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 260,
}
CAUSAL = {**SMALL, "num_key_value_heads": 2, "max_position_embeddings": 64}
FAMILIES: dict[str, tuple[list[str], dict[str, Any]]] = {
    "decoder": ([f"model={{family='decoder', {OWN}, kv_heads=2, dropout=0.1}}"], {}),
    "encoder": ([f"model={{family='encoder', {OWN}, dropout=0.1}}", "data.objective=masked"], {}),
    "encoder-decoder": (
        [f"model={{family='encoder-decoder', {OWN.replace('260', '359')}, dropout=0.1}}", "data.objective=spans"],
        {},
    ),
    "classifier": (
        [
            f"model={{family='encoder', {OWN}, head='classify', classes=2, dropout=0.1}}",
            *("data.objective=classify", "data.source=synthetic:majority", "data.samples=200"),
        ],
        {},
    ),
    "llama": ([], {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **CAUSAL}),
    "qwen2": (
        [],
        {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], **CAUSAL, "tie_word_embeddings": True},
    ),
    "mistral": (
        [],
        {"model_type": "mistral", "architectures": ["MistralForCausalLM"], **CAUSAL, "sliding_window": 8},
    ),
    "gpt2": (
        [],
        {
            "model_type": "gpt2",
            "architectures": ["GPT2LMHeadModel"],
            "vocab_size": 260,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 64,
        },
    ),
    "gpt_neox": (
        [],
        {
            "model_type": "gpt_neox",
            "architectures": ["GPTNeoXForCausalLM"],
            **SMALL,
            "max_position_embeddings": 64,
            "attention_dropout": 0.1,
            "hidden_dropout": 0.1,
        },
    ),
    "bert": (
        ["data.objective=masked"],
        {"model_type": "bert", "architectures": ["BertForMaskedLM"], **SMALL, "max_position_embeddings": 64},
    ),
    "llama with adapters": (
        ["model.adapters={rank=4, targets=['*q_proj', '*v_proj']}"],
        {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **CAUSAL},
    ),
}


def job_of(family: str, folder: Path) -> Job:
    """A small job; the first few samples of Python's own library source, as bytes."""
    overrides, config = FAMILIES[family]
    common = [
        *("data.tokenizer=bytes", "data.sequence_length=32", "data.samples=400", "data.validation_fraction=0.1"),
        *("optimizer.learning_rate=0.003", "optimizer.clip_norm=0.05", "monitor.tensorboard=false"),
    ]
    if config:
        (folder / "config.json").write_text(json.dumps(config))
        common.append(f"model={{factory='hf:{folder}'}}")
    return load_job("tiny", [*common, *overrides])


def measure(words: list[str]) -> tuple[str, bool]:
    """Verify these families, or all, in these layouts, or all; the data of others stays."""
    families, layouts = ([word for word in words if ("=" in word) is has_sign] for has_sign in (False, True))
    for word, known in (*((f, FAMILIES) for f in families), *((each, layouts_up_to(RANKS)) for each in layouts)):
        if word not in known:
            raise SystemExit(f"{word!r} is none of {', '.join(known)}")
    for family in families or FAMILIES:
        measured = list(_verify(family, layouts or layouts_up_to(RANKS)))
        again = {(row["family"], row["layout"]) for row in measured}
        rows = [row for row in read_rows() if (row["family"], row["layout"]) not in again] + measured
        with DATA.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    return page(), all(row["ok"] == "True" for row in read_rows())


def _verify(family: str, layouts: list[str]) -> Iterator[dict[str, Any]]:
    verdicts: list[LayoutVerdict] = []

    def show(verdict: LayoutVerdict) -> None:
        verdicts.append(verdict)
        print(f"{family}: {verdict}", flush=True)

    with tempfile.TemporaryDirectory() as name:
        for plan in make_verification_plans(job_of(family, Path(name)), layouts, print):
            verify_job_layouts(plan, read_environment(), log=print, on_verdict=show)
    for verdict in verdicts:
        row = {"family": family, "commit": commit(), **asdict(verdict)}
        yield {name: row[name] for name in COLUMNS}


def read_rows() -> list[dict[str, str]]:
    """A row for each pair of a family and a layout; a missing value is an empty text."""
    with DATA.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def page() -> str:
    """The page, from the data."""
    rows = sorted(read_rows(), key=lambda row: list(FAMILIES).index(row["family"]))
    families, made_at = (list(dict.fromkeys(row[column] for row in rows)) for column in ("family", "commit"))
    cells = {
        (row["family"], row["layout"]): f"{float(row['worst_relative']):.1e}" if row["ok"] == "True" else "**wrong**"
        for row in rows
    }
    layouts = [layout for layout in layouts_up_to(RANKS) if any(row["layout"] == layout for row in rows)]
    wrong = sum(row["ok"] != "True" for row in rows)
    lines = [
        "# Every layout, on families of models",
        "",
        f"`motet verify` compared {len(rows)} pairs of a layout and a model in float64; {wrong} of them are wrong. It",
        "ran three steps, each from a state of one device; three in a row; one from a checkpoint; an evaluation. A",
        "figure is the worst relative difference of any tensor, from samples to parameters; the worst of all is",
        f"{_worst(rows, 'worst_relative'):.1e}. In float32, the precision of these jobs, no tensor is over "
        f"{_worst(rows, 'worst_z'):.1f} standard deviations",
        "further off than other orders of its sums on one device are (layouts with point-to-point servers excepted).",
        f"Made by `python scripts/docs.py reference/verify-matrix.md` at commit{'s' * (len(made_at) > 1)} "
        f"{', '.join(made_at)}; the models of the script have random",
        "weights.",
        "",
    ]
    table = [[f"`{layout}`", *(cells.get((family, layout), "") for family in families)] for layout in layouts]
    return "\n".join(lines) + "\n" + markdown_table(["layout", *families], table)


def _worst(rows: list[dict[str, str]], column: str) -> float:
    return max((float(row[column] or 0) for row in rows), default=0.0)
