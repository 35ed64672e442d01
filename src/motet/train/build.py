"""Builds everything that a run on one rank consists of, from its job, and runs it."""

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

from motet.cluster.local_device import LocalDevice, bfloat16_warnings, discover_device, peak_memory_bytes
from motet.cluster.malloc_tuning import keep_freed_memory
from motet.collectives.execute.api import broadcast
from motet.core.errors import check_input
from motet.core.seeds import derive_seed
from motet.data.corpus.prepare import prepare_data
from motet.data.samples.loader import BatchLoader
from motet.models.build import TrainableModel, build_trainable_model
from motet.models.generate import generate_tokens
from motet.models.runtime_checks import DataRequirements
from motet.monitor.callback import Callback
from motet.monitor.event_dispatcher import EventDispatcher, open_event_dispatcher
from motet.monitor.events import RunStarted, StepDone, TextSampled, WarningIssued
from motet.parallel.data_parallel.fsdp import FSDP2DataParallel
from motet.parallel.layout import Layout
from motet.parallel.process.launch_environment import RankEnvironment, threads_for
from motet.parallel.process.process_group import RankGroup, pick_device, start_process_group
from motet.parallel.process.rank_consistency import (
    broadcast_buffers,
    broadcast_parameters_and_buffers,
    check_same_on_all_ranks,
    module_signature,
)
from motet.precision.cast_frozen import cast_frozen_parameters
from motet.precision.float64_mode import use_float64
from motet.precision.recipe import RECIPES
from motet.train.engine import TrainingEngine, build_optimizers
from motet.train.evaluation import EvaluationBatchSource, EvaluationResult, evaluate
from motet.train.flops import training_flops
from motet.train.job import Job
from motet.train.launch.failures import StopFlag
from motet.train.launch.preflight import check_huggingface_model
from motet.train.loop import RunProgress, StepRunner, TrainingLoop, report_run_end
from motet.train.optimizer.sharded_optimizer import ShardedOptimizer
from motet.train.replica_check.checker import ReplicaChecker
from motet.train.state import TrainingState, newest_checkpoint
from motet.train.step import StepResult, TrainStep


class ResumePoint(NamedTuple):
    """The checkpoint and the step from which a run continues."""

    checkpoint: Path | None
    completed_steps: int
    remarks: list[str]  # Changes since the checkpoint that the user should know about


@dataclass(frozen=True)
class TrainingComponents:
    """Everything that a run on one rank consists of."""

    group: RankGroup
    layout: Layout
    data: BatchLoader
    model: TrainableModel
    engine: TrainingEngine
    state: TrainingState
    total_steps: int
    worker_count: int | None = None  # Ranks that compute, if they are not the ranks of the group

    @property
    def ranks(self) -> int:
        return self.worker_count or self.group.world

    @property
    def optimizer(self) -> ShardedOptimizer:
        return self.engine.optimizer

    def make_train_step(self, job: Job) -> TrainStep:
        rows, check_every = job.data.batch_sequences, job.monitor.replica_check_every
        components = self.model, self.data, self.engine, self.layout
        checker = ReplicaChecker(*components, rows, job.communication, check_every) if check_every else None
        return TrainStep(*components, rows, checker)


def run_rank(
    job: Job, rank_env: RankEnvironment, folder: Path, stop: StopFlag, callbacks: Sequence[Callback] = ()
) -> RunProgress:
    """Train on this rank, from the newest checkpoint in the run folder or else from the start."""
    device = pick_device(job.run.device, rank_env)
    keep_freed_memory()
    if job.run.reproducible and device.type == "cuda":
        torch.use_deterministic_algorithms(True)
    torch.set_num_threads(threads_for(rank_env, job.run.requested_threads))
    process_group = start_process_group(rank_env, device, job.run.timeout_s, cpu_backend=job.run.cpu_backend)
    with process_group as group, precision_context(job):
        components = build_components(job, group, folder)
        resume_point = restore_newest_checkpoint(components)  # it may refuse, so it comes before any event
        with open_rank_monitor(job, group, folder, callbacks) as monitor:
            return run_training(job, components, resume_point, monitor, stop)


def precision_context(job: Job) -> AbstractContextManager[None]:
    """Inside, everything is computed in the precision of the job's recipe."""
    return use_float64() if job.precision.recipe == "fp64" else nullcontext()


def build_model(job: Job, device: torch.device) -> tuple[BatchLoader, TrainableModel]:
    """Data, and the model with its initial values."""
    prepared, dtype = prepare_data(job.data), getattr(torch, RECIPES[job.precision.recipe].master)
    data = BatchLoader(prepared, job.data, job.run.seed, job.run.epochs)
    requirements = DataRequirements(prepared.vocab_size, prepared.classes if job.data.objective == "classify" else None)
    model = build_trainable_model(job.model, job.run.seed, dtype, device, requirements)
    if model.objective is not None:
        sizes = {"vocab_size": model.vocab_size, "num_classes": model.num_classes}
        check_huggingface_model(job, prepared, objective=model.objective, **sizes)
    return data, model


def build_components(job: Job, group: RankGroup, folder: Path) -> TrainingComponents:
    """Data, model and optimizer at step 0, the same for every layout."""
    recipe, layout = RECIPES[job.precision.recipe], job.layout_for(group.world)
    data, model = build_model(job, group.device)
    module = model.module
    check_same_on_all_ranks(module_signature(module), group)
    broadcast_parameters_and_buffers(module, group)
    _check_same_data(data, group)
    cast_frozen_parameters(module, recipe)
    optimizer, outer_optimizer = build_optimizers(
        module, recipe, group, layout=layout, settings=job, batch_sequences=job.data.batch_sequences
    )
    engine = TrainingEngine(
        module,
        optimizer,
        group,
        clip_norm=job.optimizer.clip_norm,
        outer_optimizer=outer_optimizer,
        reproducible=job.run.reproducible is not None,
    )
    if isinstance(parameters := optimizer.sharded_parameters, FSDP2DataParallel):
        wrap = parameters.wrap_as_forward
        model = replace(model, loss_sum=wrap(model.loss_sum), logits=wrap(model.logits))
    checkpoints, keep, fingerprint = folder / "checkpoints", job.checkpoint.keep, data.fingerprint
    outer_and_rule = outer_optimizer, job.run.reproducible
    state = TrainingState(module, optimizer, group, checkpoints, keep, fingerprint, *outer_and_rule)
    steps = job.run.steps if job.run.steps is not None else data.steps_for_epochs(job.run.epochs or 1.0)
    return TrainingComponents(group, layout, data, model, engine, state, steps)


def _check_same_data(data: BatchLoader, group: RankGroup) -> None:
    """Machines with different files would mix samples that do not belong together."""
    local_seed = derive_seed(data.fingerprint)
    first_rank_seed = torch.tensor([local_seed], device=group.device)
    broadcast(first_rank_seed, group)
    check_input(
        first_rank_seed.item() == local_seed,
        f"the data of rank {group.rank} (fingerprint {data.fingerprint}) is not that of rank 0; give every machine "
        "the same files, or a folder made by `motet data build` (`stdlib` differs between Python versions)",
    )


def open_rank_monitor(job: Job, group: RankGroup, folder: Path, callbacks: Sequence[Callback]) -> EventDispatcher:
    """The monitor of the job on rank 0, and one that ignores all events on other ranks."""
    if group.rank:
        return EventDispatcher()
    return open_event_dispatcher(job.monitor, folder, job.model_dump(mode="json"), callbacks=callbacks)


def restore_newest_checkpoint(components: TrainingComponents) -> ResumePoint:
    newest = newest_checkpoint(components.state.checkpoint_folder)
    return ResumePoint(newest, *components.state.restore(newest)) if newest else ResumePoint(None, 0, [])


def run_training(
    job: Job,
    components: TrainingComponents,
    resume_point: ResumePoint,
    monitor: EventDispatcher,
    stop: StopFlag,
    step_runner: StepRunner | None = None,
) -> RunProgress:
    """Train to the end or a stop; without a `step_runner` this rank takes the steps with its group."""
    compute = RECIPES[job.precision.recipe].compute
    device = discover_device(components.group.device, [compute, "float32"] if compute == "bfloat16" else [compute])
    newest = resume_point.checkpoint
    run_started = RunStarted(
        name=job.name,
        ranks=components.ranks,
        threads=torch.get_num_threads(),
        device=device.name,
        parameters=sum(p.numel() for p in components.model.module.parameters()),
        data=components.data.fingerprint,
        first_step=resume_point.completed_steps + 1,
        last_step=components.total_steps,
        resumed_from=f"checkpoints/{newest.name}" if newest else None,
        num_classes=components.model.num_classes,
    )
    monitor.on_event(run_started)
    for text in [*resume_point.remarks, *bfloat16_warnings(device)]:
        monitor.on_event(WarningIssued(text=text))
    progress = RunProgress(resume_point.completed_steps, components.total_steps)
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
        if progress.is_finished:
            _sample_text(job, components, monitor)
    return progress


def _step_event_maker(
    job: Job, components: TrainingComponents, device: LocalDevice
) -> Callable[[int, StepResult, float], StepDone]:
    peak = device.peak_flops.get(RECIPES[job.precision.recipe].compute)
    peak_flops = peak.value * components.ranks if peak else None
    flops_per_step = training_flops(job)

    def make_event(done: int, result: StepResult, seconds: float) -> StepDone:
        return StepDone(
            step=done,
            loss=result.loss,
            target_tokens=result.targets,
            tokens=result.tokens,
            learning_rate=result.learning_rate,
            grad_norm=result.grad_norm,
            skipped=not result.is_finite,
            step_time_s=seconds,
            tokens_per_s=result.tokens / seconds,
            mfu=flops_per_step / (seconds * peak_flops) if flops_per_step and peak_flops else None,
            memory_bytes=peak_memory_bytes(components.group.device),
            epoch=components.data.epoch_at(done),
            server=result.server_work,
        )

    return make_event


def evaluate_split(
    job: Job, components: TrainingComponents, split: str, data: EvaluationBatchSource | None = None
) -> EvaluationResult | None:
    """Evaluate on a split of the run's data or of `data`; None when the job holds nothing out for it."""
    if not components.data.evaluation_batches(split):
        return None
    broadcast_buffers(components.model.module, components.engine.step_group)
    with components.engine.consensus_parameters():
        return evaluate(
            components.model,
            data or components.data,
            split,
            max_batches=job.monitor.evaluate_batches,
            group=components.group,
            layout=components.layout,
            batch_sequences=job.data.batch_sequences,
        )


def _sample_text(job: Job, components: TrainingComponents, monitor: EventDispatcher) -> None:
    settings, tokenizer = job.monitor, components.data.tokenizer
    if not settings.sample_tokens or not components.model.is_autoregressive:
        return
    prompt = tokenizer.encode(settings.sample_prompt) or [tokenizer.end_id]
    with components.engine.consensus_parameters():
        token_ids = generate_tokens(
            components.model, prompt, settings.sample_tokens, seed=job.run.seed, temperature=settings.sample_temperature
        )
    step, text = components.total_steps, tokenizer.decode(token_ids)
    monitor.on_event(TextSampled(step=step, prompt=settings.sample_prompt, text=text))
