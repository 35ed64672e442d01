"""The planner's memory of motet: the peak of live bytes of each rank, as it is measured."""

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from motet.parallel.process.process_group import RankGroup
from motet.plan.memory.step_memory import estimate_memory
from motet.plan.planned_layout import PlannedLayout
from motet.plan.search.parse_plan_layout import layout_from_words, with_balanced_stages
from motet.train.forecast.planned_job import planned_layout, planned_step
from motet.train.job import Job
from motet.train.memory_check.step_memory import measure_on_group
from ranks import Ranks
from train.runs import small_job

TOLERANCE = 0.03
# The model of the job tiny, with a vocabulary of bytes, on short sequences.
TINY = [
    *("model.layers=4", "model.hidden=256", "model.heads=8", "model.kv_heads=4", "model.ffn_hidden=688"),
    *("model.context=64", "data.sequence_length=64", "data.batch_sequences=8", "precision.recipe=fp32"),
    "data.restart_documents=false",
]
ENCODER = [
    *("model.layers=4", "model.hidden=192", "model.heads=6", "model.ffn_hidden=768", "model.context=64"),
    *("data.sequence_length=64", "data.batch_sequences=8", "precision.recipe=fp32", "data.restart_documents=false"),
    "model.dropout=0",
]


def peak(group: RankGroup, job: Job) -> int:
    with tempfile.TemporaryDirectory() as folder:
        measured = measure_on_group(job, group, Path(folder)).measured
    assert measured is not None
    return measured.peak


@pytest.mark.parametrize(
    ("model", "layout", "world"),
    [
        ("decoder", "zero=2 microbatches=2", 2),
        ("bert", "zero=3 recompute=full", 2),
        ("decoder", "pp=2 microbatches=4", 2),
    ],
)
def test_planned_memory_is_that_of_each_rank(ranks: Ranks, tmp_path: Path, model: str, layout: str, world: int) -> None:
    words = [word.partition("=") for word in layout.split()]
    settings = [f"{'memory' if key == 'recompute' else 'layout'}.{key}={value}" for key, _, value in words]
    job = small_job(tmp_path, *(ENCODER if model == "bert" else TINY), *settings, model=model)
    peaks: list[int] = ranks.run(world, peak, job, timeout_s=240)
    step = planned_step(job, PlannedLayout(), stack="motet-cpu")
    planned = with_balanced_stages(step, layout_from_words(layout, world, step.global_batch))
    memory = estimate_memory(replace(step, layout=planned))
    for rank, measured in enumerate(peaks):
        of_stage = memory.ranks[rank * planned.pp // world].allocated
        assert abs(of_stage / measured - 1) < TOLERANCE, (rank, measured, memory.ranks)


def test_the_layout_of_a_run_is_the_one_that_is_planned(tmp_path: Path) -> None:
    job = small_job(tmp_path, *TINY, "layout.pp=2", "layout.microbatches=4", "memory.recompute=full")
    step = planned_step(job, PlannedLayout(), stack="motet-cpu")
    words = layout_from_words("pp=2 microbatches=4 recompute=full stages=0-1,2-3", 2, step.global_batch)
    assert planned_layout(job, job.layout_for(2), (range(2), range(2, 4))) == words
