"""The page of compiled blocks: the graphs of every built-in job and of families of transformers, and their numbers."""

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from motet.parity.shrink_job import make_small_job, with_small_vocabulary
from motet.train.config_rules import reason_against_compiling
from motet.train.job import Job, builtin_jobs, load_job
from pages import DOCS, ROOT, markdown_table
from pages.tensor_parallel_families import FAMILIES, job_of, measure_families, rows_of_data

if TYPE_CHECKING:
    from ranks import Ranks

PAGE = "reference/compiled-blocks.md"
DATA = DOCS / "reference/compiled-blocks.csv"
LAYOUTS = {"": 1, "tp=2 sp=true": 2}  # Layout -> ranks
COLUMNS = ("family", "commit", "reason", "graphs", "difference", "split graphs", "split difference")
LIMIT = 1e-12
STEPS = 3
TEXT = ROOT / "tests/data/small.txt"
# Families whose configs have dropout by default, and the values without it.
NO_DROPOUT: dict[str, dict[str, float]] = {
    "gpt_neox": {"attention_dropout": 0.0, "hidden_dropout": 0.0},
    "gpt2": {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
    "opt": {"dropout": 0.0, "attention_dropout": 0.0},
    "bert": {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0},
    "roberta": {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0},
    "t5": {"dropout_rate": 0.0},
}


def names() -> list[str]:
    """The built-in jobs, then the families of transformers."""
    return [*(f"job {name}" for name in builtin_jobs()), *FAMILIES]


def measure(words: list[str]) -> tuple[str, bool]:
    """Train these jobs and families, or all, with compiled blocks and eagerly."""
    measure_families(words, names(), DATA, columns=COLUMNS, measure_family=_measure)
    return page(), all(_is_equal(row) for row in rows_of_data(DATA))


def small_job_of(name: str, folder: Path, layout: str = "") -> Job:
    """A small job of this name in float64, eager."""
    if not name.startswith("job "):
        return job_of(name, folder, layout, NO_DROPOUT.get(name))
    name = name.removeprefix("job ")
    objective = "synthetic:majority" if load_job(name).data.objective == "classify" else TEXT
    data = [f"data.source={objective}", "data.tokenizer=bytes", f"data.cache={folder}", "data.workers=1"]
    job = load_job(name, [*data, *(f"layout.{word}" for word in layout.split()), "run.device=cpu"])
    return make_small_job(with_small_vocabulary(job, {2}, lambda line: None).job, 8, STEPS)


def compiled(job: Job) -> Job:
    """The same job with compiled blocks."""
    return job.model_copy(update={"run": job.run.model_copy(update={"compile": "blocks"})})


def reason_of(name: str) -> str:
    """Why a built-in job does not compile its blocks; empty if nothing in it speaks against that."""
    if not name.startswith("job "):
        return ""
    return reason_against_compiling(dict(load_job(name.removeprefix("job ")))) or ""


def _measure(pool: "Ranks", name: str) -> dict[str, str]:
    from train.compiled_runs import train_compiled, train_foreign
    from train.runs import worst_difference
    from train.tensor_parallel_runs import train_and_reassemble

    row = dict.fromkeys(COLUMNS[2:], "")
    if reason := reason_of(name):
        return {**row, "reason": reason}
    for prefix, (layout, ranks) in zip(("", "split "), LAYOUTS.items(), strict=True):
        with tempfile.TemporaryDirectory() as folder:
            job = small_job_of(name, Path(folder), layout)
            written = pool.run(ranks, train_and_reassemble, job, STEPS, timeout_s=300)[0]
            train = train_compiled if name.startswith("job ") else train_foreign
            run = pool.run(ranks, train, compiled(job), STEPS, timeout_s=300)[0]
        row |= {"reason": run.reason or "", f"{prefix}graphs": str(run.graphs)}
        row[f"{prefix}difference"] = f"{worst_difference(run.trained, written):.1e}"
    return row


def _is_equal(row: dict[str, str]) -> bool:
    differences = [row["difference"], row["split difference"]]
    return bool(row["reason"]) or all(value and float(value) < LIMIT for value in differences)


def page() -> str:
    """The page, from the data."""
    rows = rows_of_data(DATA)
    commits = list(dict.fromkeys(row["commit"] for row in rows))
    graphs = [row for row in rows if not row["reason"]]
    worst = max((float(row[key]) for row in graphs for key in ("difference", "split difference")), default=0.0)
    head = [
        "model",
        "graphs",
        "difference",
        "graphs, `tp=2 sp=true`",
        "difference, `tp=2 sp=true`",
        "eager because",
    ]
    cells = [
        [
            row["family"].replace("job ", "built-in job ") + (" (no dropout)" if row["family"] in NO_DROPOUT else ""),
            *(row[key] for key in ("graphs", "difference", "split graphs", "split difference")),
            row["reason"],
        ]
        for row in rows
    ]
    return f"""# Compiled blocks, on models

Small models with random weights were trained for {STEPS} steps in float64, with `run.compile=blocks` and eagerly, on
one device and over two ranks that split layers and tokens. All blocks of one kind share a graph, which `fullgraph=True`
makes without a break: a model with two kinds of blocks has two. The columns of differences have the largest relative
difference of any loss, norm, gradient or parameter between compiled and eager; the worst of all is {worst:.1e},
and {LIMIT:.0e} is the limit. The graphs ran with torch's kernels, so that float64 shows every mistake of a graph, of a
collective in it and of its gradients; the code that torch.compile makes of a graph rounds in another order
([benchmark](../benchmarks/compiled-blocks.md)). The mode in which modules of transformers compute in
float64 was traced into their graphs here. A training run traces no mode, and compiles nothing in float64.
Backward gathers the inputs of split layers again, as eager blocks do.

Made by `python scripts/docs.py reference/compiled-blocks.md` at commit{"s" * (len(commits) > 1)} {", ".join(commits)}.

{markdown_table(head, cells)}"""
