"""Messages between ranks, inserted into the order of the computations of a schedule.

All computations are put into one sequence, by the times at which they start. Each message gets a place in it, and the
list of a rank is its part of the whole. So the message that is next in the whole sequence is next on both of its ranks:
they cannot wait for one another, even if nothing is buffered and a rank exchanges its messages strictly in turn.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from dataclasses import replace

from motet.core.errors import InputError
from motet.parallel.pipeline.pipeline_schedule import PipelineAction, PipelineSchedule, message_of_compute
from motet.parallel.pipeline.schedule_timeline import event_times

# The durations that places are chosen for. With a short message, one of two ranks that work in step is ahead of the
# other. Whole numbers are compared exactly.
_PLANNED = {"F": 50, "B": 100, "I": 50, "W": 50, "M": 1}


def insert_messages(schedule: PipelineSchedule) -> PipelineSchedule:
    """A schedule of computations, with the messages that they need.

    The receiver starts a message before the computation that it does while the message becomes ready, so that the
    transfer overlaps with it; or after it, if that computation waits for a message of the same batch. The sender starts
    it as late as the receiver allows, so that its next computation does not wait for a batch with a busy receiver.
    """
    orders, stage_ranks = schedule.actions, schedule.stage_ranks
    try:
        times = event_times(orders, _PLANNED)
    except InputError as error:
        raise InputError(f"schedule {schedule.name}: {error}") from None
    starts, stops = ([[times[action][end] for action in order] for order in orders] for end in (0, 1))
    sequence = sorted((times[action][0], rank, action) for rank, order in enumerate(orders) for action in order)
    place = {action: index for index, (_, _, action) in enumerate(sequence)}
    places = [[*map(place.__getitem__, order), len(sequence)] for order in orders]
    users = {need: place[action] for action in place for choices in action.needs() for need in choices}
    waiting: set[int] = set()  # Places of computations that wait for a message right before them
    sends_at: dict[int, list[PipelineAction]] = defaultdict(list)  # Place of a computation -> messages before it
    for ready, sender, action in sorted((times[action][1], rank, action) for _, rank, action in sequence):
        if (send := message_of_compute(action, stage_ranks)) is None:
            continue
        receiver, started = stage_ranks[send.other_end.stage], ready
        index = bisect_left(starts[receiver], ready)
        if index and stops[receiver][index - 1] > ready:
            running = places[receiver][index - 1]
            if running > place[action] and running not in waiting:
                index -= 1
            else:
                started = stops[receiver][index - 1]
        before = places[receiver][index]
        if users[send.other_end] == before:
            waiting.add(before)
        sends_at[min(before, places[sender][bisect_right(stops[sender], started)])].append(send)
    actions: list[list[PipelineAction]] = [[] for _ in orders]
    for index, (_, rank, action) in enumerate(sequence):
        for send in sends_at[index]:
            actions[stage_ranks[send.stage]].append(send)
            actions[stage_ranks[send.other_end.stage]].append(send.other_end)
        actions[rank].append(action)
    return replace(schedule, actions=tuple(map(tuple, actions)))
