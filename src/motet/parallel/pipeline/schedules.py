"""The schedules of a pipeline by name; each is a function that says in which order one rank computes.

An order is a text of words such as `F0 F0 B0`: a kind (F forward, B backward, I backward of inputs alone, W weight
gradients) and a model chunk of the rank. The first `F0` is that of micro-batch 0, the second that of micro-batch 1. `W`
without a chunk belongs to the oldest I that waits for it. So each stage adds up its gradients in the order of the
micro-batches, and all schedules give the same sums. What belongs to micro-batches beyond the last one is left out: a
function may round their number up.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import count

from motet.core.errors import InputError, check_input
from motet.parallel.pipeline.pipeline_schedule import ComputeKind, PipelineAction, PipelineSchedule
from motet.parallel.pipeline.schedule_check import check_computations
from motet.parallel.pipeline.schedule_messages import insert_messages


@dataclass(frozen=True)
class PipelineSize:
    """The numbers that a schedule depends on."""

    ranks: int
    chunks: int  # Stages of a rank
    microbatches: int


# (size, rank) -> (order of the rank, how many activations of a stage and a micro-batch it has in flight at most)
RankOrder = Callable[[PipelineSize, int], tuple[str, int]]


def gpipe(size: PipelineSize, rank: int) -> tuple[str, int]:
    """All forwards, then all backwards (Huang et al. 2018, arXiv:1811.06965)."""
    return "F0 " * size.microbatches + "B0 " * size.microbatches, size.microbatches


def one_forward_one_backward(size: PipelineSize, rank: int) -> tuple[str, int]:
    """A backward as early as possible, then a forward and a backward in turn (arXiv:2006.09503, PipeDream-Flush)."""
    warmup = min(size.ranks - 1 - rank, size.microbatches)
    steady = size.microbatches - warmup
    return "F0 " * warmup + "F0 B0 " * steady + "B0 " * warmup, min(size.ranks - rank, size.microbatches)


def interleaved(size: PipelineSize, rank: int) -> tuple[str, int]:
    """1F1B with several chunks a rank, in rounds of about `ranks` micro-batches (arXiv:2104.04473)."""
    rounds, round_size = _rounds(size)
    forwards = [f"F{chunk}" for chunk in range(size.chunks) for _ in range(round_size)] * rounds
    backwards = [f"B{chunk}" for chunk in reversed(range(size.chunks)) for _ in range(round_size)] * rounds
    warmup = (size.chunks - 1) * round_size + 2 * (size.ranks - 1 - rank)
    return _take_turns(forwards, backwards, warmup), min(warmup + 1, size.chunks * size.microbatches)


def breadth_first(size: PipelineSize, rank: int) -> tuple[str, int]:
    """GPipe with several chunks a rank: all micro-batches of a chunk, then the next (arXiv:2211.05953)."""
    forwards = "".join(f"F{chunk} " * size.microbatches for chunk in range(size.chunks))
    backwards = "".join(f"B{chunk} " * size.microbatches for chunk in reversed(range(size.chunks)))
    return forwards + backwards, size.chunks * size.microbatches


def zero_bubble_interleaved(size: PipelineSize, rank: int) -> tuple[str, int]:
    """Interleaved, with the weight gradients `rank` turns after their I (ZB1P of arXiv:2401.10241)."""
    rounds, round_size = _rounds(size)
    forwards = [f"F{chunk}" for chunk in range(size.chunks) for _ in range(round_size)] * rounds
    chunks = [chunk for chunk in reversed(range(size.chunks)) for _ in range(round_size)] * rounds
    backwards = [f"I{chunk} W" if turn >= rank else f"I{chunk}" for turn, chunk in enumerate(chunks)]
    warmup = (size.chunks - 1) * round_size + size.ranks - 1 - rank
    in_flight = min(warmup + 1 + rank, size.chunks * size.microbatches)
    return _take_turns(forwards, backwards, warmup) + " W" * min(rank, len(chunks)), in_flight


def zero_bubble_v(size: PipelineSize, rank: int) -> tuple[str, int]:
    """Two chunks whose stages go down the ranks and back up; no bubble where F, I and W take the same time, in the
    memory of 1F1B (arXiv:2401.10241, section 6)."""
    ranks, count = size.ranks, max(2 * size.ranks - 1, size.microbatches)
    order = [
        "F0 " * (2 * (ranks - rank) - 1) + "F1 F0 " * rank + "F1 I1 W1 " * (ranks - rank),
        "F0 I0 W0 F1 I1 W1 " * (count - 2 * ranks + rank + 1) + "I0 W0 F1 I1 W1 " * (ranks - rank - 1),
        "I0 I1 " * rank + "I0 W0 " * (ranks - rank) + "W1 " * rank + "W0 " * rank,
    ]
    in_flight = min(2 * ranks - rank - 1, size.microbatches) + min(rank + 1, size.microbatches)
    return "".join(order), in_flight


def dualpipe_v(size: PipelineSize, rank: int) -> tuple[str, int]:
    """Two chunks in a V; the forward of one chunk stands next to the backward of the other, so that the communication
    of one can overlap the computation of the other (arXiv:2412.19437, and github.com/deepseek-ai/DualPipe)."""
    ranks, count = size.ranks, max(2 * size.ranks, size.microbatches)
    drain = ["B1", "B0"] * (rank + 1)
    drain[rank + 1 :] = [word.replace("B", "I") for word in drain[rank + 1 :]]
    order = [
        "F0 " * (2 * (ranks - rank - 1)) + "F0 F1 " * (rank + 1) + "I1 W F1 " * (ranks - rank - 1),
        "F0 B1 F1 B0 " * (count - 2 * ranks + rank + 1) + "B1 F1 B0 " * (ranks - rank - 1),
        f"{' '.join(drain)} " + "W I0 " * (ranks - rank - 1) + "W " * (rank + 1),
    ]
    in_flight = min(2 * ranks - rank, size.microbatches) + min(rank + 1, size.microbatches)
    return "".join(order), in_flight


def _rounds(size: PipelineSize) -> tuple[int, int]:
    """Rounds, and the micro-batches of a round: `ranks` or a little more."""
    rounds = max(1, size.microbatches // size.ranks)
    return rounds, -(-size.microbatches // rounds)


def _take_turns(forwards: list[str], backwards: list[str], warmup: int) -> str:
    """Some forwards, then a forward and a backward in turn, then the other backwards."""
    turns = [word for pair in zip(forwards[warmup:], backwards, strict=False) for word in pair]
    return " ".join([*forwards[:warmup], *turns, *backwards[len(forwards[warmup:]) :]])


@dataclass(frozen=True, eq=False)  # Each kind is its own key of a cache, whatever its function is
class ScheduleKind:
    """A schedule by name; a user may add one to `SCHEDULES`."""

    rank_order: RankOrder
    chunks: int | None = None  # Stages of a rank; None: any number
    is_v: bool = False  # Stage `ranks` is on the last rank, and stage 2 * ranks - 1 on rank 0; else round and round

    def stage_ranks(self, size: PipelineSize) -> tuple[int, ...]:
        """The rank of each stage."""
        down = list(range(size.ranks))
        return tuple(rank for chunk in range(size.chunks) for rank in (down[::-1] if self.is_v and chunk % 2 else down))


SCHEDULES: dict[str, ScheduleKind] = {
    "gpipe": ScheduleKind(gpipe, chunks=1),
    "1f1b": ScheduleKind(one_forward_one_backward, chunks=1),
    "interleaved": ScheduleKind(interleaved),
    "breadth-first": ScheduleKind(breadth_first),
    "zb-interleaved": ScheduleKind(zero_bubble_interleaved),
    "zb-v": ScheduleKind(zero_bubble_v, chunks=2, is_v=True),
    "dualpipe-v": ScheduleKind(dualpipe_v, chunks=2, is_v=True),
}


def make_schedule(name: str, ranks: int, *, chunks: int, microbatches: int) -> PipelineSchedule:
    """The schedule of this name for a pipeline of `ranks` ranks with `chunks` stages each."""
    schedule = order_of_computations(name, ranks, chunks=chunks, microbatches=microbatches)
    check_computations(schedule)
    return insert_messages(schedule)


@lru_cache(maxsize=4096)
def stages_of_ranks(name: str, ranks: int, chunks: int) -> tuple[tuple[int, ...], ...]:
    """The stages of each rank of a pipeline."""
    check_input(name in SCHEDULES, f"there is no schedule {name!r}; use one of {', '.join(SCHEDULES)}")
    owners = SCHEDULES[name].stage_ranks(PipelineSize(ranks, chunks, 1))
    return tuple(tuple(stage for stage, owner in enumerate(owners) if owner == rank) for rank in range(ranks))


def order_of_computations(name: str, ranks: int, *, chunks: int, microbatches: int) -> PipelineSchedule:
    """The same schedule without messages, unchecked."""
    check_input(name in SCHEDULES, f"there is no schedule {name!r}; use one of {', '.join(SCHEDULES)}, or a file")
    kind = SCHEDULES[name]
    for value, what in ((ranks, "ranks"), (chunks, "chunks"), (microbatches, "micro-batches")):
        check_input(value >= 1, f"a pipeline cannot have {value} {what}; give 1 or more")
    check_input(
        kind.chunks in (None, chunks),
        f"a rank holds {chunks} chunks, but {kind.chunks} with the schedule {name!r}; give {kind.chunks} "
        f"chunk{'s' * (kind.chunks != 1)}",
    )
    size = PipelineSize(ranks, chunks, microbatches)
    stage_ranks = kind.stage_ranks(size)
    orders, in_flight = [], []
    for rank in range(ranks):
        words, bound = kind.rank_order(size, rank)
        actions = _actions_of_words(words, name, [stage for stage, owner in enumerate(stage_ranks) if owner == rank])
        orders.append(tuple(action for action in actions if action.microbatch < microbatches))
        in_flight.append(bound)
    return PipelineSchedule(name, microbatches, stage_ranks, tuple(orders), tuple(in_flight))


def _actions_of_words(words: str, name: str, stages: list[int]) -> list[PipelineAction]:
    """Number the micro-batches of each kind and chunk."""
    kinds: dict[str, ComputeKind] = {"F": "F", "B": "B", "I": "I"}  # Words that name their chunk
    # Each word with the number of its next micro-batch, which the B and the I of a stage share
    numbers = {(is_forward, stage): count() for is_forward in (True, False) for stage in stages}
    passes = {
        f"{word}{chunk}": (kind, stage, numbers[kind == "F", stage])
        for word, kind in kinds.items()
        for chunk, stage in enumerate(stages)
    }
    waiting: list[PipelineAction] = []  # The I whose W is still to come
    actions: list[PipelineAction] = []
    for word in words.split():
        if word[0] == "W":
            stage = passes[f"F{word[1:]}"][1] if f"F{word[1:]}" in passes else None
            matching = (index for index, action in enumerate(waiting) if word == "W" or action.stage == stage)
            first = next(matching, None)
            if first is None:
                raise InputError(f"schedule {name!r}: {word!r} has no I before it; write each W after its I")
            actions.append(waiting.pop(first)._replace(kind="W"))
            continue
        matching_pass = passes.get(word)
        if matching_pass is None:
            raise InputError(
                f"schedule {name!r}: {word!r} is no action of a rank with {len(stages)} chunks; write F, B, I or W "
                f"and a chunk, such as F{len(stages) - 1}"
            )
        kind, stage, number = matching_pass
        action = PipelineAction(kind, stage, next(number))
        actions.append(action)
        if kind == "I":
            waiting.append(action)
    return actions
