"""A definition of a right schedule that is not the check's: it is carried out on values that say where they are from.

Ranks exchange messages over a transport without buffers: each rank has one queue of batches, and only the first of them
is in progress. Messages from one rank to another arrive in the order in which they are sent, whatever they are called.
"""

from collections import Counter, deque
from itertools import groupby
from typing import Any

from motet.parallel.pipeline.pipeline_schedule import PipelineAction, PipelineSchedule

Value = tuple[str, int, int]  # (what, the stage that made it, micro-batch)


class WrongScheduleError(Exception):
    """Something is missing, comes twice, or is another value than expected."""


def take(store: dict[Value, Value], key: Value) -> Value:
    if key not in store:
        raise WrongScheduleError(f"{key} is not there")
    return store.pop(key)


class Rank:
    def __init__(self, schedule: PipelineSchedule, rank: int) -> None:
        self.schedule, self.rank = schedule, rank
        runs = groupby(schedule.actions[rank], lambda action: action.kind in ("F", "B", "I", "W"))
        self.todo = deque((is_compute, list(run)) for is_compute, run in runs)
        self.queue: deque[Batch] = deque()
        self.inputs: dict[Value, Value] = {}  # What stages of this rank can read
        self.to_send: dict[Value, Value] = {}
        self.activations: set[tuple[int, int]] = set()
        self.deferred: set[tuple[int, int]] = set()
        self.forwards: Counter[tuple[int, int]] = Counter()
        self.gradients: Counter[tuple[int, int]] = Counter()

    def advance(self) -> bool:
        """Do what can be done; whether there was something."""
        if not self.todo:
            return False
        is_compute, actions = self.todo[0]
        if not is_compute:
            self.queue.append(Batch(self, actions))
        elif not self.can_compute(actions[0]):
            return False
        else:
            self.compute(actions.pop(0))
        if not is_compute or not actions:
            self.todo.popleft()
        return True

    def needed(self, action: PipelineAction) -> Value | None:
        last = len(self.schedule.stage_ranks) - 1
        if action.kind == "F" and action.stage > 0:
            return ("activation", action.stage - 1, action.microbatch)
        if action.kind in "BI" and action.stage < last:
            return ("gradient", action.stage + 1, action.microbatch)
        return None

    def can_compute(self, action: PipelineAction) -> bool:
        need = self.needed(action)
        return need is None or need in self.inputs

    def compute(self, action: PipelineAction) -> None:
        kind, stage, microbatch = action
        ranks, part = self.schedule.stage_ranks, (stage, microbatch)
        if not (0 <= stage < len(ranks) and ranks[stage] == self.rank and 0 <= microbatch < self.schedule.microbatches):
            raise WrongScheduleError(f"{action} on rank {self.rank}")
        need = self.needed(action)
        if need is not None and take(self.inputs, need) != need:
            raise WrongScheduleError(f"{action} gets another value")
        if kind == "F":
            self.activations.add(part)
            self.forwards[part] += 1
            if len(self.activations) > self.schedule.max_in_flight[self.rank]:
                raise WrongScheduleError("too many activations")
        elif part not in (self.deferred if kind == "W" else self.activations - self.deferred):
            raise WrongScheduleError(f"{action} before what it needs")
        if kind == "I":
            self.deferred.add(part)
        if kind in "BW":
            self.activations.remove(part)
            self.deferred.discard(part)
            self.gradients[part] += 1
        if kind != "W":
            peer, what = (stage + 1, "activation") if kind == "F" else (stage - 1, "gradient")
            if 0 <= peer < len(ranks):
                output: Value = (what, stage, microbatch)
                (self.inputs if ranks[peer] == self.rank else self.to_send)[output] = output


class Batch:
    """Messages of a rank that are in progress together; what arrives is there when all are through."""

    def __init__(self, rank: Rank, actions: list[PipelineAction]) -> None:
        self.rank, self.sends, self.receives = rank, [], []
        self.arrived: dict[Value, Value] = {}
        for kind, stage, microbatch in actions:
            direction = 1 if kind in ("send_activation", "receive_gradient") else -1
            what, ranks = kind.split("_")[1], rank.schedule.stage_ranks
            if not (0 <= stage < len(ranks) and 0 <= stage + direction < len(ranks) and ranks[stage] == rank.rank):
                raise WrongScheduleError(f"a message of stage {stage} on rank {rank.rank}")
            if kind.startswith("send"):
                self.sends.append((ranks[stage + direction], take(rank.to_send, (what, stage, microbatch))))
            else:
                self.receives.append((ranks[stage + direction], (what, stage + direction, microbatch)))

    def exchange(self, other: "Batch") -> bool:
        """Hand over the first message for the other rank, if it expects one."""
        send = next((each for each in self.sends if each[0] == other.rank.rank), None)
        receive = next((each for each in other.receives if each[0] == self.rank.rank), None)
        if send is None or receive is None:
            return False
        self.sends.remove(send)
        other.receives.remove(receive)
        if receive[1] in other.arrived:
            raise WrongScheduleError(f"{receive[1]} twice")
        other.arrived[receive[1]] = send[1]
        return True


def executes(schedule: PipelineSchedule) -> bool:
    """Whether everything is done once, with the right values, within the declared memory, and without a deadlock."""
    try:
        ranks = [Rank(schedule, rank) for rank in range(len(schedule.actions))]
        while any([*(rank.advance() for rank in ranks), _exchanged(ranks)]):
            pass
    except WrongScheduleError:
        return False
    everything = {(s, m): 1 for s in range(len(schedule.stage_ranks)) for m in range(schedule.microbatches)}
    totals = [sum(counts, Counter[Any]()) for counts in ([r.forwards for r in ranks], [r.gradients for r in ranks])]
    left = any(rank.todo or rank.queue or rank.inputs or rank.to_send or rank.activations for rank in ranks)
    return not left and totals == [everything, everything]


def _exchanged(ranks: list[Rank]) -> bool:
    active = [rank.queue[0] for rank in ranks if rank.queue]
    happened = sum(a.exchange(b) for a in active for b in active) > 0
    for batch in active:
        if not batch.sends and not batch.receives:
            batch.rank.queue.popleft()
            if batch.arrived.keys() & batch.rank.inputs.keys():
                raise WrongScheduleError("a value comes twice")
            batch.rank.inputs |= batch.arrived
            happened = True
    return happened
