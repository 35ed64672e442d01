"""The live bytes of a rank in a step by category, as values without torch.

A moment is an allocation or a free; moments are counted from the start of the step, so a timeline does not depend on
the speed of a machine.

Timelines of live bytes as stacked columns of text and as stacked areas of SVG. Without torch.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from itertools import accumulate
from typing import Any, Literal

from motet.core.units import format_bytes

Category = Literal[
    "parameters",
    "master parameters",
    "gradients",
    "moments",
    "compression errors",
    "other state",
    "saved activations",
    "recomputed activations",
    "gathered or unreduced",
    "messages",
    "workspace",
]

# In the order in which a picture stacks them: what stays lies below what comes and goes.
CATEGORIES: Mapping[Category, str] = {
    "parameters": "parameters in the dtype of forward and backward, with buffers",
    "master parameters": "parameters in the dtype of the optimizer, where it is another one",
    "gradients": "sums of gradients, kept from step to step",
    "moments": "moments of the optimizer",
    "compression errors": "what lossy codecs left out, for the next message",
    "other state": "tensors that exist before the step and are none of these",
    "saved activations": "what forward leaves for backward, and the batch",
    "recomputed activations": "what backward computes again",
    "gathered or unreduced": "parameters that ranks gather, and gradients before their sum over the ranks",
    "messages": "other tensors that ranks send or receive",
    "workspace": "everything that comes and goes in forward, backward and update",
}


_EARLIER = "before the step"


@dataclass(frozen=True)
class StorageLife:
    """A piece of memory from the moment in which it is made to the one in which it is freed."""

    category: Category
    size: int
    born: int
    freed: int | None  # None: it outlives the step
    operator: str = ""  # That made it
    block: str = ""  # Of the model, in whose forward it was made


@dataclass(frozen=True)
class StepPhase:
    """A stretch of a step, such as the forward of a micro-batch."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class MemoryTimeline:
    """The pieces of memory of one rank in a step."""

    lives: tuple[StorageLife, ...]
    phases: tuple[StepPhase, ...] = ()
    moments: int = field(default=0)  # Allocations and frees

    @cached_property
    def bytes_by_category(self) -> dict[Category, list[int]]:
        """Live bytes after each moment, of the categories that occur."""
        changes: dict[Category, Counter[int]] = {}
        for life in self.lives:
            of_category = changes.setdefault(life.category, Counter())
            of_category[life.born] += life.size
            if life.freed is not None:
                of_category[life.freed] -= life.size
        return {
            category: list(accumulate(changes[category][moment] for moment in range(self.moments + 1)))
            for category in CATEGORIES
            if category in changes
        }

    @cached_property
    def total(self) -> list[int]:
        """Live bytes of all categories after each moment."""
        return [sum(each) for each in zip(*self.bytes_by_category.values(), strict=True)] or [0]

    @property
    def peak_moment(self) -> int:
        """The first moment with the most live bytes."""
        return self.total.index(max(self.total))

    @property
    def peak(self) -> int:
        return max(self.total)

    def peak_of(self, *categories: Category) -> int:
        """The most bytes that categories take together at a moment."""
        curves = [self.bytes_by_category[each] for each in categories if each in self.bytes_by_category]
        return max((sum(each) for each in zip(*curves, strict=True)), default=0)

    def before_step(self, category: Category) -> int:
        """The bytes of a category when the step begins."""
        return self.bytes_by_category.get(category, [0])[0]

    def at_peak(self) -> dict[Category, int]:
        """The bytes of each category in the moment with the most live bytes."""
        return {category: curve[self.peak_moment] for category, curve in self.bytes_by_category.items()}

    def by_operator(self, category: Category) -> dict[str, int]:
        """The bytes of a category by the operator that made them, when the category has the most; largest first."""
        counts = Counter[str]()
        for life in self._at_peak_of(category):
            counts[life.operator or _EARLIER] += life.size
        return dict(counts.most_common())

    def by_block(self, category: Category) -> dict[str, dict[str, int]]:
        """The same by the block in whose forward they were made, in the order of the blocks, and operator."""
        counts = dict[str, Counter[str]]()
        for life in self._at_peak_of(category):
            counts.setdefault(life.block or "outside of blocks", Counter())[life.operator or _EARLIER] += life.size
        return {block: dict(each.most_common()) for block, each in counts.items()}

    def _at_peak_of(self, category: Category) -> Iterator[StorageLife]:
        curve = self.bytes_by_category.get(category, [0])
        moment = curve.index(max(curve))
        for life in self.lives:
            if life.category == category and life.born <= moment and (life.freed is None or life.freed > moment):
                yield life

    def phase_at(self, moment: int) -> str:
        """The name of the phase of a moment, or an empty text."""
        return next((phase.name for phase in self.phases if phase.start <= moment < phase.stop), "")

    def columns(self, count: int) -> Iterator[tuple[int, dict[Category, int]]]:
        """(Its moment, bytes by category) of the largest total in each of at most `count` equal stretches."""
        moments = self.moments + 1
        for column in range(min(count, moments)):
            start, stop = (moments * (column + end) // min(count, moments) for end in (0, 1))
            largest = max(range(start, stop), key=self.total.__getitem__)
            yield largest, {category: curve[largest] for category, curve in self.bytes_by_category.items()}

    def as_json(self) -> dict[str, Any]:
        """Plain values, from which `from_json` makes the timeline again."""
        return {
            "lives": [
                [each.category, each.size, each.born, each.freed, each.operator, each.block] for each in self.lives
            ],
            "phases": [[each.name, each.start, each.stop] for each in self.phases],
            "moments": self.moments,
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "MemoryTimeline":
        lives = tuple(StorageLife(*row) for row in values["lives"])
        return cls(lives, tuple(StepPhase(*row) for row in values["phases"]), values["moments"])


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
