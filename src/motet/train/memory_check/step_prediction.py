"""The predicted timeline of the live bytes of a step on one rank, without torch.

State, and the peak of gathered and unreduced tensors, follow from the step plan; saved activations and workspace
from the sizes of the model, the policies of recomputation, and the order in which a rank computes.

The memory check: the need of each process by the plan of a step, and the limit that it exceeds.

A need is a lower bound, without activations: the bytes that a process holds at one moment of the second step.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from itertools import zip_longest
from typing import Any

from motet.cluster.host_limits import MemoryLimit, has_gpu_driver
from motet.core.errors import InputError
from motet.core.units import format_bytes
from motet.memory.memory_timeline import CATEGORIES, Category, MemoryTimeline, StorageLife
from motet.memory.policy_choice import Place, StatePlaces, fixed_policies
from motet.memory.tiers.file_layout import FileLayout
from motet.models.settings import UserModuleSettings
from motet.models.spec.layer_specs import BlockPolicy, MatmulSpec, MicroBatchShape
from motet.models.spec.model_spec import ModelSpec, shape_on_gpu, spec_from_settings
from motet.parallel.data_parallel.communication.communication_settings import CommunicationSettings
from motet.parallel.layout import Layout
from motet.parallel.model_sharding import PIPELINE_DIMENSION, TENSOR_DIMENSION
from motet.parallel.pipeline.border_bytes import border_traffic
from motet.parallel.pipeline.pipeline_schedule import PipelineAction
from motet.parallel.step_plan.attention_memory import shared_rows, spec_on_context_rank
from motet.parallel.step_plan.gradient_sums import GradientStorage
from motet.parallel.step_plan.memory import model_state_memory, peak_transient_bytes
from motet.parallel.step_plan.plan import StepPlan, make_step_plan
from motet.parallel.step_plan.rows_on_disk import frozen_files, window_bytes
from motet.parallel.step_plan.sent_activations import HostActivations, sent_sizes
from motet.parallel.step_plan.stage_memory import StagePeaks, stage_peaks
from motet.parallel.step_plan.traffic import delayed_update_bytes, host_link_bytes, state_files
from motet.precision.recipe import PrecisionRecipe
from motet.train.job import Job, batch_shape, computed_shape
from motet.train.memory_check.step_drawing import SavedLife, StepDrawing
from motet.train.optimizer.optimizer_settings import OptimizerSettings

MemoryNeed = Mapping[str, int]  # Category -> bytes of one process, besides the process itself
MAX_PROPOSED_RANKS = 1024


def memory_need(
    plan: StepPlan,
    recipe: PrecisionRecipe,
    optimizer: OptimizerSettings,
    *,
    rank: int,
    place: Place = "device",
    activations: int = 0,
) -> MemoryNeed:
    """The need of a rank in one place; the host has this many bytes of activations at the end of a forward."""
    moments = optimizer.moments_per_parameter
    state = model_state_memory(plan, recipe, moments_per_parameter=moments, rank=rank).in_place(place, plan.states)
    if place != "device":
        is_host = place == "host"
        sums = host_link_bytes(plan, recipe, rank=rank).kept if is_host else 0
        need = {
            "parameters": state.rows_on_host + (window_bytes(plan, recipe, rank=rank) if is_host else 0),
            "master parameters": state.masters,
            "moments": state.moments,
            "gradients that were sent": sums,
        }
        if plan.delays and place == "host":
            delayed = delayed_update_bytes(plan, recipe, rank=rank)._asdict()
            need |= {name.replace("_", " "): size for name, size in delayed.items()}
        return _with_activations({name: size for name, size in need.items() if size}, activations)
    return {
        "parameters": state.parameters,
        "master parameters": state.masters,
        "gradients": state.gradients,
        "moments": state.moments,
        "compression errors": state.compression_errors,
        "gathered and unreduced tensors": peak_transient_bytes(plan, recipe, rank=rank),
    }


_ACTIVATIONS = "activations on the host"
_IN_BACKWARD = "gradients that were sent", "gathered and unreduced tensors"


def _with_activations(need: MemoryNeed, activations: int) -> MemoryNeed:
    """The need with activations, which are complete at the end of a forward; what backward makes is freed then."""
    if activations <= sum(need.get(name, 0) for name in _IN_BACKWARD):
        return need
    return {**{name: size for name, size in need.items() if name not in _IN_BACKWARD}, _ACTIVATIONS: activations}


def bytes_elsewhere(
    plan: StepPlan, recipe: PrecisionRecipe, optimizer: OptimizerSettings, *, rank: int, activations: int = 0
) -> dict[Place, int]:
    """The bytes that a rank keeps on its host, buffers of files included, and on disk. At the end of a forward the host
    has this many bytes of activations."""
    files: tuple[FileLayout, ...] = ()
    if plan.states == "disk":
        files = state_files(plan, recipe, moment_kinds=optimizer.moment_kinds, rank=rank)
        files += frozen_files(plan, recipe, rank=rank)
    host = sum(memory_need(plan, recipe, optimizer, rank=rank, place="host", activations=activations).values())
    buffers = sum(layout.memory_bytes for layout in files)
    return {"host": host + buffers, "disk": sum(layout.update_bytes for layout in files)}


def _need_in_places(
    plan: StepPlan,
    recipe: PrecisionRecipe,
    optimizer: OptimizerSettings,
    *,
    rank: int,
    places: Sequence[Place],
    activations: int,
) -> MemoryNeed:
    """The need of a rank in several places together."""
    total = Counter[str]()
    for place in places:
        total.update(memory_need(plan, recipe, optimizer, rank=rank, place=place))
    return _with_activations(dict(total), activations if "host" in places else 0)


def memory_problem(
    subject: str,
    needs: Sequence[MemoryNeed],
    limits: Iterable[MemoryLimit],
    *,
    index: int | None = None,
    propose: Callable[[int], list[str]] = lambda available: [],
) -> str:
    """A sentence about the limit that is exceeded most, or nothing.

    `needs` are those of all local processes; `index` is that of this one, or None before they are started.
    `propose` gives remedies with which no process needs more than the bytes that are available to it.
    """
    totals = [sum(need.values()) for need in needs]
    alone, count = max(totals) if index is None else totals[index], len(needs)

    def needed_bytes(limit: MemoryLimit) -> int:
        return sum(totals) + count * limit.process_bytes if limit.is_shared else alone + limit.process_bytes

    limit = max(limits, key=lambda each: needed_bytes(each) / max(each.total_bytes, 1))
    needed, shared = needed_bytes(limit), limit.is_shared and count > 1
    if needed <= limit.total_bytes:
        return ""
    largest = needs[totals.index(max(totals) if shared else alone)]
    shown = [f"{format_bytes(size)} of {name}" for name, size in largest.items() if size]
    shown.append(f"{format_bytes(limit.process_bytes)} of the process itself")
    where = f" in {count} processes: in {'each' if len(set(totals)) == 1 else 'the largest'}" if shared else ":"
    available = (limit.total_bytes // count if shared else limit.total_bytes) - limit.process_bytes
    remedies = propose(available)
    if shared and (fitting := limit.total_bytes // (max(totals) + limit.process_bytes)):
        remedies.append(f"start {fitting} on each machine at most")
    *others, last = [*remedies, "take a smaller model"]
    return (
        f"{subject} takes {format_bytes(needed)} of memory at least{where} {', '.join(shown)}; {limit.name} "
        f"{format_bytes(limit.total_bytes)}; {', '.join(others)}{' or ' * bool(others)}{last}"
    )


@dataclass(frozen=True)
class LimitedPlaces:
    """The places about whose memory a limit is, and the bytes of activations that a rank has on its host."""

    names: Sequence[Place]
    activations_on_host: Callable[[int], int] = lambda rank: 0


CPU_PLACES = LimitedPlaces(("device", "host"))


def layout_memory_problem(
    plan: StepPlan,
    layout: Layout,
    recipe: PrecisionRecipe,
    *,
    optimizer: OptimizerSettings,
    local_ranks: range,
    limits: Iterable[MemoryLimit],
    rank: int | None = None,
    places: LimitedPlaces = CPU_PLACES,
) -> str:
    """A sentence if the local ranks of a layout need more than a limit allows; `rank` is this one. The limits are those
    of the memory of these places, by default of CPU ranks, whose device is the host."""
    count = plan.dims.ranks  # Independent replicas need the same
    sent = {local: places.activations_on_host(local) for local in {local % count for local in local_ranks}}
    needs = {
        local: _need_in_places(plan, recipe, optimizer, rank=local, places=places.names, activations=size)
        for local, size in sent.items()
    }

    def propose(available: int) -> list[str]:
        """The first layout of stage 3 in which no rank needs more."""
        sharding = layout.sharding
        is_sharded = sharding.ranks == 1 or (sharding.zero, sharding.shards) == (3, sharding.ranks)
        powers = range(int(is_sharded), (MAX_PROPOSED_RANKS // layout.dims.ranks).bit_length())
        for power in () if plan.outer_groups or sharding.bucket_owners else powers:
            proposed = layout.at_stage_3(2**power)
            rows, communication = proposed.data_ranks * proposed.sharding.microbatches, CommunicationSettings()
            parts = plan.inventory, proposed, recipe
            made = make_step_plan(
                *parts,
                settings=communication,
                batch_sequences=rows,
                model_sharding=plan.model_sharding,
                places=StatePlaces(plan.states, plan.parameters, plan.delays, plan.window),
            )
            first_ranks = {ranks[0] for group in made.groups for ranks in group.group.sum_groups}  # One per shard
            need_of = partial(
                _need_in_places, made, recipe, optimizer, places=places.names, activations=max(sent.values())
            )
            needed = max(sum(need_of(rank=first).values()) for first in first_ranks)
            if needed <= available:
                ranks = f" on {made.dims.ranks} ranks" * bool(power)
                return [f"use layout.zero=3{ranks}, where a rank takes {format_bytes(needed)} besides the process"]
        return []

    return memory_problem(
        f"layout '{layout}'",
        [needs[local % count] for local in local_ranks],
        limits,
        index=None if rank is None else local_ranks.index(rank),
        propose=propose,
    )


_SHOWN_MICROBATCHES = 2  # Micro-batches without a pipeline are alike
_TABLE = "embedding.weight"
_TIMELINES = "measured", "predicted"
_STATE: Mapping[str, Category] = {
    "parameters": "parameters",
    "master parameters": "master parameters",
    "gradients": "gradients",
    "moments": "moments",
    "compression errors": "compression errors",
}
_COMPARED = tuple(_STATE.values())


@dataclass(frozen=True)
class StepMemory:
    """One step of one rank, measured and predicted."""

    rank: int
    measured: MemoryTimeline | None
    predicted: MemoryTimeline
    has_exact_activations: bool  # Predicted saved activations are exact
    elsewhere: Mapping[Place, int] = field(default_factory=dict)  # Predicted bytes on the host and on disk

    @property
    def shown(self) -> MemoryTimeline:
        """The measured timeline if there is one, or the predicted one."""
        return self.measured or self.predicted

    def comparisons(self) -> Iterator["MemoryComparison"]:
        """The peaks of the predicted categories, and then those of all others that were measured."""
        compared: list[tuple[str, tuple[Category, ...]]] = [(name, (name,)) for name in _COMPARED]
        is_known = self.has_exact_activations
        compared += [("saved activations", ("saved activations",))] if is_known else []
        compared += [("gradients, gathered, unreduced", ("gradients", "gathered or unreduced"))]
        everything = tuple(dict.fromkeys(each for _, categories in compared for each in categories))
        for name, categories in [*compared, ("all of these", everything)]:
            measured = self.measured.peak_of(*categories) if self.measured else None
            predicted = self.predicted.peak_of(*categories)
            if measured or predicted:
                yield MemoryComparison(name, measured, predicted)
        for category in CATEGORIES if self.measured else ():
            if category not in everything and self.measured and (peak := self.measured.peak_of(category)):
                yield MemoryComparison(category, peak, None)

    def as_json(self) -> dict[str, Any]:
        measured = self.measured and self.measured.as_json()
        timelines = {"measured": measured, "predicted": self.predicted.as_json()}
        more = {"has_exact_activations": self.has_exact_activations, "elsewhere": self.elsewhere}
        return {"rank": self.rank, **timelines, **more}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "StepMemory":
        measured, predicted = (values[name] and MemoryTimeline.from_json(values[name]) for name in _TIMELINES)
        return cls(values["rank"], measured, predicted, values["has_exact_activations"], values["elsewhere"])


@dataclass(frozen=True)
class MemoryComparison:
    """The most bytes that a category takes at a moment of a step; None: not measured, or not predicted."""

    name: str
    measured: int | None
    predicted: int | None

    @property
    def difference(self) -> float | None:
        """The measurement minus the prediction, as a fraction of the prediction."""
        return self.measured / self.predicted - 1 if self.predicted and self.measured is not None else None


def model_spec(job: Job) -> ModelSpec | None:
    """The sizes of the model that one tensor-parallel rank computes; None if they are not known."""
    try:
        spec = spec_from_settings(job.model)
    except InputError:
        return None
    degree = job.layout.dims.size(TENSOR_DIMENSION)
    return spec.on_rank(degree, sequence=job.layout.sp) if degree > 1 else spec


def knows_activations(job: Job) -> bool:
    """Whether saved activations are those of motet's modules, whose sizes are known exactly."""
    return not isinstance(job.model, UserModuleSettings)


def predicted_policies(job: Job, spec: ModelSpec) -> tuple[BlockPolicy, ...]:
    """The policies of a job; `auto` chooses them in its first steps, and begins with full recomputation."""
    return fixed_policies(job.memory, spec.policy_count)


def predict_timeline(
    job: Job,
    plan: StepPlan,
    layout: Layout,
    *,
    rank: int,
    policies: Sequence[BlockPolicy] = (),
    is_packed: bool = False,
) -> MemoryTimeline:
    """The timeline of a rank; `policies` are those of all blocks of the model, by default the job's."""
    rank %= plan.dims.ranks
    need = memory_need(plan, job.precision.resolved, job.optimizer, rank=rank)
    spec = _spec_on_rank(job, plan, rank, is_packed=is_packed)
    state = [StorageLife(category, need[name], 0, None) for name, category in _STATE.items() if need[name]]
    saved, peaks = dict[int, list[SavedLife]](), dict[int, StagePeaks]()
    if spec is not None:
        shape, chosen = _shape_on_rank(job, plan, rank, is_packed=is_packed), policies or predicted_policies(job, spec)
        how: dict[str, Any] = {"offloads": job.memory.activations == "host"}
        saved = _saved_by_stage(plan, spec, shape, policies=chosen, dtype=job.precision.resolved.compute, **how)
        stages = plan.model_sharding.stages or (range(spec.policy_count),)
        storage, splits = gradient_storage(job, layout), job.layout.dims.size(TENSOR_DIMENSION) > 1
        peaks = dict(
            enumerate(stage_peaks(spec, shape, chosen, stages=stages, storage=storage, splits_vocabulary=splits, **how))
        )
    gathers = any(group.group.unit_kind == "rows" for group in plan.groups)
    factors = _factors_of_weight_gradients(spec) if spec is not None else {}
    actions = _actions_of_rank(job, plan, layout, rank=rank)
    peaks = {action.stage: peaks[action.stage] for action in actions if action.stage in peaks}
    in_forward = _gradients_of_forward(plan, spec, rank=rank) if spec is not None and knows_activations(job) else ()
    transient = peak_transient_bytes(plan, job.precision.resolved, rank=rank, saved_gradients=in_forward)
    drawing = StepDrawing(saved, peaks, factors, transient, need["gradients"], gathers)
    for action in actions:
        drawing.add(action)
    if gathers:  # A step begins by freeing the gradients of the one before
        state = [replace(life, born=drawing.first_gradient * (life.category == "gradients")) for life in state]
    return MemoryTimeline((*state, *drawing.lives), tuple(drawing.phases), drawing.moment)


def predict_host_activations(
    job: Job,
    plan: StepPlan,
    layout: Layout,
    *,
    rank: int,
    policies: Sequence[BlockPolicy] = (),
    is_packed: bool = False,
) -> HostActivations:
    """The activations of a rank on its host, with the same arguments; none where the sizes of a model are not known."""
    rank %= plan.dims.ranks
    spec = _spec_on_rank(job, plan, rank, is_packed=is_packed)
    if spec is None or job.memory.activations == "device":
        return HostActivations()
    shape, chosen = _shape_on_rank(job, plan, rank, is_packed=is_packed), policies or predicted_policies(job, spec)
    dtype = job.precision.resolved.compute
    saved = _saved_by_stage(plan, spec, shape, policies=chosen, dtype=dtype, offloads=True)
    drawing = StepDrawing(saved, {}, _factors_of_weight_gradients(spec))
    actions = _actions_of_rank(job, plan, layout, rank=rank)
    for action in actions:
        drawing.add(action)
    return drawing.host.times(layout.sharding.microbatches, len({action.microbatch for action in actions}))


def _spec_on_rank(job: Job, plan: StepPlan, rank: int, *, is_packed: bool) -> ModelSpec | None:
    """The sizes of the model with the bytes that attention takes on the rank; None if they are not known."""
    spec, shape = model_spec(job), batch_shape(job, len(plan.rows_by_rank[rank][0]))
    shape, dtype = replace(shape, packed=is_packed), job.precision.resolved.compute
    shared = shared_rows(plan, rank, shape, dtype=dtype)
    return spec_on_context_rank(spec, shared) if spec and shared else spec


def _shape_on_rank(job: Job, plan: StepPlan, rank: int, *, is_packed: bool) -> MicroBatchShape:
    """The micro-batches that a rank computes."""
    part = plan.part_on_rank(batch_shape(job, len(plan.rows_by_rank[rank][0])), rank)
    shape = replace(computed_shape(part), packed=is_packed)
    if job.run.device == "cpu" or (job.run.device == "auto" and not has_gpu_driver()):
        return shape
    spec, precision = model_spec(job), job.precision
    heads = spec.attention if spec else ()
    return shape_on_gpu(shape, heads, dtype=precision.resolved.compute, kernel=precision.attention)


def _gradients_of_forward(plan: StepPlan, spec: ModelSpec, *, rank: int) -> Collection[str]:
    """Parameters whose only gradient the fused head makes in the forward. A tied table gets another one in the backward
    where a stage of the rank looks tokens up."""
    head = next((block.layer for block in spec.blocks if block.has_fused_head), None)
    if head is None:
        return ()
    stages = plan.model_sharding.stages
    looks_up = not stages or plan.dims.coordinates(rank)[PIPELINE_DIMENSION] == plan.model_sharding.rank_of_stage(
        0, plan.dims
    )
    products = {each.parameter for each in head.operations if isinstance(each, MatmulSpec)}
    return products - ({_TABLE} if looks_up else set())


def gradient_storage(job: Job, layout: Layout) -> GradientStorage:
    """The sums of gradients of a job."""
    sharding, settings = layout.sharding, job.communication
    mib, recipe = (settings.first_bucket_mib, settings.bucket_mib), job.precision.resolved
    return GradientStorage.for_stage(
        sharding.zero,
        recipe,
        shards=sharding.shards,
        reshards=sharding.reshard_after_forward,
        microbatches=sharding.microbatches,
        reduces_once=sharding.reduces_once and not sharding.reproducible_batch_size,
        in_pipeline=layout.dims.size(PIPELINE_DIMENSION) > 1,
        bucket_mib=mib,
        rows=job.memory.parameters,
    )


def _saved_by_stage(
    plan: StepPlan,
    spec: ModelSpec,
    shape: MicroBatchShape,
    *,
    policies: Sequence[BlockPolicy],
    dtype: str,
    offloads: bool,
) -> dict[int, list[SavedLife]]:
    """The tensors that one micro-batch leaves for the backward of each stage: in a pipeline the output too."""
    sharding, saved_lives = plan.model_sharding, partial(_saved_lives, dtype=dtype, offloads=offloads)
    if not sharding.stages:
        return {0: saved_lives(spec, shape, policies, is_first=True)}
    parts, sizes = [spec.on_stage(blocks) for blocks in sharding.stages], shape.sizes_by_name
    outputs = [border.activation_bytes for border in border_traffic(sharding, sizes, compute=dtype)]
    if not sharding.wires:  # Before the split is proven: the input of the next block
        first_inputs = (next(block.input for block in part.blocks if block.input) for part in parts[1:])
        outputs = [block_input.bytes(shape, dtype) for block_input in first_inputs]
    saved = {}
    for stage, (part, blocks) in enumerate(zip(parts, sharding.stages, strict=True)):
        lives = saved_lives(part, shape, policies[blocks.start : blocks.stop], is_first=stage == 0)
        output = [_saved_life("output of the stage", outputs[stage])] if stage < len(outputs) else []
        saved[stage] = lives + output
    return saved


def _saved_lives(
    spec: ModelSpec,
    shape: MicroBatchShape,
    policies: Sequence[BlockPolicy],
    *,
    dtype: str,
    offloads: bool,
    is_first: bool,
) -> list[SavedLife]:
    lives = list[SavedLife]()
    for block_spec, block, tensors in spec.saved_by_block(policies):
        is_received = not is_first and block == 0
        received = block_spec.input.bytes(shape, dtype) if is_received and block_spec.input else 0
        sent = sent_sizes(tensors, shape, dtype, received=received) if offloads and block is not None else []
        for tensor, sent_bytes in zip_longest(tensors, sent, fillvalue=0):
            assert not isinstance(tensor, int)
            if size := tensor.bytes(shape, dtype):
                waits = tensor.kernel == "fused head" and spec.has_tied_head
                lives.append(_saved_life(tensor.name, size, block, waits=waits, is_sent=sent_bytes > 0))
    return lives


def _saved_life(name: str, size: int, block: int | None = None, **more: bool) -> SavedLife:
    return SavedLife(StorageLife("saved activations", size, 0, None, name), block, **more)


def _actions_of_rank(job: Job, plan: StepPlan, layout: Layout, *, rank: int) -> list[PipelineAction]:
    """The computations of a rank in their order; a rank without a pipeline alternates forwards and backwards. The last
    backward of a stage may send the gradient of its input before it computes those of weights."""
    count = layout.sharding.microbatches
    if not plan.model_sharding.stages:
        shown = range(min(count, _SHOWN_MICROBATCHES))
        return [PipelineAction(kind, 0, microbatch) for microbatch in shown for kind in ("F", "B")]
    schedule, index = layout.pipeline_schedule(count), plan.dims.coordinates(rank)[PIPELINE_DIMENSION]
    is_by_row = layout.sharding.reproducible_batch_size is not None
    early = gradient_storage(job, layout).kind == "flat" and not is_by_row
    return [
        part
        for action in schedule.compute_actions[index]
        for part in (
            (action._replace(kind="I"), action._replace(kind="W"))
            if early and action in schedule.sent_last_backwards
            else (action,)
        )
    ]


def _factors_of_weight_gradients(spec: ModelSpec) -> dict[str, Fraction]:
    """The saved tensors that weight gradients need, which may be computed after the gradients of inputs; and the bytes
    of the gradient of an output for each byte of them."""
    operations = (operation for block in spec.blocks for operation in block.layer.operations)
    products = (operation for operation in operations if isinstance(operation, MatmulSpec))
    return {
        f"{each.parameter.removesuffix('.weight')}.input": Fraction(each.out_features, each.in_features)
        for each in products
    }
