"""The planner's memory of motet: the peak of live bytes of each rank, as it is measured."""

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from motet.parallel.layout import layout_of_sizes
from motet.parallel.process.process_group import RankGroup
from motet.plan.memory.step_memory import estimate_memory
from motet.plan.search.layout_space import with_layout
from motet.train.forecast.planned_job import planned_step, step_of_run
from motet.train.job import Job
from motet.train.memory_check.predicted_ranks import predict_step_memory
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
    step = planned_step(job, layout_of_sizes(), stack="motet-cpu")
    step = with_layout(step, layout, world)
    memory = estimate_memory(step)
    for rank, measured in enumerate(peaks):
        stage_bytes = memory.ranks[rank * step.layout.pp // world].allocated
        assert abs(stage_bytes / measured - 1) < TOLERANCE, (rank, measured, memory.ranks)


@pytest.mark.parametrize("settings", [[], ["precision.attention=plain"]])
def test_a_plan_for_gpus_is_the_prediction_of_a_job_on_gpus(tmp_path: Path, settings: list[str]) -> None:
    """Large blocks of logits, which a kernel overwrites, and documents by variable length or by a mask."""
    gpu = ["run.device=cuda", "precision.recipe=bf16", "data.restart_documents=true", "model.vocab_size=32768"]
    long = ["model.context=8192", "data.sequence_length=8192", "data.batch_sequences=2"]
    job = small_job(tmp_path, *TINY, *gpu, *long, *settings)
    predicted = predict_step_memory(job, job.layout_for(1), is_packed=True)[0].predicted
    planned = estimate_memory(planned_step(job, layout_of_sizes(), packed=True)).worst.allocated
    assert abs(planned / predicted.peak - 1) < 1e-3, (planned, predicted)
    on_cpu = estimate_memory(planned_step(job, layout_of_sizes(), stack="motet-cpu", packed=True)).worst.allocated
    assert planned - on_cpu > 2**28, (planned, on_cpu)


def test_the_layout_of_a_run_is_the_one_that_is_planned(tmp_path: Path) -> None:
    job = small_job(tmp_path, *TINY, "layout.pp=2", "layout.microbatches=4", "memory.recompute=full")
    step = planned_step(job, layout_of_sizes(), stack="motet-cpu")
    words = with_layout(step, "pp=2 microbatches=4 recompute=full stages=0-1,2-3", 2)
    run_step = step_of_run(job, step, job.layout_for(2), stages=(range(2), range(2, 4)))
    assert replace(run_step.layout, dims=words.layout.dims) == words.layout  # A run knows where its pipeline ends
    assert (run_step.recompute, run_step.layout.dims.sizes) == (words.recompute, words.layout.dims.sizes)
