"""Verify every layout for up to so many ranks on families of models, and write the table of the worst figures.

python scripts/write_verify_page.py            # all families; takes an hour on two cores
python scripts/write_verify_page.py llama gpt2 # these again; the others stay as they are in the page's data
python scripts/write_verify_page.py --page     # the page from its data
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from motet.cli.environment import read_environment
from motet.parity.candidate_layouts import layouts_up_to
from motet.parity.layout_verdict import LayoutVerdict
from motet.parity.verify_job import make_verification_plans, verify_job_layouts
from motet.train.job import Job, load_job

ROOT = Path(__file__).parents[1]
DATA, PAGE = ROOT / "docs" / "reference" / "verify-matrix.json", ROOT / "docs" / "reference" / "verify-matrix.md"
RANKS = 4
KEPT = ("ok", "worst_relative", "worst_tensor", "worst_z", "first_difference", "cause", "noise_dominated", "failed")
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


def judged(family: str) -> dict[str, dict[str, Any]]:
    """Layout -> what is known of it."""
    with tempfile.TemporaryDirectory() as name:

        def show(verdict: LayoutVerdict) -> None:
            print(f"{family}: {verdict}", flush=True)

        return {
            verdict.layout: _kept(verdict)
            for subject in make_verification_plans(job_of(family, Path(name)), layouts_up_to(RANKS), print)
            for verdict in verify_job_layouts(subject, read_environment(), print, show)
        }


def _kept(verdict: LayoutVerdict) -> dict[str, Any]:
    known = verdict.as_json()
    return {name: known[name] for name in KEPT}


def page(data: dict[str, dict[str, Any]]) -> str:
    """The table. `data`: of each family, `commit` and `layouts`."""
    families = [family for family in FAMILIES if family in data]
    layouts = [layout for layout in layouts_up_to(RANKS) if any(layout in data[name]["layouts"] for name in families)]
    rows = [data[name]["layouts"][layout] for name in families for layout in layouts if layout in data[name]["layouts"]]
    worst = max((row["worst_relative"] or 0.0 for row in rows), default=0.0)
    worst_z = max((row["worst_z"] or 0.0 for row in rows), default=0.0)
    made_at = list(dict.fromkeys(data[name]["commit"] for name in families))
    commits = f"commit{'s' * (len(made_at) > 1)} {', '.join(made_at)}"
    lines = [
        "# Every layout, on families of models",
        "",
        f"{len(rows)} pairs of a layout and a model, {wrong_in(rows)} of them wrong, by `motet verify` in float64:",
        "three steps, each from a state of one device; three in a row; one from a checkpoint; an evaluation. A",
        "figure is the worst relative difference of any tensor, from samples to parameters; the worst of all is",
        f"{worst:.1e}. In float32, the precision of these jobs, no tensor is over {worst_z:.1f} standard deviations",
        "further off than other orders of its sums on one device are (of layouts that are not servers by messages).",
        f"Made by `python scripts/write_verify_page.py` at {commits}; the models of the script have random",
        "weights.",
        "",
        f"| layout | {' | '.join(families)} |",
        f"|---|{'---|' * len(families)}",
    ]
    for layout in layouts:
        cells = [_cell(data[family]["layouts"].get(layout)) for family in families]
        lines.append(f"| `{layout}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def wrong_in(rows: Iterable[dict[str, Any]]) -> int:
    return sum(not row["ok"] for row in rows)


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    return f"{row['worst_relative']:.1e}" if row["ok"] else "**wrong**"


def main() -> int:
    """Write the page; the exit code is 1 if a layout is wrong."""
    data: dict[str, Any] = json.loads(DATA.read_text()) if DATA.exists() else {}
    asked = [word for word in sys.argv[1:] if word != "--page"] or ([] if "--page" in sys.argv else list(FAMILIES))
    if unknown := [family for family in asked if family not in FAMILIES]:
        print(f"{unknown[0]!r} is none of the families {', '.join(FAMILIES)}")
        return 2
    for family in asked:
        head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT)
        data[family] = {"commit": head.stdout.strip(), "layouts": judged(family)}
        DATA.write_text(json.dumps(data, indent=1) + "\n")
    PAGE.write_text(page(data))
    return 1 if any(wrong_in(of["layouts"].values()) for of in data.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
