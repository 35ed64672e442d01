"""The tables of benchmarks/server_training.py: final losses of each mode, its staleness, and the check of bounds."""

from statistics import fmean

from parts.loss_curves import Curve
from parts.ps_staleness import ServerStatistics, added
from parts.ps_variants import SERVER_STUDY, VARIANTS, WORK_ITEMS_PER_STEP
from parts.report.pages import table
from parts.report.study_page import Curves, gap_cells, loss_cells, seeds_of

LAST = 8
"""Staleness from here on is one column."""
PARAMETERS = 3_950_848
"""Of `tiny`."""


def table_of(curves: Curves) -> str:
    head = [
        "variant", "validation loss", "over seeds", "gap to sync", "over seeds", "staleness, mean", "largest",
        "mean, in steps", "steps behind, at most", "left out", "bytes pushed", "bytes pulled",
    ]  # fmt: skip
    rows = []
    for name, variant in VARIANTS.items():
        if seeds_of(curves, name):
            own = [*loss_cells(curves, name), *gap_cells(SERVER_STUDY, curves, name)]
            rows.append([variant.words, *own, *staleness_cells(curves, name), *traffic_cells(curves, name)])
    return table(head, rows)


def staleness_cells(curves: Curves, name: str) -> list[str]:
    served = statistics_of_variant(curves, name)
    mean = fmean(run.mean for run in served)
    steps = mean / updates_of_a_step(name)
    largest, behind = max(run.largest for run in served), max(len(run.behind) - 1 for run in served)
    return [f"{mean:.2f}", str(largest), f"{steps:.2f}", str(behind), left_out(curves, name)]


def updates_of_a_step(name: str) -> int:
    return WORK_ITEMS_PER_STEP if name.startswith(("async", "bounded")) else 1


def left_out(curves: Curves, name: str) -> str:
    """The share of the tokens of a batch that is in no update."""
    found = []
    for seed in seeds_of(curves, name):
        reference, own = curves.get((SERVER_STUDY.reference, seed)), curves[name, seed].server
        if reference is not None and reference.server is not None and own is not None:
            found.append(1 - own.tokens / own.events / (reference.server.tokens / reference.server.events))
    return f"{fmean(found):.0%}" if found else ""


def traffic_cells(curves: Curves, name: str) -> list[str]:
    """Bytes for each parameter and step, summed over all workers."""
    served = statistics_of_variant(curves, name)
    pushed = fmean(run.pushed_bytes / run.events for run in served) / PARAMETERS
    pulled = fmean(run.pulled_bytes / run.events for run in served) / PARAMETERS
    return [f"{pushed:.3g}", f"{pulled:.3g}"]


def statistics_of_variant(curves: Curves, name: str) -> list[ServerStatistics]:
    return [served(curves[name, seed]) for seed in seeds_of(curves, name)]


def served(curve: Curve) -> ServerStatistics:
    if curve.server is None:
        raise SystemExit(f"a curve of {curve.settings} does not say how stale it was")
    return curve.server


def table_of_staleness(curves: Curves) -> str:
    """Shares of all gradients of all seeds."""
    head = ["share of gradients that missed", "gradients", *map(str, range(LAST)), f"{LAST} or more", "updates of"]
    rows = []
    for name, variant in VARIANTS.items():
        runs = statistics_of_variant(curves, name)
        if not runs:
            continue
        total = added([run.staleness for run in runs])
        count = sum(total)
        parts = [*(sum(total[late : late + 1]) for late in range(LAST)), sum(total[LAST:])]
        unit = "a share" if updates_of_a_step(name) > 1 else "a step"
        rows.append([variant.words, f"{count:,}", *(percent(part, count) for part in parts), unit])
    return table(head, rows)


def percent(part: int, count: int) -> str:
    if part * 2000 < count:
        return "below 0.1%" if part else ""
    return f"{part / count:.1%}"


def checked(curves: Curves) -> str:
    """The number of events without a gradient beyond its bound. Runs with such a gradient are not kept."""
    found = []
    for name, variant in VARIANTS.items():
        runs = statistics_of_variant(curves, name)
        if variant.bound is None or not runs:
            continue
        worst = max(len(run.behind) - 1 for run in runs)
        if worst > variant.bound:
            raise SystemExit(f"{name}: {worst} steps behind, above the bound {variant.bound}")
        events = sum(run.events for run in runs)
        found.append(f"{variant.words} {worst} behind at most, of {variant.bound}, in {events:,} events")
    kept = [curve.server for (name, _), curve in curves.items() if VARIANTS[name].bound is not None and curve.server]
    events = sum(run.events for run in kept)
    return (
        f"The bound was checked in every event of a step of these runs, {events:,} in all, and held in each: "
        f"{'; '.join(found)}."
    )
