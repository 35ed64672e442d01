"""The live bytes of a rank in a step by category, as values without torch.

A moment is an allocation or a free; moments are counted from the start of the step, so a timeline does not depend on
the speed of a machine.

Timelines of live bytes as stacked columns of text and as stacked areas of SVG. Without torch.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal

from motet.core.svg import MARGIN, PAGE_WIDTH, Scale, element, grid, svg_page, text
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

# The order in which a picture stacks them: lasting tensors lie below temporary ones.
CATEGORIES: Mapping[Category, str] = {
    "parameters": "parameters in the dtype of forward and backward, with buffers",
    "master parameters": "parameters in the dtype of the optimizer, where it is another one",
    "gradients": "sums of gradients, kept from step to step",
    "moments": "moments of the optimizer",
    "compression errors": "errors of lossy codecs, which the next message adds",
    "other state": "tensors that exist before the step and are none of these",
    "saved activations": "tensors that forward leaves for backward, and the batch",
    "recomputed activations": "tensors that backward computes again",
    "gathered or unreduced": "parameters that ranks gather, and gradients before their sum over the ranks",
    "messages": "other tensors that ranks send or receive",
    "workspace": "temporary tensors of forward, backward and update",
}


_EARLIER = "before the step"


@dataclass(frozen=True)
class StorageLife:
    """A piece of memory from its allocation to its free."""

    category: Category
    size: int
    born: int
    freed: int | None  # None: it outlives the step
    operator: str = ""  # Operator that made the storage
    block: str = ""  # Block of the model in whose forward it was made


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
            category_changes = changes.setdefault(life.category, Counter())
            category_changes[life.born] += life.size
            if life.freed is not None:
                category_changes[life.freed] -= life.size
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
        """The bytes of `by_operator`, by the block in whose forward they were made (in block order), and operator."""
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


# Category -> (letter of the text, fill of the picture)
_LOOKS: dict[Category, tuple[str, str]] = {
    "parameters": ("P", "#2a5699"),
    "master parameters": ("M", "#5b93dd"),
    "gradients": ("G", "#1a7439"),
    "moments": ("O", "#57a773"),
    "compression errors": ("E", "#8a5a00"),
    "other state": ("s", "#6e7781"),
    "saved activations": ("a", "#a84300"),
    "recomputed activations": ("r", "#e08b4a"),
    "gathered or unreduced": ("g", "#7a3fb0"),
    "messages": ("m", "#b58ad6"),
    "workspace": ("w", "#afb8c1"),
}
_PHASE_FILLS = {"forward": "#54aeff33", "backward": "#c297ff2e"}
_ROWS, _LEFT, _PANEL, _GAP, _COLUMNS = 16, 86, 190, 44, 700


@dataclass(frozen=True)
class MemoryPanel:
    """One timeline of a picture."""

    title: str
    timeline: MemoryTimeline


def draw_text(timeline: MemoryTimeline, lines: Mapping[str, int] | None = None, width: int = 96) -> list[str]:
    """Columns of letters, one for each category, with bytes on the left; `lines` of dashes have names and bytes."""
    sizes_by_name = lines or {}
    top = max([timeline.peak, *sizes_by_name.values()]) or 1
    columns = [sizes for _, sizes in timeline.columns(width)]
    names_by_row = {min(_ROWS - 1, size * _ROWS // top): name for name, size in sizes_by_name.items()}
    drawn = []
    for row in reversed(range(_ROWS)):
        cells = [_cell(sizes, (row + 0.5) * top / _ROWS) for sizes in columns]
        if row in names_by_row:
            cells = [cell if cell != " " else "-" for cell in cells]
        label = format_bytes((row + 1) * top / _ROWS) if row % 4 == 3 else ""
        drawn.append(f"{names_by_row.get(row, label):>9} |{''.join(cells)}".rstrip())
    phases = "".join(timeline.phase_at(moment)[:1] or "." for moment, _ in timeline.columns(width))
    shown = [f"{_LOOKS[category][0]} {category}" for category in timeline.bytes_by_category]
    return [*drawn, f"{'phase':>9} |{phases}", "", f"({', '.join(shown)})"]


def _cell(sizes: dict[Category, int], height: float) -> str:
    """The letter of the category that is stacked at this height."""
    below = 0
    for category, size in sizes.items():
        below += size
        if height < below:
            return _LOOKS[category][0]
    return " "


def draw_svg(panels: Sequence[MemoryPanel], *, title: str, note: str, lines: Mapping[str, int] | None = None) -> str:
    """A panel of stacked areas for each timeline, all with one scale of bytes, and lines with names and bytes."""
    sizes_by_name = lines or {}
    top = max([*(panel.timeline.peak for panel in panels), *sizes_by_name.values()]) or 1
    used = {category for panel in panels for category in panel.timeline.bytes_by_category}
    legend: list[tuple[str, str]] = [(fill, category) for category, (_, fill) in _LOOKS.items() if category in used]
    legend += [(fill, phase) for phase, fill in _PHASE_FILLS.items()]
    body = (part for i, panel in enumerate(panels) for part in _svg_panel(panel, i, top, lines=sizes_by_name))
    return svg_page(title, note, body, height=len(panels) * (_PANEL + _GAP) - _GAP, legend=legend)


def _svg_panel(panel: MemoryPanel, index: int, top: int, *, lines: Mapping[str, int]) -> Iterator[str]:
    timeline, ceiling = panel.timeline, index * (_PANEL + _GAP) + 18
    x = Scale(0, timeline.moments + 1, _LEFT, PAGE_WIDTH - MARGIN)
    y = Scale(0, top, ceiling + _PANEL - 18, ceiling)
    yield text((_LEFT, ceiling - 6), panel.title)
    for phase in timeline.phases:
        kind = "forward" if phase.name[:1].lower() == "f" else "backward" if phase.name[:1] in "bBIWw" else ""
        if kind and phase.stop > phase.start:
            box = {"x": x(phase.start), "width": x(phase.stop) - x(phase.start), "y": ceiling, "height": _PANEL - 18}
            yield element("rect", "", hint=phase.name, fill=_PHASE_FILLS[kind], **box)
    yield from grid(x, y, x_ticks={}, y_ticks={part * top / 4: format_bytes(part * top / 4) for part in range(5)})
    yield from _svg_areas(timeline, x, y)
    for size in lines.values():
        yield element("path", "limit", d=f"M{x.start} {y(size):.1f} H{x.stop}")
    names = ", ".join(f"{name} {format_bytes(size)}" for name, size in lines.items())
    if names:
        yield text((x.stop, ceiling - 6), names, "end limit-name")


def _svg_areas(timeline: MemoryTimeline, x: Scale, y: Scale) -> Iterator[str]:
    columns = [sizes for _, sizes in timeline.columns(_COLUMNS)]
    edges, below = Scale(0, len(columns), x.start, x.stop), [0] * len(columns)
    for category in timeline.bytes_by_category:
        above = [base + sizes[category] for base, sizes in zip(below, columns, strict=True)]
        corners = [*_steps(above), *reversed([*_steps(below)])]
        points = " ".join(f"{edges(column):.1f},{y(value):.1f}" for column, value in corners)
        hint = f"{category}, {format_bytes(timeline.peak_of(category))} at most: {CATEGORIES[category]}"
        yield element("polygon", "", points=points, fill=_LOOKS[category][1], hint=hint)
        below = above


def _steps(values: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The corners of a line that stays level in each column."""
    for column, value in enumerate(values):
        if column == 0 or value != values[column - 1]:
            yield column, values[max(column - 1, 0)]
            yield column, value
    yield len(values), values[-1]
