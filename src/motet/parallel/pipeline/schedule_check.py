"""The check that a schedule computes a step: all work exactly once, in an order that never deadlocks."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from itertools import product

from motet.core.errors import InputError
from motet.parallel.pipeline.pipeline_schedule import (
    NEEDS,
    PipelineAction,
    PipelineSchedule,
    message_of_compute,
    peak_in_flight,
)
from motet.parallel.pipeline.schedule_timeline import event_times


class PipelineScheduleError(InputError):
    """A schedule does not compute a step."""


def check_schedule(schedule: PipelineSchedule) -> None:
    """Raise at the first mistake of a schedule, in one sentence that names the rank and the action."""
    check_computations(schedule)
    _raise_first(schedule, _messages, _order_between_ranks)
    try:
        event_times(schedule.actions)
    except InputError as error:
        raise PipelineScheduleError(f"schedule {schedule.name}: {error}") from None


def check_computations(schedule: PipelineSchedule) -> None:
    """Raise at the first mistake of what each rank computes, whether or not the messages are there yet."""
    _raise_first(schedule, _misplaced, _work, _order_on_ranks, _in_flight)


def _raise_first(schedule: PipelineSchedule, *rules: Callable[[PipelineSchedule], Iterator[str]]) -> None:
    for mistakes in rules:
        for mistake in mistakes(schedule):
            raise PipelineScheduleError(f"schedule {schedule.name}: {mistake}")


def _misplaced(schedule: PipelineSchedule) -> Iterator[str]:
    """Ranks, stages and micro-batches that do not exist, and actions on the wrong rank."""
    if len(schedule.max_in_flight) != schedule.ranks:
        yield f"{schedule.ranks} ranks have {len(schedule.max_in_flight)} bounds of activations; give one for each"
    for rank in sorted(set(schedule.stage_ranks).symmetric_difference(range(schedule.ranks))):
        yield f"rank {rank} of {schedule.ranks} has no stage or no actions; give it both"
    for rank, order in enumerate(schedule.actions):
        for action in order:
            if action.kind not in NEEDS:
                yield f"rank {rank} has an action of kind {action.kind!r}; use one of {', '.join(NEEDS)}"
            elif not 0 <= action.stage < schedule.stages:
                yield f"rank {rank} has {action}, but stages are 0 to {schedule.stages - 1}; use one of them"
            elif not 0 <= action.microbatch < schedule.microbatches:
                yield f"rank {rank} has {action}, but micro-batches are 0 to {schedule.microbatches - 1}; use these"
            elif schedule.stage_ranks[action.stage] != rank:
                owner = schedule.stage_ranks[action.stage]
                yield f"rank {rank} has {action}, but stage {action.stage} is on rank {owner}; move it there"


def _work(schedule: PipelineSchedule) -> Iterator[str]:
    """Forwards and gradients that are missing or repeated."""
    counts = Counter(action for order in schedule.actions for action in order)
    for stage, microbatch in product(range(schedule.stages), range(schedule.microbatches)):
        f, b, i, w = (counts[PipelineAction(kind, stage, microbatch)] for kind in ("F", "B", "I", "W"))
        which = f"micro-batch {microbatch} has at stage {stage}"
        if f != 1:
            yield f"{which} {f} forwards; write {stage}F{microbatch} once"
        if b + i != 1 or w != i:
            yield f"{which} B {b}, I {i} and W {w} times; write either B once, or I and W once each"


def _messages(schedule: PipelineSchedule) -> Iterator[str]:
    """Messages that are missing, repeated, or between stages of one rank."""
    counts = Counter(action for order in schedule.actions for action in order if action.is_message)
    expected: set[PipelineAction] = set()
    for order in schedule.actions:
        for send in filter(None, (message_of_compute(action, schedule.stage_ranks) for action in order)):
            expected |= {send, send.other_end}
    for message in sorted(expected.union(counts)):
        if counts[message] != (message in expected):
            rank, times = schedule.stage_ranks[message.stage], ("no", "one")[message in expected]
            yield f"rank {rank} has {message} {counts[message]} times; write {times} such message"


def _order_on_ranks(schedule: PipelineSchedule) -> Iterator[str]:
    """Actions that stand before another one of their rank that they need."""
    for rank, order in enumerate(schedule.actions):
        index_of = {action: index for index, action in enumerate(order)}
        for action in order:
            for need in (need for choices in action.needs() for need in choices):
                if index_of.get(need, -1) > index_of[action]:
                    yield f"rank {rank} has {action} before {need}, which it needs; write {need} first"


def _order_between_ranks(schedule: PipelineSchedule) -> Iterator[str]:
    """Sends that are received in another order."""
    queues: dict[tuple[int, int, bool], list[PipelineAction]] = defaultdict(list)  # (from, to, is received) -> sends
    for rank, order in enumerate(schedule.actions):
        for message in (action for action in order if action.is_message):
            peer = schedule.peer(message)
            ends, send = ((peer, rank), message.other_end) if message.is_receive else ((rank, peer), message)
            queues[*ends, message.is_receive].append(send)
    for (src, dst, is_received), sends in list(queues.items()):
        for send, received in zip(sends, queues[src, dst, True], strict=True) if not is_received else ():
            if send != received:
                yield f"rank {src} sends {send} where rank {dst} receives {received.other_end}; write one order on both"


def _in_flight(schedule: PipelineSchedule) -> Iterator[str]:
    """Ranks that hold more activations than declared."""
    for rank, (order, bound) in enumerate(zip(schedule.actions, schedule.max_in_flight, strict=True)):
        if (peak := peak_in_flight(order)) > bound:
            yield f"rank {rank} has {peak} activations in flight, above its bound of {bound}; write backwards earlier"
