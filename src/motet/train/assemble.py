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
from motet.parallel.process.rank_consistency import check_same_on_all_ranks, described
from motet.precision.cast_frozen import cast_frozen_parameters
from motet.precision.float64_mode import use_float64
from motet.precision.recipe import RECIPES
from motet.train.engine import Engine, Manner, make_updaters
from motet.train.evaluate import Evaluation, Splits, evaluate
from motet.train.faults import StopFlag
from motet.train.flops import training_flops
from motet.train.job import Job
from motet.train.loop import Loop, Steps
from motet.train.optimizer import Updater
from motet.train.preflight import check_huggingface
from motet.train.state import RunState, newest_checkpoint
from motet.train.step import Stepper
from motet.train.telling import Describer, Progress, parameter_count, told_to_the_end
from motet.train.watch import Watch

Restored = tuple[Path | None, int, list[str]]
"""The checkpoint that a run goes on from, the steps done by then, and what a person should know about it."""


@dataclass(frozen=True)
class Outcome:
    """How far a run came."""

    steps: int
    last_step: int

    @property
    def finished(self) -> bool:
        return self.steps >= self.last_step


@dataclass(frozen=True)
class Parts:
    """What a run on one rank is made of."""

    group: RankGroup
    layout: Layout
    data: BatchLoader
    model: TrainableModel
    engine: Engine
    state: RunState
    steps: int
    workers: int | None = None
    """Ranks that compute, if they are not those of the group."""

    @property
    def ranks(self) -> int:
        return self.workers or self.group.world

    @property
    def updater(self) -> Updater:
        return self.engine.updater

    def stepper(self, job: Job) -> Stepper:
        rows, every = job.data.batch_sequences, job.monitor.replica_check_every
        parts = self.model, self.data, self.engine, self.layout
        return Stepper(*parts, rows, Watch(*parts, rows, job.communication, every) if every else None)


def run_rank(
    job: Job, place: RankEnvironment, folder: Path, stop: StopFlag, callbacks: Sequence[Callback] = ()
) -> Outcome:
    """Train on this rank, from the newest checkpoint in the run folder or else from the start."""
    device = pick_device(job.run.device, place)
    keep_freed_memory()
    if job.run.reproducible and device.type == "cuda":
        torch.use_deterministic_algorithms(True)
    torch.set_num_threads(threads_for(place, job.run.threads_wanted))
    with start_process_group(place, device, job.run.timeout_s, job.run.cpu_backend) as group, numerics(job):
        parts = build_parts(job, group, folder)
        restored = restore(parts)  # before anybody hears of a start, which may be refused here
        with monitoring(job, group, folder, callbacks) as monitor:
            return train(job, parts, restored, monitor, stop)


def numerics(job: Job) -> AbstractContextManager[None]:
    """Inside it, numbers are what the job's recipe says."""
    return use_float64() if job.precision.recipe == "fp64" else nullcontext()


def build_model(job: Job, device: torch.device) -> tuple[BatchLoader, TrainableModel]:
    """Data, and the model with its first values."""
    recipe = RECIPES[job.precision.recipe]
    prepared = prepare_data(job.data)
    data = BatchLoader(prepared, job.data, job.run.seed, job.run.epochs)
    demands = DataRequirements(prepared.vocab_size, prepared.classes if job.data.objective == "classify" else None)
    model = build_trainable_model(job.model, job.run.seed, getattr(torch, recipe.master), device, demands)
    if model.objective is not None:
        check_huggingface(job, prepared, model.objective, (model.vocab_size, model.num_classes))
    return data, model


def build_parts(job: Job, group: RankGroup, folder: Path) -> Parts:
    """Data, model and optimizer at step 0, the same for every layout."""
    recipe = RECIPES[job.precision.recipe]
    layout = job.resolved(group.world)
    data, model = build_model(job, group.device)
    check_same_on_all_ranks(described(model.module), group)
    broadcast_parameters_and_buffers(model.module, group)
    _agree_on_data(data, group)
    cast_frozen_parameters(model.module, recipe)
    manner = Manner(job.optimizer, job.communication, job.outer)
    updater, outer = make_updaters(model.module, recipe, group, layout, manner, job.data.batch_sequences)
    bits = job.run.reproducible
    engine = Engine(model.module, updater, group, job.optimizer.clip_norm, outer=outer, reproducible=bits is not None)
    if isinstance(updater.spread, FSDP2DataParallel):
        calling = updater.spread.wrap_as_forward
        model = replace(model, loss_sum=calling(model.loss_sum), logits=calling(model.logits))
    kept, saved = job.checkpoint.keep, folder / "checkpoints"
    state = RunState(model.module, updater, group, saved, kept, data.fingerprint, outer, bits)
    steps = job.run.steps if job.run.steps is not None else data.steps_for_epochs(job.run.epochs or 1.0)
    return Parts(group, layout, data, model, engine, state, steps)


def _agree_on_data(data: BatchLoader, group: RankGroup) -> None:
    """Machines with other files would train on samples that do not belong together."""
    mine = derive_seed(data.fingerprint)
    first = torch.tensor([mine], device=group.device)
    broadcast(first, group)
    if first.item() != mine:
        raise InputError(
            f"the data of rank {group.rank} (fingerprint {data.fingerprint}) is not that of rank 0; give every machine "
            "the same files, or a folder made by `motet data build` (`stdlib` differs between Python versions)"
        )


def monitoring(job: Job, group: RankGroup, folder: Path, callbacks: Sequence[Callback]) -> EventDispatcher:
    """Rank 0 tells; the others keep silent."""
    if group.rank != 0:
        return EventDispatcher([])
    return open_event_dispatcher(job.monitor, folder, job.model_dump(mode="json"), callbacks)


def restore(parts: Parts) -> Restored:
    newest = newest_checkpoint(parts.state.folder)
    return (newest, *parts.state.restore(newest)) if newest else (None, 0, [])


def train(
    job: Job,
    parts: Parts,
    restored: Restored,
    monitor: EventDispatcher,
    stop: StopFlag,
    stepper: Steps | None = None,
) -> Outcome:
    """`stepper`: who does the steps, if not this rank with its group."""
    newest, done, changes = restored
    compute = RECIPES[job.precision.recipe].compute
    this = discover_device(parts.group.device, [compute, "float32"] if compute == "bfloat16" else [compute])
    resumed = f"checkpoints/{newest.name}" if newest else None
    monitor.on_event(_started(job, parts, this, done, resumed))
    for text in [*changes, *bfloat16_warnings(this)]:
        monitor.on_event(WarningIssued(text=text))
    progress = Progress(done, parts.steps)
    with told_to_the_end(monitor.on_event, progress):
        Loop(
            job=job,
            stepper=stepper or parts.stepper(job),
            state=parts.state,
            progress=progress,
            evaluate=functools.partial(evaluate_split, job, parts),
            describe=_describer(job, parts, this),
            tell=monitor.on_event,
            stop_requested=lambda: stop.requested,
        ).run()
        if progress.done == progress.steps:
            _sample(job, parts, progress.done, monitor)
    return Outcome(progress.done, progress.steps)


def _started(job: Job, parts: Parts, this: LocalDevice, done: int, resumed_from: str | None) -> RunStarted:
    return RunStarted(
        name=job.name,
        ranks=parts.ranks,
        threads=torch.get_num_threads(),
        device=this.name,
        parameters=parameter_count(parts.model.module),
        data=parts.data.fingerprint,
        first_step=done + 1,
        last_step=parts.steps,
        resumed_from=resumed_from,
        num_classes=parts.model.num_classes,
    )


def _describer(job: Job, parts: Parts, this: LocalDevice) -> Describer:
    peak = this.peak_flops.get(RECIPES[job.precision.recipe].compute)
    return Describer(
        flops_per_step=training_flops(job),
        peak_flops=peak.value * parts.ranks if peak else None,
        memory_bytes=functools.partial(peak_memory_bytes, parts.group.device),
        epoch_at=parts.data.epoch_at,
    )


def evaluate_split(job: Job, parts: Parts, split: str, data: Splits | None = None) -> Evaluation | None:
    """None when the job keeps nothing apart to judge on. `data`: what is judged on, if not that of the run."""
    if not parts.data.evaluation_batches(split):
        return None
    broadcast_buffers(parts.model.module, parts.engine.peers)
    shares = (parts.group, parts.layout, job.data.batch_sequences)
    with parts.engine.agreed():
        return evaluate(parts.model, data or parts.data, split, job.monitor.evaluate_batches, shares)


def _sample(job: Job, parts: Parts, done: int, monitor: EventDispatcher) -> None:
    """Text from the trained model, where it can write any. All ranks write, since each may have a part of the model."""
    if not job.monitor.sample_tokens or not parts.model.is_autoregressive:
        return
    tokenizer = parts.data.tokenizer
    prompt = tokenizer.encode(job.monitor.sample_prompt) or [tokenizer.end_id]
    monitored = job.monitor
    with parts.engine.agreed():
        written = generate_tokens(
            parts.model, prompt, monitored.sample_tokens, job.run.seed, monitored.sample_temperature
        )
    monitor.on_event(TextSampled(step=done, prompt=job.monitor.sample_prompt, text=tokenizer.decode(written)))
