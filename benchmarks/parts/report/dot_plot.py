"""Rows of dots over one axis as SVG, with a line at the mean of each row. No library is needed."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from statistics import fmean

from parts.report.line_plot import TICKS, round_numbers

from motet.collectives.draw.program_drawing import COLOURS, svg_opening

LEFT, TOP, PLOT_WIDTH, ROW_HEIGHT, BELOW = 240, 76, 740, 30, 60


@dataclass(frozen=True)
class Row:
    """A name and the values of its dots."""

    name: str
    values: Sequence[float]
    colour: int


def dot_plot(title: str, note: str, rows: Sequence[Row], label: str) -> str:
    """The axis holds 0 and all values."""
    values = [value for row in rows for value in (0.0, *row.values)]
    ticks = list(round_numbers(min(values), max(values) if max(values) > min(values) else min(values) + 1.0, TICKS))
    low, high, bottom = ticks[0], ticks[-1], TOP + ROW_HEIGHT * len(rows)

    def x(value: float) -> float:
        return LEFT + PLOT_WIDTH * (value - low) / (high - low)

    width, height = LEFT + PLOT_WIDTH + 40, bottom + BELOW
    parts = [
        svg_opening(width, height, title),
        f'<rect class="page" width="{width}" height="{height}"/>',
        f'<text class="big" x="16" y="30">{escape(title)}</text>',
        f'<text class="quiet" x="16" y="52">{escape(note)}</text>',
        f'<rect class="frame" x="{LEFT}" y="{TOP}" width="{PLOT_WIDTH}" height="{bottom - TOP}"/>',
    ]
    for tick in ticks:
        parts.append(f'<path class="frame" d="M{x(tick):.1f} {TOP} V{bottom}"/>')
        parts.append(f'<text class="quiet middle" x="{x(tick):.1f}" y="{bottom + 20}">{tick:.4g}</text>')
    parts.append(f'<path class="done" d="M{x(0):.1f} {TOP} V{bottom}"/>')
    for number, row in enumerate(rows):
        middle = TOP + ROW_HEIGHT * (number + 0.5)
        parts += _drawn(row, [x(value) for value in row.values], middle)
    parts.append(f'<text class="middle" x="{LEFT + PLOT_WIDTH / 2:g}" y="{bottom + 44}">{escape(label)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _drawn(row: Row, places: Sequence[float], y: float) -> Iterator[str]:
    colour = row.colour % len(COLOURS)
    yield f'<text class="t{colour} head end" x="{LEFT - 10}" y="{y + 4:.1f}">{escape(row.name)}</text>'
    yield f'<path class="curve c{colour} light" d="M{min(places):.1f} {y:.1f} H{max(places):.1f}"/>'
    yield f'<path class="curve c{colour} heavy" d="M{fmean(places):.1f} {y - 9:.1f} v18"/>'
    for place, value in zip(places, row.values, strict=True):
        yield f'<circle class="t{colour}" cx="{place:.1f}" cy="{y:.1f}" r="4"><title>{value:+.4f}</title></circle>'
