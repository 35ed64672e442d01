"""The makespan of a pipeline's schedule with the durations of its stages, and a bound below it."""

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise

from motet.parallel.pipeline.schedule_timeline import Durations, EventGraph
from motet.parallel.pipeline.schedules import order_of_computations, stages_of_ranks

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
        return stages_of_ranks(self.schedule, self.ranks, self.chunks)[rank]

    @property
    def by_kind(self) -> Durations:
        """Seconds by the kind of an action and its stage, with the messages for which both ends wait."""
        backward = [seconds + self.blocks_s for seconds in self.backward_s]
        return {
            "F": [seconds + self.blocks_s for seconds in self.forward_s],
            "B": backward,
            "I": [seconds - weight for seconds, weight in zip(backward, self.weight_s, strict=True)],
            "W": self.weight_s,
            "M": self.message_s,
        }


@lru_cache(maxsize=256)
def _event_graph(size: _PipelineKey) -> EventGraph:
    schedule, ranks, chunks, microbatches = size
    return EventGraph(order_of_computations(schedule, ranks, chunks=chunks, microbatches=microbatches).actions)


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
    graph = _event_graph((durations.schedule, durations.ranks, durations.chunks, durations.microbatches))
    return max(graph.simulate(durations.by_kind)[1])


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
