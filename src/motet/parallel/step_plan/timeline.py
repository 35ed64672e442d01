"""What waits for what in a step of data parallelism: which gradient is there when, what is sent after it, who needs it.

The graph of one step and the forward of the next. Each rank has two lanes, which work off their nodes in this order: it
computes, and its network carries one message after another.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from motet.parallel.data_parallel.communication.communication_settings import CommunicationSettings
from motet.parallel.data_parallel.zero import ZERO_STAGES
from motet.parallel.layout import Layout

NodeKind = Literal["forward", "backward", "reduce", "agree", "update", "gather"]
TimelineResource = Literal["compute", "network"]


@dataclass(frozen=True)
class ModelSegment:
    """A part of the model that is computed as one."""

    name: str
    flops: float  # Of a forward of a micro-batch; backward takes twice as many
    parameters: frozenset[str]


@dataclass(frozen=True)
class CommUnitVolume:
    """What travels as one: a bucket of stages 0 to 2, or a unit of stage 3."""

    name: str
    parameters: frozenset[str]
    reduce_bytes: float  # Bytes of its gradients
    gather_bytes: float  # Bytes of its parameters, or at stage 0 of what of its gradients is gathered
    is_block: bool = False  # Stage 3 frees it after forward, where parameters are gathered again


@dataclass(frozen=True)
class TimelineNode:
    """Something that a rank does, once all of `after` is done."""

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
    segments: Sequence[ModelSegment], units: Sequence[CommUnitVolume], layout: Layout, settings: CommunicationSettings
) -> tuple[TimelineNode, ...]:
    """`stretches` in the order of the forward; `messages` in the order in which they are sent."""
    assert segments and units
    builder = _StepGraphBuilder(segments, units, layout, settings.overlap)
    for microbatch in range(layout.microbatches):
        builder.add_microbatch(microbatch)
    builder.add_update()
    return tuple(builder.nodes)


def compute_node_times(
    nodes: Sequence[TimelineNode], seconds: Callable[[TimelineNode], float]
) -> dict[str, tuple[float, float]]:
    """When each begins and ends, if it takes so long."""
    free_at: dict[TimelineResource, float] = {"compute": 0.0, "network": 0.0}
    times: dict[str, tuple[float, float]] = {}
    for node in nodes:
        start = max([free_at[node.resource], *(times[name][1] for name in node.depends_on)])
        free_at[node.resource] = start + seconds(node)
        times[node.name] = (start, free_at[node.resource])
    return times


class _StepGraphBuilder:
    """A graph that grows in the order of time."""

    def __init__(
        self, segments: Sequence[ModelSegment], units: Sequence[CommUnitVolume], layout: Layout, overlap: str
    ) -> None:
        self.nodes: list[TimelineNode] = []
        self._segments, self._units, self._layout, self._overlap = segments, units, layout, overlap
        # An all-reduce sends everything there and back.
        self._reduce_factor = 2 if layout.zero == 0 and overlap != "forward" else 1
        self._reduce_nodes: list[str] = []
        self._compute_dependencies: tuple[str, ...] = ()  # What the next computation follows

    def add_microbatch(self, microbatch: int) -> None:
        suffix = f" of part {microbatch + 1}" if self._layout.microbatches > 1 else ""
        self._add_forward(suffix)
        self._add_backward(suffix, reduces=ZERO_STAGES[self._layout.zero].gradients or self._is_last(microbatch))

    def add_update(self) -> None:
        """And the forward that follows."""
        layout, overlaps_forward = self._layout, self._overlap == "forward"
        norm_node = self._add("agree", "on the norm", 0.0, (*self._reduce_nodes, *self._compute_dependencies))
        if layout.zero == 3:
            self._compute_dependencies = (self._add("update", "all", 0.0, (norm_node,)),)
            self._add_forward(" of the next step")
            return
        self._compute_dependencies = (
            (norm_node,) if layout.zero == 0 and overlaps_forward else (self._add("update", "all", 0.0, (norm_node,)),)
        )
        gathers = overlaps_forward or (layout.shards > 1 and layout.zero > 0)
        order = self._in_order_of_use() if overlaps_forward else list(self._units)
        arrival_nodes = {
            m.name: self._add("gather", m.name, m.gather_bytes, self._compute_dependencies) for m in order if gathers
        }
        if not overlaps_forward:
            self._compute_dependencies = tuple(arrival_nodes.values()) or self._compute_dependencies
        for segment in self._segments:
            needed = [m.name for m in order if m.name in arrival_nodes and m.parameters & segment.parameters]
            for name in needed if layout.zero == 0 else ():
                if arrival_nodes[name].startswith("gather"):
                    arrival_nodes[name] = self._add("update", name, 0.0, (arrival_nodes[name],))
            dependencies = dict.fromkeys(
                (*self._compute_dependencies, *(arrival_nodes[name] for name in needed if overlaps_forward))
            )
            self._compute_dependencies = (
                self._add("forward", f"{segment.name} of the next step", segment.flops, tuple(dependencies)),
            )

    def _add_forward(self, suffix: str) -> None:
        earlier: list[tuple[str, ...]] = [self._compute_dependencies, self._compute_dependencies]
        gathered: dict[str, str] = {}
        for segment in self._segments:
            # One stretch ahead of what is being computed.
            self._add_gathers(segment, gathered, "forward", suffix, earlier[-2])
            self._compute_dependencies = (
                self._add(
                    "forward", f"{segment.name}{suffix}", segment.flops, self._dependencies_of(segment, gathered)
                ),
            )
            earlier.append(self._compute_dependencies)
        self._gathered = gathered

    def _add_backward(self, suffix: str, reduces: bool) -> None:
        earlier: list[tuple[str, ...]] = [self._compute_dependencies, self._compute_dependencies]
        gathered = {name: node for name, node in self._gathered.items() if not self._is_resharded(name)}
        unreduced = list(self._units)
        for index in reversed(range(len(self._segments))):
            segment = self._segments[index]
            self._add_gathers(segment, gathered, "backward", suffix, earlier[-2])
            dependencies = self._dependencies_of(segment, gathered)
            self._compute_dependencies = (
                self._add("backward", f"{segment.name}{suffix}", 2 * segment.flops, dependencies),
            )
            earlier.append(self._compute_dependencies)
            later_parameters = frozenset[str]().union(*(s.parameters for s in self._segments[:index]))
            while (
                reduces
                and unreduced
                and (index == 0 or (self._overlap != "none" and not unreduced[0].parameters & later_parameters))
            ):
                unit = unreduced.pop(0)
                self._reduce_nodes.append(
                    self._add(
                        "reduce",
                        f"{unit.name}{suffix}",
                        self._reduce_factor * unit.reduce_bytes,
                        self._compute_dependencies,
                    )
                )

    def _add_gathers(
        self,
        segment: ModelSegment,
        gathered: dict[str, str],
        direction: str,
        suffix: str,
        dependencies: tuple[str, ...],
    ) -> None:
        """Stage 3: whatever of its parameters is not there."""
        for unit in self._units:
            if self._layout.zero == 3 and unit.name not in gathered and unit.parameters & segment.parameters:
                gathered[unit.name] = self._add(
                    "gather", f"{unit.name} for {direction}{suffix}", unit.gather_bytes, dependencies
                )

    def _dependencies_of(self, segment: ModelSegment, gathered: dict[str, str]) -> tuple[str, ...]:
        gathers = (gathered[m.name] for m in self._units if m.name in gathered and m.parameters & segment.parameters)
        return tuple(dict.fromkeys((*self._compute_dependencies, *gathers)))

    def _is_resharded(self, name: str) -> bool:
        return self._layout.reshard_after_forward and any(m.is_block for m in self._units if m.name == name)

    def _is_last(self, microbatch: int) -> bool:
        return microbatch == self._layout.microbatches - 1

    def _in_order_of_use(self) -> list[CommUnitVolume]:
        """What the first stretch needs comes first."""
        first_segments = [
            next((i for i, s in enumerate(self._segments) if m.parameters & s.parameters), 0) for m in self._units
        ]
        return [
            message for _, message in sorted(zip(first_segments, self._units, strict=True), key=lambda pair: pair[0])
        ]

    def _add(self, kind: NodeKind, label: str, work: float, depends_on: tuple[str, ...]) -> str:
        self.nodes.append(TimelineNode(kind, label, work, depends_on))
        return self.nodes[-1].name
