"""The rehearsal of one rank: its start and a step of shapes, by the code of a run, on torch's meta device.

The process group is torch's fake one, so no other process takes part: where ranks agree on something, this rank agrees
with itself. Data is random tokens in the shapes of the job. Nothing is written but the cache of proofs.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch

from motet.core.batch import Batch
from motet.core.errors import check_input
from motet.data.corpus.prepare import find_data
from motet.memory.storage_tracker import StepCategories
from motet.models.build import TrainableModel, build_trainable_model
from motet.models.settings import UserModuleSettings
from motet.models.trace.known_values import KnownValuesMode
from motet.parallel.data_parallel.communication.communication_settings import BACKEND
from motet.parallel.layout import Layout
from motet.parallel.model_sharding import PIPELINE_DIMENSION, ModelSharding
from motet.parallel.process.process_group import RankGroup, default_rank_group
from motet.parallel.step_plan.plan import StepPlan
from motet.parallel.tensor_parallel.sharding_proposal import splits_layers
from motet.parallel.torch_private import fake_process_group, kernels_of_cpu_on_meta
from motet.train.build import build_job_engine, precision_context
from motet.train.engine import TrainingEngine
from motet.train.flops import batch_shape
from motet.train.job import Job
from motet.train.launch.preflight import check_classes, check_job, check_objective, check_vocabulary
from motet.train.memory_check.step_memory import compare_with_prediction, measure_timeline, names_of_blocks
from motet.train.memory_check.step_prediction import StepMemory
from motet.train.proposed_sharding import RandomBatches, sharding_of_model
from motet.train.rehearsal.collective_counts import (
    CollectiveCount,
    StartedCollectives,
    compare_with_plan,
    planned_collectives,
)
from motet.train.rehearsal.phases import PhaseRecorder, RehearsalPhase
from motet.train.step import MicroBatchLoop, TrainStep

RANKS_PER_HOST = 8  # Assumed; it decides which ranks of a pipeline send activations in slices
_META = torch.device("meta")


@dataclass(frozen=True)
class RankRehearsal:
    """The memory and the collectives of one rank, as rehearsed and as planned."""

    rank: int
    coordinates: dict[str, int]
    memory: StepMemory
    collectives: list[CollectiveCount]
    phases: list[RehearsalPhase]


@dataclass(frozen=True)
class JobToRehearse:
    """A job that was checked, with everything that all of its ranks have in common."""

    job: Job
    layout: Layout
    ranks: int
    sharding: ModelSharding
    way_of_check: int | None  # What the check of the model on tokens has returned to the proof


def prepare_rehearsal(job: Job, ranks: int, recorder: PhaseRecorder) -> JobToRehearse:
    """Check a job as its ranks do, and prove how they split the model."""
    with recorder.phase("preflight"):
        check_input(ranks == job.run.ranks, f"{ranks} ranks, but run.ranks = {job.run.ranks}")
        _refuse_unsupported(job)
        layout = check_job(job, ranks)
        vocab_size, classes = find_data(job.data)
    with recorder.phase("model"):
        model = _build_on_meta(job)
        check_objective(job, model)
        if model.vocab_size is not None and vocab_size is not None:
            key = "model.vocab_size" if model.objective is None else "model.arguments.vocab_size"
            check_vocabulary(job, vocab_size, model.vocab_size, key=key)
        if job.data.objective == "classify" and classes and model.num_classes is not None:
            check_classes(classes, model.num_classes, "model.classes")
    sharding, ways = ModelSharding(), list[int]()
    if splits_layers(layout.dims) or layout.dims.size(PIPELINE_DIMENSION) > 1:
        with recorder.phase("proof"):
            check = partial(_recorded_check, model, ways)
            proven = replace(model, check_on_tokens=check, use_check=ways.append)  # A twin of the model has its own
            sharding = sharding_of_model(job, proven, RandomBatches(job, model), layout=layout)
    return JobToRehearse(job, layout, ranks, sharding, ways[-1] if ways else None)


def _recorded_check(model: TrainableModel, ways: list[int]) -> int:
    ways.append(model.check_on_tokens() if model.check_on_tokens else 0)
    return ways[-1]


def _build_on_meta(job: Job) -> TrainableModel:
    dtype = getattr(torch, job.precision.resolved.master)
    return build_trainable_model(job.model, job.run.seed, dtype, torch.device("cpu"), on_meta=True)


def _refuse_unsupported(job: Job) -> None:
    communication, layout = job.communication, job.layout
    algorithms = (communication.all_reduce, communication.reduce_scatter, communication.all_gather)
    reasons = {
        "layout.data = 'parameter_server'": layout.uses_server_processes,
        "outer.every (local SGD)": job.outer.every is not None,
        "communication.compress_gradients or compress_parameters": communication.compress_gradients is not None
        or communication.compress_parameters is not None,
        "a named algorithm of communication": any(name != BACKEND for name in algorithms),
        "run.reproducible = 'layout'": job.run.reproducible == "layout",
        "precision.emulate": job.precision.emulate,
        "memory.recompute = 'auto'": job.memory.recompute == "auto",
    }
    for setting, is_set in reasons.items():
        check_input(
            not is_set,
            f"--rehearse: {setting} depends on values or on messages of other ranks, which a rehearsal does not have; "
            "leave it out to rehearse the rest of the job",
        )


def rehearse_rank(prepared: JobToRehearse, rank: int, recorder: PhaseRecorder) -> tuple[RankRehearsal, StepPlan]:
    """The start and the step of one rank. Returns the plan too, which tells the kinds of ranks."""
    job, layout = prepared.job, prepared.layout
    with _group_of_rank(rank, prepared.ranks) as group, kernels_of_cpu_on_meta(), precision_context(job):
        with recorder.phase("start", shows_parts=True):
            model = _build_on_meta(job)
            if prepared.way_of_check is not None:
                model.use_check(prepared.way_of_check)
            if not _has_own_code(job):
                model.module.to("meta")  # Buffers have values until now
            model, engine = build_job_engine(job, model, group, layout=layout, model_sharding=prepared.sharding)
        with recorder.phase("a step of shapes"):
            return _rehearse_step(prepared, model, engine, recorder=recorder), engine.plan


def _has_own_code(job: Job) -> bool:
    """Whether the module is a user's, which may read values that depend on no parameter, such as positions."""
    return isinstance(job.model, UserModuleSettings)


@contextmanager
def _group_of_rank(rank: int, ranks: int) -> Iterator[RankGroup]:
    first = rank // RANKS_PER_HOST * RANKS_PER_HOST
    with fake_process_group(rank, ranks) if ranks > 1 else nullcontext():
        local_ranks = range(first, min(first + RANKS_PER_HOST, ranks))
        yield replace(default_rank_group(_META), local_ranks=local_ranks)


def _rehearse_step(
    prepared: JobToRehearse, model: TrainableModel, engine: TrainingEngine, *, recorder: PhaseRecorder
) -> RankRehearsal:
    job, layout, rank, started = prepared.job, prepared.layout, engine.group.rank, StartedCollectives()
    loop = MicroBatchLoop(model, _ExpectedBatches(job, model), engine, layout, job.data.batch_sequences)
    train_step = TrainStep(engine, loop)

    def take_step(step: int) -> None:
        with KnownValuesMode() if _has_own_code(job) else nullcontext():
            train_step.step(step, job.optimizer.learning_rate)

    blocks = names_of_blocks(engine.module)
    tracker = StepCategories(blocks, on_meta=True, on_message=started.on_message)
    timeline = measure_timeline(engine, take_step, tracker, steps_before=0)
    shape, slices = batch_shape(job, len(engine.plan.rows_by_rank[rank][0])), 1
    if engine.pipeline and engine.pipeline.state.slices:
        slices = engine.pipeline.state.slices.world
    recipe = job.precision.resolved
    planned = planned_collectives(engine.plan, layout, recipe, shape=shape, rank=rank, slices=slices)
    return RankRehearsal(
        rank,
        engine.plan.dims.coordinates(rank),
        compare_with_prediction(job, engine, layout, timeline=timeline, is_packed=False),
        compare_with_plan(started.sizes, planned, engine.plan.dims),
        recorder.phases,
    )


@dataclass(frozen=True)
class _ExpectedBatches(RandomBatches):
    """Random tokens, of which as many are targets as the job is expected to have. Each row is one document."""

    def batch(self, step: int, rows: range) -> Batch:
        batch, targets = super().batch(step, rows), batch_shape(self.job, len(rows)).targets
        if targets is None:
            return batch
        weights = torch.zeros_like(batch.weights)
        weights.view(-1)[:targets] = 1
        return replace(batch, weights=weights)
