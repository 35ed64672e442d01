"""Builds everything that a run on one rank consists of, from its job, and runs it."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from motet.cluster.device_clock import DeviceClock
from motet.cluster.host_limits import keep_freed_memory
from motet.cluster.local_device import LocalDevice, discover_device, peak_memory_bytes, slow_matmul_warnings
from motet.collectives.execute.api import broadcast
from motet.core.errors import InputError, check_input
from motet.core.seeds import derive_seed
from motet.core.units import DTYPE_BYTES
from motet.data.corpus.prepare import prepare_data
from motet.data.samples.loader import BatchLoader
from motet.models.build import TrainableModel, build_trainable_model, generate_tokens
from motet.models.settings import ModelSettings, UserModuleSettings
from motet.models.user_module import DataRequirements
from motet.monitor.event_dispatcher import EventDispatcher, open_event_dispatcher
from motet.monitor.events import RunStarted, StepDone, StepPredicted, TextSampled, WarningIssued
from motet.monitor.sinks import Callback
from motet.parallel.data_parallel.zero import sharded_states
from motet.parallel.layout import Layout
from motet.parallel.model_sharding import ModelSharding
from motet.parallel.process.launch_environment import RankEnvironment, threads_for
from motet.parallel.process.process_group import (
    RankGroup,
    all_ranks,
    broadcast_buffers,
    check_same_on_all_ranks,
    first_difference,
    module_attributes,
    module_signature,
    pick_device,
    refuse_together,
    start_process_group,
)
from motet.precision.numerics import numerics_remark, precision_numerics
from motet.train.engine import TrainingEngine, build_engine
from motet.train.evaluation import EvaluationBatchSource, EvaluationResult, evaluate
from motet.train.job import Job, training_flops
from motet.train.job_step_plan import split_warnings
from motet.train.launch.failures import StopFlag
from motet.train.launch.preflight import check_huggingface_model
from motet.train.loop import RunProgress, StepEventMaker, StepFunction, TrainingLoop, report_run_end
from motet.train.numerics_monitor.monitor import NumericsMonitor
from motet.train.pipeline.predicted_bubble import bubble_warning
from motet.train.pipeline.stage_usage import StepUsage
from motet.train.proposed_sharding import agreed_sharding, sharding_of_model
from motet.train.replica_check.checker import ReplicaChecker
from motet.train.state import TrainingState, newest_checkpoint
from motet.train.step import MicroBatchLoop, StepResult, TrainStep

# Freed blocks of memory that a process keeps for the next step. At stage 3 large ones are gathered and freed between
# gradients that stay: if they were kept, the heap would grow by the holes.
KEPT_BLOCK_BYTES, KEPT_BLOCK_BYTES_STAGE_3 = 32 << 20, 1 << 20


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
    ranks: int  # Ranks that compute: those of the group, or the workers of a parameter server

    def make_runner(self, job: Job) -> MicroBatchLoop:
        return MicroBatchLoop(self.model, self.data, self.engine, self.layout, job.data.batch_sequences)

    def make_train_step(self, job: Job) -> TrainStep:
        every_steps = job.monitor.replica_check_every
        checker = ReplicaChecker(self.model, self.data, self.engine, every_steps) if every_steps else None
        every_steps = job.monitor.numerics_every
        numerics = NumericsMonitor(self.engine, job.precision.resolved, every_steps) if every_steps else None
        return TrainStep(self.engine, self.make_runner(job), checker, numerics)


def run_rank(
    job: Job, rank_env: RankEnvironment, folder: Path, stop: StopFlag, callbacks: Sequence[Callback] = ()
) -> RunProgress:
    """Train on this rank, from the newest checkpoint in the run folder or else from the start."""
    device = pick_device(job.run.device, rank_env, share_device=job.run.share_device)
    keep_freed_memory(
        up_to_bytes=KEPT_BLOCK_BYTES_STAGE_3 if sharded_states(job.layout.zero).parameters else KEPT_BLOCK_BYTES
    )
    if job.run.reproducible and device.type == "cuda":
        torch.use_deterministic_algorithms(True)
    torch.set_num_threads(threads_for(rank_env, job.run.requested_threads))
    process_group = start_process_group(
        rank_env, device, job.run.timeout_s, cpu_backend=job.run.cpu_backend, share_device=job.run.share_device
    )
    with process_group as group, precision_context(job, device):
        parts = build_components(job, group, folder)
        resume_point = restore_newest_checkpoint(parts)  # it may refuse, so it comes before any event
        with open_rank_monitor(job, group, folder, callbacks) as monitor:
            return run_training(job, parts, resume_point, monitor, stop)


def precision_context(job: Job, device: torch.device | None = None) -> AbstractContextManager[None]:
    """Inside, everything is computed in the precision of the job's recipe; on a processor by default."""
    return precision_numerics(job.precision, device or torch.device("cpu"))


def build_model(job: Job, device: torch.device, group: RankGroup | None = None) -> tuple[BatchLoader, TrainableModel]:
    """Data, and the model. On the ranks of a group, parameters may be on the meta device, and get values later."""
    prepared, dtype = prepare_data(job.data), getattr(torch, job.precision.resolved.master)
    data = BatchLoader(prepared, job.data, job.run.seed, job.run.epochs)
    requirements = DataRequirements(prepared.vocab_size, prepared.classes if job.data.objective == "classify" else None)
    build = partial(build_trainable_model, job.model, job.run.seed, dtype, device, requirements)
    model = _build_on_ranks(job.model, build, group) if group else build()
    if model.objective is not None:
        check_huggingface_model(job, prepared, model)
    return data, model


def _build_on_ranks(settings: ModelSettings, build: Callable[..., TrainableModel], group: RankGroup) -> TrainableModel:
    """The model of a rank, without memory for parameters. Where only a complete module has their values, the first
    rank builds one; so does a rank whose module differs from it without them."""
    is_first, has_factory = group.rank == 0, isinstance(settings, UserModuleSettings) and settings.hf_path is None
    model = _build_together(build if has_factory and is_first else partial(_try_on_meta, build), group)
    values = model.initial_values if model else None
    if all_ranks(values is not None, group) and model and values:
        check_same_on_all_ranks([*module_signature(model.module), f"weights {values.fingerprint}"], group)
        return model
    remark, is_built = model.remark if model else None, model is not None and (has_factory or not is_first)
    if values:
        remark = "rank 0 loads all weights before ranks keep their parts: another rank cannot read slices of its files"
    model = _build_together((lambda: model) if is_built else build, group)
    assert model is not None
    attributes = module_attributes(model.module) if has_factory else ()  # transformers marks what it has loaded
    if first_difference([*module_signature(model.module), *attributes], group):
        model = None
    model = _build_together((lambda: model) if model else build, group)
    assert model is not None
    check_same_on_all_ranks(module_signature(model.module), group)
    broadcast_buffers(model.module, group, only_persistent=False)
    if not all_ranks(is_first or all(p.is_meta for p in model.module.parameters()), group):
        remark = (
            "every rank builds the complete module before it keeps its part: without values of parameters, "
            "model.factory makes another module, or none"
        )
    return replace(model, initial_values=None, remark=remark if group.world > 1 else None)


def _build_together(build: Callable[[], TrainableModel | None], group: RankGroup) -> TrainableModel | None:
    problem, model = "", None
    try:
        model = build()
    except InputError as error:
        problem = str(error)
    refuse_together(problem, group)
    return model


def _try_on_meta(build: Callable[..., TrainableModel]) -> TrainableModel | None:
    try:
        return build(on_meta=True)
    except InputError:
        raise
    except Exception:  # noqa: BLE001  # whatever a factory runs into; with values it may run into nothing
        return None


def build_components(
    job: Job, group: RankGroup, folder: Path, *, model_sharding: ModelSharding | None = None
) -> TrainingComponents:
    """Data, model and optimizer at step 0, the same for every layout; by default the split of the model is proposed."""
    layout = job.layout_for(group.world)
    data, model = build_model(job, group.device, group)
    _check_same_data(data, group)
    propose = partial(sharding_of_model, job, data=data, layout=layout)
    known = model_sharding
    model_sharding = agreed_sharding(model, propose, known, group=group, dims=layout.dims)
    model, engine = build_job_engine(job, model, group, layout=layout, model_sharding=model_sharding)
    folder.mkdir(parents=True, exist_ok=True)
    state = engine.training_state(folder / "checkpoints", job.checkpoint.keep, data.fingerprint)
    steps = job.run.steps if job.run.steps is not None else data.steps_for_epochs(job.run.epochs or 1.0)
    return TrainingComponents(group, layout, data, model, engine, state, steps, group.world)


def build_job_engine(
    job: Job, model: TrainableModel, group: RankGroup, *, layout: Layout, model_sharding: ModelSharding
) -> tuple[TrainableModel, TrainingEngine]:
    """The model as this rank computes it, and its engine."""
    engine = build_engine(
        model.module,
        group,
        layout=layout,
        settings=job,
        batch_sequences=job.data.batch_sequences,
        model_sharding=model_sharding,
        values=model.initial_values,
    )
    engine.optimizer.rounding_seed = job.run.seed
    if engine.pipeline is None:
        wrap = engine.optimizer.sharded_parameters.wrap_as_forward
        if model.check_on_tokens and group.device.type != "meta":
            with torch.no_grad():
                wrap(model.check_on_tokens)()
        model = replace(model, loss_sum=wrap(model.loss_sum), logits=wrap(model.logits))
    return replace(model, initial_values=None), engine


def _check_same_data(data: BatchLoader, group: RankGroup) -> None:
    first_rank_seed = torch.tensor([local_seed := derive_seed(data.fingerprint)], device=group.device)
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
    clock = DeviceClock(group.device) if group.device.type == "cuda" else None
    settings = job.model_dump(mode="json")
    return open_event_dispatcher(job.monitor, folder, settings, callbacks=callbacks, device_clock=clock)


def restore_newest_checkpoint(parts: TrainingComponents) -> ResumePoint:
    newest = newest_checkpoint(parts.state.checkpoint_folder)
    resume_point = ResumePoint(newest, *parts.state.restore(newest)) if newest else ResumePoint(None, 0, [])
    parts.state.clear_interrupted_saves()  # a run that was killed at its end saves nothing more
    return resume_point


def run_training(
    job: Job,
    parts: TrainingComponents,
    resume_point: ResumePoint,
    monitor: EventDispatcher,
    stop: StopFlag,
    take_step: StepFunction | None = None,
) -> RunProgress:
    """Train to the end or a stop; without `take_step` this rank takes the steps with its group."""
    compute = _multiplied_dtype(job)
    measured = [compute, "float32"] if DTYPE_BYTES[compute] < DTYPE_BYTES["float32"] else [compute]
    device = discover_device(parts.group.device, measured)
    newest = resume_point.checkpoint
    monitor.on_event(
        RunStarted(
            name=job.name,
            ranks=parts.ranks,
            threads=torch.get_num_threads(),
            device=device.name,
            parameters=parts.engine.plan.inventory.parameter_count,
            data=parts.data.fingerprint,
            first_step=resume_point.completed_steps + 1,
            last_step=parts.total_steps,
            resumed_from=f"checkpoints/{newest.name}" if newest else None,
            num_classes=parts.model.num_classes,
        )
    )
    splits = split_warnings(job, parts.engine.plan, len(parts.group.local_ranks or ()))
    numerics = numerics_remark(job.precision, parts.group.device)
    remarks = [parts.model.remark, numerics, *splits, bubble_warning(parts.layout, job.data.batch_sequences)]
    for text in [*filter(None, remarks), *resume_point.remarks, *slow_matmul_warnings(device)]:
        monitor.on_event(WarningIssued(text=text))
    progress = RunProgress(resume_point.completed_steps, parts.total_steps)
    with report_run_end(monitor.on_event, progress):
        TrainingLoop(
            job=job,
            take_step=take_step or parts.make_train_step(job).step,
            state=parts.state,
            progress=progress,
            evaluate=partial(evaluate_split, job, parts),
            make_step_event=_step_event_maker(job, parts, device),
            emit_event=monitor.on_event,
            stop_requested=lambda: stop.is_requested() or monitor.is_output_closed,
        ).run()
        if progress.is_finished:
            _sample_text(job, parts, monitor)
            if take_step is None and (predicted := _predicted_step(job, parts)):
                monitor.on_event(predicted)
    return progress


def _predicted_step(job: Job, parts: TrainingComponents) -> StepPredicted | None:
    """The planner's prediction of a step, on the rank whose events are shown."""
    if parts.group.rank or not job.monitor.predict:
        return None
    from motet.train.forecast.step_forecast import predict_step  # After the last step: a run starts without the planner

    return predict_step(job, parts.layout, parts.engine.plan.model_sharding.stages, device=parts.group.device)


def _multiplied_dtype(job: Job) -> str:
    """The dtype in which matrices are multiplied."""
    return "float32" if job.precision.emulate else job.precision.resolved.compute


def _step_event_maker(job: Job, parts: TrainingComponents, device: LocalDevice) -> StepEventMaker:
    peak, flops_per_step = device.peak_flops.get(_multiplied_dtype(job)), training_flops(job)
    peak_flops = peak.value * parts.ranks if peak else None

    def make_event(done: int, result: StepResult, seconds: float) -> StepDone:
        return StepDone(
            step=done,
            loss=result.loss,
            target_tokens=result.targets,
            tokens=result.tokens,
            learning_rate=result.learning_rate,
            grad_norm=result.grad_norm,
            skipped=not result.is_finite,
            loss_scale=result.loss_scale,
            step_time_s=seconds,
            tokens_per_s=result.tokens / seconds,
            mfu=flops_per_step / (seconds * peak_flops) if flops_per_step and peak_flops else None,
            **vars(result.usage or StepUsage(peak_memory_bytes(parts.group.device))),
            epoch=parts.data.epoch_at(done),
            server=result.server_work,
        )

    return make_event


def evaluate_split(
    job: Job, parts: TrainingComponents, split: str, data: EvaluationBatchSource | None = None
) -> EvaluationResult | None:
    """Evaluate on a split of the run's data or of `data`; None when the job holds nothing out for it."""
    if not parts.data.evaluation_batches(split):
        return None
    broadcast_buffers(parts.model.module, parts.engine.module_part_group)
    data, batches, rows = data or parts.data, job.monitor.evaluate_batches, job.data.batch_sequences
    pipeline = parts.engine.pipeline
    with parts.engine.consensus_parameters():
        return evaluate(
            parts.model,
            data,
            split,
            max_batches=batches,
            group=parts.group,
            layout=parts.layout,
            batch_sequences=rows,
            **({"forward": pipeline.forward} if pipeline else {}),
        )


def _sample_text(job: Job, parts: TrainingComponents, monitor: EventDispatcher) -> None:
    count, temperature, tokenizer = job.monitor.sample_tokens, job.monitor.sample_temperature, parts.data.tokenizer
    if not count or not parts.model.is_autoregressive:
        return
    prompt = tokenizer.encode(job.monitor.sample_prompt) or [tokenizer.end_id]
    model, pipeline = parts.model, parts.engine.pipeline
    if pipeline is not None:
        model = replace(model, logits=lambda batch: pipeline.forward_on_all(partial(parts.model.logits, batch), batch))
    with parts.engine.consensus_parameters():
        tokens = generate_tokens(model, prompt, count, seed=job.run.seed, temperature=temperature)
    step, text = parts.total_steps, tokenizer.decode(tokens)
    monitor.on_event(TextSampled(step=step, prompt=job.monitor.sample_prompt, text=text))
