"""Schedules of pipelines: all are right, hold as many activations as they declare, and compute in torch's order."""

import pytest

from motet.parallel.pipeline.pipeline_schedule import peak_in_flight
from motet.parallel.pipeline.schedule_check import check_schedule
from motet.parallel.pipeline.schedules import SCHEDULES, make_schedule


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_is_right_and_its_bound_is_reached(name: str, ranks: int) -> None:
    for chunks in [SCHEDULES[name].chunks or 2]:
        for microbatches in range(1, 17):
            schedule = make_schedule(name, ranks, chunks=chunks, microbatches=microbatches)
            check_schedule(schedule)
            assert tuple(map(peak_in_flight, schedule.actions)) == schedule.max_in_flight
