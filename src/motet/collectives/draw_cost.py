"""Predicted time over message size as SVG: a curve for each algorithm, and above them which is the cheapest where."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from math import ceil, floor, log2, log10

from motet.collectives.curves import Crossover, Curve, format_seconds
from motet.collectives.draw_svg import COLOURS, opening
from motet.core.units import format_bytes

_WIDTH, _HEIGHT, _LEFT, _TOP, _PLOT_WIDTH, _PLOT_HEIGHT = 1040, 640, 78, 116, 760, 460
_LABEL_GAP = 17
_BAND, _WORD = 24, 66


@dataclass(frozen=True)
class _Scale:
    """Both logarithmic: where a size and a time lie."""

    sizes: Sequence[float]
    fastest: float
    slowest: float

    def x(self, size: float) -> float:
        return _LEFT + _PLOT_WIDTH * log2(size / self.sizes[0]) / log2(self.sizes[-1] / self.sizes[0])

    def y(self, seconds: float) -> float:
        decades = log10(self.slowest / self.fastest)
        return _TOP + _PLOT_HEIGHT * (1 - log10(seconds / self.fastest) / decades)


def cost_svg(title: str, found: Sequence[Curve], sizes: Sequence[float], crossed: Sequence[Crossover]) -> str:
    """The sizes are at least two, from small to large."""
    times = [seconds for curve in found for seconds in curve.seconds]
    fastest = 10.0 ** floor(log10(min(times)))
    scale = _Scale(sizes, fastest, max(10 * fastest, 10.0 ** ceil(log10(max(times)))))
    number = {curve.algorithm: n for n, curve in enumerate(found)}
    first = crossed[0].before if crossed else min(found, key=lambda curve: curve.seconds[0]).algorithm
    reigning = [first, *(crossover.after for crossover in crossed)]
    parts = [
        opening(_WIDTH, _HEIGHT, title),
        f'<rect class="page" width="{_WIDTH}" height="{_HEIGHT}"/>',
        f'<text class="big" x="{_LEFT}" y="30">{escape(title)}</text>',
        f'<text class="quiet" x="{_LEFT}" y="52">the cheapest, and the sizes at which another one takes over:</text>',
        *_axes(scale),
        *_bands(scale, reigning, crossed, number),
        *(_line(scale, curve, n, curve.algorithm in reigning) for n, curve in enumerate(found)),
        *_names(scale, found),
    ]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _axes(scale: _Scale) -> Iterator[str]:
    bottom, right = _TOP + _PLOT_HEIGHT, _LEFT + _PLOT_WIDTH
    yield f'<rect class="frame" x="{_LEFT}" y="{_TOP}" width="{_PLOT_WIDTH}" height="{_PLOT_HEIGHT}"/>'
    powers = range(ceil(log2(scale.sizes[0])), floor(log2(scale.sizes[-1])) + 1)
    for power in powers[:: max(1, len(powers) // 10)]:
        x = scale.x(2**power)
        yield f'<path class="frame" d="M{x:.1f} {_TOP} V{bottom}"/>'
        yield f'<text class="quiet middle" x="{x:.1f}" y="{bottom + 20}">{format_bytes(2**power)}</text>'
    for decade in range(round(log10(scale.fastest)), round(log10(scale.slowest)) + 1):
        y = scale.y(10.0**decade)
        yield f'<path class="frame" d="M{_LEFT} {y:.1f} H{right}"/>'
        yield f'<text class="quiet end" x="{_LEFT - 8}" y="{y + 4:.1f}">{format_seconds(10.0**decade)}</text>'
    yield f'<text class="middle" x="{_LEFT + _PLOT_WIDTH / 2}" y="{bottom + 46}">size of the message S</text>'


def _bands(
    scale: _Scale, reigning: Sequence[str], crossed: Sequence[Crossover], number: dict[str, int]
) -> Iterator[str]:
    """Who is the cheapest from where to where, with the crossovers as lines through the plot."""
    edges = [scale.sizes[0], *(crossover.size for crossover in crossed), scale.sizes[-1]]
    y = _TOP - _BAND - 20
    for name, (first, last) in zip(reigning, pairwise(edges), strict=True):
        x, width = scale.x(first), scale.x(last) - scale.x(first)
        words = f"{name}, {format_bytes(first)} to {format_bytes(last)}"
        colour = number[name] % len(COLOURS)
        yield f'<g><title>{words}</title><rect class="k{colour}" x="{x + 1:.1f}" y="{y}" width="{width - 2:.1f}"'
        yield f' height="{_BAND}" rx="3"/>'
        if width > 7.5 * len(name):
            yield f'<text class="digit" x="{x + width / 2:.1f}" y="{y + 16}">{name}</text>'
        yield "</g>"
    written = 0.0
    for crossover in crossed:
        x = scale.x(crossover.size)
        yield f'<path class="arrow copy" d="M{x:.1f} {_TOP} V{_TOP + _PLOT_HEIGHT}"/>'
        if x > written:
            yield f'<text class="middle" x="{x:.1f}" y="{_TOP - 5}">{format_bytes(crossover.size)}</text>'
            written = x + _WORD


def _line(scale: _Scale, curve: Curve, number: int, reigns: bool) -> str:
    """Those that are the cheapest somewhere are drawn heavier; the second round of colours is dashed."""
    points = " L".join(
        f"{scale.x(size):.1f} {scale.y(s):.1f}" for size, s in zip(scale.sizes, curve.seconds, strict=True)
    )
    dashed = " dashed" if number >= len(COLOURS) else ""
    heavy = "heavy" if reigns else "light"
    look = f"curve c{number % len(COLOURS)} {heavy}{dashed}"
    return f'<path class="{look}" d="M{points}"><title>{curve.algorithm}</title></path>'


def _names(scale: _Scale, found: Sequence[Curve]) -> Iterator[str]:
    """At the right end of each curve, pushed apart where curves end close to each other."""
    ends = sorted((scale.y(curve.seconds[-1]), n) for n, curve in enumerate(found))
    places = _apart([y for y, _ in ends])
    right = _LEFT + _PLOT_WIDTH
    for (y, number), place in zip(ends, places, strict=True):
        colour = number % len(COLOURS)
        yield f'<path class="curve c{colour} light" d="M{right} {y:.1f} L{right + 16} {place:.1f} h6"/>'
        name = found[number].algorithm
        yield f'<text class="t{colour} head" x="{right + 27}" y="{place + 4:.1f}">{name}</text>'


def _apart(wanted: Sequence[float]) -> list[float]:
    """Rising places at least a line apart, as a whole as near to the wanted ones as they can be from the lowest up."""
    places: list[float] = []
    for y in wanted:
        places.append(max(y, places[-1] + _LABEL_GAP) if places else y)
    lowest = float(_TOP + _PLOT_HEIGHT)
    for n in reversed(range(len(places))):
        places[n] = min(places[n], lowest)
        lowest = places[n] - _LABEL_GAP
    return places


def cost_page(title: str, drawn: str, rows: Sequence[Sequence[str]]) -> str:
    """The picture and the numbers as a page of their own."""
    head, *body = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows)
    lines = "".join(f"<tr>{row}</tr>" for row in body)
    dark = "body { color: #e6edf3; background: #14181e } td { border-color: #444c56 }"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title><style>\n'
        ":root { color-scheme: light dark } body { margin: 0 auto; max-width: 1100px; padding: 1rem; color: #1f2328;"
        " background: #ffffff; font: 15px/1.5 system-ui, sans-serif } table { border-collapse: collapse }\n"
        "td { padding: .25rem .7rem; border-bottom: 1px solid #d0d7de; text-align: right; white-space: nowrap }\n"
        "td:first-child { text-align: left } thead td { font-weight: 600 } .wide { overflow-x: auto }\n"
        f"@media (prefers-color-scheme: dark) {{ {dark} }}\n</style></head>\n<body>{drawn}"
        f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div></body></html>\n'
    )
