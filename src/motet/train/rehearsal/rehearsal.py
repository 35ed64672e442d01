"""`motet train --rehearse`: one rank of a job, or one of each kind, in one process.

The rehearsal of one rank: its start and a step of shapes, by the code of a run, on torch's meta device.

The process group is torch's fake one, so no other process takes part: where ranks agree on something, this rank agrees
with itself. Data is random tokens in the shapes of the job. Nothing is written but the cache of proofs.

The phases of a rehearsal: their time, the peak of the host's memory, and a line of progress for long ones.

The collectives of a step: started by a rank on its process groups, and planned.
"""

import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch

from motet.cluster.local_device import peak_memory_bytes
from motet.core import trace
from motet.core.batch import Batch
from motet.core.errors import InputError, check_input
from motet.core.trace import log_if_slow
from motet.core.units import DTYPE_BYTES
from motet.data.corpus.prepare import find_data
from motet.memory import storage_tracker
from motet.memory.storage_tracker import StepCategories
from motet.models.build import TrainableModel, build_trainable_model
from motet.models.settings import ModelSettings, UserModuleSettings
from motet.models.spec.layer_specs import BlockPolicy, MicroBatchShape
from motet.models.trace import meta_kernels
from motet.models.trace.record_forward import KnownValuesMode
from motet.parallel.data_parallel.comm_units import CommUnit, SyncGroupPlan
from motet.parallel.data_parallel.communication.communication_settings import BACKEND
from motet.parallel.data_parallel.zero import CommUnitAction
from motet.parallel.layout import Layout
from motet.parallel.model_sharding import CONTEXT_DIMENSION, PIPELINE_DIMENSION, TENSOR_DIMENSION, ModelSharding
from motet.parallel.parallel_dims import ParallelDims
from motet.parallel.pipeline.border_bytes import border_traffic
from motet.parallel.pipeline.pipeline_schedule import PipelineAction
from motet.parallel.process.process_group import RankGroup, default_rank_group, world_of_one
from motet.parallel.step_plan.attention_traffic import AttentionComm, attention_comms
from motet.parallel.step_plan.expert_traffic import expert_collectives
from motet.parallel.step_plan.plan import StepPlan
from motet.parallel.step_plan.traffic import activation_collectives
from motet.parallel.torch_private import fake_process_group, kernels_of_cpu_on_meta, message_of_call
from motet.precision.recipe import PrecisionRecipe
from motet.train.build import build_job_engine, precision_context
from motet.train.engine import TrainingEngine
from motet.train.job import Job, batch_shape
from motet.train.job_step_plan import block_policies, blocks_computed_again
from motet.train.launch.preflight import check_classes, check_job, check_objective, check_vocabulary
from motet.train.memory_check.predicted_ranks import check_device_limit
from motet.train.memory_check.step_memory import (
    compare_with_prediction,
    measure_timeline,
    names_of_blocks,
    steps_before_gathers,
)
from motet.train.memory_check.step_prediction import StepMemory
from motet.train.proof.proposed_sharding import RandomBatches, sharding_of_model
from motet.train.rehearsal.rank_kinds import ranks_of_each_kind
from motet.train.step import MicroBatchLoop, TrainStep

_VALUE_WORDS = ("on meta tensors", "meta tensor", "Meta tensor")  # Words of torch's errors where a value is read


def _waiting_problem(error: BaseException) -> str:
    outside = ("/torch/", storage_tracker.__file__, meta_kernels.__file__)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not any(path in f.filename for path in outside)]
    where = f"{frames[-1].filename}, line {frames[-1].lineno} ({frames[-1].line})"
    return (
        f"a step reads a value of a tensor on its device, which makes the host wait, and cannot be rehearsed: {where}; "
        "keep the number on the device"
    )


@dataclass(frozen=True)
class RehearsalPhase:
    """A part of the start of a rank, or its step."""

    name: str
    seconds: float
    peak_host_bytes: int  # Peak of this process up to the end of the phase


@dataclass
class PhaseRecorder:
    """Records the phases of a rank. Parts of a phase are the outermost spans of the code that a rank runs."""

    log: Callable[[str], None]
    phases: list[RehearsalPhase] = field(default_factory=list)
    _shows_parts: bool = False

    @contextmanager
    def phase(self, name: str, *, shows_parts: bool = False) -> Iterator[None]:
        """Record the code of a block as a phase; with `shows_parts`, each of its outermost spans instead."""
        self._shows_parts, start_s = shows_parts, time.perf_counter()
        try:
            with log_if_slow(self.log, f"rehearsal: {name} ..."), ExitStack() as stack:
                if shows_parts:
                    stack.enter_context(trace.install_sink(self))
                yield
        except RuntimeError as error:
            if any(words in str(error) for words in _VALUE_WORDS):
                raise InputError(_waiting_problem(error)) from error
            raise
        if not shows_parts:
            self._add(name, time.perf_counter() - start_s)

    def on_span(self, action: str, *times: float) -> None:
        """Record a part of the phase that is under way."""
        start, stop, depth = times
        if depth == 0:
            self._add(action, stop - start)

    def on_count(self, name: str, value: float) -> None:
        """Do nothing: collectives are counted where they reach the process group."""

    def _add(self, name: str, seconds: float) -> None:
        self.phases.append(RehearsalPhase(name, seconds, peak_memory_bytes("cpu")))


_MOST_AGREED_BYTES = 4096  # The largest agreement of all ranks, which has a few numbers for each
CollectiveKey = tuple[str, tuple[int, ...]]  # The collective, and the ranks of its group
MessageSizes = Counter[tuple[CollectiveKey, int]]  # (Key, bytes of one message) -> how often


@dataclass(frozen=True)
class CollectiveCount:
    """The collectives of one kind over one group of ranks in a step."""

    collective: str
    over: str  # The dimensions along which the ranks of the group differ
    ranks: int
    count: int
    bytes: int  # The sum of the larger buffer of each collective
    planned_count: int | None  # None: agreements, which no plan has
    planned_bytes: int | None

    @property
    def is_as_planned(self) -> bool:
        return self.planned_bytes in (None, self.bytes)


@dataclass
class StartedCollectives:
    """Counts calls of torch.distributed by collective, group and size."""

    sizes: MessageSizes = field(default_factory=Counter)

    def on_message(self, operator: Any, args: Sequence[Any]) -> None:
        """Count a call."""
        collective, ranks, size = message_of_call(operator, args)
        self.sizes[(collective, ranks), size] += 1


def compare_with_plan(started: MessageSizes, planned: MessageSizes, dims: ParallelDims) -> list[CollectiveCount]:
    """The collectives of a step by kind and group, those of the plan first.

    A plan has one collective where the loss has one for each block of rows, so bytes are compared. A collective that is
    started beyond the plan, in a size that the plan does not have, is an agreement of a few numbers. Where the loss has
    blocks, too, an agreement is a small message whose bytes are the excess over the plan.
    """
    rows = list[CollectiveCount]()
    for key in dict.fromkeys(key for key, _ in (*started, *planned)):
        sizes, expected = _sizes_for_key(started, key), _sizes_for_key(planned, key)
        beyond = Counter({size: times for size, times in sizes.items() if size not in expected})
        is_more = _bytes(sizes) != _bytes(expected) and _bytes(sizes - beyond) >= _bytes(expected)
        if expected and not is_more:
            excess = _bytes(sizes) - _bytes(expected)
            beyond = Counter({n: times for n, times in beyond.items() if n * times == excess <= _MOST_AGREED_BYTES})
        place = key[0], _dimensions(key[1], dims), len(key[1])
        if expected:
            planned_totals = expected.total(), _bytes(expected)
            rows.append(CollectiveCount(*place, (sizes - beyond).total(), _bytes(sizes - beyond), *planned_totals))
        if beyond:
            rows.append(CollectiveCount(*place, beyond.total(), _bytes(beyond), None, None))
    return sorted(rows, key=lambda row: (row.planned_bytes is None, -row.bytes))


def _sizes_for_key(sizes: MessageSizes, key: CollectiveKey) -> Counter[int]:
    return Counter({size: times for (other, size), times in sizes.items() if other == key})


def _bytes(sizes: Counter[int]) -> int:
    return sum(size * times for size, times in sizes.items())


def _dimensions(ranks: Sequence[int], dims: ParallelDims) -> str:
    """The dimensions in which ranks differ."""
    indices = [dims.coordinates(rank % dims.ranks) for rank in ranks]
    return " ".join(name for name, _ in dims.sizes if len({each[name] for each in indices}) > 1)


def planned_collectives(
    plan: StepPlan,
    layout: Layout,
    recipe: PrecisionRecipe,
    *,
    model: ModelSettings,
    shape: MicroBatchShape,
    rank: int,
    slices: int,
    policies: Sequence[BlockPolicy] = (),
) -> MessageSizes:
    """The collectives of a rank in a step with micro-batches of complete rows of this shape; each of the `slices` ranks
    that have an activation sends one slice. Backward computes blocks again by their `policies`."""
    planned: MessageSizes = Counter()
    recomputed = blocks_computed_again(policies)
    for group in plan.groups:
        ranks = next((ranks for ranks in group.group.sum_groups if rank in ranks), ())
        actions = ((unit, action) for unit in group.units for action in unit.schedule)
        for unit, action in actions if ranks else ():
            _add_action(planned, group, unit, action=action, ranks=ranks, rank=rank, recipe=recipe)
    for each in activation_collectives(plan, shape, recipe, rank=rank, policies=policies):
        members = next(ranks for ranks in plan.dims.groups(each.over) if rank in ranks)
        planned[(each.collective, members), DTYPE_BYTES[each.dtype] * each.numel] += plan.microbatches
    for comm in attention_comms(plan, shape, recipe, rank=rank):
        _add_attention(planned, comm, microbatches=plan.microbatches, is_recomputed=comm.block in recomputed)
    for choices in expert_collectives(model, plan, layout, shape=shape, recipe=recipe, rank=rank):
        forwards = plan.microbatches * (1 + (choices.block in recomputed))
        planned[(choices.collective, choices.ranks), choices.bytes] += forwards
    if plan.model_sharding.stages:
        _add_messages(planned, plan, layout=layout, recipe=recipe, shape=shape, rank=rank, slices=slices)
    return planned


def _add_attention(planned: MessageSizes, comm: AttentionComm, *, microbatches: int, is_recomputed: bool) -> None:
    """Add collectives on gathered keys, or the bytes that a ring sends. Heads are exchanged in messages of sizes that
    the plan does not have."""
    forwards, others = 1 + is_recomputed, len(comm.ranks) - 1
    match comm.forward:
        case ("all-gather",):
            size = comm.forward_bytes * len(comm.ranks) // others
            planned[("all-gather", comm.ranks), size] += microbatches * (1 + forwards)
            planned[("reduce-scatter", comm.ranks), size] += microbatches
        case ("send",):
            planned[("send", comm.ranks), forwards * comm.forward_bytes + comm.backward_bytes] += microbatches


def _add_action(
    planned: MessageSizes,
    group: SyncGroupPlan,
    unit: CommUnit,
    *,
    action: CommUnitAction,
    ranks: tuple[int, ...],
    rank: int,
    recipe: PrecisionRecipe,
) -> None:
    place = ranks.index(rank)
    members = next((each for each in action.rank_groups if place in each), ()) if action.over else ()
    dtype = recipe.reduce if action.tensor == "gradients" else recipe.compute
    numel = {
        "reduce_scatter": lambda: unit.reduction_spec(None).numel,
        "all_reduce": lambda: unit.reduction_spec(place % unit.shards if unit.shards > 1 else None).numel,
        "all_gather": lambda: unit.gathered_numel,
    }.get(action.kind)
    if numel is None or len(members) < 2 or not (size := DTYPE_BYTES[dtype] * numel()):
        return
    key = action.kind.replace("_", "-"), tuple(ranks[index] for index in members)
    planned[key, size] += action.times(group.group.sharding.microbatches)


def _add_messages(
    planned: MessageSizes,
    plan: StepPlan,
    *,
    layout: Layout,
    recipe: PrecisionRecipe,
    shape: MicroBatchShape,
    rank: int,
    slices: int,
) -> None:
    """Add the messages between stages, one for each tensor of a border."""
    members, tensor_ranks = (
        next(ranks for ranks in plan.dims.groups(dim) if rank in ranks)
        for dim in (PIPELINE_DIMENSION, TENSOR_DIMENSION)
    )
    sizes: Mapping[str, int] = plan.part_on_rank(shape, rank).sizes_by_name
    steps = layout.pipeline_schedule(plan.microbatches).steps[members.index(rank)]
    for message in (message for step in steps if not isinstance(step, PipelineAction) for message in step):
        kind = "receive" if message.is_receive else "send"
        for wire in plan.model_sharding.wires[message.border]:
            traffic_of = partial(border_traffic, ModelSharding(wires=((wire,),)), sizes, compute=recipe.compute)
            (sent,), (complete,) = traffic_of(slices=slices), traffic_of()
            if message.is_gradient and not wire.needs_gradient:
                continue
            planned[(kind, members), sent.activation_bytes] += 1
            if message.is_receive and sent != complete:  # The slices are gathered
                planned[("all-gather", tensor_ranks), complete.activation_bytes] += 1


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
    way_of_check: int | None  # The result of the model's check on tokens, from the proof


def prepare_rehearsal(job: Job, ranks: int, recorder: PhaseRecorder) -> JobToRehearse:
    """Check a job as its ranks do, and prove how they split the model."""
    with recorder.phase("preflight"):
        check_input(ranks == job.run.ranks, f"{ranks} ranks, but run.ranks = {job.run.ranks}")
        _refuse_unsupported(job)
        layout = check_job(job, ranks)
        check_device_limit(job, ranks)
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
    if layout.dims.size(TENSOR_DIMENSION, PIPELINE_DIMENSION, CONTEXT_DIMENSION) > 1:
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
    with fake_process_group(rank, ranks) if ranks > 1 else world_of_one():
        local_ranks = range(first, min(first + RANKS_PER_HOST, ranks))
        yield replace(default_rank_group(_META), local_ranks=local_ranks)


def _rehearse_step(
    prepared: JobToRehearse, model: TrainableModel, engine: TrainingEngine, *, recorder: PhaseRecorder
) -> RankRehearsal:
    job, layout, rank, started = prepared.job, prepared.layout, engine.group.rank, StartedCollectives()
    loop = MicroBatchLoop(model, _ExpectedBatches(job, model), engine, layout, job.data.batch_sequences)
    train_step = TrainStep(engine, loop)

    def take_step(step: int) -> None:
        started.sizes.clear()  # Those of the steps before
        with KnownValuesMode() if _has_own_code(job) else nullcontext():
            train_step.step(step, job.optimizer.learning_rate)

    blocks = names_of_blocks(engine.module)
    tracker = StepCategories(blocks, on_meta=True, on_message=started.on_message)
    timeline = measure_timeline(engine, take_step, tracker, steps_before=steps_before_gathers(job))
    shape, slices = batch_shape(job, len(engine.plan.rows_by_rank[rank][0])), 1
    if engine.pipeline and engine.pipeline.state.slices:
        slices = engine.pipeline.state.slices.world
    recipe = job.precision.resolved
    planned = planned_collectives(
        *(engine.plan, layout, recipe),
        model=job.model,
        shape=shape,
        rank=rank,
        slices=slices,
        policies=block_policies(job, engine.plan),
    )
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


@dataclass(frozen=True)
class Rehearsal:
    """The rehearsed ranks of a job."""

    job: str
    layout: str
    ranks: int
    ranks_per_host: int  # Assumed
    phases: list[RehearsalPhase]  # Phases before the ranks differ
    rehearsed: list[RankRehearsal]

    def as_json(self) -> dict[str, Any]:
        """The JSON of a rehearsal."""
        head = {name: getattr(self, name) for name in ("job", "layout", "ranks", "ranks_per_host")}
        phases = [asdict(phase) for phase in self.phases]
        return {**head, "phases": phases, "rehearsed": [_rank_as_json(each) for each in self.rehearsed]}


def rehearse(job: Job, ranks: int, rank: int | None, *, all_kinds: bool, log: Callable[[str], None]) -> Rehearsal:
    """Rehearse a rank of a job on as many ranks, or one of each kind. Raises as the rank would be refused."""
    check_input(
        rank is None or rank < ranks,
        f"--rank {rank} is beyond the last of {ranks} ranks; give one from 0 to {ranks - 1}, or more --ranks",
    )
    recorder, rehearsed = PhaseRecorder(log), list[RankRehearsal]()
    prepared = prepare_rehearsal(job, ranks, recorder)
    first, plan = rehearse_rank(prepared, rank or 0, PhaseRecorder(log))
    kinds = ranks_of_each_kind(plan, job) if all_kinds else [first.rank]
    for index, each in enumerate(kinds):
        if len(kinds) > 1:
            log(f"rehearsal: rank {each}, {index + 1} of {len(kinds)} kinds")
        rehearsed.append(first if each == first.rank else rehearse_rank(prepared, each, PhaseRecorder(log))[0])
    return Rehearsal(job.name, str(prepared.layout), ranks, min(ranks, RANKS_PER_HOST), recorder.phases, rehearsed)


def _rank_as_json(rehearsal: RankRehearsal) -> dict[str, Any]:
    comparisons = [asdict(each) | {"difference": each.difference} for each in rehearsal.memory.comparisons()]
    return {
        "rank": rehearsal.rank,
        "coordinates": rehearsal.coordinates,
        "peak_bytes": rehearsal.memory.shown.peak,
        "memory": comparisons,
        "collectives": [asdict(each) | {"is_as_planned": each.is_as_planned} for each in rehearsal.collectives],
        "phases": [asdict(phase) for phase in rehearsal.phases],
    }
