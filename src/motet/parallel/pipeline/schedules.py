"""The schedules of a pipeline by name; each is a function that returns the order in which one rank computes.

An order is a text of words such as `F0 F0 B0`: a kind (F forward, B backward, I backward of inputs alone, W weight
gradients) and a model chunk of the rank. The first `F0` is that of micro-batch 0, the second that of micro-batch 1. `W`
without a chunk belongs to the oldest I that waits for it. So each stage adds up its gradients in the order of the
micro-batches, and all schedules give the same sums. Actions of micro-batches beyond the last one are left out: a
function may round their number up.

Messages between ranks, inserted into the order of the computations of a schedule.

All computations are put into one sequence, by the times at which they start. Each message gets a place in it, and the
list of a rank is its part of the whole. So the message that is next in the whole sequence is next on both of its ranks:
they cannot wait for one another, even if nothing is buffered and a rank exchanges its messages strictly in turn.

The check that a schedule computes a step: all work exactly once, in an order that never deadlocks.

Schedules as files: a line for each rank, with actions such as `0F3` (stage, kind, micro-batch) between commas.

The format is that of torch's pipelines. Kinds are F, B, I, W, and SEND_F, RECV_F, SEND_B, RECV_B for messages. A file
without messages gets them here. Cells may be empty.
"""

import re
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import count, product
from pathlib import Path

from motet.core.errors import InputError, check_input, convert_os_errors
from motet.parallel.pipeline.pipeline_schedule import (
    MESSAGES,
    NEEDS,
    ActionKind,
    ComputeKind,
    PipelineAction,
    PipelineSchedule,
    message_of_compute,
    peak_in_flight,
)
from motet.parallel.pipeline.schedule_timeline import event_times

# The durations for which places are chosen. With a short message, one of two ranks that work in step is ahead of the
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
    """Raise at the first mistake in the computations of a rank, whether or not the messages are there yet."""
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


@dataclass(frozen=True)
class PipelineSize:
    """The numbers that a schedule depends on."""

    ranks: int
    chunks: int  # Stages of a rank
    microbatches: int


# (size, rank) -> (order of the rank, most activations of a stage and a micro-batch that it has in flight)
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
    for value, noun in ((ranks, "ranks"), (chunks, "chunks"), (microbatches, "micro-batches")):
        check_input(value >= 1, f"a pipeline cannot have {value} {noun}; give 1 or more")
    check_input(
        kind.chunks in (None, chunks),
        f"schedule {name!r} has {kind.chunks} chunk{'s' * (kind.chunks != 1)} a rank, not {chunks}; give {kind.chunks}",
    )
    size = PipelineSize(ranks, chunks, microbatches)
    stage_ranks = kind.stage_ranks(size)
    orders, in_flight = [], []
    for rank in range(ranks):
        words, bound = kind.rank_order(size, rank)
        actions = _actions_of_words(words, name, [stage for stage, owner in enumerate(stage_ranks) if owner == rank])
        orders.append(tuple([action for action in actions if action[2] < microbatches]))
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
            matching = (index for index, action in enumerate(waiting) if word == "W" or action[1] == stage)
            first = next(matching, None)
            if first is None:
                raise InputError(f"schedule {name!r}: {word!r} has no I before it; write each W after its I")
            actions.append(PipelineAction("W", *waiting.pop(first)[1:]))
            continue
        matching_pass = passes.get(word)
        if matching_pass is None:
            raise InputError(
                f"schedule {name!r}: {word!r} is not an action of a rank with {len(stages)} chunks; write F, B, I or W "
                f"and a chunk, such as F{len(stages) - 1}"
            )
        kind, stage, number = matching_pass
        action = PipelineAction(kind, stage, next(number))
        actions.append(action)
        if kind == "I":
            waiting.append(action)
    return actions


_KINDS: dict[str, ActionKind] = {MESSAGES[kind][0] if kind in MESSAGES else kind: kind for kind in NEEDS}
_OVERLAPPED = re.compile(r"\(([^()]*)\)OVERLAP_F_B")  # torch's word for a forward and a backward at the same time


def find_schedule(source: str, ranks: int, *, chunks: int, microbatches: int) -> PipelineSchedule:
    """The schedule of this name, or of this file, for these numbers; it is checked."""
    if source in SCHEDULES or not Path(source).is_file():
        return _named_schedule(source, SCHEDULES.get(source), PipelineSize(ranks, chunks, microbatches))
    schedule = read_schedule(Path(source))
    sizes = (("ranks", schedule.ranks, ranks), ("chunks", schedule.chunks, chunks))
    for noun, size, wanted in (*sizes, ("micro-batches", schedule.microbatches, microbatches)):
        problem = f"{source} is a schedule of {size} {noun}, not {wanted}"
        check_input(size == wanted, f"{problem}; use {size} {noun}, or another schedule")
    return schedule


@lru_cache(maxsize=16)
def _named_schedule(name: str, _kind: ScheduleKind | None, size: PipelineSize) -> PipelineSchedule:
    """A checked schedule; it is kept for its kind too, since a user may give the name to another kind later."""
    schedule = make_schedule(name, size.ranks, chunks=size.chunks, microbatches=size.microbatches)
    check_schedule(schedule)
    return schedule


def read_schedule(path: Path) -> PipelineSchedule:
    """The schedule in a file, which is checked; its bound of activations in flight is the most that it reaches."""
    with convert_os_errors(f"read {path}", "give another file"):
        lines = path.read_text(encoding="utf-8-sig", errors="replace").rstrip().splitlines()
    orders = [_actions_of_line(line, f"{path}, line {number}") for number, line in enumerate(lines, 1)]
    check_input(any(orders), f"{path} has no actions; write a line for each rank, such as 0F0,0B0")
    owner: dict[int, int] = {}  # Stage -> the first rank that has it
    for rank, order in enumerate(orders):
        for action in order:
            owner.setdefault(action.stage, rank)
    microbatches = {action.microbatch for order in orders for action in order}
    for noun, numbers in (("stage", set(owner)), ("micro-batch", microbatches)):
        missing = next(number for number in count() if number not in numbers)
        problem = f"{path} has {noun} {max(numbers)}, but no {noun} {missing}"
        check_input(missing == len(numbers), f"{problem}; number them from 0 without gaps")
    stage_ranks = tuple(owner[stage] for stage in range(len(owner)))
    in_flight = tuple(map(peak_in_flight, orders))
    schedule = PipelineSchedule(str(path), len(microbatches), stage_ranks, tuple(orders), in_flight)
    if not any(action.is_message for order in orders for action in order):
        check_computations(schedule)
        return insert_messages(schedule)
    check_schedule(schedule)
    return schedule


def format_schedule(schedule: PipelineSchedule, *, with_messages: bool = True) -> str:
    """The text of the file of a schedule."""
    orders = schedule.actions if with_messages else schedule.compute_actions
    return "".join(",".join(map(str, order)) + "\n" for order in orders)


def _actions_of_line(line: str, where: str) -> tuple[PipelineAction, ...]:
    actions = []
    for number, cell in enumerate(line.split(","), 1):
        overlapped = _OVERLAPPED.fullmatch(cell.strip())
        for text in overlapped[1].split(";") if overlapped else [cell.strip()] if cell.strip() else []:
            match = re.fullmatch(rf"(\d{{1,6}})({'|'.join(_KINDS)})(\d{{1,6}})", text.strip(), re.ASCII)
            if match is None:
                raise InputError(
                    f"{where}, cell {number}: {text[:60]!r} is not an action; write stage, kind and micro-batch such "
                    f"as 0F3, with a kind of {', '.join(_KINDS)}"
                )
            actions.append(PipelineAction(_KINDS[match[2]], int(match[1]), int(match[3])))
    return tuple(actions)
