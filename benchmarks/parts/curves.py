"""A finished run of a variant as a file of a few KB: means of the loss, the validation, and what its servers did."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

from parts.staleness import Served, served_of

WINDOWS = 50
"""Into which the steps of a run are cut; of a short run each step is one."""


@dataclass(frozen=True)
class Curve:
    """What is kept of a run."""

    settings: list[str]
    """All that differs from the job `tiny`, but for threads."""
    ended: str
    """`finished` or `diverged`."""
    steps_per_window: int
    losses: list[float]
    """The mean loss of each window; of a run that diverged, of those that are whole."""
    validation: float | None
    """After the last step; None where the run diverged."""
    torch: str
    server: Served | None = None
    """Of a run with a parameter server."""

    def to_json(self) -> str:
        content = asdict(self)
        if self.server is None:
            del content["server"]
        return json.dumps(content, indent=1) + "\n"


def read_curve(path: Path, settings: list[str]) -> Curve | None:
    """None: it was made with other settings."""
    content = json.loads(path.read_text(encoding="utf-8"))
    served = content.pop("server", None)
    curve = Curve(**content, server=Served(**served) if served else None)
    return curve if curve.settings == settings else None


def curve_of(events: Path, settings: list[str], steps: int, bound: int | None = None) -> Curve | None:
    """None: the run did not come to its end. A gradient further behind than the bound ends the program."""
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
    return Curve(settings, ended.reason, each, finite, validation, version, served_of(done, bound))
