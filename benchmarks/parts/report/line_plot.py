"""Lines over an axis as SVG, on a light or a dark page, with a name at the end of each line. No library is needed."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

from motet.collectives.draw.program_drawing import COLOURS, svg_opening

WIDTH, HEIGHT, LEFT, TOP, PLOT_WIDTH, PLOT_HEIGHT = 1040, 560, 78, 76, 720, 420
NAME_GAP = 17
TICKS = 8


@dataclass(frozen=True)
class Line:
    """The points of one line, from left to right, and its style."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: int
    dashed: bool = False


@dataclass(frozen=True)
class Axis:
    """The label and the ends of an axis; `logarithmic` needs numbers above 0."""

    label: str
    logarithmic: bool = False
    ticks: tuple[float, ...] = ()
    """Chosen when not given."""
    low: float | None = None
    high: float | None = None
    """As the lines need them when not given. What lies outside is cut off."""


@dataclass(frozen=True)
class _Scale:
    """The map from numbers on an axis to positions from 0 to 1."""

    low: float
    high: float
    logarithmic: bool
    ticks: tuple[float, ...]

    def place(self, value: float) -> float:
        if self.logarithmic:
            return log10(value / self.low) / log10(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def line_plot(title: str, note: str, lines: Sequence[Line], x: Axis, y: Axis) -> str:
    """At least one line must have a point."""
    across = _scale(x, [point[0] for line in lines for point in line.points], tight=True)
    up = _scale(y, [point[1] for line in lines for point in line.points], tight=False)
    parts = [
        svg_opening(WIDTH, HEIGHT, title),
        f'<rect class="page" width="{WIDTH}" height="{HEIGHT}"/>',
        f'<text class="big" x="{LEFT}" y="30">{escape(title)}</text>',
        f'<text class="quiet" x="{LEFT}" y="52">{escape(note)}</text>',
        f'<clipPath id="plot"><rect x="{LEFT}" y="{TOP}" width="{PLOT_WIDTH}" height="{PLOT_HEIGHT}"/></clipPath>',
        *_axes(across, up, x.label, y.label),
        *(_drawn(line, across, up) for line in lines),
        *_names(lines, up),
    ]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _scale(axis: Axis, values: Sequence[float], tight: bool) -> _Scale:
    """`tight`: from the first number to the last; else up to the next ticks."""
    low = min(values) if axis.low is None else axis.low
    high = max(values) if axis.high is None else axis.high
    if high <= low:
        high = low * 2 if axis.logarithmic else low + 1.0
    ticks = axis.ticks or tuple(_decades(low, high) if axis.logarithmic else round_numbers(low, high, TICKS))
    if not tight:
        low = ticks[0] if axis.low is None else low
        high = ticks[-1] if axis.high is None else high
    kept = tuple(tick for tick in ticks if low * (1 - 1e-9) <= tick <= high * (1 + 1e-9) or tick == 0 <= high)
    return _Scale(low, high, axis.logarithmic, tuple(tick for tick in kept if low <= tick or low <= 0))


def round_numbers(low: float, high: float, steps: int) -> Iterator[float]:
    """Multiples of 1, 2 or 5 times a power of ten, from at most `low` to at least `high`, in about as many steps."""
    rough = (high - low) / steps
    power = 10.0 ** floor(log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    for number in range(floor(low / step), ceil(high / step) + 1):
        yield number * step


def _decades(low: float, high: float) -> Iterator[float]:
    """1, 2 and 5 times powers of ten; powers of ten alone where they are many."""
    first, last = floor(log10(low)), ceil(log10(high))
    found = [f * 10.0**power for power in range(first, last + 1) for f in ((1, 2, 5) if last - first < 5 else (1,))]
    below = max(tick for tick in found if tick <= low)
    above = min(tick for tick in found if tick >= high)
    yield from (tick for tick in found if below <= tick <= above)


def _x(scale: _Scale, value: float) -> float:
    return LEFT + PLOT_WIDTH * scale.place(value)


def _y(scale: _Scale, value: float) -> float:
    return TOP + PLOT_HEIGHT * (1 - scale.place(value))


def _axes(across: _Scale, up: _Scale, below: str, beside: str) -> Iterator[str]:
    bottom, right = TOP + PLOT_HEIGHT, LEFT + PLOT_WIDTH
    yield f'<rect class="frame" x="{LEFT}" y="{TOP}" width="{PLOT_WIDTH}" height="{PLOT_HEIGHT}"/>'
    for tick in across.ticks:
        x = _x(across, tick)
        yield f'<path class="frame" d="M{x:.1f} {TOP} V{bottom}"/>'
        yield f'<text class="quiet middle" x="{x:.1f}" y="{bottom + 20}">{tick:.4g}</text>'
    for tick in up.ticks:
        y = _y(up, tick)
        yield f'<path class="frame" d="M{LEFT} {y:.1f} H{right}"/>'
        yield f'<text class="quiet end" x="{LEFT - 8}" y="{y + 4:.1f}">{tick:.4g}</text>'
    yield f'<text class="middle" x="{LEFT + PLOT_WIDTH / 2:g}" y="{bottom + 44}">{escape(below)}</text>'
    middle = TOP + PLOT_HEIGHT / 2
    yield f'<text class="middle" transform="translate(22 {middle:g}) rotate(-90)">{escape(beside)}</text>'


def _drawn(line: Line, across: _Scale, up: _Scale) -> str:
    points = " L".join(f"{_x(across, x):.1f} {_y(up, y):.1f}" for x, y in line.points)
    look = f"curve c{line.colour % len(COLOURS)} light{' dashed' if line.dashed else ''}"
    drawn = f'<path class="{look}" clip-path="url(#plot)" d="M{points}"><title>{escape(line.name)}</title></path>'
    return drawn if line.points else ""


def _names(lines: Sequence[Line], up: _Scale) -> Iterator[str]:
    """At the right end, from top to bottom, pushed apart where lines end close to each other."""
    bottom, right = float(TOP + PLOT_HEIGHT), LEFT + PLOT_WIDTH
    ends = [(min(max(_y(up, line.points[-1][1]), TOP), bottom), line) for line in lines if line.points]
    ends.sort(key=lambda end: end[0])
    for (y, line), place in zip(ends, _apart([y for y, _ in ends], bottom), strict=True):
        colour = line.colour % len(COLOURS)
        dashed = " dashed" if line.dashed else ""
        yield f'<path class="curve c{colour} light{dashed}" d="M{right} {y:.1f} L{right + 16} {place:.1f} h12"/>'
        yield f'<text class="t{colour} head" x="{right + 33}" y="{place + 4:.1f}">{escape(line.name)}</text>'


def _apart(wanted: Sequence[float], lowest: float) -> list[float]:
    """Rising places at least a line apart."""
    places: list[float] = []
    for y in wanted:
        places.append(max(y, places[-1] + NAME_GAP) if places else y)
    for number in reversed(range(len(places))):
        places[number] = min(places[number], lowest)
        lowest = places[number] - NAME_GAP
    return places
