"""When each action of a schedule starts and stops, and the share of time in which the ranks are idle.

A rank computes one action after another. It starts messages in the order of its list; neighbouring ones are one batch,
which starts after the computation before it and after the previous batch of the rank. No message is buffered: one takes
place when both ends have started it, and a batch ends with its last message. A computation waits for the batch of what
it receives. NCCL with one stream for each rank behaves so. Other transports wait less.
"""

from collections.abc import Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from itertools import groupby
from typing import NamedTuple

from motet.core.errors import InputError
from motet.parallel.pipeline.pipeline_schedule import PipelineAction

DURATIONS: Mapping[str, float] = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}


class MessageBatch(NamedTuple):
    """The start or the end of neighbouring messages of a rank."""

    rank: int
    number: int
    is_end: bool


Event = PipelineAction | MessageBatch
EventTimes = dict[Event, tuple[float, float]]  # (start, stop)


def event_times(
    actions: Sequence[Sequence[PipelineAction]],
    durations: Mapping[str, float] = DURATIONS,
    message_duration: float = 0.0,
) -> EventTimes:
    """Start and stop of each computation and batch, for durations by kind.

    Without messages between two ranks, what one computes is there for the other immediately.
    """
    events = _dependencies(actions)
    times: EventTimes = {}
    try:
        for event in TopologicalSorter(events).static_order():
            start = max((times[earlier][1] for earlier in events[event]), default=0.0)
            if isinstance(event, MessageBatch):
                times[event] = (start, start + message_duration * event.is_end)
            else:
                times[event] = (start, start + durations[event.kind])
    except CycleError as error:
        waiting = dict.fromkeys(str(event) for event in error.args[1] if isinstance(event, PipelineAction))
        raise InputError(
            f"the schedule deadlocks: {', '.join(waiting) or 'messages'} wait for one another; change their order"
        ) from None
    return times


def _dependencies(actions: Sequence[Sequence[PipelineAction]]) -> dict[Event, set[Event]]:
    """The events that each event waits for."""
    batches: dict[PipelineAction, MessageBatch] = {}  # Message -> the end of its batch
    events: dict[Event, set[Event]] = {}
    for rank, order in enumerate(actions):
        compute: set[Event] = set()  # The last one
        batch: set[Event] = set()
        for number, (is_message, group) in enumerate(groupby(order, lambda action: action.is_message)):
            if is_message:
                end = MessageBatch(rank, number, is_end=True)
                batches |= dict.fromkeys(group, end)
                events[end._replace(is_end=False)] = compute | batch
                events[end] = {end._replace(is_end=False)}
                batch = {end}
                continue
            for action in group:
                events[action] = set(compute)
                compute = {action}
    for message, end in batches.items():
        if message.other_end in batches:
            events[end].add(batches[message.other_end]._replace(is_end=False))
    for event in events:
        if isinstance(event, PipelineAction):
            events[event].update(batches.get(need, need) for need in _needs(event, events, batches))
    return events


def _needs(
    action: PipelineAction, events: Mapping[Event, object], batches: Mapping[PipelineAction, object]
) -> Iterator[PipelineAction]:
    """The values that a computation uses: an earlier one of its rank, a message, or without messages another rank's."""
    _, stage, microbatch = action
    if action.kind == "W":
        yield PipelineAction("I", stage, microbatch)
        return
    candidates = [[PipelineAction("receive_activation", stage, microbatch), PipelineAction("F", stage - 1, microbatch)]]
    if action.kind != "F":
        yield PipelineAction("F", stage, microbatch)
        kinds = (("receive_gradient", 0), ("B", 1), ("I", 1))
        candidates = [[PipelineAction(kind, stage + distance, microbatch) for kind, distance in kinds]]  # type: ignore[arg-type]  # Literals of the line above
    for choices in candidates:
        yield from [choice for choice in choices if choice in batches or choice in events][:1]
