"""Timelines of live bytes as stacked columns of text and as stacked areas of SVG. Without torch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from motet.core.units import format_bytes
from motet.memory.memory_timeline import CATEGORIES, Category, MemoryTimeline

_LETTERS: dict[Category, str] = {
    "parameters": "P",
    "master parameters": "M",
    "gradients": "G",
    "moments": "O",
    "compression errors": "E",
    "other state": "s",
    "saved activations": "a",
    "recomputed activations": "r",
    "gathered or unreduced": "g",
    "messages": "m",
    "workspace": "w",
}
_ROWS = 16
_PHASES = "forward", "backward"  # With a colour behind them
_WIDTH, _LEFT, _RIGHT, _PANEL, _GAP, _TOP, _COLUMNS = 1120, 86, 236, 190, 44, 62, 700
_STYLE = """
.page { fill: #ffffff }
text { font-family: system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; font-size: 12px; fill: #1f2328 }
.big { font-weight: 600; font-size: 15px } .quiet { fill: #57606a } .grid { stroke: #d0d7de; stroke-width: 1 }
.right { text-anchor: end } .middle { text-anchor: middle }
.budget { stroke: #cf222e; stroke-width: 1.5; stroke-dasharray: 6 4 }
.forward { fill: #ddf4ff } .backward { fill: #fbefff }
.P { fill: #123a75 } .M { fill: #1f5fbf } .G { fill: #1a7439 } .O { fill: #57a773 } .E { fill: #8a5a00 }
.s { fill: #6e7781 } .a { fill: #a84300 } .r { fill: #e08b4a } .g { fill: #7a3fb0 } .m { fill: #b58ad6 }
.w { fill: #afb8c1 }
@media (prefers-color-scheme: dark) {
.page { fill: #14181e } text { fill: #e6edf3 } .quiet { fill: #9da7b3 } .grid { stroke: #30363d }
.forward { fill: #12263a } .backward { fill: #2a1b38 } .P { fill: #3f6fb5 } .budget { stroke: #ff7b72 }
}
"""


@dataclass(frozen=True)
class MemoryPanel:
    """One timeline of a picture."""

    title: str
    timeline: MemoryTimeline


def draw_text(timeline: MemoryTimeline, budget: int | None = None, width: int = 96) -> list[str]:
    """Columns of letters, one for each category, with bytes on the left; a budget is a line of dashes."""
    top = max(timeline.peak, budget or 0) or 1
    columns = [sizes for _, sizes in timeline.columns(width)]
    budget_row = None if budget is None else min(_ROWS - 1, budget * _ROWS // top)
    lines = []
    for row in reversed(range(_ROWS)):
        cells = [_cell(sizes, (row + 0.5) * top / _ROWS) for sizes in columns]
        if row == budget_row:
            cells = [cell if cell != " " else "-" for cell in cells]
        label = format_bytes((row + 1) * top / _ROWS) if row % 4 == 3 else ""
        lines.append(f"{'budget' if row == budget_row else label:>9} |{''.join(cells)}".rstrip())
    phases = "".join(timeline.phase_at(moment)[:1] or "." for moment, _ in timeline.columns(width))
    shown = [f"{_LETTERS[category]} {category}" for category in timeline.bytes_by_category]
    return [*lines, f"{'phase':>9} |{phases}", "", f"({', '.join(shown)})"]


def _cell(sizes: dict[Category, int], height: float) -> str:
    """The letter of the category that is stacked at this height."""
    below = 0
    for category, size in sizes.items():
        below += size
        if height < below:
            return _LETTERS[category]
    return " "


def draw_svg(panels: Sequence[MemoryPanel], *, title: str, note: str, budget: int | None = None) -> str:
    """A panel of stacked areas for each timeline, all with one scale of bytes."""
    top = max([*(panel.timeline.peak for panel in panels), budget or 0]) or 1
    used = [each for each in CATEGORIES if any(each in panel.timeline.bytes_by_category for panel in panels)]
    height = _TOP + max(len(panels) * (_PANEL + _GAP), 24 * (len(used) + len(_PHASES)) + 48) + 10
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img">',
            f"<title>{escape(title)}</title><style>{_STYLE}</style>",
            f'<rect class="page" width="{_WIDTH}" height="{height}"/>',
            f'<text class="big" x="16" y="24">{escape(title)}</text>',
            f'<text class="quiet" x="16" y="42">{escape(note)}</text>',
            *(line for i, panel in enumerate(panels) for line in _svg_panel(panel, i, top, budget=budget)),
            *_svg_legend(used),
            "</svg>",
            "",
        ]
    )


def _svg_panel(panel: MemoryPanel, index: int, top: int, *, budget: int | None) -> Iterator[str]:
    timeline, floor = panel.timeline, _TOP + index * (_PANEL + _GAP) + _PANEL
    width, ceiling = _WIDTH - _LEFT - _RIGHT, _TOP + index * (_PANEL + _GAP) + 18
    scale, across = (floor - ceiling) / top, width / (timeline.moments + 1)
    yield f'<text x="{_LEFT}" y="{ceiling - 6}">{escape(panel.title)}</text>'
    for phase in timeline.phases:
        kind = "forward" if phase.name[:1].lower() == "f" else "backward" if phase.name[:1] in "bBIWw" else ""
        if kind and phase.stop > phase.start:
            place = f'x="{_LEFT + phase.start * across:.1f}" width="{(phase.stop - phase.start) * across:.1f}"'
            hint = f"<title>{escape(phase.name)}</title>"
            yield f'<rect class="{kind}" {place} y="{ceiling}" height="{floor - ceiling}">{hint}</rect>'
    for part in range(5):
        y = floor - part * (floor - ceiling) / 4
        yield f'<line class="grid" x1="{_LEFT}" x2="{_LEFT + width}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text class="quiet right" x="{_LEFT - 8}" y="{y + 4:.1f}">{format_bytes(part * top / 4)}</text>'
    yield from _svg_areas(timeline, floor, scale, width=width)
    if budget is not None:
        y = floor - budget * scale
        yield f'<line class="budget" x1="{_LEFT}" x2="{_LEFT + width}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text class="right" x="{_LEFT + width - 4}" y="{y - 4:.1f}">budget {format_bytes(budget)}</text>'


def _svg_areas(timeline: MemoryTimeline, floor: float, scale: float, *, width: float) -> Iterator[str]:
    columns = [sizes for _, sizes in timeline.columns(_COLUMNS)]
    step, below = width / len(columns), [0] * len(columns)
    for category in timeline.bytes_by_category:
        above = [base + sizes[category] for base, sizes in zip(below, columns, strict=True)]
        upper = (f"{x:.1f},{floor - value * scale:.1f}" for x, value in _steps(above, step))
        lower = [f"{x:.1f},{floor - value * scale:.1f}" for x, value in _steps(below, step)]
        hint = f"<title>{escape(category)}, {format_bytes(timeline.peak_of(category))} at most</title>"
        yield f'<polygon class="{_LETTERS[category]}" points="{" ".join([*upper, *reversed(lower)])}">{hint}</polygon>'
        below = above


def _steps(values: Sequence[int], step: float) -> Iterator[tuple[float, int]]:
    """The corners of a line that stays level in each column."""
    for column, value in enumerate(values):
        if column == 0 or value != values[column - 1]:
            yield _LEFT + column * step, values[max(column - 1, 0)]
            yield _LEFT + column * step, value
    yield _LEFT + len(values) * step, values[-1]


def _svg_legend(used: Sequence[Category]) -> Iterator[str]:
    x = _WIDTH - _RIGHT + 24
    for row, category in enumerate(reversed(used)):
        y = _TOP + 30 + row * 24
        yield f'<rect class="{_LETTERS[category]}" x="{x}" y="{y - 11}" width="14" height="14"/>'
        yield f'<text x="{x + 22}" y="{y}"><title>{escape(CATEGORIES[category])}</title>{escape(category)}</text>'
    for row, phase in enumerate(_PHASES, start=len(used)):
        y = _TOP + 38 + row * 24
        yield f'<rect class="{phase}" x="{x}" y="{y - 11}" width="14" height="14"/>'
        yield f'<text x="{x + 22}" y="{y}">{phase}</text>'
