"""The start and stop of each action of a schedule, and the share of time in which the ranks are idle.

A rank computes one action after another. It starts messages in the order of its list; neighbouring ones are one batch,
which starts after the computation before it and after the previous batch of the rank. No message is buffered: one takes
place when both ends have started it, and a batch ends with its last message. A computation waits for the batch
of its received tensor. NCCL with one stream for each rank behaves so. Other transports wait less.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from itertools import groupby, repeat
from typing import NamedTuple

from motet.core.errors import InputError
from motet.parallel.pipeline.pipeline_schedule import (
    MESSAGES,
    NEEDS,
    ActionKind,
    PipelineAction,
    PipelineSchedule,
    peak_in_flight,
)

# Kind -> duration of a computation of any stage, or of each stage, and of a message (M), in any unit.
Durations = Mapping[str, float | Sequence[float]]
DURATIONS: Mapping[str, float] = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0, "M": 0.0}


class MessageBatch(NamedTuple):
    """The start or the end of neighbouring messages of a rank."""

    rank: int
    number: int
    is_end: bool


Event = PipelineAction | MessageBatch
EventTimes = dict[Event, tuple[float, float]]  # (start, stop)


def event_times(actions: Sequence[Sequence[PipelineAction]], durations: Durations = DURATIONS) -> EventTimes:
    """Start and stop of each computation and batch; an error if they wait for one another.

    Actions without messages start as soon as their inputs can be on their ranks.
    """
    graph = EventGraph(actions)
    return dict(zip(graph.events, zip(*graph.simulate(durations), strict=True), strict=True))


class EventGraph:
    """The events of the ranks of a pipeline, and the needs of each: made once, simulated with any durations."""

    def __init__(self, actions: Sequence[Sequence[PipelineAction]]) -> None:
        self.events: list[Event] = []
        # Needs of each event: `event` for the stop of another, `~event` for the arrival of its message.
        self._waits: list[tuple[int, ...]] = []
        self._kinds: dict[tuple[str, int] | None, int] = {None: 0}  # (kind, stage), or None for a batch -> a number
        self._kind_of_event: list[int] = []
        self._order = self._sort(self._add_events(actions))

    def simulate(self, durations: Durations) -> tuple[list[float], list[float]]:
        """(Starts, stops) of the events."""
        seconds = [0.0 if kind is None else _duration(durations, *kind) for kind in self._kinds]
        message, kinds, waits = _duration(durations, "M", 0), self._kind_of_event, self._waits
        starts, stops = [0.0] * len(kinds), [0.0] * 2 * len(kinds)  # The second half has arrivals, from the end
        for event in self._order:
            start = 0.0
            for other in waits[event]:
                if stops[other] > start:
                    start = stops[other]
            starts[event] = start
            stops[event] = stop = start + seconds[kinds[event]]
            stops[~event] = stop + message
        return starts, stops[: len(kinds)]

    def _add_events(self, actions: Sequence[Sequence[PipelineAction]]) -> list[Sequence[int]]:
        """Add the events of each rank; the computations and the batches of each rank, in order."""
        events, waits, kinds, chains = self.events, self._waits, self._kinds, list[Sequence[int]]()
        places = dict[
            tuple[ActionKind, int, int], tuple[int, int]
        ]()  # Action -> its event, or the end of its batch; rank
        for rank, order in enumerate(actions):
            computations, batches = list[int](), list[int]()
            chains += computations, batches
            for number, (is_message, run) in enumerate(groupby(order, lambda action: action[0] in MESSAGES)):
                if is_message:
                    start, end = len(events), len(events) + 1
                    waits += (*computations[-1:], *batches[-1:]), (~start,)
                    events += MessageBatch(rank, number, is_end=False), MessageBatch(rank, number, is_end=True)
                    self._kind_of_event += 0, 0
                    batches += start, end
                    places |= dict.fromkeys(run, (end, rank))
                    continue
                computed = [*run]
                numbers = range(len(events), len(events) + len(computed))
                waits += (*computations[-1:],), *zip(numbers[:-1], strict=True)
                places |= zip(computed, zip(numbers, repeat(rank)), strict=False)
                computations += numbers
                events += computed
                self._kind_of_event += [kinds.setdefault(action[:2], len(kinds)) for action in computed]
        self._add_needs(places)
        return chains

    def _add_needs(self, places: Mapping[tuple[ActionKind, int, int], tuple[int, int]]) -> None:
        """Add the needs of computations, and the other ends of messages, which must have started."""
        waits, kinds = self._waits, {kind for kind, _, _ in places}
        needs = {
            kind: [[(need, distance) for need, distance in choices if need in kinds] for choices in NEEDS[kind]]
            for kind in kinds
        }
        for (kind, stage, microbatch), (event, rank) in places.items():
            if kind in MESSAGES:
                _, other_end, distance = MESSAGES[kind]
                if (place := places.get((other_end, stage + distance, microbatch))) is not None:
                    waits[event] += (~(place[0] - 1),)  # The start of its batch
                continue
            for choices in needs[kind]:
                for need, distance in choices:
                    if (place := places.get((need, stage + distance, microbatch))) is not None:
                        other, owner = place
                        if need in MESSAGES:
                            waits[event] += (other,)
                        elif owner != rank:
                            waits[event] += (~other,)
                        elif other > event:  # The rank would compute it too late
                            waits[event] += (other,)
                        break

    def _sort(self, chains: Sequence[Sequence[int]]) -> list[int]:
        """The events, each after all that it waits for."""
        order, waits, count = list[int](), self._waits, -1
        done = [False] * 2 * len(waits)
        rests = [iter(chain) for chain in chains]
        heads = [next(rest, -1) for rest in rests]  # The next event of each chain, or -1
        while count < len(order):
            count = len(order)
            for number, event in enumerate(heads):
                while event >= 0:
                    for other in waits[event]:
                        if not done[other]:
                            break
                    else:
                        done[event] = done[~event] = True
                        order.append(event)
                        event = next(rests[number], -1)
                        continue
                    break
                heads[number] = event
        if len(order) < len(waits):
            self._raise_deadlock()
        return order

    def _raise_deadlock(self) -> None:
        waits = {event: [max(other, ~other) for other in others] for event, others in enumerate(self._waits)}
        try:
            TopologicalSorter(waits).prepare()
        except CycleError as error:
            cycle = [self.events[event] for event in error.args[1]]
        computations = dict.fromkeys(str(event) for event in cycle if isinstance(event, PipelineAction))
        ranks = sorted({event.rank for event in cycle if isinstance(event, MessageBatch)})
        waiting = " and ".join(
            f"{noun} {', '.join(map(str, which))}" for noun, which in (("", computations), ("ranks", ranks)) if which
        )
        raise InputError(f"the order deadlocks: {waiting.strip()} wait for one another; change it")


def _duration(durations: Durations, kind: str, stage: int) -> float:
    value = durations[kind]
    return value if isinstance(value, (float, int)) else value[stage]


@dataclass(frozen=True)
class ScheduleTimeline:
    """A schedule with the duration of each kind of action."""

    schedule: PipelineSchedule
    durations: Mapping[str, float] = field(default_factory=lambda: DURATIONS)

    @cached_property
    def times(self) -> dict[PipelineAction, tuple[float, float]]:
        """(start, stop) of each computation."""
        times = event_times(self.schedule.actions, self.durations)
        return {event: span for event, span in times.items() if isinstance(event, PipelineAction)}

    @cached_property
    def end(self) -> float:
        return max(stop for _, stop in self.times.values())

    def bubble_share(self, rank: int | None = None) -> float:
        """The share of the time of a rank, or of all ranks, in which nothing is computed."""
        orders = self.schedule.compute_actions if rank is None else [self.schedule.compute_actions[rank]]
        busy = sum(self.durations[action.kind] for order in orders for action in order)
        return 1 - busy / (self.end * len(orders))

    def memory(self, rank: int) -> float:
        """The most activations that a rank holds, in those of one micro-batch in all of its stages."""
        return peak_in_flight(self.schedule.actions[rank]) / len(self.schedule.stages_of_rank(rank))

    @property
    def bytes_factor(self) -> float:
        """The bytes between ranks over those of a schedule with one chunk a rank."""
        return self.schedule.crossings / max(1, self.schedule.ranks - 1)
