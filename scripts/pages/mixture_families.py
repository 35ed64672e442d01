"""The page of mixtures of experts on families of models: the numbers of layouts with each balance, or a refusal."""

import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from motet.cli.environment_variables import read_environment
from motet.core.errors import InputError
from motet.parallel.process.process_group import RankGroup
from motet.parity.layout_verdict import LayoutVerdict
from motet.parity.verify_job import make_verification_plans, verify_job_layouts
from motet.train.balance.balanced_layers import balanced_layers_of_job
from motet.train.job import load_job
from pages import DOCS, import_from_tests, markdown_table
from pages.tensor_parallel_families import LIMIT, measure_families, rows_of_data, trained_rows_of

if TYPE_CHECKING:
    from ranks import Ranks

PAGE = "reference/mixture-families.md"
DATA = DOCS / "reference/mixture-families.csv"
LAYOUTS = ("dp=2 zero=3", "tp=2 sp=true recompute=full", "pp=2", "dp=2 microbatches=2", "cp=2 recompute=selective")
VERIFIED = ("relative", "z-score")  # The largest of a layout in float64, and in float32
COLUMNS = ("family", "commit", "correction", "refusal", *LAYOUTS, *VERIFIED)
RANKS = 2


def measure(words: list[str]) -> tuple[str, bool]:
    """Train these families, or all, on one device and over two ranks; the data of others stays. The word `verify`
    verifies these, or all that are trained, instead."""
    import_from_tests()
    from train.mixture_runs import FAMILIES, MORE_FAMILIES

    families, function = [word for word in words if word != "verify"], _train_family
    if "verify" in words:
        families, function = families or [row["family"] for row in trained_rows()], _verify_family
    measure_families(families, [*FAMILIES, *MORE_FAMILIES], DATA, columns=COLUMNS, measure_family=function)
    return page(), all(is_right(row) for row in trained_rows())


def is_right(row: dict[str, str]) -> bool:
    """Whether all layouts of a family train as one device, and `motet verify` says so where it ran."""
    return all(float(row[layout]) < LIMIT for layout in LAYOUTS) and row["relative"] != "wrong"


def _train_family(pool: "Ranks", family: str) -> dict[str, str]:
    """A row without figures of `motet verify`."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        answers, parity = describe_balance(folder, family), dict.fromkeys(LAYOUTS, "")
        if not answers["refusal"]:
            kinds = ("row", "bias") if answers["correction"] else ("row",)
            by_kind = [_train(pool, folder, family, kind) for kind in kinds]
            parity = {layout: f"{max(worst[layout] for worst in by_kind):.1e}" for layout in LAYOUTS}
    return {**answers, **parity, **dict.fromkeys(VERIFIED, "")}


def _verify_family(_: "Ranks", family: str) -> dict[str, str]:
    """The row of a family that is trained, with the figures of `motet verify`."""
    (row,) = (row for row in trained_rows() if row["family"] == family)
    with tempfile.TemporaryDirectory() as name:
        verdicts = _verify(Path(name), family, "bias" if row["correction"] else "row")
    assert len(verdicts) == len(LAYOUTS)
    return {**{name: text for name, text in row.items() if name not in ("family", "commit")}, **_describe(verdicts)}


def describe_balance(folder: Path, family: str) -> dict[str, str]:
    """The buffer that corrects the choice of routers, or the refusal of any balance."""
    from train.mixture_runs import BALANCES, job_of_family

    job = job_of_family(folder, family, BALANCES["row"])
    try:
        balanced_layers_of_job(job)
    except InputError as error:
        return {"correction": "", "refusal": str(error).replace(getattr(job.model, "factory", ""), "hf:FOLDER")}
    try:
        first = balanced_layers_of_job(job_of_family(folder, family, BALANCES["bias"]))[0]
    except InputError:
        return {"correction": "", "refusal": ""}
    assert first.correction is not None
    return {"correction": first.correction.removeprefix(f"{first.layer.name}."), "refusal": ""}


def _train(pool: "Ranks", folder: Path, family: str, kind: str) -> dict[str, float]:
    """The largest difference of each layout in ten steps; other loads or corrections are an AssertionError."""
    from train.mixture_runs import BALANCES, job_of_family, settings_of, train_mixture, worst_mixture_difference

    alone = train_mixture(RankGroup(0, 1, None, torch.device("cpu")), job_of_family(folder, family, BALANCES[kind]))
    worst = {}
    for layout in LAYOUTS:
        job = job_of_family(folder, family, BALANCES[kind], *settings_of(layout))
        results = pool.run(RANKS, train_mixture, job, timeout_s=300)
        worst[layout] = max(worst_mixture_difference(result, alone) for result in results)
    return worst


def _verify(folder: Path, family: str, kind: str) -> list[LayoutVerdict]:
    """The verdicts of `motet verify` on the same layouts, without recomputation, in the precision of a small job."""
    from train.mixture_runs import BALANCES, model_of_family
    from train.runs import TEXT

    verdicts: list[LayoutVerdict] = []
    data = [f"data.source={TEXT}", "data.tokenizer=bytes", "data.sequence_length=24", "data.validation_fraction=0.1"]
    steps = ["optimizer.learning_rate=0.003", "optimizer.clip_norm=0.05", "monitor.tensorboard=false", "run.device=cpu"]
    job = load_job("tiny", [*data, f"data.cache={folder}", *steps, model_of_family(folder, family, BALANCES[kind])])
    for plan in make_verification_plans(job, [layout.partition(" recompute")[0] for layout in LAYOUTS], print):
        verify_job_layouts(plan, read_environment(), log=lambda _: None, on_verdict=verdicts.append)
    for verdict in verdicts:
        print(f"{family}: {verdict}", flush=True)
    return verdicts


def _describe(verdicts: Sequence[LayoutVerdict]) -> dict[str, str]:
    """The largest figures of verdicts, or that one is wrong."""
    if not all(verdict.ok for verdict in verdicts):
        return dict.fromkeys(VERIFIED, "wrong")
    z_scores = [verdict.worst_z or 0.0 for verdict in verdicts]
    return {"relative": f"{max(v.worst_relative for v in verdicts):.1e}", "z-score": f"{max(0.0, *z_scores):.1f}"}


read_rows, trained_rows = partial(rows_of_data, DATA), partial(trained_rows_of, DATA)


def page() -> str:
    """The page, from the data."""
    rows, trained = read_rows(), trained_rows()
    commits = list(dict.fromkeys(row["commit"] for row in rows))
    head = ["family", "kinds of balance", *(f"`{layout}`" for layout in LAYOUTS), "`motet verify`"]
    cells = [
        [
            row["family"],
            f"`row`; `bias` moves `{row['correction']}`" if row["correction"] else "`row`",
            *(value if float(value := row[layout]) < LIMIT else f"**{value}**" for layout in LAYOUTS),
            f"{row['relative']}; {row['z-score']}" if row["relative"] else "-",
        ]
        for row in trained
    ]
    corrected = sum(bool(row["correction"]) for row in trained)
    worst = max(float(row[layout]) for row in trained for layout in LAYOUTS)
    verified = [row for row in trained if row["relative"]]
    return f"""# Mixtures of experts, on families of models

Each of these {len(rows)} families of transformers is a small mixture with random weights. motet knows none of them by
name: it [finds experts and routers](../guide/mixtures.md#balance) by running the model, and refuses others before
ranks start.

## Trained

{len(trained)} families were trained for ten steps in float64 on one device and over two ranks, with `kind = "row"` and
a `z_weight`. The {corrected} families with a buffer that corrects the choice were trained again, with `kind = "bias"`
and a `weight`; others are refused with `bias`. Loads of experts and corrections are exactly those of one device in each
step. The columns of the layouts have the largest relative difference of any loss, balance term, entropy, norm, gradient
or parameter; the worst of all is {worst:.1e}, and {LIMIT:.0e} is the limit. Gradients are compared with their share of
the norm of all, and parameters with what updates could do.

`motet verify` compared {len(verified)} of the families in these layouts, without recomputation: the last column has the
largest relative difference in float64, and the largest z-score in float32, of 8 allowed.

Made by `python scripts/docs.py {PAGE}` at commit{"s" * (len(commits) > 1)} {", ".join(commits)}.

{markdown_table(head, cells)}
## Refused

`[model.balance]` is refused for these families. Without the section they train like other models of transformers,
unless routers draw random numbers.

{markdown_table(["family", "reason"], [[row["family"], row["refusal"]] for row in rows if row["refusal"]])}"""
