"""The memory of a planned step: one rank of each stage of the pipeline, by category.

State follows from the recipe and the stage of ZeRO, saved activations from the sizes of the model and from
the micro-batches that the schedule has in flight; both are the values that training reads. A stage of motet is the
simulation that `motet show memory` predicts with; one of another framework follows from its row of constants.

The memory of the ranks of a planned step by category, and whether a device has it.

`allocated` is the size of tensors at the peak, `reserved` the memory that the allocator holds for them, `outside` the
memory of the process that other tools see.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

from motet.core.units import DTYPE_BYTES, format_bytes
from motet.memory.policy_choice import Place
from motet.models.spec.layer_specs import BlockPolicy, BlockSpec, MatmulSpec, MicroBatchShape, SameBlock
from motet.models.spec.model_spec import ModelSpec
from motet.parallel.data_parallel.zero import ShardedStates, sharded_states
from motet.parallel.layout import Layout
from motet.parallel.pipeline.pipeline_schedule import PipelineAction
from motet.parallel.pipeline.schedules import order_of_computations, stages_of_ranks
from motet.parallel.step_plan.attention_memory import SharedRows, spec_on_context_rank
from motet.parallel.step_plan.gradient_sums import GradientStorage
from motet.parallel.step_plan.memory import ModelStateMemory, state_of_shards
from motet.parallel.step_plan.stage_memory import (
    BusyMoment,
    StageBlocks,
    StagePeaks,
    busy_moments,
    largest_moment,
)
from motet.parallel.step_plan.traffic import delayed_bytes_per_element, host_link_bytes_per_element, state_file_layout
from motet.plan.frameworks import MEMORY_CONSTANTS, MemoryConstants
from motet.plan.memory.framework_stage import FrameworkStage
from motet.plan.planned_step import (
    POLICY_OF_BLOCKS,
    ParameterCounts,
    PlannedStep,
    SameObject,
    count_parameters,
    expert_products,
)
from motet.precision.recipe import parameter_state_bytes

_STATES = ("parameters", "master parameters", "gradients", "moments")
# Flat and long-lived: the allocator gives them whole blocks, which they fill
_CONTIGUOUS = (*_STATES, "gathered parameters", "flat copies")
# The least share of the gaps between tensors: before an allocator fails it gives back the blocks that hold no tensor.
# Assumed, after 14 published runs of llm-foundry that fit and would not with all gaps.
_KEPT_GAPS = 0.5
# The system, the processes of the ranks and the page cache need the rest. Assumed.
_USABLE_HOST_MEMORY = 0.9


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank at its peak, by category."""

    pipeline_rank: int
    bytes: Mapping[str, float]
    constants: MemoryConstants
    communicators: int
    kept_gaps: float = 1.0  # Share of the gaps between tensors that the allocator keeps: all where a device has enough

    @property
    def allocated(self) -> float:
        """Tensors at the peak."""
        return sum(self.bytes.values())

    @property
    def reserved(self) -> float:
        """The memory that the allocator holds: it rounds blocks, and cannot use all gaps."""
        return self.allocated + self.kept_gaps * self._gaps

    @property
    def outside(self) -> float:
        """Reserved memory, the context of the device, and buffers of the collective library."""
        return self.reserved + self._beyond_allocator

    @property
    def state(self) -> float:
        """Bytes that are kept from step to step."""
        return sum(self.bytes.get(name, 0.0) for name in _STATES)

    def on_device(self, usable_bytes: float) -> "RankMemory":
        """The memory on a device whose allocator gives back free blocks before it fails."""
        left, gaps = usable_bytes - self.allocated - self._beyond_allocator, self._gaps
        return replace(self, kept_gaps=min(1.0, max(_KEPT_GAPS, left / gaps)) if gaps else 1.0)

    @property
    def _gaps(self) -> float:
        contiguous = sum(self.bytes.get(name, 0.0) for name in _CONTIGUOUS)
        return self.constants.fragmentation * (self.allocated - contiguous)

    @property
    def _beyond_allocator(self) -> float:
        return self.constants.context_bytes + self.communicators * self.constants.communicator_bytes


PlaceBytes = Mapping[Place, Mapping[str, float]]
"""Bytes of a rank by category, on its host and on disk."""


@dataclass(frozen=True)
class PlannedMemory:
    """The memory of one rank of each stage of a pipeline."""

    ranks: tuple[RankMemory, ...]
    elsewhere: tuple[PlaceBytes, ...] = ()  # By rank of the pipeline, where states do not lie on the devices
    ranks_per_stage: int = 1

    def on_fullest_host(self, place: Place, devices_per_host: int) -> Mapping[str, float]:
        """Bytes by category of all ranks of the fullest host in a place."""
        together = min(self.ranks_per_stage, devices_per_host)
        stages = max(1, devices_per_host // self.ranks_per_stage)  # On one host
        hosts = list[Counter[str]]()
        for first in range(0, len(self.elsewhere), stages):
            total = Counter[str]()
            for rank in self.elsewhere[first : first + stages]:
                total.update({name: round(together * size) for name, size in rank.get(place, {}).items()})
            hosts.append(total)
        return max(hosts, key=lambda total: sum(total.values()), default={})

    @property
    def worst(self) -> RankMemory:
        """The rank with the most; where several fill their devices, the one whose tensors take the most."""
        return max(self.ranks, key=lambda rank: (rank.outside, rank.allocated))

    def on_device(self, usable_bytes: float) -> "PlannedMemory":
        """The memory on devices whose allocators give back free blocks before they fail."""
        return replace(self, ranks=tuple(rank.on_device(usable_bytes) for rank in self.ranks))


def fits(memory: PlannedMemory, usable_bytes: float) -> str | None:
    """Why a step needs more than a device has, or None."""
    worst = memory.on_device(usable_bytes).worst
    if worst.outside <= usable_bytes * (1 + 1e-12):
        return None
    activations = worst.bytes.get("saved activations", 0.0)
    other = worst.outside - activations - worst.state
    parts = f"activations {format_bytes(activations)} + states {format_bytes(worst.state)}"
    parts += f" + buffers {format_bytes(other)}"
    return f"stage {worst.pipeline_rank}: {parts} > {format_bytes(usable_bytes)}"


def host_problem(
    memory: PlannedMemory, host_bytes: float, devices_per_host: int, *, shares_with_devices: bool
) -> tuple[str | None, float]:
    """Why the ranks of a host need more than its memory, or None, and the bytes that are missing. Processors have the
    tensors of their devices there, too."""
    needed = sum(memory.on_fullest_host("host", devices_per_host).values())
    if shares_with_devices:
        needed += min(devices_per_host, memory.ranks_per_stage * len(memory.elsewhere)) * memory.worst.outside
    usable = _USABLE_HOST_MEMORY * host_bytes
    if needed <= usable:
        return None, 0.0
    ranks = f"the {devices_per_host} ranks of a host" if devices_per_host > 1 else "the rank of a host"
    return f"{ranks}: {format_bytes(needed)} of its memory > {format_bytes(usable)}", needed - usable


# Least part of the model's saved sizes that any framework saves, by its definition.
_SURELY_SAVED = 0.9
_SCHEDULE_ROUNDS = 2  # Further rounds of as many micro-batches as ranks add none in flight

ScheduleSize = tuple[str, int, int, int]  # Schedule, ranks, chunks, micro-batches


def estimate_memory(step: PlannedStep, *, only_fullest: bool = False) -> PlannedMemory:
    """The memory of a step: of all ranks, or of those alone that can have the most."""
    estimate, layout = _Estimate(step), step.layout
    splits = (layout.dp * layout.cp, layout.tp, layout.cp, layout.pp, layout.ep)
    communicators = 1 + sum(ranks > 1 for ranks in splits)  # One for all ranks, one for each dimension
    chosen = estimate.fullest_ranks() if only_fullest else range(layout.pp)
    ranks = tuple(RankMemory(rank, estimate.rank(rank), estimate.constants, communicators) for rank in chosen)
    if step.states == "device":
        return PlannedMemory(ranks)
    return PlannedMemory(ranks, tuple(map(estimate.elsewhere, range(layout.pp))), layout.ranks // layout.pp)


def least_memory(step: PlannedStep) -> float:
    """Bytes that the first rank needs at least: its state, and nearly all that it saves. It takes far less time."""
    return _Estimate(step).state_and_saved(0, _SURELY_SAVED)


def planned_state(step: PlannedStep, counts: ParameterCounts) -> ModelStateMemory:
    """Bytes that a rank keeps from step to step for its parameters, whose elements are those before ZeRO shards them.
    A frozen parameter keeps only the value with which the rank computes."""
    layout, frozen = step.layout, (counts.frozen_dense, counts.frozen_experts)
    sharded = sharded_states(layout.zero, reduces_once=step.sums_gradients)
    each = parameter_state_bytes(
        step.recipe,
        step.moments,
        storage="rows" if sharded.parameters else "buckets",
        separate_masters=step.states != "device",
    )
    numel = _shard_numel(layout, counts.dense, counts.experts)
    state = state_of_shards(each, numel if sharded.parameters else counts.trained, numel, sharded=sharded)
    kept = _shard_numel(layout, *frozen) if sharded.parameters else sum(frozen)
    return replace(state, parameters=state.parameters + round(DTYPE_BYTES[step.recipe.compute] * kept))


def updated_numel(step: PlannedStep, counts: ParameterCounts) -> float:
    """Elements whose masters a rank updates."""
    is_sharded = sharded_states(step.layout.zero).optimizer_states
    return _shard_numel(step.layout, counts.dense, counts.experts) if is_sharded else counts.trained


def _shard_numel(layout: Layout, dense: float, experts: float) -> float:
    expert_shards = max(1, layout.shards * layout.tp // (layout.ep * layout.expert_tp))
    return dense / layout.shards + experts / expert_shards


class _Estimate:
    def __init__(self, step: PlannedStep) -> None:
        self.step, self.constants = step, MEMORY_CONSTANTS[step.stack.memory]
        # Later stages have an embedding without parameters, of which they keep the tensors that all blocks read.
        self._kinds, self._known_peaks = step.stage_kinds, dict[int, StagePeaks]()
        layout = step.layout
        self._size = _shortest_size((layout.schedule, layout.pp, layout.chunks, layout.microbatches))
        self.compute, self.reduce = DTYPE_BYTES[step.recipe.compute], DTYPE_BYTES[step.recipe.reduce]

    def rank(self, rank: int) -> dict[str, float]:
        """Bytes by category of one rank of the pipeline, in the moment with the most."""
        stages, constants = self._ranks[rank], self.constants
        peaks = {stage: self._peaks(stage) for stage in stages}
        moment = largest_moment(peaks, self._moments[rank])
        live = moment.live(peaks)
        work = constants.forward_work if moment.is_forward else constants.backward_work
        result = self._state(stages) | {
            "saved activations": live.saved,
            "recomputed activations": live.recomputed,
            "gathered parameters": live.gathered,
            work: live.workspace,
        }
        if constants.simulates_kernels and self._storage.kind == "rows":
            result["gradients"] = live.gradients
        else:
            result["gathered parameters"] += live.gradients
        if constants.workspace_bytes:
            result["workspace"] = self._workspace
        if self.step.layout.pp > 1 and not constants.simulates_kernels:
            result["communication buffers"] = self._message_buffers(rank)
        return {name: size for name, size in result.items() if size}

    def elsewhere(self, rank: int) -> PlaceBytes:
        """Bytes of a rank of the pipeline on its host and on disk, as a run has them: sums of gradients, the buffers of
        files, masters and moments."""
        step, counts = self.step, self._parameters(self._ranks[rank])
        state = planned_state(step, counts).in_place(step.states, step.states)
        each = host_link_bytes_per_element(step.recipe, is_in_rows=self._sharded.parameters)
        updated = round(updated_numel(step, counts))
        host = {"gradients that were sent": float(each.to_host * updated)}
        if step.delays_update:
            delayed = delayed_bytes_per_element(step.recipe, is_in_rows=self._sharded.parameters)
            host |= {name.replace("_", " "): float(size * updated) for name, size in delayed._asdict().items()}
        states = {"master parameters": float(state.masters), "moments": float(state.moments)}
        if step.states == "host":
            return {"host": states | host}
        files = state_file_layout(step.recipe, [f"moment {index}" for index in range(step.moments)], [updated])
        return {"host": host | {"buffers of files": float(files.memory_bytes)}, "disk": states}

    def state_and_saved(self, rank: int, share: float) -> float:
        """Bytes of state, and a share of the saved activations, when a rank has all of them."""
        state = self._state(self._ranks[rank])
        if self.constants.simulates_kernels and self._storage.kind == "rows" and self.step.layout.microbatches == 1:
            state["gradients"] = 0.0  # Those of the only micro-batch come when saved activations go
        return sum(state.values()) + share * self._kept(rank, self._kept_of_stage)

    def fullest_ranks(self) -> list[int]:
        """The rank that keeps the most activations, of all ranks whose stages have the same blocks."""
        fullest = dict[tuple[int, ...], tuple[float, int]]()
        for rank in range(self.step.layout.pp):
            kinds = tuple([self._kinds[stage] for stage in self._ranks[rank]])
            saved = self._kept(rank, lambda stage: self._peaks(stage).kept)
            if kinds not in fullest or saved > fullest[kinds][0]:
                fullest[kinds] = saved, rank
        return sorted(rank for _, rank in fullest.values())

    @property
    def _ranks(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each rank."""
        return stages_of_ranks(*self._size[:3])

    def _kept(self, rank: int, bytes_of: Callable[[int], float]) -> float:
        """Saved activations of a rank when it keeps the most, by the bytes of a micro-batch on a stage."""
        return sum([bytes_of(stage) * count for stage, count in _most_in_flight(self._size)[rank]])

    @property
    def _moments(self) -> tuple[tuple[BusyMoment, ...], ...]:
        return busy_moments_of_ranks(self._size)

    def _peaks(self, stage: int) -> StagePeaks:
        """The peaks of a stage, which are computed once for all stages with the same blocks."""
        kind = self._kinds[stage]
        if kind not in self._known_peaks:
            if self.constants.simulates_kernels:
                self._known_peaks[kind] = _peaks_of_stage(self._stage(kind), self._settings, **self._ends(kind))
            else:
                self._known_peaks[kind] = FrameworkStage(self.step, self.constants, stage).peaks()
        return self._known_peaks[kind]

    def _kept_of_stage(self, stage: int) -> float:
        kind = self._kinds[stage]
        if self.constants.simulates_kernels:
            return _stage_blocks(self._stage(kind), self._settings, **self._ends(kind)).kept
        return FrameworkStage(self.step, self.constants, kind).kept

    def _stage(self, stage: int) -> SameObject[ModelSpec]:
        """The part of a rank's model that a stage computes, with the bytes that attention takes on its rows."""
        return _stage_on_context_rank(SameObject(self.step.stage_specs), stage, self._shared_rows)

    def _ends(self, stage: int) -> dict[str, bool]:
        return {"is_first": stage == 0, "is_last": stage == len(self._kinds) - 1}

    @cached_property
    def _shared_rows(self) -> SharedRows | None:
        step, layout = self.step, self.step.layout
        if layout.cp == 1:
            return None
        shape = MicroBatchShape(step.rows, step.sequence, packed=step.packed)
        rows = layout.context.partition(step.sequence), 0, layout.cp_kind, layout.context.head_ranks, shape
        return SharedRows(*rows, step.recipe.compute)

    @property
    def _sharded(self) -> ShardedStates:
        return sharded_states(self.step.layout.zero)

    @cached_property
    def _settings(self) -> "_StageSettings":
        policy: BlockPolicy = POLICY_OF_BLOCKS.get(self.step.recompute, "none")
        return _StageSettings(self.step.shape, policy, self._storage, self.step.layout.tp > 1)

    @cached_property
    def _storage(self) -> GradientStorage:
        layout = self.step.layout
        return GradientStorage.for_stage(
            layout.zero,
            self.step.recipe,
            shards=layout.shards,
            reduces_once=self.step.sums_gradients,
            reshards=layout.sharding.reshard_after_forward,
            microbatches=min(layout.microbatches, 2),  # One, or several
            in_pipeline=layout.pp > 1,
        )

    def _state(self, stages: tuple[int, ...]) -> dict[str, float]:
        """Bytes that a rank keeps from step to step, with copies of gradients for their reduction."""
        counts = self._parameters(stages)
        state = planned_state(self.step, counts).in_place("device", self.step.states)
        total, sharded = counts.trained, self._sharded
        narrow = self.compute * total if self.constants.gradients_twice and self.reduce != self.compute else 0.0
        return {
            "parameters": state.parameters,
            "master parameters": state.masters,
            "gradients": state.gradients + narrow * (not sharded.parameters),
            "moments": state.moments,
            "flat copies": self._flat_copies(narrow, updated_numel(self.step, counts)),
        }

    def _flat_copies(self, narrow: float, updated: float) -> float:
        """Copies of gradients for their reduction: a bucket, or all of them, narrowed from wide sums; a bucket of
        gathers; and gradients that are widened for the optimizer. The gaps that activations leave are too small for
        them."""
        size = self.constants.bucket_elements
        if not size:
            return 0.0
        widened = self.constants.shard_copy_bytes * updated if self.reduce < DTYPE_BYTES["float32"] else 0.0
        return (narrow or self.reduce * size) + self.compute * size + widened

    @property
    def _workspace(self) -> float:
        """Workspaces of products; frameworks compute experts one after another if a token visits only one."""
        products = (product for block in self.step.spec.blocks for product in expert_products(block))
        is_grouped = any(product.uses_per_token > 1 for product in products)
        return self.constants.workspace_bytes + (self.constants.expert_workspace_bytes if is_grouped else 0.0)

    def _message_buffers(self, rank: int) -> float:
        """Activations of micro-batches between two stages."""
        step, layout = self.step, self.step.layout
        message = step.shape.count("token") * step.spec.hidden * self.compute / (layout.tp if layout.sp else 1)
        parts = (
            self.constants.kept_output_parts * sum(count for _, count in _most_in_flight(self._size)[rank]) / layout.tp
        )
        outputs = self.constants.kept_outputs * layout.chunks * layout.microbatches
        return (4.0 + parts + outputs) * message

    def _parameters(self, stages: tuple[int, ...]) -> ParameterCounts:
        counts = count_parameters(each for stage in stages for each in self._with_extra_blocks(stage))
        trained, frozen = self._tied_copy(stages)
        return counts._replace(dense=counts.dense + trained, frozen_dense=counts.frozen_dense + frozen)

    def _with_extra_blocks(self, stage: int) -> Iterator[tuple[BlockSpec, int]]:
        """The blocks of a stage, each with their number; multi-token prediction adds to the last ones."""
        blocks = self.step.stage_specs[stage].blocks
        is_last = stage == len(self.step.stage_specs) - 1
        yield from ((block, block.repeat) for block in blocks)
        if is_last and self.step.extra_outputs:
            yield [block for block in self.step.rank_spec.blocks if block.input][-1], self.step.extra_outputs

    def _tied_copy(self, stages: tuple[int, ...]) -> tuple[float, float]:
        """Elements of the embedding that a stage with a tied output head keeps, if another rank has the embedding:
        those of one that is trained, and those of a frozen one."""
        if self.step.layout.pp == 1 or len(self.step.stage_specs) - 1 not in stages:
            return 0.0, 0.0
        blocks = [b for stage in stages for b in self.step.stage_specs[stage].blocks if not b.input]
        held = {parameter.name for block in blocks for parameter in block.layer.parameters}
        operations = (operation for block in blocks for operation in block.layer.operations)
        heads = [each for each in operations if isinstance(each, MatmulSpec) and each.parameter not in held]
        sizes = [(head.in_features * head.out_features, head.weight_gradient) for head in heads]
        trained, frozen = (sum(size for size, each in sizes if each is kind) for kind in (True, False))
        return float(trained), float(frozen)


@lru_cache(maxsize=1 << 14)
def _stage_on_context_rank(
    specs: SameObject[tuple[ModelSpec, ...]], stage: int, shared: SharedRows | None
) -> SameObject[ModelSpec]:
    return _stage_of_blocks(tuple([(SameBlock(block), block.repeat) for block in specs.value[stage].blocks]), shared)


@lru_cache(maxsize=1 << 14)
def _stage_of_blocks(blocks: tuple[tuple[SameBlock, int], ...], shared: SharedRows | None) -> SameObject[ModelSpec]:
    """One object for all stages with these blocks, in pipelines of any length; their indices do not count."""
    spec = ModelSpec(tuple(same.block for same, _ in blocks))
    return SameObject(spec if shared is None else spec_on_context_rank(spec, shared))


class _StageSettings(NamedTuple):
    """The values besides the model on which the peaks of a stage depend."""

    shape: MicroBatchShape
    policy: BlockPolicy
    storage: GradientStorage
    splits_vocabulary: bool


@lru_cache(maxsize=1 << 14)
def _stage_blocks(
    stage: SameObject[ModelSpec], settings: _StageSettings, *, is_first: bool, is_last: bool
) -> StageBlocks:
    """The blocks of a stage, which many layouts share; what they keep takes far less time than their peaks."""
    policies = (settings.policy,) * stage.value.policy_count
    ends = {"is_first": is_first, "is_last": is_last}
    return StageBlocks(
        stage.value, settings.shape, policies, settings.storage, splits_vocabulary=settings.splits_vocabulary, **ends
    )


@lru_cache(maxsize=1 << 14)
def _peaks_of_stage(
    stage: SameObject[ModelSpec], settings: _StageSettings, *, is_first: bool, is_last: bool
) -> StagePeaks:
    return _stage_blocks(stage, settings, is_first=is_first, is_last=is_last).peaks()


@lru_cache(maxsize=4096)
def busy_moments_of_ranks(size: ScheduleSize) -> tuple[tuple[BusyMoment, ...], ...]:
    """The moments of each rank of a pipeline."""
    if size[1] == 1:
        return (busy_moments(PipelineAction(kind, 0, 0) for kind in ("F", "B")),)
    schedule, ranks, chunks, microbatches = _shortest_size(size)
    order = order_of_computations(schedule, ranks, chunks=chunks, microbatches=microbatches)
    return tuple(map(busy_moments, order.actions))


@lru_cache(maxsize=4096)
def _most_in_flight(size: ScheduleSize) -> tuple[tuple[tuple[int, int], ...], ...]:
    """(Stage, micro-batches that a rank keeps of it) when the rank keeps the most, for each rank."""
    counts = ([moment.in_flight for moment in moments] for moments in busy_moments_of_ranks(size))
    return tuple(tuple(max(each, key=lambda kept: sum(kept.values())).items()) for each in counts)


def _shortest_size(size: ScheduleSize) -> ScheduleSize:
    """The size with the fewest micro-batches that has as many in flight."""
    schedule, ranks, chunks, microbatches = size
    is_bounded = schedule not in ("gpipe", "breadth-first")  # Otherwise all micro-batches are in flight
    is_even = microbatches % ranks == 0  # Otherwise the size of a round depends on the number of all micro-batches
    count = min(microbatches, _SCHEDULE_ROUNDS * ranks) if is_bounded and is_even else microbatches
    return schedule, ranks, chunks, count
