"""Published and predicted bus bandwidth over message size as SVG: a small panel for each curve, on equal axes."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from html import escape
from math import ceil, log2, log10
from statistics import median

from motet.collectives.cost.published_curves import PublishedTime
from motet.collectives.draw.program_drawing import svg_opening
from motet.core.errors import check_input
from motet.core.units import format_bytes

_COLUMNS, _PANEL_WIDTH, _PANEL_HEIGHT, _GAP_X, _GAP_Y = 5, 196, 132, 22, 62
_LEFT, _TOP, _RIGHT, _BOTTOM = 78, 118, 16, 40
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
    width = _LEFT + _COLUMNS * (_PANEL_WIDTH + _GAP_X) - _GAP_X + _RIGHT
    height = _TOP + rows * (_PANEL_HEIGHT + _GAP_Y) - _GAP_Y + _BOTTOM
    parts = [
        svg_opening(width, height, title),
        f'<rect class="page" width="{width}" height="{height}"/>',
        f'<text class="big" x="{_LEFT}" y="30">{escape(title)}</text>',
        f'<text class="quiet" x="{_LEFT}" y="54">Bus bandwidth over message size, both logarithmic. '
        "Circles: published. Line: predicted. Percentages: median error.</text>",
    ]
    for number, curve in enumerate(curves):
        x = _LEFT + number % _COLUMNS * (_PANEL_WIDTH + _GAP_X)
        y = _TOP + number // _COLUMNS * (_PANEL_HEIGHT + _GAP_Y)
        is_last = number + _COLUMNS >= len(curves)
        parts += [f'<g transform="translate({x} {y})">', *_panel(curve, is_first=x == _LEFT, is_last=is_last), "</g>"]
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
