"""The check of schedules finds what a machine breaks, and nothing else."""

from collections import Counter
from functools import cache
from random import Random

import pytest
from schedule_corruptions import CORRUPTIONS
from schedule_execution import executes

from motet.core.errors import InputError
from motet.parallel.pipeline.pipeline_schedule import PipelineSchedule
from motet.parallel.pipeline.schedule_check import check_schedule
from motet.parallel.pipeline.schedules import SCHEDULES, make_schedule

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
