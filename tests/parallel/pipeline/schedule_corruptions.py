"""Mistakes that a machine makes in schedules; each returns a changed schedule, or None where it does not apply."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from random import Random

from motet.parallel.pipeline.pipeline_schedule import ActionKind, PipelineAction, PipelineSchedule

Actions = list[list[PipelineAction]]
Corruption = Callable[[PipelineSchedule, Random], PipelineSchedule | None]


def changed(schedule: PipelineSchedule, orders: Actions) -> PipelineSchedule | None:
    actions = tuple(map(tuple, orders))
    return None if actions == schedule.actions else replace(schedule, actions=actions)


def pick(schedule: PipelineSchedule, random: Random, *kinds: str) -> tuple[Actions, int, int] | None:
    """A random action whose kind begins with one of the words: all actions, its rank, its index."""
    orders = [list(order) for order in schedule.actions]
    places = [
        (rank, index) for rank, order in enumerate(orders) for index, a in enumerate(order) if a.kind.startswith(kinds)
    ]
    return (orders, *random.choice(places)) if places else None


COMPUTE, MESSAGE = ("F", "B", "I", "W"), ("send", "receive")


def drop(*kinds: str) -> Corruption:
    def corrupt(schedule: PipelineSchedule, random: Random) -> PipelineSchedule | None:
        if (picked := pick(schedule, random, *kinds)) is None:
            return None
        orders, rank, index = picked
        del orders[rank][index]
        return changed(schedule, orders)

    return corrupt


def repeat(*kinds: str) -> Corruption:
    def corrupt(schedule: PipelineSchedule, random: Random) -> PipelineSchedule | None:
        if (picked := pick(schedule, random, *kinds)) is None:
            return None
        orders, rank, index = picked
        orders[rank].insert(random.randrange(len(orders[rank]) + 1), orders[rank][index])
        return changed(schedule, orders)

    return corrupt


def alter(field: str, *kinds: str) -> Corruption:
    """Another stage or another micro-batch."""

    def corrupt(schedule: PipelineSchedule, random: Random) -> PipelineSchedule | None:
        if (picked := pick(schedule, random, *kinds)) is None:
            return None
        orders, rank, index = picked
        count = schedule.microbatches if field == "microbatch" else len(schedule.stage_ranks)
        orders[rank][index] = orders[rank][index]._replace(**{field: random.randrange(-1, count + 1)})
        return changed(schedule, orders)

    return corrupt


def move(by: tuple[int, ...], *kinds: str) -> Corruption:
    """Some places earlier or later in the list of the rank."""

    def corrupt(schedule: PipelineSchedule, random: Random) -> PipelineSchedule | None:
        if (picked := pick(schedule, random, *kinds)) is None:
            return None
        orders, rank, index = picked
        action = orders[rank].pop(index)
        orders[rank].insert(max(0, index + random.choice(by)), action)
        return changed(schedule, orders)

    return corrupt


def before(first: ActionKind, second: str) -> Corruption:
    """An action of the kind `second` right before that of the kind `first` of its stage and micro-batch."""

    def corrupt(schedule: PipelineSchedule, random: Random) -> PipelineSchedule | None:
        if (picked := pick(schedule, random, second)) is None:
            return None
        orders, rank, index = picked
        action = orders[rank].pop(index)
        orders[rank].insert(orders[rank].index(action._replace(kind=first)), action)
        return changed(schedule, orders)

    return corrupt


def swap(schedule: PipelineSchedule, random: Random) -> PipelineSchedule | None:
    """Two computations that follow one another."""
    picked = pick(schedule, random, *COMPUTE)
    assert picked is not None  # Every schedule computes
    orders, rank, _ = picked
    places = [index for index, action in enumerate(orders[rank]) if not action.is_message]
    i, j = random.choice(list(pairwise(places)))
    orders[rank][i], orders[rank][j] = orders[rank][j], orders[rank][i]
    return changed(schedule, orders)


def swap_messages(kind: str) -> Corruption:
    """Two neighbouring messages of one kind of a rank, anywhere in its list."""

    def corrupt(schedule: PipelineSchedule, random: Random) -> PipelineSchedule | None:
        if (picked := pick(schedule, random, kind)) is None:
            return None
        orders, rank, _ = picked
        places = [index for index, action in enumerate(orders[rank]) if action.kind.startswith(kind)]
        if len(places) < 2:
            return None
        i, j = random.choice(list(pairwise(places)))
        orders[rank][i], orders[rank][j] = orders[rank][j], orders[rank][i]
        return changed(schedule, orders)

    return corrupt


def other_rank(schedule: PipelineSchedule, random: Random) -> PipelineSchedule | None:
    picked = pick(schedule, random, *COMPUTE, *MESSAGE)
    assert picked is not None  # Every schedule computes
    orders, rank, index = picked
    orders[(rank + 1) % len(orders)].append(orders[rank].pop(index))
    return changed(schedule, orders)


def lower_bound(schedule: PipelineSchedule, random: Random) -> PipelineSchedule:
    rank = random.randrange(schedule.ranks)
    bounds = tuple(bound - (r == rank) for r, bound in enumerate(schedule.max_in_flight))
    return replace(schedule, max_in_flight=bounds)


def one_more_forward(schedule: PipelineSchedule, random: Random) -> PipelineSchedule | None:
    """A forward before the computation that is before it, with its message: one more activation may be in flight."""
    if (picked := pick(schedule, random, "F")) is None:
        return None
    orders, rank, index = picked
    forward = orders[rank].pop(index)
    earlier = [place for place in range(index) if not orders[rank][place].is_message]
    if not earlier:
        return None
    orders[rank].insert(earlier[-1], forward)
    return changed(schedule, orders)


def send_first(schedule: PipelineSchedule, random: Random) -> PipelineSchedule | None:
    """A receive goes behind the next computation, so that the rank may wait for a send before it receives."""
    if (picked := pick(schedule, random, "receive")) is None:
        return None
    orders, rank, index = picked
    receive = orders[rank].pop(index)
    later = [place for place in range(index, len(orders[rank])) if not orders[rank][place].is_message]
    orders[rank].insert(later[0] + 1 if later else len(orders[rank]), receive)
    return changed(schedule, orders)


def whole_backward(schedule: PipelineSchedule, random: Random) -> PipelineSchedule | None:
    """B where I belongs, so that weight gradients count twice; or I where B belongs, so that they are missing."""
    if (picked := pick(schedule, random, "B", "I")) is None:
        return None
    orders, rank, index = picked
    action = orders[rank][index]
    orders[rank][index] = action._replace(kind="I" if action.kind == "B" else "B")
    return changed(schedule, orders)


CORRUPTIONS: dict[str, Corruption] = {
    "computation dropped": drop(*COMPUTE),
    "computation repeated": repeat(*COMPUTE),
    "neighbouring computations swapped": swap,
    "computation of another stage": alter("stage", *COMPUTE),
    "computation of another micro-batch": alter("microbatch", *COMPUTE),
    "computation moved": move((-4, -3, -2, 2, 3, 4), *COMPUTE),
    "B before its F": before("F", "B"),
    "I before its F": before("F", "I"),
    "W before its I": before("I", "W"),
    "B for I, or I for B": whole_backward,
    "one more activation than declared": lower_bound,
    "a forward earlier": one_more_forward,
    "send dropped": drop("send"),
    "receive dropped": drop("receive"),
    "message repeated": repeat(*MESSAGE),
    "message of another stage": alter("stage", *MESSAGE),
    "message of another micro-batch": alter("microbatch", *MESSAGE),
    "sends reordered": swap_messages("send"),
    "receives reordered": swap_messages("receive"),
    "send moved earlier": move((-1, -2, -3), "send"),
    "send moved later": move((1, 2, 3), "send"),
    "receive moved earlier": move((-1, -2, -3), "receive"),
    "receive moved later": send_first,
    "on another rank": other_rank,
}
