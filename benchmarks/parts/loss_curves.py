"""Finished runs of variants as lines of one CSV file: means of the loss, the validation, and statistics of servers."""

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from parts.ps_staleness import ServerStatistics, server_statistics

WINDOWS = 50
"""The number of windows into which the steps of a run are cut; in a short run each step is one."""


@dataclass(frozen=True)
class Curve:
    """The record of one run."""

    settings: list[str]
    """Differences from the job `tiny`, except for threads."""
    ended: str
    """`finished` or `diverged`."""
    steps_per_window: int
    losses: list[float]
    """The mean loss of each window; for a run that diverged, of complete windows."""
    validation: float | None
    """The validation after the last step; None where the run diverged."""
    torch: str
    server: ServerStatistics | None = None
    """The statistics of a run with a parameter server."""


_COLUMNS = (
    *("run", "ended", "steps_per_window", "validation", "torch", "losses", "events", "staleness", "behind", "tokens"),
    *("pulled_bytes", "pushed_bytes", "settings"),
)


def read_curves(path: Path) -> dict[str, Curve]:
    """The curve of each finished run, by the run's name; lists are numbers with spaces between them."""
    if not path.exists():
        return {}
    with path.open(newline="", encoding="utf-8") as file:
        return {row["run"]: _curve_from_row(row) for row in csv.DictReader(file)}


def _curve_from_row(row: Mapping[str, str]) -> Curve:
    server = None
    if row["events"]:
        server = ServerStatistics(
            events=int(row["events"]),
            staleness=[int(count) for count in row["staleness"].split()],
            behind=[int(count) for count in row["behind"].split()],
            tokens=int(row["tokens"]),
            pulled_bytes=int(row["pulled_bytes"]),
            pushed_bytes=int(row["pushed_bytes"]),
        )
    return Curve(
        settings=row["settings"].split(),
        ended=row["ended"],
        steps_per_window=int(row["steps_per_window"]),
        losses=[float(loss) for loss in row["losses"].split()],
        validation=float(row["validation"]) if row["validation"] else None,
        torch=row["torch"],
        server=server,
    )


def write_curves(path: Path, curves: Mapping[str, Curve]) -> None:
    """Replace the file by these runs, sorted by name."""
    partial = path.with_suffix(".part")
    with partial.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, _COLUMNS, lineterminator="\n")
        writer.writeheader()
        for name, curve in sorted(curves.items()):
            values = {"run": name, **vars(curve), **(vars(curve.server) if curve.server else {})}
            row = {column: values.get(column) for column in _COLUMNS}
            writer.writerow({key: " ".join(map(str, v)) if isinstance(v, list) else v for key, v in row.items()})
    partial.replace(path)


def curve_of(events: Path, settings: list[str], steps: int, bound: int | None = None) -> Curve | None:
    """The curve of a run; None if it did not end. A gradient further behind than the bound ends the program."""
    import torch

    from motet.monitor.events import EvaluationDone, RunEnded, StepDone, effective_events, read_events

    if not events.exists():
        return None
    told = effective_events(read_events(events))
    ended = told[-1] if told else None
    if not isinstance(ended, RunEnded) or ended.reason not in ("finished", "diverged"):
        return None
    done = [event for event in told if isinstance(event, StepDone)]
    losses = [event.loss for event in done]
    each = max(1, steps // WINDOWS)
    windows = [losses[n : n + each] for n in range(0, len(losses), each)]
    found = [e.loss for e in told if isinstance(e, EvaluationDone) and e.step == steps and e.split == "validation"]
    means = [round(fmean(window), 5) for window in windows if len(window) == each]
    finite = [mean for mean in means if mean - mean == 0]
    version = torch.__version__.partition("+")[0]
    validation = round(found[-1], 5) if found else None
    return Curve(settings, ended.reason, each, finite, validation, version, server_statistics(done, bound))
