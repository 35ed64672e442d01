"""Records of a step of the engine: gradients before each reduction and after it, the update, and the state."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from math import ceil, prod
from typing import Any

import torch
from torch import Tensor

from motet.collectives.execute.work_queue import WorkHandle
from motet.parallel.data_parallel.comm_units import CommUnit, SyncGroupPlan
from motet.parallel.data_parallel.flat_parameters import LocalShard
from motet.parallel.data_parallel.fsdp import local_shard
from motet.parallel.data_parallel.zero import CommUnitAction
from motet.parallel.process.module_inventory import persistent_buffers
from motet.parity.record.activation_parts import parts_of_activations
from motet.parity.record.recomputed_tensors import RecomputedBuffers
from motet.parity.record.tensor_recorder import MASTER_PREFIX, TensorKind, TensorRecorder
from motet.train.engine import StepStats, TrainingEngine
from motet.train.pipeline.pipeline_step import MicroBatchWork


def record_step(engine: TrainingEngine, recorder: TensorRecorder, step: Callable[[], None]) -> None:
    """Record everything that a step of the engine computes."""
    place_recorder(engine, recorder)
    record_parameters(engine, recorder, "starting parameter")
    buffers = RecomputedBuffers(lambda: recorder.microbatch, recorder.add_recomputed)
    with ExitStack() as hooks:
        hooks.enter_context(recorder.recording_hooks(engine.module))
        hooks.enter_context(_recording_update(engine, recorder))
        hooks.enter_context(_recording_reductions(engine, recorder))
        hooks.enter_context(_recording_stages(engine, recorder))
        hooks.enter_context(buffers.watching(engine.module))
        step()
    buffers.check_unchanged(engine.module)
    record_parameters(engine, recorder, "parameter")
    for name, buffer in persistent_buffers(engine.module).items():
        if name in recorder.specs:
            recorder.add_shard("buffer", name, buffer)


def record_parameters(engine: TrainingEngine, recorder: TensorRecorder, kind: TensorKind) -> None:
    """Record this rank's parts of the parameters of the model."""
    for name, parameter in engine.module.named_parameters():
        if name in recorder.specs:
            recorder.add_shard(kind, name, local_shard(parameter))


def place_recorder(engine: TrainingEngine, recorder: TensorRecorder) -> None:
    """Let a recorder know which parts of tensors this rank has."""
    rank = recorder.rank = engine.step_group.rank
    specs = {tensor: engine.plan.specs[tensor.name].get(rank) for tensor in engine.plan.inventory.tensors}
    recorder.specs = {name: spec for t, spec in specs.items() if spec for name in (t.name, *t.aliases)}
    recorder.blocks = engine.plan.model_sharding.block_names
    recorder.activations = parts_of_activations(engine.plan, recorder.activation_order, row_tokens=1)


@contextmanager
def _recording_update(engine: TrainingEngine, recorder: TensorRecorder) -> Iterator[None]:
    """Record the sums and updates of the engine, which stays the same object: its state is compared, too."""
    original_update, sharded = engine.update, engine.optimizer.sharded_parameters

    def update(*args: Any, **kwargs: Any) -> StepStats:
        updates_later = sharded.updates_on_arrival  # Sums arrive after the update has begun
        summed = {} if updates_later else sharded.local_shards(sharded.local_gradients())
        dtype = sharded.local_masters[0].dtype  # Buckets sum in another dtype if precision.reduce_dtype says so
        summed = {n: shard._replace(values=shard.values.to(dtype, copy=True)) for n, shard in summed.items()}
        with engine.optimizer.capture_gradients() as captured:
            stats = original_update(*args, **kwargs)
            sharded.wait_for_pending()
            clipped = sharded.local_shards(captured) if captured else {}
        if updates_later:
            scale = engine.gradient_scale(stats.grad_norm, stats.count)
            summed = {name: shard._replace(values=shard.values / scale) for name, shard in clipped.items()}
        recorder.add_shards("gradient", summed)
        if stats.experts is not None and dtype == torch.float64:  # With less precision some tokens choose others
            recorder.add_expert_loads(stats.experts, stats.count)
        recorder.add_step_scalars(stats.count, stats.loss, stats.grad_norm)
        recorder.add_shards("clipped gradient", clipped)
        record_state(recorder, engine.optimizer.state())
        return stats

    with patched_method(engine, "update", update):
        yield


def record_state(recorder: TensorRecorder, state: Mapping[str, LocalShard | Tensor]) -> None:
    """Record the state of an optimizer; masters come last, for they are updated last."""
    for name in sorted(state, key=lambda name: name.startswith(MASTER_PREFIX)):
        recorder.add_shard("state", name, state[name])


@contextmanager
def patched_method(owner: object, name: str, replacement: Callable[..., Any]) -> Iterator[None]:
    """Replace a method of this object alone."""
    vars(owner)[name] = replacement
    try:
        yield
    finally:
        del vars(owner)[name]


@contextmanager
def _recording_stages(engine: TrainingEngine, recorder: TensorRecorder) -> Iterator[None]:
    """Record the tensors of a pipeline under the number of their micro-batch."""
    pipeline = engine.pipeline
    if pipeline is None:
        yield
        return
    recorder.stage_run, original = pipeline.stages.current_run, pipeline.step

    def microbatch_at(read: Callable[[int], MicroBatchWork], index: int) -> MicroBatchWork:
        recorder.next_microbatch = index
        microbatch = read(index)
        place = recorder.microbatch, recorder.rows, recorder.is_recording
        return replace(microbatch, context=partial(recorder.within_microbatch, place, microbatch.context))

    def step(read: Callable[[int], MicroBatchWork], microbatches: int, **options: Any) -> list[Tensor]:
        return original(partial(microbatch_at, read), microbatches, **options)

    with patched_method(pipeline, "step", step):
        yield


@contextmanager
def _recording_reductions(engine: TrainingEngine, recorder: TensorRecorder) -> Iterator[None]:
    """Record gradients before each reduction."""
    with ExitStack() as stack:
        for each in engine.optimizer.sharded_parameters.engines:
            execute = _recording_execute(each.communicator.execute, each.plan, recorder, rank=engine.step_group.rank)
            stack.enter_context(patched_method(each.communicator, "execute", execute))
        yield


def _recording_execute(
    original: Callable[..., WorkHandle], plan: SyncGroupPlan, recorder: TensorRecorder, *, rank: int
) -> Callable[..., WorkHandle]:
    position = plan.position(rank)

    def execute(action: CommUnitAction, unit_id: int, output: Tensor, **options: Any) -> WorkHandle:
        if action.tensor == "gradients" and not action.is_gather and recorder.is_recording:
            source = options.get("source")
            gradients = output if source is None else source
            _record_gradients(recorder, plan.units[unit_id], action, gradients=gradients, position=position)
        return original(action, unit_id, output, **options)

    return execute


def _record_gradients(
    recorder: TensorRecorder, unit: CommUnit, action: CommUnitAction, *, gradients: Tensor, position: int | None
) -> None:
    reductions = [each for each in unit.schedule if each.tensor == "gradients" and each.over and not each.is_gather]
    is_first = action == reductions[0]
    if action.kind == "tree_all_reduce":  # Its inputs are sums over parts of a tree
        return
    groups = () if is_first else reductions[0].rank_groups
    shard = next((ranks.index(position) for ranks in groups if position in ranks), None)
    microbatch = recorder.microbatch if action.moment == "microbatch" else -1
    for name, start, values in unit_members(unit, gradients, shard):
        local = LocalShard(torch.Size(unit.shapes[name]), start, values)
        recorder.add_shard("local gradient" if is_first else "partial sum", name, local, microbatch=microbatch)


def unit_members(unit: CommUnit, flat: Tensor, shard: int | None) -> Iterator[tuple[str, int, Tensor]]:
    """(Name, first element, values) of each member of a flat unit, or of one of its shards."""
    ranges = {name: (first, stop) for name, first, stop in unit.member_ranges(shard)}
    if unit.kind == "bucket":
        (span,) = unit.spans
        base = span.start + (0 if shard is None else span.shard_ranges[shard][0])
        for member in unit.members:
            first, stop = ranges.get(member.name, (0, 0))
            if first < stop:
                offset = member.start + first - base
                yield member.name, first, flat[offset : offset + stop - first]
        return
    shapes, by_shard, offset = unit.shapes, flat.view(unit.shards if shard is None else 1, -1), 0
    widths = {m.name: ceil(shapes[m.name][0] / unit.shards) * prod(shapes[m.name][1:]) for m in unit.members}
    if by_shard.shape[1] != sum(widths.values()):  # FSDP2 before torch 2.13 leaves out parameters without a gradient
        return
    for name, width in widths.items():
        first, stop = ranges.get(name, (0, 0))
        if first < stop:
            yield name, first, by_shard[:, offset : offset + width].reshape(-1)[: stop - first]
        offset += width
