"""The check of schedules finds what a machine breaks, and nothing else."""

import re
from collections import Counter
from dataclasses import replace
from functools import cache
from random import Random
from typing import Any, get_args

import pytest
from schedule_corruptions import CORRUPTIONS
from schedule_execution import executes

from motet.core.errors import InputError
from motet.parallel.pipeline.pipeline_schedule import (
    MESSAGES,
    ActionKind,
    ComputeKind,
    PipelineAction,
    PipelineSchedule,
)
from motet.parallel.pipeline.schedules import SCHEDULES, check_schedule, make_schedule
from refusals import refused

SEEDS = range(10)


@cache
def schedule_of(name: str, ranks: int, microbatches: int) -> PipelineSchedule:
    return make_schedule(name, ranks, chunks=SCHEDULES[name].chunks or 2, microbatches=microbatches)


def is_accepted(schedule: PipelineSchedule) -> bool:
    try:
        check_schedule(schedule)
    except InputError:
        return False
    return True


@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_what_a_machine_breaks_is_rejected_unless_it_still_works(kind: str) -> None:
    counts: Counter[str] = Counter()
    for name in SCHEDULES:
        for seed in SEEDS:
            random = Random(f"{kind} {name} {seed}")
            schedule = schedule_of(name, random.choice([2, 3, 4]), random.choice([2, 3, 5]))
            corrupted = CORRUPTIONS[kind](schedule, random)
            if corrupted is None:
                counts["does not apply"] += 1
                continue
            accepted, works = is_accepted(corrupted), executes(corrupted)
            assert accepted == works, (name, seed, corrupted)
            counts["still right" if works else "rejected"] += 1
    print(f"\n{kind}: {dict(counts)}", end="")  # noqa: T201 - the report of `pytest -s`
    assert counts["rejected"] >= 10


def schedule_of_text(text: str) -> PipelineSchedule:
    """Two ranks with a stage each, from lines of a file."""
    kinds: dict[str, ActionKind] = {kind: kind for kind in get_args(ComputeKind)}
    kinds |= {word: kind for kind, (word, _, _) in MESSAGES.items()}
    actions = tuple(
        tuple(
            PipelineAction(kinds[word], int(stage), int(number))
            for stage, word, number in (
                re.fullmatch(r"(-?\d+)([A-Z_]+)(-?\d+)", cell).groups() for cell in line.split()
            )
        )
        for line in text.strip().splitlines()
    )
    microbatches = 1 + max(action.microbatch for order in actions for action in order)
    return PipelineSchedule("planted", microbatches, (0, 1), actions, (9,) * len(actions))


def test_two_ranks_that_both_send_first_are_a_deadlock() -> None:
    """Rank 0 sends its second activation before it receives a gradient, which rank 1 sends before it receives that."""
    text = """
    0F0 0SEND_F0 0F1 0SEND_F1 0F2 0SEND_F2 0RECV_B0 0B0 0RECV_B1 0B1 0RECV_B2 0B2
    1RECV_F0 1F0 1I0 1SEND_B0 1W0 1RECV_F1 1F1 1B1 1SEND_B1 1RECV_F2 1F2 1B2 1SEND_B2
    """
    planted = schedule_of_text(text)
    assert not executes(planted)
    refused(
        r"^schedule planted: the order deadlocks: ranks 0, 1 wait for one another; change it$", check_schedule, planted
    )
    # In one batch both messages are under way, and neither waits for the other.
    right = schedule_of_text(text.replace("0SEND_F1 0F2", "0F2 0SEND_F1"))
    assert executes(right)
    check_schedule(right)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("0F0 0SEND_F0 0RECV_B0 0B0", r"rank 1 of 1 has no stage or no actions; give it both$"),
        ("0F0 0B0\n0F0", r"rank 1 has 0F0, but stage 0 is on rank 0; move it there$"),
        ("0F0 2F0\n1F0", r"rank 0 has 2F0, but stages are 0 to 1; use one of them$"),
        ("0F0 0F-1\n1F0", r"rank 0 has 0F-1, but micro-batches are 0 to 0; use these$"),
        ("0F0\n1F0 1B0", r"micro-batch 0 has at stage 0 B 0, I 0 and W 0 times"),
        ("0F0 0B0 0W0\n1F0 1B0", r"micro-batch 0 has at stage 0 B 1, I 0 and W 1 times"),
        ("0F0 0W0 0I0\n1F0 1B0", r"rank 0 has 0W0 before 0I0, which it needs; write 0I0 first$"),
        ("0SEND_F0 0F0 0RECV_B0 0B0\n1RECV_F0 1F0 1B0 1SEND_B0", r"rank 0 has 0SEND_F0 before 0F0, which it needs"),
        ("0F0 0SEND_F0 0RECV_B0 0B0\n1F0 1RECV_F0 1B0 1SEND_B0", r"rank 1 has 1F0 before 1RECV_F0, which it needs"),
        (
            "0F0 0SEND_F0 0RECV_B0 0B0 0SEND_B0\n1RECV_F0 1F0 1B0 1SEND_B0",
            r"rank 0 has 0SEND_B0 1 times; write no such",
        ),
        ("0F0 0SEND_F0 0RECV_B0 0B0\n1RECV_F0 1F0 1B0", r"rank 1 has 1SEND_B0 0 times; write one such message$"),
    ],
)
def test_a_mistake_is_named(text: str, sentence: str) -> None:
    refused(sentence, check_schedule, schedule_of_text(text))


def test_bounds_and_kinds_are_checked() -> None:
    schedule = schedule_of("1f1b", 2, 3)
    refused(
        r"2 ranks have 1 bounds of activations; give one for each$",
        check_schedule,
        replace(schedule, max_in_flight=(2,)),
    )
    refused(
        r"rank 0 has 2 activations .* above its bound of 1", check_schedule, replace(schedule, max_in_flight=(1, 1))
    )
    no_kind: Any = "X"
    odd = PipelineAction(no_kind, 0, 0)
    refused(
        r"rank 0 has an action of kind 'X'", check_schedule, replace(schedule, actions=((odd,), schedule.actions[1]))
    )
