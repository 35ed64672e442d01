"""The live bytes of a step of a job on one rank, measured by category."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from motet.collectives.execute.work_queue import WorkHandle
from motet.core.batch import Batch
from motet.memory.measured_costs import MEASURED_STEPS
from motet.memory.memory_timeline import Category, MemoryTimeline
from motet.memory.storage_tracker import StepCategories, tensors_reachable_from
from motet.models.user_module import find_blocks
from motet.parallel.data_parallel.fsdp import local_shard
from motet.parallel.data_parallel.zero import CommUnitAction
from motet.parallel.layout import Layout
from motet.parallel.process.launch_environment import RankEnvironment
from motet.parallel.process.process_group import RankGroup, start_process_group
from motet.train.build import TrainingComponents, build_components, precision_context
from motet.train.engine import StepStats, TrainingEngine
from motet.train.job import Job
from motet.train.launch.failures import StopFlag
from motet.train.launch.run_folder import read_stored_job
from motet.train.memory_check.step_prediction import (
    StepMemory,
    bytes_elsewhere,
    knows_activations,
    predict_host_activations,
    predict_timeline,
)

StateTensors = Sequence[tuple[Category, Sequence[Tensor]]]


def steps_before(job: Job) -> int:
    """The steps before the measured one: moments exist after the first, and policies are chosen after some more."""
    return max(1, steps_before_gathers(job), len(MEASURED_STEPS) if job.memory.recompute == "auto" else 0)


def steps_before_gathers(job: Job) -> int:
    """The steps before the first one that gathers updated parameters. The host updates them while the next step
    computes if the update is delayed, and they arrive while another one computes if it overlaps the forward."""
    is_on_device = job.memory.optimizer == "device"
    return 0 if is_on_device else (job.memory.update == "delayed") + (job.communication.overlap == "forward")


def measure_on_group(job: Job, group: RankGroup, folder: Path) -> StepMemory:
    """Measure a step of a job on this rank. All ranks of the group call this."""
    with precision_context(job, group.device):
        components = build_components(job, group, folder)
        engine, packed = components.engine, list[bool]()
        train_step = components.make_train_step(job)
        with _noting_batches(components, packed):
            timeline = measure_timeline(
                engine,
                lambda step: train_step.step(step, job.optimizer.learning_rate),
                StepCategories(names_of_blocks(engine.module)),
                steps_before=steps_before(job),
            )
    return compare_with_prediction(job, engine, components.layout, timeline=timeline, is_packed=any(packed))


def measure_timeline(
    engine: TrainingEngine, take_step: Callable[[int], object], tracker: StepCategories, *, steps_before: int
) -> MemoryTimeline:
    """The timeline of a step, after others."""
    with tracker.watching(), _marking(engine, tracker):
        tracker.begin_step([("other state", _reachable_tensors(engine))])
        for step in range(steps_before + 1):
            if step == steps_before:
                tracker.begin_step(state_tensors(engine))
            take_step(step)
        return tracker.end_step()


def compare_with_prediction(
    job: Job, engine: TrainingEngine, layout: Layout, *, timeline: MemoryTimeline, is_packed: bool
) -> StepMemory:
    """A measured timeline, and the one that is predicted for the same rank and policies."""
    recomputation, rank = engine.recomputation.recomputation, engine.step_group.rank
    policies = tuple(recomputation.policies) if recomputation else ()
    how: dict[str, Any] = {"policies": policies, "is_packed": is_packed}
    predicted = predict_timeline(job, engine.plan, layout, rank=rank, **how)
    activations = predict_host_activations(job, engine.plan, layout, rank=rank, **how).peak_bytes
    elsewhere = bytes_elsewhere(engine.plan, job.precision.resolved, job.optimizer, rank=rank, activations=activations)
    return StepMemory(engine.group.rank, timeline, predicted, knows_activations(job), elsewhere)


def names_of_blocks(module: nn.Module) -> dict[nn.Module, str]:
    """Blocks by the names that the module gives them."""
    names = {inner: name for name, inner in module.named_modules()}
    return {block: names[block] for block in find_blocks(module)}


def state_tensors(engine: TrainingEngine) -> StateTensors:
    """The tensors that a rank keeps from step to step; a tensor of two categories counts in the first."""
    optimizer, sharded = engine.optimizer, engine.optimizer.sharded_parameters
    is_on_device = engine.plan.states == "device"
    moments = [
        shard.values
        for kind, shards in (optimizer.state_by_kind() if is_on_device else {}).items()
        if kind != "master"
        for shard in shards.values()
    ]
    parameters = [p.data for p in engine.module.parameters() if not (isinstance(p, DTensor) and p.requires_grad)]
    if not is_on_device:  # Rows of stage 3 are copies of the masters
        parameters = [local_shard(p).values for p in engine.module.parameters()]
    errors = [t for each in sharded.engines for t in each.communicator.compression_state().values()]
    return [
        ("gradients", sharded.local_gradients()),
        ("parameters", [*parameters, *engine.module.buffers()]),
        ("master parameters", sharded.local_masters if is_on_device else []),
        ("moments", moments),
        ("compression errors", errors),
        ("other state", _reachable_tensors(engine)),
    ]


def _reachable_tensors(engine: TrainingEngine) -> list[Tensor]:
    on_meta = engine.group.device.type == "meta"
    return tensors_reachable_from(*engine.recomputation.roots, without=(RankGroup, ProcessGroup), on_meta=on_meta)


@contextmanager
def _marking(engine: TrainingEngine, tracker: StepCategories) -> Iterator[None]:
    """Mark the tensors that data parallelism communicates, and the sums of gradients."""
    sharded, update = engine.optimizer.sharded_parameters, engine.update

    def update_marked(*args: Any, **named: Any) -> StepStats:
        with tracker.paused():
            gradients = sharded.local_gradients()
        tracker.assign("gradients", gradients)
        del gradients
        return update(*args, **named)

    with ExitStack() as stack:
        for each in sharded.engines:
            execute = partial(_execute_marked, each.communicator.execute, tracker)
            stack.enter_context(_replaced_method(each.communicator, "execute", execute))
        stack.enter_context(_replaced_method(engine, "update", update_marked))
        yield


def _execute_marked(
    execute: Callable[..., WorkHandle],
    tracker: StepCategories,
    action: CommUnitAction,
    *args: Any,
    source: Tensor | None = None,
    **named: Any,
) -> WorkHandle:
    _, output = args
    tracker.assign("gathered or unreduced", [output] if source is None else [output, source])
    return execute(action, *args, source=source, **named)


@contextmanager
def _noting_batches(components: TrainingComponents, packed: list[bool]) -> Iterator[None]:
    read = components.data.batch

    def batch(step: int, rows: range) -> Batch:
        values = read(step, rows)
        packed.append(values.documents is not None)
        return values

    with _replaced_method(components.data, "batch", batch):
        yield


@contextmanager
def _replaced_method(owner: object, name: str, replacement: Callable[..., Any]) -> Iterator[None]:
    vars(owner)[name] = replacement
    try:
        yield
    finally:
        del vars(owner)[name]


# --- in rank processes ------------------------------------------------------------------------------


def measure_on_rank(rank_env: RankEnvironment, stop: StopFlag, folder: str) -> int:
    """The function of a rank: measure the job of the folder, and write the result there."""
    stop.exit_on_sigterm()
    torch.set_num_threads(1)
    path = Path(folder)
    job = read_stored_job(path)
    with start_process_group(rank_env, "cpu", job.run.timeout_s, cpu_backend=job.run.cpu_backend) as group:
        measured = measure_on_group(job, group, path / "run")
    (path / f"memory-{rank_env.rank}.json").write_text(json.dumps(measured.as_json()), encoding="utf-8")
    return 0
