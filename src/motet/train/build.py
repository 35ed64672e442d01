"""The one file that knows every room: from a job and a place to a loop that runs."""

import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from motet.cluster.local_device import LocalDevice, bfloat16_warnings, discover_device, peak_memory_bytes
from motet.cluster.malloc_tuning import keep_freed_memory
from motet.collectives.execute.api import broadcast
from motet.core.errors import InputError
from motet.core.seeds import derive_seed
from motet.data.corpus.prepare import prepare_data
from motet.data.samples.loader import BatchLoader
from motet.models.build import TrainableModel, build_trainable_model
from motet.models.generate import generate_tokens
from motet.models.runtime_checks import DataRequirements
from motet.monitor.callback import Callback
from motet.monitor.event_dispatcher import EventDispatcher, open_event_dispatcher
from motet.monitor.events import RunStarted, TextSampled, WarningIssued
from motet.parallel.data_parallel.bucketed_zero import broadcast_buffers, broadcast_parameters_and_buffers
from motet.parallel.data_parallel.fsdp import FSDP2DataParallel
from motet.parallel.layout import Layout
from motet.parallel.process.launch_environment import RankEnvironment, threads_for
from motet.parallel.process.process_group import RankGroup, pick_device, start_process_group
from motet.parallel.process.rank_consistency import check_same_on_all_ranks, module_signature
from motet.precision.cast_frozen import cast_frozen_parameters
from motet.precision.float64_mode import use_float64
from motet.precision.recipe import RECIPES
from motet.train.engine import TrainingEngine, UpdateSettings, build_optimizers
from motet.train.evaluation import EvaluationBatchSource, EvaluationResult, evaluate
from motet.train.flops import training_flops
from motet.train.job import Job
from motet.train.launch.failures import StopFlag
from motet.train.launch.preflight import check_huggingface_model
from motet.train.loop import StepRunner, TrainingLoop
from motet.train.optimizer.sharded_optimizer import ShardedOptimizer
from motet.train.replica_check.checker import ReplicaChecker
from motet.train.run_events import RunProgress, StepEventMaker, count_parameters, report_run_end
from motet.train.state import TrainingState, newest_checkpoint
from motet.train.step import TrainStep

# The checkpoint that a run goes on from, the steps done by then, and what a person should know about it.
ResumePoint = tuple[Path | None, int, list[str]]


@dataclass(frozen=True)
class TrainingOutcome:
    """How far a run came."""

    completed_steps: int
    last_step: int

    @property
    def is_finished(self) -> bool:
        return self.completed_steps >= self.last_step


@dataclass(frozen=True)
class TrainingComponents:
    """What a run on one rank is made of."""

    group: RankGroup
    layout: Layout
    data: BatchLoader
    model: TrainableModel
    engine: TrainingEngine
    state: TrainingState
    total_steps: int
    worker_count: int | None = None  # Ranks that compute, if they are not those of the group

    @property
    def ranks(self) -> int:
        return self.worker_count or self.group.world

    @property
    def optimizer(self) -> ShardedOptimizer:
        return self.engine.optimizer

    def make_train_step(self, job: Job) -> TrainStep:
        batch_sequences, check_every = job.data.batch_sequences, job.monitor.replica_check_every
        components = self.model, self.data, self.engine, self.layout
        return TrainStep(
            *components,
            batch_sequences,
            ReplicaChecker(*components, batch_sequences, job.communication, check_every) if check_every else None,
        )


def run_rank(
    job: Job, rank_env: RankEnvironment, folder: Path, stop: StopFlag, callbacks: Sequence[Callback] = ()
) -> TrainingOutcome:
    """Train on this rank, from the newest checkpoint in the run folder or else from the start."""
    device = pick_device(job.run.device, rank_env)
    keep_freed_memory()
    if job.run.reproducible and device.type == "cuda":
        torch.use_deterministic_algorithms(True)
    torch.set_num_threads(threads_for(rank_env, job.run.requested_threads))
    with start_process_group(rank_env, device, job.run.timeout_s, job.run.cpu_backend) as group, precision_context(job):
        components = build_components(job, group, folder)
        resume_point = restore_newest_checkpoint(
            components
        )  # before anybody hears of a start, which may be refused here
        with open_rank_monitor(job, group, folder, callbacks) as monitor:
            return run_training(job, components, resume_point, monitor, stop)


def precision_context(job: Job) -> AbstractContextManager[None]:
    """Inside it, numbers are what the job's recipe says."""
    return use_float64() if job.precision.recipe == "fp64" else nullcontext()


def build_model(job: Job, device: torch.device) -> tuple[BatchLoader, TrainableModel]:
    """Data, and the model with its first values."""
    recipe = RECIPES[job.precision.recipe]
    prepared = prepare_data(job.data)
    data = BatchLoader(prepared, job.data, job.run.seed, job.run.epochs)
    requirements = DataRequirements(prepared.vocab_size, prepared.classes if job.data.objective == "classify" else None)
    model = build_trainable_model(job.model, job.run.seed, getattr(torch, recipe.master), device, requirements)
    if model.objective is not None:
        check_huggingface_model(job, prepared, model.objective, (model.vocab_size, model.num_classes))
    return data, model


def build_components(job: Job, group: RankGroup, folder: Path) -> TrainingComponents:
    """Data, model and optimizer at step 0, the same for every layout."""
    recipe = RECIPES[job.precision.recipe]
    layout = job.layout_for(group.world)
    data, model = build_model(job, group.device)
    check_same_on_all_ranks(module_signature(model.module), group)
    broadcast_parameters_and_buffers(model.module, group)
    _check_same_data(data, group)
    cast_frozen_parameters(model.module, recipe)
    update_settings = UpdateSettings(job.optimizer, job.communication, job.outer)
    optimizer, outer_optimizer = build_optimizers(
        model.module, recipe, group, layout, update_settings, job.data.batch_sequences
    )
    reproducible = job.run.reproducible
    engine = TrainingEngine(
        model.module,
        optimizer,
        group,
        job.optimizer.clip_norm,
        outer_optimizer=outer_optimizer,
        reproducible=reproducible is not None,
    )
    if isinstance(optimizer.sharded_parameters, FSDP2DataParallel):
        wrap_as_forward = optimizer.sharded_parameters.wrap_as_forward
        model = replace(model, loss_sum=wrap_as_forward(model.loss_sum), logits=wrap_as_forward(model.logits))
    keep, checkpoint_folder = job.checkpoint.keep, folder / "checkpoints"
    state = TrainingState(
        model.module, optimizer, group, checkpoint_folder, keep, data.fingerprint, outer_optimizer, reproducible
    )
    steps = job.run.steps if job.run.steps is not None else data.steps_for_epochs(job.run.epochs or 1.0)
    return TrainingComponents(group, layout, data, model, engine, state, steps)


def _check_same_data(data: BatchLoader, group: RankGroup) -> None:
    """Machines with other files would train on samples that do not belong together."""
    local_seed = derive_seed(data.fingerprint)
    first_rank_seed = torch.tensor([local_seed], device=group.device)
    broadcast(first_rank_seed, group)
    if first_rank_seed.item() != local_seed:
        raise InputError(
            f"the data of rank {group.rank} (fingerprint {data.fingerprint}) is not that of rank 0; give every machine "
            "the same files, or a folder made by `motet data build` (`stdlib` differs between Python versions)"
        )


def open_rank_monitor(job: Job, group: RankGroup, folder: Path, callbacks: Sequence[Callback]) -> EventDispatcher:
    """Rank 0 tells; the others keep silent."""
    if group.rank != 0:
        return EventDispatcher([])
    return open_event_dispatcher(job.monitor, folder, job.model_dump(mode="json"), callbacks)


def restore_newest_checkpoint(components: TrainingComponents) -> ResumePoint:
    newest = newest_checkpoint(components.state.checkpoint_folder)
    return (newest, *components.state.restore(newest)) if newest else (None, 0, [])


def run_training(
    job: Job,
    components: TrainingComponents,
    resume_point: ResumePoint,
    monitor: EventDispatcher,
    stop: StopFlag,
    step_runner: StepRunner | None = None,
) -> TrainingOutcome:
    """`stepper`: who does the steps, if not this rank with its group."""
    newest, done, changes = resume_point
    compute = RECIPES[job.precision.recipe].compute
    device = discover_device(components.group.device, [compute, "float32"] if compute == "bfloat16" else [compute])
    resumed_from = f"checkpoints/{newest.name}" if newest else None
    monitor.on_event(_run_started_event(job, components, device, done, resumed_from))
    for text in [*changes, *bfloat16_warnings(device)]:
        monitor.on_event(WarningIssued(text=text))
    progress = RunProgress(done, components.total_steps)
    with report_run_end(monitor.on_event, progress):
        TrainingLoop(
            job=job,
            step_runner=step_runner or components.make_train_step(job),
            state=components.state,
            progress=progress,
            evaluate=functools.partial(evaluate_split, job, components),
            make_step_event=_step_event_maker(job, components, device),
            emit_event=monitor.on_event,
            stop_requested=lambda: stop.requested,
        ).run()
        if progress.completed_steps == progress.total_steps:
            _sample_text(job, components, progress.completed_steps, monitor)
    return TrainingOutcome(progress.completed_steps, progress.total_steps)


def _run_started_event(
    job: Job, components: TrainingComponents, device: LocalDevice, done: int, resumed_from: str | None
) -> RunStarted:
    return RunStarted(
        name=job.name,
        ranks=components.ranks,
        threads=torch.get_num_threads(),
        device=device.name,
        parameters=count_parameters(components.model.module),
        data=components.data.fingerprint,
        first_step=done + 1,
        last_step=components.total_steps,
        resumed_from=resumed_from,
        num_classes=components.model.num_classes,
    )


def _step_event_maker(job: Job, components: TrainingComponents, device: LocalDevice) -> StepEventMaker:
    peak_flops = device.peak_flops.get(RECIPES[job.precision.recipe].compute)
    return StepEventMaker(
        flops_per_step=training_flops(job),
        peak_flops=peak_flops.value * components.ranks if peak_flops else None,
        memory_bytes=functools.partial(peak_memory_bytes, components.group.device),
        epoch_at=components.data.epoch_at,
    )


def evaluate_split(
    job: Job, components: TrainingComponents, split: str, data: EvaluationBatchSource | None = None
) -> EvaluationResult | None:
    """None when the job keeps nothing apart to judge on. `data`: what is judged on, if not that of the run."""
    if not components.data.evaluation_batches(split):
        return None
    broadcast_buffers(components.model.module, components.engine.step_group)
    partition = (components.group, components.layout, job.data.batch_sequences)
    with components.engine.consensus_parameters():
        return evaluate(components.model, data or components.data, split, job.monitor.evaluate_batches, partition)


def _sample_text(job: Job, components: TrainingComponents, done: int, monitor: EventDispatcher) -> None:
    """Text from the trained model, where it can write any. All ranks write, since each may have a part of the model."""
    if not job.monitor.sample_tokens or not components.model.is_autoregressive:
        return
    tokenizer = components.data.tokenizer
    prompt = tokenizer.encode(job.monitor.sample_prompt) or [tokenizer.end_id]
    settings = job.monitor
    with components.engine.consensus_parameters():
        generated_ids = generate_tokens(
            components.model, prompt, settings.sample_tokens, job.run.seed, settings.sample_temperature
        )
    monitor.on_event(TextSampled(step=done, prompt=job.monitor.sample_prompt, text=tokenizer.decode(generated_ids)))
