"""What waits for what in a step of data parallelism: which gradient is there when, what is sent after it, who needs it.

The graph of one step and the forward of the next. Each rank has two lanes, which work off their nodes in this order: it
computes, and its network carries one message after another.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from motet.parallel.communication import CommunicationSettings
from motet.parallel.layout import Layout
from motet.parallel.placement import PLACEMENTS

Kind = Literal["forward", "backward", "reduce", "agree", "update", "gather"]
Lane = Literal["compute", "network"]


@dataclass(frozen=True)
class Stretch:
    """A part of the model that is computed as one."""

    name: str
    flops: float
    """Of a forward of a micro-batch; backward takes twice as many."""
    parameters: frozenset[str]


@dataclass(frozen=True)
class Message:
    """What travels as one: a bucket of stages 0 to 2, or a unit of stage 3."""

    name: str
    parameters: frozenset[str]
    reduced: float
    """Bytes of its gradients."""
    gathered: float
    """Bytes of its parameters, or at stage 0 of what of its gradients is gathered."""
    is_block: bool = False
    """Stage 3 frees it after forward, where parameters are gathered again."""


@dataclass(frozen=True)
class Node:
    """Something that a rank does, once all of `after` is done."""

    kind: Kind
    of: str
    work: float
    """FLOPs, or bytes."""
    after: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.kind} {self.of}"

    @property
    def lane(self) -> Lane:
        return "network" if self.kind in ("reduce", "gather") else "compute"


def step_graph(
    stretches: Sequence[Stretch], messages: Sequence[Message], layout: Layout, settings: CommunicationSettings
) -> tuple[Node, ...]:
    """`stretches` in the order of the forward; `messages` in the order in which they are sent."""
    assert stretches and messages
    made = _Graph(stretches, messages, layout, settings.overlap)
    for number in range(layout.microbatches):
        made.micro_batch(number)
    made.update()
    return tuple(made.nodes)


def schedule(nodes: Sequence[Node], seconds: Callable[[Node], float]) -> dict[str, tuple[float, float]]:
    """When each begins and ends, if it takes so long."""
    free: dict[Lane, float] = {"compute": 0.0, "network": 0.0}
    found: dict[str, tuple[float, float]] = {}
    for node in nodes:
        start = max([free[node.lane], *(found[name][1] for name in node.after)])
        free[node.lane] = start + seconds(node)
        found[node.name] = (start, free[node.lane])
    return found


class _Graph:
    """A graph that grows in the order of time."""

    def __init__(self, stretches: Sequence[Stretch], messages: Sequence[Message], layout: Layout, overlap: str) -> None:
        self.nodes: list[Node] = []
        self._stretches, self._messages, self._layout, self._overlap = stretches, messages, layout, overlap
        self._ways = 2 if layout.zero == 0 and overlap != "forward" else 1
        """An all-reduce sends everything there and back."""
        self._reduced: list[str] = []
        self._last: tuple[str, ...] = ()
        """What the next computation follows."""

    def micro_batch(self, number: int) -> None:
        part = f" of part {number + 1}" if self._layout.microbatches > 1 else ""
        self._all_forward(part)
        self._all_backward(part, sends=PLACEMENTS[self._layout.zero].gradients or self._is_last(number))

    def update(self) -> None:
        """And the forward that follows."""
        layout, early = self._layout, self._overlap == "forward"
        agreed = self._add("agree", "on the norm", 0.0, (*self._reduced, *self._last))
        if layout.zero == 3:
            self._last = (self._add("update", "all", 0.0, (agreed,)),)
            self._all_forward(" of the next step")
            return
        self._last = (agreed,) if layout.zero == 0 and early else (self._add("update", "all", 0.0, (agreed,)),)
        sends = early or (layout.shards > 1 and layout.zero > 0)
        order = self._by_need() if early else list(self._messages)
        arrived = {m.name: self._add("gather", m.name, m.gathered, self._last) for m in order if sends}
        if not early:
            self._last = tuple(arrived.values()) or self._last
        for stretch in self._stretches:
            needed = [m.name for m in order if m.name in arrived and m.parameters & stretch.parameters]
            for name in needed if layout.zero == 0 else ():
                if arrived[name].startswith("gather"):
                    arrived[name] = self._add("update", name, 0.0, (arrived[name],))
            after = dict.fromkeys((*self._last, *(arrived[name] for name in needed if early)))
            self._last = (self._add("forward", f"{stretch.name} of the next step", stretch.flops, tuple(after)),)

    def _all_forward(self, part: str) -> None:
        before: list[tuple[str, ...]] = [self._last, self._last]
        held: dict[str, str] = {}
        for stretch in self._stretches:
            # One stretch ahead of what is being computed.
            self._gather(stretch, held, "forward", part, before[-2])
            self._last = (self._add("forward", f"{stretch.name}{part}", stretch.flops, self._after(stretch, held)),)
            before.append(self._last)
        self._held = held

    def _all_backward(self, part: str, sends: bool) -> None:
        before: list[tuple[str, ...]] = [self._last, self._last]
        held = {name: node for name, node in self._held.items() if not self._is_freed(name)}
        waiting = list(self._messages)
        for place in reversed(range(len(self._stretches))):
            stretch = self._stretches[place]
            self._gather(stretch, held, "backward", part, before[-2])
            after = self._after(stretch, held)
            self._last = (self._add("backward", f"{stretch.name}{part}", 2 * stretch.flops, after),)
            before.append(self._last)
            to_come = frozenset[str]().union(*(s.parameters for s in self._stretches[:place]))
            while (
                sends and waiting and (place == 0 or (self._overlap != "none" and not waiting[0].parameters & to_come))
            ):
                message = waiting.pop(0)
                self._reduced.append(
                    self._add("reduce", f"{message.name}{part}", self._ways * message.reduced, self._last)
                )

    def _gather(self, stretch: Stretch, held: dict[str, str], way: str, part: str, after: tuple[str, ...]) -> None:
        """Stage 3: whatever of its parameters is not there."""
        for message in self._messages:
            if self._layout.zero == 3 and message.name not in held and message.parameters & stretch.parameters:
                held[message.name] = self._add("gather", f"{message.name} for {way}{part}", message.gathered, after)

    def _after(self, stretch: Stretch, held: dict[str, str]) -> tuple[str, ...]:
        gathers = (held[m.name] for m in self._messages if m.name in held and m.parameters & stretch.parameters)
        return tuple(dict.fromkeys((*self._last, *gathers)))

    def _is_freed(self, name: str) -> bool:
        return self._layout.regather and any(m.is_block for m in self._messages if m.name == name)

    def _is_last(self, number: int) -> bool:
        return number == self._layout.microbatches - 1

    def _by_need(self) -> list[Message]:
        """What the first stretch needs comes first."""
        first = [
            next((i for i, s in enumerate(self._stretches) if m.parameters & s.parameters), 0) for m in self._messages
        ]
        return [message for _, message in sorted(zip(first, self._messages, strict=True), key=lambda pair: pair[0])]

    def _add(self, kind: Kind, of: str, work: float, after: tuple[str, ...]) -> str:
        self.nodes.append(Node(kind, of, work, after))
        return self.nodes[-1].name
