"""Predicted time over message size as SVG, HTML or text: a curve for each algorithm, and the cheapest at every size.

Published and predicted bus bandwidth over message size as SVG: a small panel for each curve, on equal axes.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate, pairwise
from math import ceil, floor, log, log2, log10
from statistics import median

from motet.collectives.cost.cheapest_algorithm import AlgorithmCrossover, AlgorithmTimeCurve
from motet.collectives.cost.published_curves import PublishedTime
from motet.collectives.draw.frames import align_columns
from motet.collectives.draw.program_drawing import COLOURS, svg_opening
from motet.core.errors import check_input
from motet.core.units import format_bytes, format_seconds

_WIDTH, _HEIGHT, _LEFT, _TOP, _PLOT_WIDTH, _PLOT_HEIGHT = 1040, 640, 78, 116, 760, 460
_LABEL_GAP = 17
_BAND_HEIGHT, _SIZE_LABEL_WIDTH = 24, 66
_BOTTOM, _RIGHT = _TOP + _PLOT_HEIGHT, _LEFT + _PLOT_WIDTH
_TEXT_ROWS = 16
_CURVE_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def _log_position(value: float, low: float, high: float) -> float:
    return log(value / low) / max(log(high / low), 1e-9)


@dataclass(frozen=True)
class _LogLogScale:
    sizes: Sequence[float]
    fastest: float
    slowest: float

    def x(self, size: float) -> float:
        return _LEFT + _PLOT_WIDTH * _log_position(size, self.sizes[0], self.sizes[-1])

    def y(self, seconds: float) -> float:
        return _TOP + _PLOT_HEIGHT * (1 - _log_position(seconds, self.fastest, self.slowest))


def cost_plot_svg(
    title: str, curves: Sequence[AlgorithmTimeCurve], sizes: Sequence[float], crossovers: Sequence[AlgorithmCrossover]
) -> str:
    """The plot for at least two ascending sizes."""
    times = [seconds for curve in curves for seconds in curve.seconds]
    fastest = 10.0 ** floor(log10(min(times)))
    scale = _LogLogScale(sizes, fastest, max(10 * fastest, 10.0 ** ceil(log10(max(times)))))
    curve_index = {curve.algorithm: n for n, curve in enumerate(curves)}
    first = crossovers[0].before if crossovers else min(curves, key=lambda curve: curve.seconds[0]).algorithm
    cheapest_names = [first, *(crossover.after for crossover in crossovers)]
    parts = [
        svg_opening(_WIDTH, _HEIGHT, title),
        f'<rect class="page" width="{_WIDTH}" height="{_HEIGHT}"/>',
        f'<text class="big" x="{_LEFT}" y="30">{escape(title)}</text>',
        f'<text class="quiet" x="{_LEFT}" y="52">the cheapest, and the sizes at which another one takes over:</text>',
        *_axes(scale),
        *_cheapest_bands(scale, cheapest_names, crossovers, curve_index),
        *(_curve_path(scale, curve, n, curve.algorithm in cheapest_names) for n, curve in enumerate(curves)),
        *_curve_labels(scale, curves),
    ]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _axes(scale: _LogLogScale) -> Iterator[str]:
    yield f'<rect class="frame" x="{_LEFT}" y="{_TOP}" width="{_PLOT_WIDTH}" height="{_PLOT_HEIGHT}"/>'
    powers = range(ceil(log2(scale.sizes[0])), floor(log2(scale.sizes[-1])) + 1)
    for power in powers[:: max(1, len(powers) // 10)]:
        x = scale.x(2**power)
        yield f'<path class="frame" d="M{x:.1f} {_TOP} V{_BOTTOM}"/>'
        yield f'<text class="quiet middle" x="{x:.1f}" y="{_BOTTOM + 20}">{format_bytes(2**power)}</text>'
    for decade in range(round(log10(scale.fastest)), round(log10(scale.slowest)) + 1):
        y = scale.y(10.0**decade)
        yield f'<path class="frame" d="M{_LEFT} {y:.1f} H{_RIGHT}"/>'
        yield f'<text class="quiet end" x="{_LEFT - 8}" y="{y + 4:.1f}">{format_seconds(10.0**decade)}</text>'
    yield f'<text class="middle" x="{_LEFT + _PLOT_WIDTH / 2}" y="{_BOTTOM + 46}">size of the message S</text>'


def _cheapest_bands(
    scale: _LogLogScale, names: Sequence[str], crossovers: Sequence[AlgorithmCrossover], curve_index: dict[str, int]
) -> Iterator[str]:
    edges = [scale.sizes[0], *(crossover.size for crossover in crossovers), scale.sizes[-1]]
    y = _TOP - _BAND_HEIGHT - 20
    for name, (first, last) in zip(names, pairwise(edges), strict=True):
        x, width = scale.x(first), scale.x(last) - scale.x(first)
        words = f"{name}, {format_bytes(first)} to {format_bytes(last)}"
        colour = curve_index[name] % len(COLOURS)
        yield f'<g><title>{words}</title><rect class="k{colour}" x="{x + 1:.1f}" y="{y}" width="{width - 2:.1f}"'
        yield f' height="{_BAND_HEIGHT}" rx="3"/>'
        if width > 7.5 * len(name):
            yield f'<text class="digit" x="{x + width / 2:.1f}" y="{y + 16}">{name}</text>'
        yield "</g>"
    label_end = 0.0
    for crossover in crossovers:
        x = scale.x(crossover.size)
        yield f'<path class="arrow copy" d="M{x:.1f} {_TOP} V{_BOTTOM}"/>'
        if x > label_end:
            yield f'<text class="middle" x="{x:.1f}" y="{_TOP - 5}">{format_bytes(crossover.size)}</text>'
            label_end = x + _SIZE_LABEL_WIDTH


def _curve_path(scale: _LogLogScale, curve: AlgorithmTimeCurve, curve_index: int, is_cheapest: bool) -> str:
    pairs = zip(scale.sizes, curve.seconds, strict=True)
    points = " L".join(f"{scale.x(size):.1f} {scale.y(s):.1f}" for size, s in pairs)
    style = ("heavy" if is_cheapest else "light") + (" dashed" if curve_index >= len(COLOURS) else "")
    css_classes = f"curve c{curve_index % len(COLOURS)} {style}"
    return f'<path class="{css_classes}" d="M{points}"><title>{curve.algorithm}</title></path>'


def _curve_labels(scale: _LogLogScale, curves: Sequence[AlgorithmTimeCurve]) -> Iterator[str]:
    ends = sorted((scale.y(curve.seconds[-1]), n) for n, curve in enumerate(curves))
    for (y, curve_index), label_y in zip(ends, _spread_labels([y for y, _ in ends]), strict=True):
        colour = curve_index % len(COLOURS)
        yield f'<path class="curve c{colour} light" d="M{_RIGHT} {y:.1f} L{_RIGHT + 16} {label_y:.1f} h6"/>'
        name = curves[curve_index].algorithm
        yield f'<text class="t{colour} head" x="{_RIGHT + 27}" y="{label_y + 4:.1f}">{name}</text>'


def _spread_labels(desired: Sequence[float]) -> list[float]:
    """Ascending positions with room for a line between them, from the top; the last ones move up to fit the plot."""
    positions = list(accumulate(desired, lambda above, y: max(y, above + _LABEL_GAP)))
    lowest = float(_BOTTOM)
    for n in reversed(range(len(positions))):
        positions[n] = min(positions[n], lowest)
        lowest = positions[n] - _LABEL_GAP
    return positions


def cost_plot_html(title: str, svg: str, rows: Sequence[Sequence[str]]) -> str:
    """A page with the picture and the numbers."""
    head, *body = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows)
    lines = "".join(f"<tr>{row}</tr>" for row in body)
    dark = "body { color: #e6edf3; background: #14181e } td { border-color: #444c56 }"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title><style>\n'
        ":root { color-scheme: light dark } body { margin: 0 auto; max-width: 1100px; padding: 1rem; color: #1f2328;"
        " background: #ffffff; font: 15px/1.5 system-ui, sans-serif } table { border-collapse: collapse }\n"
        "td { padding: .25rem .7rem; border-bottom: 1px solid #d0d7de; text-align: right; white-space: nowrap }\n"
        "td:first-child { text-align: left } thead td { font-weight: 600 } .wide { overflow-x: auto }\n"
        f"@media (prefers-color-scheme: dark) {{ {dark} }}\n</style></head>\n<body>{svg}"
        f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div></body></html>\n'
    )


def ascii_plot(
    curves: Sequence[AlgorithmTimeCurve], sizes: Sequence[float], crossovers: Sequence[AlgorithmCrossover]
) -> list[str]:
    """The plot as text: a letter for each algorithm, a capital for the cheapest, which hides others."""
    low, high = min(min(curve.seconds) for curve in curves), max(max(curve.seconds) for curve in curves)
    cells = [[" "] * len(sizes) for _ in range(_TEXT_ROWS)]
    for x in range(len(sizes)):
        ordered = sorted(zip(curves, _CURVE_LETTERS, strict=False), key=lambda pair: -pair[0].seconds[x])
        for curve, letter in ordered:
            y = round((_TEXT_ROWS - 1) * _log_position(curve.seconds[x], low, high))
            cells[y][x] = letter.upper() if curve is ordered[-1][0] else letter
    labels = {_TEXT_ROWS - 1: format_seconds(high), 0: format_seconds(low)}
    lines = [f"{labels.get(y, ''):>10} |{''.join(cells[y]).rstrip()}" for y in reversed(range(_TEXT_ROWS))]
    marks = [" "] * len(sizes)
    for crossover in crossovers:
        marks[min(range(len(sizes)), key=lambda x: abs(log(sizes[x] / crossover.size)))] = "^"
    smallest, largest = format_bytes(sizes[0]), format_bytes(sizes[-1])
    lines += [
        f"{'':10} +{'-' * len(sizes)}",
        f"{'':12}{''.join(marks)}".rstrip(),
        f"{'':12}{smallest}{largest:>{len(sizes) - len(smallest)}}",
    ]
    names = [f"{letter} {curve.algorithm}" for curve, letter in zip(curves, _CURVE_LETTERS, strict=False)]
    names += [""] * (-len(names) % 3)
    return lines + align_columns([names[n : n + 3] for n in range(0, len(names), 3)])


_COLUMNS, _PANEL_WIDTH, _PANEL_HEIGHT, _GAP_X, _GAP_Y = 5, 196, 132, 22, 62
_PANELS_LEFT, _PANELS_TOP, _PANELS_RIGHT, _PANELS_BOTTOM = 78, 118, 16, 40
_SMALLEST, _LARGEST = 2.0**10, 2.0**34  # Below, messages take as long as the smallest
_LOWEST_BPS, _HIGHEST_BPS = 1e7, 1e12
_FEWEST_POINTS = 4


def curve_panels_svg(times: Sequence[PublishedTime], title: str) -> str:
    """The curves with at least four sizes, by collective, network and ranks."""
    by_curve = defaultdict[str, list[PublishedTime]](list)
    for time in times:
        if time.size_bytes >= _SMALLEST:
            by_curve[time.curve].append(time)
    curves = [sorted(each, key=lambda t: t.size_bytes) for each in by_curve.values() if len(each) >= _FEWEST_POINTS]
    check_input(bool(curves), f"no curve has {_FEWEST_POINTS} sizes from 1 KiB on; give a file with a longer curve")
    curves.sort(key=lambda each: (each[0].collective, each[0].network, each[0].ranks, each[0].device))
    rows = ceil(len(curves) / _COLUMNS)
    width = _PANELS_LEFT + _COLUMNS * (_PANEL_WIDTH + _GAP_X) - _GAP_X + _PANELS_RIGHT
    height = _PANELS_TOP + rows * (_PANEL_HEIGHT + _GAP_Y) - _GAP_Y + _PANELS_BOTTOM
    parts = [
        svg_opening(width, height, title),
        f'<rect class="page" width="{width}" height="{height}"/>',
        f'<text class="big" x="{_LEFT}" y="30">{escape(title)}</text>',
        f'<text class="quiet" x="{_LEFT}" y="54">Bus bandwidth over message size, both logarithmic. '
        "Circles: published. Line: predicted. Percentages: median error.</text>",
    ]
    for number, curve in enumerate(curves):
        x = _PANELS_LEFT + number % _COLUMNS * (_PANEL_WIDTH + _GAP_X)
        y = _PANELS_TOP + number // _COLUMNS * (_PANEL_HEIGHT + _GAP_Y)
        is_last = number + _COLUMNS >= len(curves)
        parts += [
            f'<g transform="translate({x} {y})">',
            *_panel(curve, is_first=x == _PANELS_LEFT, is_last=is_last),
            "</g>",
        ]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _x(size: float) -> float:
    return _PANEL_WIDTH * log2(size / _SMALLEST) / log2(_LARGEST / _SMALLEST)


def _y(bandwidth: float) -> float:
    share = log10(bandwidth / _LOWEST_BPS) / log10(_HIGHEST_BPS / _LOWEST_BPS)
    return _PANEL_HEIGHT * (1 - min(1.0, max(0.0, share)))


def _panel(curve: Sequence[PublishedTime], *, is_first: bool, is_last: bool) -> Iterator[str]:
    first = curve[0]
    error = f"{100 * median(time.error for time in curve):.0f} %"
    yield f'<text class="head" x="0" y="-22">{first.collective}, {first.ranks} ranks</text>'
    yield f'<text class="quiet" x="0" y="-7">{escape(_short(first.device))}, {first.network}</text>'
    yield f'<rect class="frame" width="{_PANEL_WIDTH}" height="{_PANEL_HEIGHT}"/>'
    for power, label in ((10, "1 KiB"), (20, "1 MiB"), (30, "1 GiB")):
        x = _x(2.0**power)
        yield f'<path class="frame" d="M{x:.1f} 0 V{_PANEL_HEIGHT}"/>'
        if is_last:
            yield f'<text class="quiet middle" x="{x:.1f}" y="{_PANEL_HEIGHT + 18}">{label}</text>'
    for bandwidth, label in ((1e8, "0.1"), (1e9, "1"), (1e10, "10"), (1e11, "100 GB/s")):
        y = _y(bandwidth)
        yield f'<path class="frame" d="M0 {y:.1f} H{_PANEL_WIDTH}"/>'
        if is_first:
            yield f'<text class="quiet end" x="-6" y="{y + 4:.1f}">{label}</text>'
    line = " L".join(f"{_x(t.size_bytes):.1f} {_y(t.bus_bandwidth(t.predicted_s)):.1f}" for t in curve)
    yield f'<path class="curve c1 heavy" d="M{line}"/>'
    for time in curve:
        x, y = _x(time.size_bytes), _y(time.bus_bandwidth(time.measured_s))
        words = f"{format_bytes(time.size_bytes)}: {time.bus_bandwidth(time.measured_s) / 1e9:.3g} GB/s"
        yield f'<circle class="curve c0 light" cx="{x:.1f}" cy="{y:.1f}" r="3"><title>{words}</title></circle>'
    yield f'<text class="end" x="{_PANEL_WIDTH - 6}" y="{_PANEL_HEIGHT - 7}">{error}</text>'


def _short(device: str) -> str:
    return device.replace("-SXM", " SXM").replace("-PCIe", " PCIe").split("-")[0].split(" SXM")[0]
