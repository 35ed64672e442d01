"""The dependency graph of a data-parallel step and the next forward, for the overlap of compute and communication.

Each rank has two resources, compute and network; each processes its nodes one after another, in the order of the graph.
The timeline is drawn as text and as SVG.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Literal

from motet.core.dtypes import DTYPE_BYTES
from motet.parallel.data_parallel.comm_units import CommUnit
from motet.parallel.data_parallel.unit_schedule import CommUnitAction
from motet.parallel.data_parallel.zero import Moment
from motet.parallel.step_plan.plan import StepPlan
from motet.precision.recipe import PrecisionRecipe

NodeKind = Literal["forward", "backward", "exchange", "reduce", "agree", "update", "gather"]
TimelineResource = Literal["compute", "network"]
NodeTimes = dict[str, tuple[float, float]]  # (start, end) of each node, by name


@dataclass(frozen=True)
class ModelSegment:
    """A part of the model with one forward and one backward."""

    name: str
    flops: float  # Forward of a micro-batch; backward takes twice as many
    parameters: frozenset[str]
    # Bytes of the activations that ranks communicate before the next segment; an all-reduce sends its activation twice
    forward_bytes: int = 0
    backward_bytes: int = 0


@dataclass(frozen=True)
class TimelineNode:
    """A computation, a communication of activations, or an action of the plan; it starts after all of `depends_on`."""

    kind: NodeKind
    label: str
    work: float  # FLOPs, or bytes
    depends_on: tuple[str, ...]
    unit: CommUnit | None = None
    action: CommUnitAction | None = None

    @property
    def name(self) -> str:
        return f"{self.action.kind.replace('_', '-') if self.action else self.kind} {self.label}"

    @property
    def resource(self) -> TimelineResource:
        return "network" if self.action or self.kind == "exchange" else "compute"


def build_step_graph(
    segments: Sequence[ModelSegment], plan: StepPlan, recipe: PrecisionRecipe
) -> tuple[TimelineNode, ...]:
    """The graph of segments, in the order of the forward, and of the actions on the units of a plan."""
    builder, last = _StepGraphBuilder(segments, plan, recipe), plan.microbatches - 1
    for microbatch in range(plan.microbatches):
        suffix = f" of part {microbatch + 1}" if last else ""
        builder.add_pass("forward", suffix)
        last_moments: tuple[Moment, ...] = ("last_microbatch",) if microbatch == last else ()
        builder.add_pass("backward", suffix, reduced_at=("microbatch", *last_moments))
    builder.add_update()
    builder.add_pass("forward", " of the next step")
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
    def __init__(self, segments: Sequence[ModelSegment], plan: StepPlan, recipe: PrecisionRecipe) -> None:
        self.nodes: list[TimelineNode] = []
        self._segments, self._units, self._recipe = segments, plan.comm_units, recipe
        self._previous: tuple[str, ...] = ()  # Dependencies of the next computation
        self._reductions: list[str] = []
        self._available: dict[str, str] = {}  # Unit -> the node after which its parameters may be used
        self._pending_updates: set[str] = set()  # Units whose gathered sums are still to be applied
        self._users: dict[str, list[int]] = {}  # Unit -> indices of the segments that use it
        self._complete_at: dict[str, int] = {}  # Unit -> the segment whose backward completes what is reduced in order
        for group in plan.groups:
            earliest = len(segments)
            for unit in group.units:
                names = {member.name for member in unit.members}
                users = [i for i, segment in enumerate(segments) if names & segment.parameters] or [0]
                earliest = min(earliest, users[0]) if unit.kind == "bucket" else users[0]
                self._users[unit.name], self._complete_at[unit.name] = users, earliest

    def add_pass(
        self, kind: Literal["forward", "backward"], suffix: str, *, reduced_at: Collection[Moment] = ()
    ) -> None:
        """Add a forward or backward of all segments, with the gathers before and the reductions after each."""
        for unit in self._units:
            if any(_transfers(unit, kind)):
                self._available.pop(unit.name, None)
        direction, earlier = 1 if kind == "forward" else -1, [self._previous, self._previous]
        for index, segment in list(enumerate(self._segments))[::direction]:
            # A gather starts one segment ahead of the computation.
            waits = list(self._add_gathers(index, kind, suffix, depends_on=earlier[-2]))
            depends_on, flops = tuple(dict.fromkeys((*self._previous, *waits))), segment.flops * (1 + (direction < 0))
            self._previous = (self._add(kind, f"{segment.name}{suffix}", flops, depends_on=depends_on),)
            if exchanged := segment.forward_bytes if kind == "forward" else segment.backward_bytes:
                label = f"of {kind} {segment.name}{suffix}"
                self._previous = (self._add("exchange", label, exchanged, depends_on=self._previous),)
            earlier.append(self._previous)
            self._add_reductions(index, suffix, reduced_at)

    def add_update(self) -> None:
        """Add the norm, the update, and the gathers after it."""
        self._previous = (self._add("agree", "on the norm", depends_on=(*self._reductions, *self._previous)),)
        gathers = [(unit, action) for unit in self._units for action in _transfers(unit, "step")]
        self._pending_updates = {unit.name for unit, action in gathers if action.tensor == "gradients"}
        if len(self._pending_updates) < len(self._units):
            self._previous = (self._add("update", "all", depends_on=self._previous),)
        gathers.sort(key=lambda pair: pair[1].overlaps * (1 + self._users[pair[0].name][0]))
        nodes = [self._add_transfer(unit, action, "", depends_on=self._previous) for unit, action in gathers]
        pairs = list(zip(gathers, nodes, strict=True))
        self._available |= {unit.name: node for (unit, action), node in pairs if action.overlaps}
        self._previous = tuple(node for (_, action), node in pairs if not action.overlaps) or self._previous

    def _add_gathers(self, index: int, moment: Moment, suffix: str, *, depends_on: tuple[str, ...]) -> Iterator[str]:
        """Add the gathers before a segment, and yield the nodes that it waits for."""
        for unit in (unit for unit in self._units if index in self._users[unit.name]):
            for action in _transfers(unit, moment) if unit.name not in self._available else ():
                label = f" for {moment}{suffix}"
                self._available[unit.name] = self._add_transfer(unit, action, label, depends_on=depends_on)
            if unit.name in self._pending_updates:
                self._pending_updates.remove(unit.name)
                arrived = (self._available[unit.name],)
                self._available[unit.name] = self._add("update", unit.name, depends_on=arrived)
            if unit.name in self._available:
                yield self._available[unit.name]

    def _add_reductions(self, index: int, suffix: str, moments: Collection[Moment]) -> None:
        for unit in self._units:
            depends_on = self._previous
            for action in _transfers(unit, *moments):
                if index == self._complete_at[unit.name] * action.overlaps:
                    depends_on = (self._add_transfer(unit, action, suffix, depends_on=depends_on),)
                    self._reductions += depends_on

    def _add_transfer(self, unit: CommUnit, action: CommUnitAction, suffix: str, *, depends_on: tuple[str, ...]) -> str:
        """Add an action with the bytes of its buffer, which an all-reduce sends twice."""
        width = DTYPE_BYTES[self._recipe.compute if action.tensor == "parameters" else self._recipe.reduce]
        numel = unit.gathered_numel if action.is_gather else unit.reduction_spec(None if action.is_scatter else 0).numel
        kind: NodeKind = "gather" if action.is_gather else "reduce"
        work = numel * width * (1 + action.kind.endswith("all_reduce"))
        return self._add(kind, f"{unit.name}{suffix}", work, depends_on=depends_on, unit=unit, action=action)

    def _add(self, kind: NodeKind, label: str, work: float = 0.0, **others: Any) -> str:
        self.nodes.append(TimelineNode(kind, label, work, **others))
        return self.nodes[-1].name


def _transfers(unit: CommUnit, *moments: Moment) -> Iterator[CommUnitAction]:
    """The actions at these moments that communicate tensors."""
    return (a for a in unit.schedule if a.moment in moments and a.over and a.kind != "keep_secondary")


RESOURCES: tuple[TimelineResource, ...] = ("compute", "network")

_WIDTH, _LABEL, _ROW, _GAP, _TOP = 1120, 80, 46, 74, 60
_STYLE = """
.page { fill: #ffffff }
text { font-family: system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; font-size: 12px; fill: #1f2328 }
.big { font-weight: 600; font-size: 15px } .quiet { fill: #57606a } .box { stroke: #ffffff; stroke-width: 1 }
.inside { fill: #ffffff; font-size: 11px; text-anchor: middle; pointer-events: none }
.forward { fill: #1f5fbf } .backward { fill: #7a3fb0 } .reduce { fill: #a84300 }
.exchange { fill: #8a5a00 } .gather { fill: #1a7439 }
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
