"""The dependency graph of a data-parallel step and the next forward, for the overlap of compute and communication.

Each rank has two resources, compute and network; each processes its nodes one after another, in the order of the graph.
The timeline is drawn as text and as SVG.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

from motet.parallel.data_parallel.communication.communication_settings import CommunicationSettings
from motet.parallel.data_parallel.data_sharding import DataParallelSharding
from motet.parallel.data_parallel.zero import sharded_states

NodeKind = Literal["forward", "backward", "reduce", "agree", "update", "gather"]
TimelineResource = Literal["compute", "network"]
NodeTimes = dict[str, tuple[float, float]]  # (start, end) of each node, by name


@dataclass(frozen=True)
class ModelSegment:
    """A part of the model with one forward and one backward."""

    name: str
    flops: float  # Forward of a micro-batch; backward takes twice as many
    parameters: frozenset[str]


@dataclass(frozen=True)
class CommUnitVolume:
    """The bytes of one bucket of stages 0 to 2, or of one unit of stage 3."""

    name: str
    parameters: frozenset[str]
    reduce_bytes: float
    gather_bytes: float  # Of parameters; of gradients at stage 0 with overlapped forward
    is_block: bool = False  # Stage 3: resharded after its forward if the layout says so


@dataclass(frozen=True)
class TimelineNode:
    """A computation or communication, which starts when all of `depends_on` is complete."""

    kind: NodeKind
    label: str
    work: float  # FLOPs, or bytes
    depends_on: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.kind} {self.label}"

    @property
    def resource(self) -> TimelineResource:
        return "network" if self.kind in ("reduce", "gather") else "compute"


def build_step_graph(
    layers: Sequence[ModelSegment],
    units: Sequence[CommUnitVolume],
    sharding: DataParallelSharding,
    *,
    settings: CommunicationSettings,
) -> tuple[TimelineNode, ...]:
    """The graph of layers in the order of the forward, and units in the order in which they are reduced."""
    assert layers and units
    builder = _StepGraphBuilder(layers, units, sharding, overlap=settings.overlap)
    count = sharding.microbatches
    for microbatch in range(count):
        suffix = f" of part {microbatch + 1}" if count > 1 else ""
        builder.add_forward(suffix)
        builder.add_backward(suffix, reduces=sharded_states(sharding.zero)["gradients"] or microbatch == count - 1)
    builder.add_update()
    return tuple(builder.nodes)


def compute_node_times(nodes: Sequence[TimelineNode], seconds: Callable[[TimelineNode], float]) -> NodeTimes:
    """(start, end) of each node, which takes `seconds`."""
    free_at: dict[TimelineResource, float] = {"compute": 0.0, "network": 0.0}
    times: NodeTimes = {}
    for node in nodes:
        start = max([free_at[node.resource], *(times[name][1] for name in node.depends_on)])
        free_at[node.resource] = start + seconds(node)
        times[node.name] = (start, free_at[node.resource])
    return times


class _StepGraphBuilder:
    def __init__(
        self,
        segments: Sequence[ModelSegment],
        units: Sequence[CommUnitVolume],
        sharding: DataParallelSharding,
        *,
        overlap: str,
    ) -> None:
        self.nodes: list[TimelineNode] = []
        self._segments, self._units, self._layout, self._overlap = segments, units, sharding, overlap
        # An all-reduce sends everything twice.
        self._reduce_factor = 2 if sharding.zero == 0 and overlap != "forward" else 1
        self._reduce_nodes: list[str] = []
        self._previous: tuple[str, ...] = ()  # Dependencies of the next computation
        self._gathered: dict[str, str] = {}  # Unit -> the gather of its parameters, at stage 3

    def add_update(self) -> None:
        """Add the norm, the update and the forward of the next step."""
        sharding, overlaps_forward = self._layout, self._overlap == "forward"
        norm = self._add("agree", "on the norm", 0.0, depends_on=(*self._reduce_nodes, *self._previous))
        updates_on_arrival = sharding.zero == 0 and overlaps_forward
        self._previous = (norm,) if updates_on_arrival else (self._add("update", "all", 0.0, depends_on=(norm,)),)
        if sharding.zero == 3:
            self.add_forward(" of the next step")
            return
        units = sorted(self._units, key=self._first_use) if overlaps_forward else list(self._units)
        arrivals: dict[str, str] = {}
        if overlaps_forward or (sharding.shards > 1 and sharding.zero > 0):
            arrivals = {u.name: self._add("gather", u.name, u.gather_bytes, depends_on=self._previous) for u in units}
        if not overlaps_forward:
            self._previous = tuple(arrivals.values()) or self._previous
        for segment in self._segments:
            used = [u.name for u in units if u.name in arrivals and u.parameters & segment.parameters]
            for name in used if sharding.zero == 0 else ():
                if arrivals[name].startswith("gather"):
                    arrivals[name] = self._add("update", name, 0.0, depends_on=(arrivals[name],))
            waits = [arrivals[name] for name in used if overlaps_forward]
            self._compute("forward", f"{segment.name} of the next step", flops=segment.flops, waits=waits)

    def add_forward(self, suffix: str) -> None:
        earlier = [self._previous, self._previous]
        self._gathered = {}
        for segment in self._segments:
            waits = self._gather(segment, f" for forward{suffix}", depends_on=earlier[-2])
            self._compute("forward", f"{segment.name}{suffix}", flops=segment.flops, waits=waits)
            earlier.append(self._previous)

    def add_backward(self, suffix: str, *, reduces: bool) -> None:
        earlier = [self._previous, self._previous]
        for unit in self._units:
            if unit.is_block and self._layout.reshard_after_forward:
                self._gathered.pop(unit.name, None)
        unreduced = list(self._units) if reduces else []
        for index, segment in reversed(list(enumerate(self._segments))):
            waits = self._gather(segment, f" for backward{suffix}", depends_on=earlier[-2])
            self._compute("backward", f"{segment.name}{suffix}", flops=2 * segment.flops, waits=waits)
            earlier.append(self._previous)
            needed = frozenset[str]().union(*(s.parameters for s in self._segments[:index]))
            while unreduced and (index == 0 or (self._overlap != "none" and not unreduced[0].parameters & needed)):
                unit = unreduced.pop(0)
                size = self._reduce_factor * unit.reduce_bytes
                self._reduce_nodes.append(self._add("reduce", f"{unit.name}{suffix}", size, depends_on=self._previous))

    def _gather(self, segment: ModelSegment, suffix: str, *, depends_on: tuple[str, ...]) -> list[str]:
        """Stage 3: gather what the segment needs, one segment ahead of the computation."""
        needed = [unit for unit in self._units if unit.parameters & segment.parameters]
        for unit in needed if self._layout.zero == 3 else ():
            if unit.name not in self._gathered:
                name = f"{unit.name}{suffix}"
                self._gathered[unit.name] = self._add("gather", name, unit.gather_bytes, depends_on=depends_on)
        return [self._gathered[unit.name] for unit in needed if unit.name in self._gathered]

    def _first_use(self, unit: CommUnitVolume) -> int:
        return next((i for i, s in enumerate(self._segments) if unit.parameters & s.parameters), 0)

    def _compute(self, kind: NodeKind, label: str, *, flops: float, waits: Sequence[str]) -> None:
        self._previous = (self._add(kind, label, flops, depends_on=tuple(dict.fromkeys((*self._previous, *waits)))),)

    def _add(self, kind: NodeKind, label: str, work: float, *, depends_on: tuple[str, ...]) -> str:
        self.nodes.append(TimelineNode(kind, label, work, depends_on))
        return self.nodes[-1].name


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
        rows.append(f"{resource:8} {''.join(row).rstrip()}")
    longest = max(len(node.name) for node in nodes)
    after = {node.name: f"after {', '.join(node.depends_on)}" if node.depends_on else "" for node in nodes}
    lines = [f"{100 * times[name][0] / end:6.1f} % {name:{longest}}  {text}".rstrip() for name, text in after.items()]
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
    scale, height = (_WIDTH - _LABEL - 16) / (end_time or _end_time(times)), _TOP + 2 * _ROW + _GAP + 24
    resource_of = {node.name: node.resource for node in nodes}
    spans = {name: (_LABEL + start * scale, _LABEL + stop * scale) for name, (start, stop) in times.items()}
    elements = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style>",
        f'<rect class="page" width="{_WIDTH}" height="{height}"/>',
        f'<text class="big" x="16" y="24">{escape(title)}</text>',
        f'<text class="quiet" x="16" y="42">{escape(note)}</text>',
        *(f'<text x="16" y="{_top(resource) + _ROW / 2 + 4:g}">{resource}</text>' for resource in RESOURCES),
    ]
    crossing = [(name, node) for node in nodes for name in node.depends_on if resource_of[name] != node.resource]
    elements += [_dependency_path(spans[name][1], spans[node.name][0], node.resource) for name, node in crossing]
    boxes = (_box(node, spans[node.name][0], max(spans[node.name][1] - spans[node.name][0], 2.0)) for node in nodes)
    return "\n".join([*elements, *boxes, "</svg>", ""])


def _top(resource: TimelineResource) -> float:
    return _TOP + RESOURCES.index(resource) * (_ROW + _GAP)


def _dependency_path(begin: float, end: float, destination: TimelineResource) -> str:
    compute, network = _top("compute") + _ROW, _top("network")
    y1, y2 = (compute, network) if destination == "network" else (network, compute)
    middle = (compute + network) / 2
    return f'<path class="waits" d="M{begin:.1f} {y1:g}C{begin:.1f} {middle:g} {end:.1f} {middle:g} {end:.1f} {y2:g}"/>'


def _box(node: TimelineNode, x: float, width: float) -> str:
    y = _top(node.resource)
    hint = escape("\n".join((node.name, *(f"after {name}" for name in node.depends_on))))
    box = f'<rect class="box {node.kind}" x="{x:.1f}" y="{y:g}" width="{width:.1f}" height="{_ROW}"/>'
    label = f'<text class="inside" x="{x + width / 2:.1f}" y="{y + _ROW / 2 + 4:g}">{escape(node.label)}</text>'
    return f"<g><title>{hint}</title>{box}{label if width > 6.5 * len(node.label) else ''}</g>"
