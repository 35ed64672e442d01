"""The timeline of a step as text and as SVG: compute and network over time, and their dependencies."""

from collections.abc import Sequence
from html import escape

from motet.parallel.step_plan.timeline import TimelineNode, TimelineResource

NodeTimes = dict[str, tuple[float, float]]
RESOURCES: tuple[TimelineResource, ...] = ("compute", "network")

_WIDTH, _LABEL, _ROW, _GAP, _TOP = 1120, 80, 46, 74, 60
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


def draw_text(nodes: Sequence[TimelineNode], times: NodeTimes, width: int = 96) -> str:
    """A row of letters for each resource, and a line for each node."""
    end = _end_time(times)
    rows = []
    for resource in RESOURCES:
        row = [" "] * width
        for node in nodes:
            if node.resource == resource:
                start, stop = (round(t / end * width) for t in times[node.name])
                row[start:stop] = node.kind[0] * (stop - start)
                row = row[:width]
        rows.append(f"{resource:8} {''.join(row).rstrip()}")
    longest = max(len(node.name) for node in nodes)
    lines = []
    for node in nodes:
        after = f"after {', '.join(node.depends_on)}" if node.depends_on else ""
        lines.append(f"{100 * times[node.name][0] / end:6.1f} % {node.name:{longest}}  {after}".rstrip())
    kinds = ", ".join(f"{kind[0]} {kind}" for kind in dict.fromkeys(node.kind for node in nodes if node.work))
    return "\n".join([*rows, f"({kinds})", "", *lines])


def _end_time(times: NodeTimes) -> float:
    return max(stop for _, stop in times.values()) or 1.0


def draw_svg(
    nodes: Sequence[TimelineNode], times: NodeTimes, *, title: str, note: str, end_time: float | None = None
) -> str:
    """A box for each node, and a line for each dependency between the resources.

    `end_time` is the time at the right edge; the end of the last node when not given.
    """
    scale = (_WIDTH - _LABEL - 16) / (end_time or _end_time(times))
    height = _TOP + 2 * _ROW + _GAP + 24
    resource_of = {node.name: node.resource for node in nodes}

    def x_at(time: float) -> float:
        return _LABEL + time * scale

    elements = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style>",
        f'<rect class="page" width="{_WIDTH}" height="{height}"/>',
        f'<text class="big" x="16" y="24">{escape(title)}</text>',
        f'<text class="quiet" x="16" y="42">{escape(note)}</text>',
        *(f'<text x="16" y="{_top(resource) + _ROW / 2 + 4:g}">{resource}</text>' for resource in RESOURCES),
    ]
    for node in nodes:
        for name in node.depends_on:
            if resource_of[name] != node.resource:
                begin, end = x_at(times[name][1]), x_at(times[node.name][0])
                elements.append(_dependency_path(begin, end, is_downward=resource_of[name] == "compute"))
    for node in nodes:
        start, stop = times[node.name]
        elements.append(_box(node, x_at(start), max(x_at(stop) - x_at(start), 2.0)))
    return "\n".join([*elements, "</svg>", ""])


def _top(resource: TimelineResource) -> float:
    return _TOP + RESOURCES.index(resource) * (_ROW + _GAP)


def _dependency_path(begin: float, end: float, *, is_downward: bool) -> str:
    compute, network = _top("compute") + _ROW, _top("network")
    y1, y2 = (compute, network) if is_downward else (network, compute)
    middle = (y1 + y2) / 2
    return f'<path class="waits" d="M{begin:.1f} {y1:g}C{begin:.1f} {middle:g} {end:.1f} {middle:g} {end:.1f} {y2:g}"/>'


def _box(node: TimelineNode, x: float, width: float) -> str:
    y = _top(node.resource)
    hint = escape("\n".join((node.name, *(f"after {name}" for name in node.depends_on))))
    box = f'<rect class="box {node.kind}" x="{x:.1f}" y="{y:g}" width="{width:.1f}" height="{_ROW}"/>'
    label = ""
    if width > 6.5 * len(node.label):
        label = f'<text class="inside" x="{x + width / 2:.1f}" y="{y + _ROW / 2 + 4:g}">{escape(node.label)}</text>'
    return f"<g><title>{hint}</title>{box}{label}</g>"
