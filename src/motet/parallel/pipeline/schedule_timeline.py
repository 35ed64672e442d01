"""When each action of a schedule starts and stops, and the share of time in which the ranks are idle.

A rank computes one action after another. It starts messages in the order of its list; neighbouring ones are one batch,
which starts after the computation before it and after the previous batch of the rank. No message is buffered: one takes
place when both ends have started it, and a batch ends with its last message. A computation waits for the batch of what
it receives. NCCL with one stream for each rank behaves so. Other transports wait less.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from itertools import groupby
from typing import NamedTuple

from motet.core.errors import InputError
from motet.parallel.pipeline.pipeline_schedule import PipelineAction, PipelineSchedule, peak_in_flight

# Kind -> duration of its computation, and of a message (M), in any unit.
DURATIONS: Mapping[str, float] = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0, "M": 0.0}


class MessageBatch(NamedTuple):
    """The start or the end of neighbouring messages of a rank."""

    rank: int
    number: int
    is_end: bool


Event = PipelineAction | MessageBatch
EventTimes = dict[Event, tuple[float, float]]  # (start, stop)


def event_times(actions: Sequence[Sequence[PipelineAction]], durations: Mapping[str, float] = DURATIONS) -> EventTimes:
    """Start and stop of each computation and batch; an error if they wait for one another.

    Of actions without messages, each starts as soon as what it needs can be on its rank.
    """
    earlier = _earlier_events(actions)
    times: EventTimes = {}
    try:
        for event in TopologicalSorter(earlier).static_order():
            ready = (times[other][1] + durations["M"] * by_message for other, by_message in earlier[event].items())
            start = max(ready, default=0.0)
            times[event] = (start, start + (durations[event.kind] if isinstance(event, PipelineAction) else 0.0))
    except CycleError as error:
        computations = dict.fromkeys(str(event) for event in error.args[1] if isinstance(event, PipelineAction))
        ranks = sorted({event.rank for event in error.args[1] if isinstance(event, MessageBatch)})
        waiting = " and ".join(
            f"{what} {', '.join(map(str, which))}" for what, which in (("", computations), ("ranks", ranks)) if which
        )
        raise InputError(f"the order deadlocks: {waiting.strip()} wait for one another; change it") from None
    return times


def _earlier_events(actions: Sequence[Sequence[PipelineAction]]) -> dict[Event, dict[Event, bool]]:
    """The events that each event waits for, and whether a message lies between them."""
    events: dict[Event, dict[Event, bool]] = {}
    batches: dict[PipelineAction, MessageBatch] = {}  # Message -> the end of its batch
    rank_of = {action: rank for rank, order in enumerate(actions) for action in order}
    for rank, order in enumerate(actions):
        computed: dict[Event, bool] = {}  # The last computation
        sent: dict[Event, bool] = {}  # The end of the last batch
        for number, (is_message, run) in enumerate(groupby(order, lambda action: action.is_message)):
            if is_message:
                start, end = (MessageBatch(rank, number, is_end) for is_end in (False, True))
                batches |= dict.fromkeys(run, end)
                events |= {start: computed | sent, end: {start: True}}
                sent = {end: False}
                continue
            for action in run:
                events[action], computed = dict(computed), {action: False}
    for message, end in batches.items():
        if message.other_end in batches:
            events[end][batches[message.other_end]._replace(is_end=False)] = True
    for action in (event for event in events if isinstance(event, PipelineAction)):
        for choices in action.needs():
            for need in [choice for choice in choices if choice in rank_of][:1]:
                crosses = need not in batches and rank_of[need] != rank_of[action]
                events[action].setdefault(batches.get(need, need), crosses)
    return events


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
