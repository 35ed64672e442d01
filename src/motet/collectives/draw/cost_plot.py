"""Predicted time over message size as SVG, HTML or text: a curve for each algorithm, and the cheapest at every size.

Published and predicted bus bandwidth over message size as SVG: a small panel for each curve, on equal axes.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from itertools import accumulate, pairwise
from math import ceil, floor, log, log2, log10
from statistics import median

from motet.collectives.cost.cheapest_algorithm import AlgorithmCrossover, AlgorithmTimeCurve
from motet.collectives.cost.published_curves import PublishedTime
from motet.collectives.draw.frames import align_columns
from motet.core.errors import check_input
from motet.core.svg import COLOURS, Scale, element, grid, labelled_box, path_through, svg_page, text, text_width
from motet.core.units import format_bytes, format_seconds

_WIDTH, _LEFT, _TOP, _PLOT_WIDTH, _PLOT_HEIGHT = 1040, 78, 52, 760, 460
_LABEL_GAP, _BAND_HEIGHT = 17, 24
_BOTTOM, _RIGHT = _TOP + _PLOT_HEIGHT, _LEFT + _PLOT_WIDTH
_TEXT_ROWS = 16
_CURVE_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def cost_plot_svg(
    title: str, curves: Sequence[AlgorithmTimeCurve], sizes: Sequence[float], crossovers: Sequence[AlgorithmCrossover]
) -> str:
    """The plot for at least two ascending sizes."""
    times = [seconds for curve in curves for seconds in curve.seconds]
    first_decade = floor(log10(min(times)))
    last_decade = max(first_decade + 1, ceil(log10(max(times))))
    x = Scale(sizes[0], sizes[-1], _LEFT, _RIGHT, is_logarithmic=True)
    y = Scale(10.0**first_decade, 10.0**last_decade, _BOTTOM, _TOP, is_logarithmic=True)
    powers = range(ceil(log2(sizes[0])), floor(log2(sizes[-1])) + 1)
    size_ticks = {2.0**power: format_bytes(2**power) for power in powers[:: max(1, len(powers) // 10)]}
    time_ticks = {10.0**decade: format_seconds(10.0**decade) for decade in range(first_decade, last_decade + 1)}
    first = crossovers[0].before if crossovers else min(curves, key=lambda curve: curve.seconds[0]).algorithm
    cheapest_names = [first, *(crossover.after for crossover in crossovers)]
    body = [
        *grid(x, y, x_ticks=size_ticks, y_ticks=time_ticks),
        text((_LEFT + _PLOT_WIDTH / 2, _BOTTOM + 44), "size of the message S", "middle"),
        *_cheapest_bands(x, cheapest_names, crossovers, {curve.algorithm: n for n, curve in enumerate(curves)}),
    ]
    for n, curve in enumerate(curves):
        style = ("heavy" if curve.algorithm in cheapest_names else "light") + " dashed" * (n >= len(COLOURS))
        line = path_through(zip(map(x, sizes), map(y, curve.seconds), strict=True))
        body.append(element("path", f"curve c{n % len(COLOURS)} {style}", d=line, hint=curve.algorithm))
    note = "the cheapest, and the sizes at which another one takes over:"
    body += _curve_labels({curve.algorithm: y(curve.seconds[-1]) for curve in curves})
    return svg_page(title, note, body, width=_WIDTH, height=_BOTTOM + 44)


def _cheapest_bands(
    x: Scale, names: Sequence[str], crossovers: Sequence[AlgorithmCrossover], /, curve_index: Mapping[str, int]
) -> Iterator[str]:
    edges = [x.low, *(crossover.size for crossover in crossovers), x.high]
    for name, (first, last) in zip(names, pairwise(edges), strict=True):
        box = {"x": x(first) + 1, "width": x(last) - x(first) - 2, "y": 4, "height": _BAND_HEIGHT}
        words = f"{name}, {format_bytes(first)} to {format_bytes(last)}"
        yield labelled_box(f"k{curve_index[name] % len(COLOURS)}", [name], words, **box, rx=3)
    label_end = 0.0
    for crossover in crossovers:
        left, words = x(crossover.size), format_bytes(crossover.size)
        yield element("path", "arrow copy", d=f"M{left:.1f} {_TOP} V{_BOTTOM}")
        if left > label_end:
            yield text((left, _TOP - 6), words, "middle")
            label_end = left + text_width(words)


def _curve_labels(ends: Mapping[str, float]) -> Iterator[str]:
    """Names to the right of the ends of the curves, whose heights are the values of `ends`."""
    colours = {algorithm: n % len(COLOURS) for n, algorithm in enumerate(ends)}
    ordered = sorted(ends, key=ends.__getitem__)
    for algorithm, y in zip(ordered, _spread_labels([ends[each] for each in ordered]), strict=True):
        css = f"curve c{colours[algorithm]} light"
        yield element("path", css, d=f"M{_RIGHT} {ends[algorithm]:.1f} L{_RIGHT + 16} {y:.1f} h6")
        yield text((_RIGHT + 27, y + 4), algorithm, f"t{colours[algorithm]} head")


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
    row_of = Scale(low, high, 0, _TEXT_ROWS - 1, is_logarithmic=True)
    cells = [[" "] * len(sizes) for _ in range(_TEXT_ROWS)]
    for x in range(len(sizes)):
        ordered = sorted(zip(curves, _CURVE_LETTERS, strict=False), key=lambda pair: -pair[0].seconds[x])
        for curve, letter in ordered:
            cells[round(row_of(curve.seconds[x]))][x] = letter.upper() if curve is ordered[-1][0] else letter
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
_PANELS_LEFT, _PANELS_RIGHT, _PANELS_TOP = 78, 16, 46
_SMALLEST, _LARGEST = 2.0**10, 2.0**34  # Below, messages take as long as the smallest
_LOWEST_BPS, _HIGHEST_BPS = 1e7, 1e12
_SIZE_TICKS = {2.0**10: "1 KiB", 2.0**20: "1 MiB", 2.0**30: "1 GiB"}
_SPEED_TICKS = {1e8: "0.1", 1e9: "1", 1e10: "10", 1e11: "100 GB/s"}
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
    body = []
    for number, curve in enumerate(curves):
        row, column = divmod(number, _COLUMNS)
        x, y = _PANELS_LEFT + column * (_PANEL_WIDTH + _GAP_X), _PANELS_TOP + row * (_PANEL_HEIGHT + _GAP_Y)
        panel = _panel(curve, is_first=column == 0, is_last=number + _COLUMNS >= len(curves))
        body.append(element("g", "", *panel, transform=f"translate({x} {y})"))
    return svg_page(
        title,
        "Bus bandwidth over message size, both logarithmic. Circles: published. Line: predicted. Percentages: median "
        "error.",
        body,
        width=_PANELS_LEFT + _COLUMNS * (_PANEL_WIDTH + _GAP_X) - _GAP_X + _PANELS_RIGHT,
        height=_PANELS_TOP + ceil(len(curves) / _COLUMNS) * (_PANEL_HEIGHT + _GAP_Y) - _GAP_Y + 20,
    )


def _panel(curve: Sequence[PublishedTime], *, is_first: bool, is_last: bool) -> Iterator[str]:
    first = curve[0]
    across = Scale(_SMALLEST, _LARGEST, 0, _PANEL_WIDTH, is_logarithmic=True)
    up = Scale(_LOWEST_BPS, _HIGHEST_BPS, _PANEL_HEIGHT, 0, is_logarithmic=True)

    def place(time: PublishedTime, seconds: float) -> tuple[float, float]:
        bandwidth = min(max(time.bus_bandwidth(seconds), _LOWEST_BPS), _HIGHEST_BPS)
        return across(time.size_bytes), up(bandwidth)

    yield text((0, -22), f"{first.collective}, {first.ranks} ranks", "head")
    yield text((0, -7), f"{_short(first.device)}, {first.network}", "quiet")
    size_ticks = {size: label * is_last for size, label in _SIZE_TICKS.items()}
    speed_ticks = {speed: label * is_first for speed, label in _SPEED_TICKS.items()}
    yield from grid(across, up, x_ticks=size_ticks, y_ticks=speed_ticks)
    yield element("path", "curve c1 heavy", d=path_through(place(t, t.predicted_s) for t in curve))
    for time in curve:
        x, y = place(time, time.measured_s)
        words = f"{format_bytes(time.size_bytes)}: {time.bus_bandwidth(time.measured_s) / 1e9:.3g} GB/s"
        yield element("circle", "curve c0 light", cx=x, cy=y, r=3, hint=words)
    error = f"{100 * median(time.error for time in curve):.0f} %"
    yield text((_PANEL_WIDTH - 6, _PANEL_HEIGHT - 7), error, "end")


def _short(device: str) -> str:
    return device.replace("-SXM", " SXM").replace("-PCIe", " PCIe").split("-")[0].split(" SXM")[0]
