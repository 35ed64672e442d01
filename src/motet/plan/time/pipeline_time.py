"""The makespan of a pipeline's schedule with the durations of its stages, and a bound below it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise

from motet.parallel.pipeline.schedules import order_of_computations

_PipelineKey = tuple[str, int, int, int]  # Schedule, ranks, chunks, micro-batches

# Micro-batches beyond this many times the ranks repeat the steady part of a schedule.
_EXACT_ROUNDS = 4


@dataclass(frozen=True)
class PipelineDurations:
    """Seconds of each stage for one micro-batch."""

    schedule: str
    ranks: int
    chunks: int
    microbatches: int
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    weight_s: tuple[float, ...]  # The part of a backward that schedules with split backwards delay
    message_s: float
    blocks_s: float  # The part of a message for which both ends wait

    def stages_of_rank(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank computes."""
        return _stages_of_rank(self.schedule, self.ranks, self.chunks)[rank]


class _Order:
    """The actions of each rank as numbers: what they need, and how long they take."""

    def __init__(self, size: _PipelineKey) -> None:
        schedule, ranks, chunks, microbatches = size
        made = order_of_computations(schedule, ranks, chunks=chunks, microbatches=microbatches)
        self.splits = made.splits_backward
        stages, count = made.stages, made.microbatches
        owner, last = made.stage_ranks, made.stages - 1
        self.actions = list[list[tuple[int, int, int, bool]]]()  # (time slot, slot needed or -1, duration, by message)
        self.slots = 2 * stages * count
        for order in made.actions:
            of_rank = list[tuple[int, int, int, bool]]()
            for kind, stage, microbatch in order:
                forward = stage * count + microbatch
                backward = stages * count + forward
                if kind == "F":
                    need, crosses = forward - count if stage else -1, stage > 0 and owner[stage - 1] != owner[stage]
                    of_rank.append((forward, need, stage, crosses))
                elif kind == "W":
                    of_rank.append((-1, -1, 3 * stages + stage, False))
                else:
                    need = backward + count if stage < last else forward
                    crosses = stage < last and owner[stage + 1] != owner[stage]
                    of_rank.append((backward, need, (1 if kind == "B" else 2) * stages + stage, crosses))
            self.actions.append(of_rank)

    def makespan(self, durations: Sequence[float], message_s: float) -> float:
        """The end of the last action; `durations` are by kind (F, B, I, W) and stage."""
        done: list[float | None] = [None] * self.slots
        position, clock = [0] * len(self.actions), [0.0] * len(self.actions)
        is_moving = True
        while is_moving:
            is_moving = False
            for rank, actions in enumerate(self.actions):
                index, now, stop = position[rank], clock[rank], len(actions)
                while index < stop:
                    slot, need, kind, crosses = actions[index]
                    if need >= 0:
                        ready = done[need]
                        if ready is None:
                            break
                        ready += message_s if crosses else 0.0
                        now = max(now, ready)
                    now += durations[kind]
                    if slot >= 0:
                        done[slot] = now
                    index += 1
                is_moving = is_moving or index > position[rank]
                position[rank], clock[rank] = index, now
        return max(clock)


@lru_cache(maxsize=256)
def _order(size: _PipelineKey) -> _Order:
    return _Order(size)


@lru_cache(maxsize=1024)
def _stages_of_rank(schedule: str, ranks: int, chunks: int) -> tuple[tuple[int, ...], ...]:
    if ranks == 1:
        return (tuple(range(chunks)),)
    made = order_of_computations(schedule, ranks, chunks=chunks, microbatches=1)
    return tuple(made.stages_of_rank(rank) for rank in range(ranks))


def simulate_pipeline(durations: PipelineDurations) -> float:
    """Seconds from the first forward to the last backward."""
    count, ranks = durations.microbatches, durations.ranks
    if ranks == 1:
        return count * (sum(durations.forward_s) + sum(durations.backward_s))
    if count <= _EXACT_ROUNDS * ranks:
        return _makespan(durations)
    # Each further round of as many micro-batches as ranks takes as long as the one before.
    fewer = (_EXACT_ROUNDS - 2) * ranks + count % ranks
    first = _makespan(replace(durations, microbatches=fewer))
    second = _makespan(replace(durations, microbatches=fewer + ranks))
    return first + (count - fewer) / ranks * (second - first)


@lru_cache(maxsize=1024)
def _makespan(durations: PipelineDurations) -> float:
    order = _order((durations.schedule, durations.ranks, durations.chunks, durations.microbatches))
    wait = durations.blocks_s
    forward = [seconds + wait for seconds in durations.forward_s]
    backward = [seconds + wait for seconds in durations.backward_s]
    of_inputs = [seconds - weight for seconds, weight in zip(backward, durations.weight_s, strict=True)]
    return order.makespan([*forward, *backward, *of_inputs, *durations.weight_s], durations.message_s)


def splits_backward(schedule: str) -> bool:
    """Whether a schedule delays the gradients of weights."""
    return schedule.startswith(("zb", "dualpipe"))


def pipeline_lower_bound(durations: PipelineDurations) -> float:
    """Seconds below the makespan: for each rank its own work, after the forwards of all stages before its first one,
    and before their backwards."""
    wait = durations.blocks_s if durations.ranks > 1 else 0.0
    worst, owners = 0.0, dict[int, int]()
    for rank in range(durations.ranks):
        owners |= dict.fromkeys(durations.stages_of_rank(rank), rank)
    splits = splits_backward(durations.schedule)
    forward, backward = durations.forward_s, durations.backward_s
    order = [owners[stage] for stage in range(len(forward))]
    crossings = [0, *accumulate(before != after for before, after in pairwise(order))]  # Messages up to each stage
    fills = [0.0, *accumulate(seconds + wait for seconds in forward)]
    drains = [0.0, *accumulate(seconds + wait for seconds in backward)]
    for rank in range(durations.ranks):
        stages = durations.stages_of_rank(rank)
        first = min(stages)
        work = sum(forward[s] + backward[s] + 2 * wait for s in stages)
        messages_s = crossings[first] * durations.message_s
        drain = 0.0 if splits else drains[first] + messages_s
        worst = max(worst, durations.microbatches * work + fills[first] + messages_s + drain)
    return worst
