"""The check that a schedule computes a step: all work exactly once, in an order that never deadlocks."""

from collections import Counter
from collections.abc import Iterator
from itertools import product

from motet.core.errors import InputError
from motet.parallel.pipeline.pipeline_schedule import (
    MESSAGES,
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
    for find_mistakes in (_shape, _work, _messages, _order_on_ranks, _order_between_ranks, _in_flight):
        for mistake in find_mistakes(schedule):
            raise PipelineScheduleError(f"schedule {schedule.name!r}: {mistake}")
    try:
        event_times(schedule.actions)
    except InputError as error:
        raise PipelineScheduleError(f"schedule {schedule.name!r}: {error}") from None


def _shape(schedule: PipelineSchedule) -> Iterator[str]:
    """Ranks, stages and micro-batches that do not exist, and actions on the wrong rank."""
    if len(schedule.max_in_flight) != schedule.ranks:
        yield f"{schedule.ranks} ranks have {len(schedule.max_in_flight)} bounds of activations; give one for each"
    for rank in set(schedule.stage_ranks).symmetric_difference(range(schedule.ranks)):
        yield f"rank {rank} of {schedule.ranks} has no stage or no actions; give it both"
    for rank, order in enumerate(schedule.actions):
        for action in order:
            if action.kind not in (*"FBIW", *MESSAGES):
                yield f"rank {rank} has an action of kind {action.kind!r}; use F, B, I, W or a message"
            elif not 0 <= action.stage < schedule.stages:
                yield f"rank {rank} has {action}, but stages are 0 to {schedule.stages - 1}"
            elif not 0 <= action.microbatch < schedule.microbatches:
                yield f"rank {rank} has {action}, but micro-batches are 0 to {schedule.microbatches - 1}"
            elif schedule.stage_ranks[action.stage] != rank:
                owner = schedule.stage_ranks[action.stage]
                yield f"rank {rank} has {action}, but stage {action.stage} is on rank {owner}; move it there"


def _work(schedule: PipelineSchedule) -> Iterator[str]:
    """Forwards and gradients that are missing or repeated."""
    counts = Counter(action for order in schedule.actions for action in order)
    for stage, microbatch in product(range(schedule.stages), range(schedule.microbatches)):
        f, b, i, w = (counts[PipelineAction(kind, stage, microbatch)] for kind in ("F", "B", "I", "W"))
        which = f"micro-batch {microbatch} of stage {stage}"
        if f != 1:
            yield f"{which} has {f} forwards; write {stage}F{microbatch} once"
        if b + i != 1 or w != i:
            yield f"{which} has B {b}, I {i} and W {w} times; write either B once, or I and W once each"


def _messages(schedule: PipelineSchedule) -> Iterator[str]:
    """Messages that are missing, repeated, or between stages of one rank."""
    counts = Counter(action for order in schedule.actions for action in order if action.is_message)
    expected = set()
    for order in schedule.actions:
        for send in filter(None, (message_of_compute(action, schedule.stage_ranks) for action in order)):
            expected |= {send, send.other_end}
    for message in sorted(expected.union(counts)):
        if counts[message] != (message in expected):
            rank = schedule.stage_ranks[message.stage]
            yield f"rank {rank} has {message} {counts[message]} times; write it {int(message in expected)} times"


def _order_on_ranks(schedule: PipelineSchedule) -> Iterator[str]:
    """Actions that stand before what they need."""
    for rank, order in enumerate(schedule.actions):
        place = {action: index for index, action in enumerate(order)}
        for action in order:
            for need in _needs_on_rank(action):
                if place.get(need, -1) > place[action]:
                    yield f"rank {rank} has {action} before {need}, which it needs; write {need} first"


def _needs_on_rank(action: PipelineAction) -> Iterator[PipelineAction]:
    """Actions that must stand before an action, where they are on the same rank."""
    _, stage, microbatch = action

    def actions(*kinds: str, of: int) -> Iterator[PipelineAction]:
        return (PipelineAction(kind, of, microbatch) for kind in kinds)  # type: ignore[arg-type]  # only our words

    match action.kind:
        case "F":
            yield from actions("receive_activation", of=stage)
            yield from actions("F", of=stage - 1)
        case "B" | "I":
            yield from actions("F", "receive_gradient", of=stage)
            yield from actions("B", "I", of=stage + 1)
        case "W":
            yield from actions("I", of=stage)
        case "send_activation":
            yield from actions("F", of=stage)
        case "send_gradient":
            yield from actions("B", "I", of=stage)


def _order_between_ranks(schedule: PipelineSchedule) -> Iterator[str]:
    """Sends that are received in another order."""
    for src, dst in product(range(schedule.ranks), repeat=2):
        sent = [a for a in schedule.actions[src] if a.is_message and not a.is_receive and schedule.peer(a) == dst]
        received = [a.other_end for a in schedule.actions[dst] if a.is_receive and schedule.peer(a) == src]
        for send, expected in zip(sent, received, strict=True):
            if send != expected:
                yield (
                    f"rank {src} sends {send} to rank {dst}, which receives {expected.other_end} there; write both "
                    "in the same order"
                )


def _in_flight(schedule: PipelineSchedule) -> Iterator[str]:
    """Ranks that hold more activations than declared."""
    for rank, (order, bound) in enumerate(zip(schedule.actions, schedule.max_in_flight, strict=True)):
        if (peak := peak_in_flight(order)) > bound:
            yield f"rank {rank} has {peak} activations in flight, above its bound of {bound}; do backwards earlier"
