"""Measured values as SVG, drawn by matplotlib: lines over an axis with a legend, and rows of dots over one axis."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from motet.core.svg import COLOURS

SETTINGS = {
    "svg.hashsalt": "motet",  # The same values are the same file
    "svg.fonttype": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#d0d7de",
    "axes.axisbelow": True,
}


@dataclass(frozen=True)
class Line:
    """The points of one line, from left to right, and its style."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: int
    dashed: bool = False


@dataclass(frozen=True)
class Axis:
    """The label and the ends of an axis."""

    label: str
    logarithmic: bool = False
    ticks: tuple[float, ...] = ()
    """The ends, chosen from the lines when not given."""
    low: float | None = None
    high: float | None = None
    """The ends, chosen from the lines when not given. Points outside are cut off."""


@dataclass(frozen=True)
class Row:
    """A name and the values of its dots."""

    name: str
    values: Sequence[float]
    colour: int


def save_line_plot(path: Path, lines: Sequence[Line], *, title: str, note: str, x: Axis, y: Axis) -> None:
    """Draw lines into a file; the legend has their names."""

    def draw(axes: Any) -> None:
        for line in lines:
            style = {"color": COLOURS[line.colour % len(COLOURS)], "linestyle": "--" if line.dashed else "-"}
            axes.plot(*zip(*line.points, strict=True), label=line.name, linewidth=1.4, **style)
        for name, axis in (("x", x), ("y", y)):
            axes.set(**{f"{name}label": axis.label, f"{name}scale": "log" if axis.logarithmic else "linear"})
            axes.set(**{f"{name}lim": (axis.low, axis.high)})
            if axis.ticks:
                axes.set(**{f"{name}ticks": axis.ticks, f"{name}ticklabels": [f"{tick:g}" for tick in axis.ticks]})
                axes.minorticks_off()
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)

    _save(path, draw, title=title, note=note, height=5.6)


def save_dot_plot(path: Path, rows: Sequence[Row], *, title: str, note: str, label: str) -> None:
    """Draw rows of dots into a file, each with a mark at its mean, around a line at 0."""

    def draw(axes: Any) -> None:
        axes.axvline(0, color="#1f2328")
        for height, row in enumerate(rows):
            colour = COLOURS[row.colour % len(COLOURS)]
            axes.plot(row.values, [height] * len(row.values), "o-", color=colour, linewidth=1, markersize=5)
            axes.plot(fmean(row.values), height, "|", color=colour, markersize=16, markeredgewidth=3)
        axes.set(xlabel=label, yticks=range(len(rows)), yticklabels=[row.name for row in rows])
        axes.invert_yaxis()

    _save(path, draw, title=title, note=note, height=1.6 + 0.3 * len(rows))


def _save(path: Path, draw: Callable[[Any], None], *, title: str, note: str, height: float) -> None:
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        print(f"{path.name} is not drawn, since matplotlib is not installed; run: pip install 'motet[docs]'")
        return
    with rc_context(SETTINGS):
        figure = Figure(figsize=(10.4, height), layout="constrained")
        axes = figure.subplots()
        draw(axes)
        figure.suptitle(title, x=0.01, horizontalalignment="left", weight="bold")
        axes.set_title(note, loc="left", fontsize="medium", color="#57606a")
        figure.savefig(path, metadata={"Date": None})
