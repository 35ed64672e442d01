"""Inserting the messages between ranks into the order in which they compute."""

from collections.abc import Sequence

from motet.parallel.pipeline.pipeline_schedule import PipelineAction, message_of_compute
from motet.parallel.pipeline.schedule_timeline import event_times


def insert_messages(
    orders: Sequence[Sequence[PipelineAction]], stage_ranks: tuple[int, ...]
) -> tuple[tuple[PipelineAction, ...], ...]:
    """The actions of each rank, with a send after what is sent is computed, and the receive at the same moment.

    All ranks are put into one order, by time. A rank's list is its part of that order, so that the message that is
    next in the order is next on both of its ranks: they cannot wait for one another.
    """
    times = event_times(orders)
    # (moment, whether it is a computation) -> sorts a message before the computations that start when it is sent
    moments: list[tuple[float, bool, int, PipelineAction]] = []
    for rank, order in enumerate(orders):
        for action in order:
            start, stop = times[action]
            moments.append((start, True, rank, action))
            if (send := message_of_compute(action, stage_ranks)) is not None:
                moments.append((stop, False, rank, send))
    actions: list[list[PipelineAction]] = [[] for _ in orders]
    for _, is_compute, rank, action in sorted(moments):
        actions[rank].append(action)
        if not is_compute:
            actions[stage_ranks[action.other_end.stage]].append(action.other_end)
    return tuple(map(tuple, actions))
