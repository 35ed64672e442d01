"""The graph of a step as text and as SVG: two lanes over time, and what waits for what."""

from collections.abc import Sequence
from html import escape

from motet.parallel.graph import Lane, Node

Times = dict[str, tuple[float, float]]
LANES: tuple[Lane, ...] = ("compute", "network")

_WIDTH, _LABEL, _LANE, _GAP, _TOP = 1120, 80, 46, 74, 60
_STYLE = """
.page { fill: #ffffff }
text { font-family: system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; font-size: 12px; fill: #1f2328 }
.big { font-weight: 600; font-size: 15px } .quiet { fill: #57606a } .box { stroke: #ffffff; stroke-width: 1 }
.inside { fill: #ffffff; font-size: 11px; text-anchor: middle; pointer-events: none }
.forward { fill: #1f5fbf } .backward { fill: #7a3fb0 } .reduce { fill: #a84300 } .gather { fill: #1a7439 }
.agree, .update { fill: #4c5a6b } .waits { fill: none; stroke: #8c959f; stroke-width: 1 }
@media (prefers-color-scheme: dark) {
.page { fill: #14181e } text { fill: #e6edf3 } .quiet { fill: #9da7b3 } .inside { fill: #ffffff }
.box { stroke: #14181e } .waits { stroke: #768390 }
}
"""


def text(nodes: Sequence[Node], times: Times, width: int = 96) -> str:
    """The lanes as rows of letters, and a line for each node."""
    end = _end(times)
    rows = []
    for lane in LANES:
        row = [" "] * width
        for node in nodes:
            if node.lane == lane:
                start, stop = (round(t / end * width) for t in times[node.name])
                row[start:stop] = node.kind[0] * (stop - start)
                row = row[:width]
        rows.append(f"{lane:8} {''.join(row).rstrip()}")
    longest = max(len(node.name) for node in nodes)
    lines = [
        f"{100 * times[node.name][0] / end:6.1f} % {node.name:{longest}}  {_waits(node)}".rstrip() for node in nodes
    ]
    kinds = ", ".join(f"{kind[0]} {kind}" for kind in dict.fromkeys(node.kind for node in nodes if node.work))
    return "\n".join([*rows, f"({kinds})", "", *lines])


def _waits(node: Node) -> str:
    return f"after {', '.join(node.after)}" if node.after else ""


def _end(times: Times) -> float:
    return max(stop for _, stop in times.values()) or 1.0


def svg(nodes: Sequence[Node], times: Times, title: str, note: str, until: float | None = None) -> str:
    """A box for each node. Lines go from what carries a message to what waits for it, and back.

    `until`: the time at the right edge; the end of the last node when not given.
    """
    scale = (_WIDTH - _LABEL - 16) / (until or _end(times))
    height = _TOP + 2 * _LANE + _GAP + 24
    lanes = {node.name: node.lane for node in nodes}

    def across(time: float) -> float:
        return _LABEL + time * scale

    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style>",
        f'<rect class="page" width="{_WIDTH}" height="{height}"/>',
        f'<text class="big" x="16" y="24">{escape(title)}</text>',
        f'<text class="quiet" x="16" y="42">{escape(note)}</text>',
        *(f'<text x="16" y="{_top(lane) + _LANE / 2 + 4:g}">{lane}</text>' for lane in LANES),
    ]
    for node in nodes:
        for name in node.after:
            if lanes[name] != node.lane:
                drawn.append(_line(across(times[name][1]), lanes[name], across(times[node.name][0]), node.lane))
    for node in nodes:
        start, stop = times[node.name]
        drawn.append(_box(node, across(start), max(across(stop) - across(start), 2.0)))
    return "\n".join([*drawn, "</svg>", ""])


def _top(lane: Lane) -> float:
    return _TOP + LANES.index(lane) * (_LANE + _GAP)


def _line(begin: float, source: Lane, end: float, target: Lane) -> str:
    down = source == "compute"
    y1 = _top(source) + (_LANE if down else 0)
    y2 = _top(target) + (0 if down else _LANE)
    middle = (y1 + y2) / 2
    return f'<path class="waits" d="M{begin:.1f} {y1:g}C{begin:.1f} {middle:g} {end:.1f} {middle:g} {end:.1f} {y2:g}"/>'


def _box(node: Node, x: float, width: float) -> str:
    y = _top(node.lane)
    hint = escape("\n".join((node.name, *(f"after {name}" for name in node.after))))
    box = f'<rect class="box {node.kind}" x="{x:.1f}" y="{y:g}" width="{width:.1f}" height="{_LANE}"/>'
    inside = ""
    if width > 6.5 * len(node.of):
        inside = f'<text class="inside" x="{x + width / 2:.1f}" y="{y + _LANE / 2 + 4:g}">{escape(node.of)}</text>'
    return f"<g><title>{hint}</title>{box}{inside}</g>"
