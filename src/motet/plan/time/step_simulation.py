"""The simulation of a step: stages one after the other, then the pipeline, then the work after the last backward.

Each rank has a stream for kernels and one for collectives.

The makespan of a pipeline's schedule with the durations of its stages, and a bound below it.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple, TypeVar

from motet.core.units import DTYPE_BYTES
from motet.models.spec.layer_specs import BlockSpec
from motet.parallel.data_parallel.zero import Moment, sharded_states
from motet.parallel.pipeline.border_bytes import sends_slices
from motet.parallel.pipeline.schedule_timeline import Durations, EventGraph
from motet.parallel.pipeline.schedules import order_of_computations, stages_of_ranks
from motet.parallel.step_plan.traffic import host_link_bytes_per_element
from motet.plan.planned_step import ParameterCounts, PlannedStep, count_parameters
from motet.plan.time.host_update import HostRates, HostUpdate, PartSeconds, simulate_host_update
from motet.plan.time.kernel_times import DeviceRates
from motet.plan.time.stage_times import (
    GroupTimes,
    PlannedBlock,
    ShardedBlock,
    StageTimes,
    end_s,
    simulate_backward,
    simulate_forward,
)

_PipelineKey = tuple[str, int, int, int]  # Schedule, ranks, chunks, micro-batches

# Micro-batches beyond this many times the ranks repeat the steady part of a schedule.
_EXACT_ROUNDS = 4


@dataclass(frozen=True)
class PipelineDurations:
    """Seconds of each stage for one micro-batch."""

    schedule: str
    ranks: int
    chunks: int
    microbatches: int
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    weight_s: tuple[float, ...]  # The part of a backward that schedules with split backwards delay
    message_s: float
    blocks_s: float  # The part of a message for which both ends wait

    def stages_of_rank(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank computes."""
        return stages_of_ranks(self.schedule, self.ranks, self.chunks)[rank]

    @property
    def by_kind(self) -> Durations:
        """Seconds by the kind of an action and its stage, with the messages for which both ends wait."""
        backward = [seconds + self.blocks_s for seconds in self.backward_s]
        return {
            "F": [seconds + self.blocks_s for seconds in self.forward_s],
            "B": backward,
            "I": [seconds - weight for seconds, weight in zip(backward, self.weight_s, strict=True)],
            "W": self.weight_s,
            "M": self.message_s,
        }


@lru_cache(maxsize=256)
def _event_graph(size: _PipelineKey) -> EventGraph:
    schedule, ranks, chunks, microbatches = size
    return EventGraph(order_of_computations(schedule, ranks, chunks=chunks, microbatches=microbatches).actions)


def simulate_pipeline(durations: PipelineDurations) -> float:
    """Seconds from the first forward to the last backward."""
    count, ranks = durations.microbatches, durations.ranks
    if ranks == 1:
        return count * (sum(durations.forward_s) + sum(durations.backward_s))
    if count <= _EXACT_ROUNDS * ranks:
        return _makespan(durations)
    # Each further round of as many micro-batches as ranks takes as long as the one before.
    fewer = (_EXACT_ROUNDS - 2) * ranks + count % ranks
    first = _makespan(replace(durations, microbatches=fewer))
    second = _makespan(replace(durations, microbatches=fewer + ranks))
    return first + (count - fewer) / ranks * (second - first)


@lru_cache(maxsize=1024)
def _makespan(durations: PipelineDurations) -> float:
    graph = _event_graph((durations.schedule, durations.ranks, durations.chunks, durations.microbatches))
    return max(graph.simulate(durations.by_kind)[1])


def splits_backward(schedule: str) -> bool:
    """Whether a schedule delays the gradients of weights."""
    return schedule.startswith(("zb", "dualpipe"))


def pipeline_lower_bound(durations: PipelineDurations) -> float:
    """Seconds below the makespan: for each rank its own work, after the forwards of all stages before its first one,
    and before their backwards."""
    wait = durations.blocks_s if durations.ranks > 1 else 0.0
    stages_of_rank = stages_of_ranks(durations.schedule, durations.ranks, durations.chunks)
    worst, owners = 0.0, {stage: rank for rank, stages in enumerate(stages_of_rank) for stage in stages}
    splits = splits_backward(durations.schedule)
    forward, backward = durations.forward_s, durations.backward_s
    order = [owners[stage] for stage in range(len(forward))]
    crossings = [0, *accumulate(before != after for before, after in pairwise(order))]  # Messages up to each stage
    fills = [0.0, *accumulate(seconds + wait for seconds in forward)]
    drains = [0.0, *accumulate(seconds + wait for seconds in backward)]
    for stages in stages_of_rank:
        first = min(stages)
        work = sum([forward[s] + backward[s] + 2 * wait for s in stages])
        messages_s = crossings[first] * durations.message_s
        drain = 0.0 if splits else drains[first] + messages_s
        worst = max(worst, durations.microbatches * work + fills[first] + messages_s + drain)
    return worst


_Value = TypeVar("_Value")
REDUCED: tuple[Moment, ...] = ("microbatch", "last_microbatch")  # When gradients are reduced
GATHERED_ONCE: tuple[Moment, ...] = ("forward", "step")  # When parameters that all micro-batches use are gathered
_ROUNDING = 1e-9  # Smaller parts of a step, also below zero, are rounding of differences


class RankWork(NamedTuple):
    """Parameters of a rank, and its seconds for one micro-batch."""

    parameters: ParameterCounts
    forward_s: float
    backward_s: float
    blocks: int


Blocks = tuple[tuple[BlockSpec, PlannedBlock], ...]


class ExposedCollectives(NamedTuple):
    """Seconds of the collectives of data parallelism on a rank that nothing hides."""

    seconds: float = 0.0
    hidden_s: float = 0.0  # Seconds of the other collectives
    reduction_s: float = 0.0  # Reduction of gradients after the last backward
    gather_s: float = 0.0  # Gather before the next forward
    microbatch_s: float = 0.0  # Collectives after the backward of each other micro-batch


class _StageSeconds(NamedTuple):
    """Seconds of a stage for one micro-batch."""

    forward: float
    backward: float
    weight: float  # The part of a backward that schedules with split backwards delay
    last_reduction: float = 0.0  # Extra time of the last backward where gradients are reduced once a step


def _plain_stage(blocks: Blocks) -> _StageSeconds:
    """A stage whose parameters are not gathered."""
    return _StageSeconds(
        sum(block.repeat * costs.forward_s for block, costs in blocks),
        sum(block.repeat * costs.backward_s for block, costs in blocks),
        sum(block.repeat * costs.kernels.weight_s for block, costs in blocks),
    )


class StepSimulation:
    """One step; `read_s` is the time in which a host reads its data."""

    def __init__(
        self,
        step: PlannedStep,
        rates: DeviceRates,
        groups: GroupTimes,
        *,
        read_s: float,
        host: HostRates | None = None,
        stage_times: StageTimes | None = None,
    ) -> None:
        """`host` is what a rank gets of its host, if that updates the states."""
        self.step, self.rates, self.groups, self.read_s, self.host = step, rates, groups, read_s, host
        self._stage_times = stage_times or StageTimes(step, rates, groups)
        self.actions = step.actions
        moments = {action.moment for action, _ in self.actions}
        self.reduces_once = "microbatch" not in moments
        # Otherwise parameters are gathered once a step, like those of stage 1
        self.is_sharded = "forward" in moments and ("backward" in moments or not self.reduces_once)
        self._sharded_of_kind = dict[tuple[str, int], ShardedBlock]()
        # Bytes of an element that is communicated
        self._widths = {"parameters": DTYPE_BYTES[step.recipe.compute], "gradients": DTYPE_BYTES[step.recipe.reduce]}

    def lower_bound(self) -> float:
        return max(self.read_s, pipeline_lower_bound(self.durations) + self._outside_of_pipeline_s())

    def with_schedule(self, name: str) -> "StepSimulation":
        """The same stages in another order."""
        if name == self.step.layout.schedule:
            return self
        layout = replace(self.step.layout, schedule=name)
        step, kept = replace(self.step, layout=layout), self._stage_times
        other = StepSimulation(step, self.rates, self.groups, read_s=self.read_s, host=self.host, stage_times=kept)
        other.seconds_of_stages, other._parameters_of_stages = self.seconds_of_stages, self._parameters_of_stages
        return other

    def lower_bound_of_schedules(self) -> float:
        """Seconds with any schedule: each rank of a pipeline has at least its part of the work."""
        step, layout = self.step, self.step.layout
        blocks = [(block.repeat, block, costs) for block, costs in self._stage_times.blocks(step.rank_spec)]
        forward = sum(repeat * costs.forward_s for repeat, _, costs in blocks)
        backward = sum(repeat * costs.backward_s for repeat, _, costs in blocks)
        if self.is_sharded:
            sharded = [(repeat, self._sharded_once(block, costs)) for repeat, block, costs in blocks]
            forward = max(forward, sum(repeat * each.gather_s for repeat, each in sharded))
            backward = max(backward, sum(repeat * each.gather_again_s for repeat, each in sharded))
        return max(self.read_s, layout.microbatches * (forward + backward) / layout.pp + step.stack.step_overhead_s)

    def _shared_cores_s(self) -> float:
        """The work of all ranks, if they share the cores of a host; ranks of a stage compute simultaneously."""
        cores, layout = self.rates.cores, self.step.layout
        if not cores or layout.ranks <= cores:
            return 0.0
        together = layout.ranks // layout.pp
        work = layout.microbatches * (sum(self.durations.forward_s) + sum(self.durations.backward_s))
        return work * together / max(together, cores)

    def run(self) -> tuple[float, dict[str, float]]:
        """The seconds of the step, and the parts that add up to them."""
        step, layout = self.step, self.step.layout
        computed_s = self.makespan_s + self._outside_of_pipeline_s()
        seconds = max(self.read_s, computed_s)  # The data of the next step is read meanwhile
        work = self._work_of_slowest_rank()
        parts = {name: value * layout.microbatches for name, value in work.items()}
        parts["data parallelism"] = parts.get("data parallelism", 0.0) + self._data_parallel_s
        parts["pipeline bubble"] = max(0.0, self.makespan_s - layout.microbatches * sum(work.values()))
        parts["optimizer"] = self.optimizer_s
        parts |= {} if self.host_update is None else self.host_update.seconds_by_resource
        parts["host"] = step.stack.step_overhead_s
        parts["data loading"] = seconds - computed_s
        parts = {name: value if value > _ROUNDING * seconds else 0.0 for name, value in parts.items()}
        total = sum(parts.values())
        return seconds, {name: value * seconds / total for name, value in parts.items()}

    @cached_property
    def makespan_s(self) -> float:
        """Seconds from the first forward to the last backward."""
        return max(simulate_pipeline(self.durations), pipeline_lower_bound(self.durations), self._shared_cores_s())

    def _outside_of_pipeline_s(self) -> float:
        host_s = 0.0 if self.host_update is None else self.host_update.exposed_s
        return self._data_parallel_s + self.optimizer_s + host_s + self.step.stack.step_overhead_s

    @property
    def _hiding_s(self) -> float:
        """Seconds of a step that hide a delayed update; on processors, which are the host, none do."""
        if not self.step.stack.hides_data_parallel:
            return 0.0
        return self.makespan_s + self._data_parallel_s + self.optimizer_s + self.step.stack.step_overhead_s

    @cached_property
    def _data_parallel_s(self) -> float:
        """Exposed collectives, and the kernels that hidden ones slow down."""
        return self.exposed_collectives.seconds + self.slowdown_s

    @property
    def slowdown_s(self) -> float:
        """Seconds that computation takes longer because of hidden collectives."""
        return self.exposed_collectives.hidden_s * self.step.stack.contention

    @property
    def hides_data_parallel(self) -> bool:
        """Whether collectives of data parallelism overlap computation."""
        return self.step.stack.hides_data_parallel and self.step.communication.overlap != "none"

    @property
    def stages(self) -> tuple[Blocks, ...]:
        return self._stage_times.stages

    @cached_property
    def durations(self) -> PipelineDurations:
        layout, stages = self.step.layout, self.seconds_of_stages
        forward, backward = (tuple(each.forward for each in stages), tuple(each.backward for each in stages))
        message = self._message_s() if layout.pp > 1 else 0.0
        names = (layout.schedule, layout.pp, layout.chunks, layout.microbatches)
        weight = tuple(each.weight for each in stages)
        return PipelineDurations(*names, forward, backward, weight, message, self._blocks_s())

    @cached_property
    def seconds_of_stages(self) -> list[_StageSeconds]:
        return self._values_of_stages(self._sharded_stage if self.is_sharded else _plain_stage)

    def _values_of_stages(self, function: Callable[[Blocks], _Value]) -> list[_Value]:
        """The values of a function for the blocks of each stage, called once for all stages with the same blocks."""
        kinds = self.step.stage_kinds
        kind_values = {kind: function(self.stages[kind]) for kind in {*kinds}}
        return [kind_values[kind] for kind in kinds]

    def _sharded_stage(self, blocks: Blocks) -> _StageSeconds:
        contention, sharded = self.step.stack.contention, self.sharded_blocks(blocks)
        forward = end_s(simulate_forward(sharded, contention))
        backward = end_s(simulate_backward(sharded, contention))
        seconds = _plain_stage(blocks)._replace(forward=forward, backward=backward)
        if not self.reduces_once:
            return seconds
        without = end_s(simulate_backward(sharded, contention, reduces=False))
        return seconds._replace(backward=without, last_reduction=backward - without)

    def sharded_blocks(self, blocks: Blocks) -> list[ShardedBlock]:
        """Each repetition of the blocks of a stage whose parameters are gathered."""
        return [each for block, costs in blocks for each in [self._sharded_once(block, costs)] * block.repeat]

    def _blocks_s(self) -> float:
        """The part of a message for which both ends wait."""
        is_hidden = self.step.stack.pipeline_hidden or self.step.layout.pp == 1
        return 0.0 if is_hidden else self._message_s()

    def _message_s(self) -> float:
        step, layout = self.step, self.step.layout
        size = step.shape.count("token") * step.spec.hidden * DTYPE_BYTES[step.recipe.compute]
        local = self.groups.devices_per_host
        # Each tensor-parallel rank sends a slice: with motet where a job does by default, with others always.
        if step.stack.memory != "motet" or sends_slices(None, degree=layout.tp, local_ranks=local, ranks=layout.ranks):
            size //= layout.tp
        return self.groups.seconds("send-receive", size, "pp")

    def _sharded_once(self, block: BlockSpec, costs: PlannedBlock) -> ShardedBlock:
        """The times of a sharded block, which are computed once for all blocks of a kind."""
        key = block.name, len(block.layer.parameters)
        if key not in self._sharded_of_kind:
            self._sharded_of_kind[key] = self._sharded(block, costs)
        return self._sharded_of_kind[key]

    def _sharded(self, block: BlockSpec, costs: PlannedBlock) -> ShardedBlock:
        is_block, widths = block.input is not None, dict[str, float](self._widths)
        if self.step.matmul == "float8" and is_block:
            widths["parameters"] = 1
        # Less of the bandwidth is reached, which takes the time of more bytes.
        widths = {tensor: width / self.step.stack.sharded_efficiency for tensor, width in widths.items()}
        pieces, counts = self.step.stack.gathers_per_block if is_block else 1, count_parameters([(block, 1)])
        collectives = (
            sum(self.seconds_by_collective(counts, moments, widths, pieces=pieces).values())
            for moments in (("forward",), ("backward",), REDUCED)
        )
        return ShardedBlock(costs.forward_s, costs.backward_s, *collectives)

    def seconds_by_collective(
        self,
        counts: ParameterCounts,
        moments: Collection[Moment],
        widths: Mapping[str, float] | None = None,
        *,
        pieces: int = 1,
    ) -> dict[str, float]:
        """Seconds of each kind of collective on parameters and their gradients at these moments."""
        widths = widths or self._widths
        return {
            action.kind.replace("_", "-"): self.groups.action_s(
                action, counts, widths[action.tensor], is_scattered=is_scattered, pieces=pieces
            )
            for action, is_scattered in self.actions
            if action.over and action.moment in moments
        }

    @cached_property
    def exposed_collectives(self) -> ExposedCollectives:
        """The collectives of the rank with the most, once a step."""
        layout = self.step.layout
        if self.is_sharded:
            ranks = map(self.durations.stages_of_rank, range(self.durations.ranks))
            seconds = max(sum(self.seconds_of_stages[stage].last_reduction for stage in stages) for stages in ranks)
            return ExposedCollectives(seconds, reduction_s=seconds)
        if layout.dp * layout.cp == 1:
            return ExposedCollectives()
        return max(map(self._exposed_on_rank, self._distinct_ranks))

    @cached_property
    def _distinct_ranks(self) -> set[RankWork]:
        """The ranks of the pipeline, without repetitions."""
        durations, kinds = self.durations, self.step.stage_kinds
        rank_by_kinds = {
            tuple([kinds[stage] for stage in durations.stages_of_rank(rank)]): rank for rank in range(durations.ranks)
        }
        return set(map(self._work_of_rank, rank_by_kinds.values()))

    def _work_of_rank(self, rank: int) -> RankWork:
        durations, stages = self.durations, self.durations.stages_of_rank(rank)
        return RankWork(
            self.parameters_of_rank(rank),
            sum(durations.forward_s[stage] for stage in stages),
            sum(durations.backward_s[stage] for stage in stages),
            sum(block.repeat for stage in stages for block, _ in self.stages[stage]),
        )

    def _exposed_on_rank(self, rank: RankWork) -> ExposedCollectives:
        layout = self.step.layout
        reduce_s = sum(self.seconds_by_collective(rank.parameters, REDUCED).values())
        gather_s = self._gather_s(rank) if self.host is None else 0.0  # Else a part of the update on the host
        rounds = self._rounds
        reduction_s, next_s, microbatch_s = reduce_s, gather_s, reduce_s
        if self.hides_data_parallel:
            last = 1 / max(1, rank.blocks)  # The part of the first block
            reduction_s = max(last * reduce_s, reduce_s - rounds * rank.backward_s)
            next_s = max(last * gather_s, gather_s - rounds * rank.forward_s)
            microbatch_s = max(0.0, reduce_s - rank.backward_s)
        exposed = reduction_s + next_s
        if self.reduces_once:
            return ExposedCollectives(exposed, reduce_s + gather_s - exposed, reduction_s, next_s)
        exposed += (layout.microbatches - 1) * microbatch_s
        reduce_s += (layout.microbatches - 1) * reduce_s
        return ExposedCollectives(exposed, reduce_s + gather_s - exposed, reduction_s, next_s, microbatch_s)

    @property
    def _rounds(self) -> int:
        """Micro-batches during whose passes a rank communicates: a chunk is complete while the last ones pass through
        the chunks before it."""
        layout = self.step.layout
        return min(layout.pp, layout.microbatches) if layout.chunks > 1 else 1

    def _gather_s(self, rank: RankWork) -> float:
        return sum(self.seconds_by_collective(rank.parameters, GATHERED_ONCE).values())

    @cached_property
    def host_update(self) -> HostUpdate | None:
        """The update of the rank with the longest one, where states do not lie on devices."""
        if self.host is None:
            return None
        updates = (self._host_update(rank, self.host) for rank in self._distinct_ranks)
        return max(updates, key=lambda update: update.exposed_s)

    def host_update_of_rank(self, rank: int) -> HostUpdate | None:
        """The update of a rank of the pipeline."""
        return None if self.host is None else self._host_update(self._work_of_rank(rank), self.host)

    def _host_update(self, rank: RankWork, host: HostRates) -> HostUpdate:
        """The parts of a rank are as many as its blocks, and alike."""
        step, count = self.step, max(1, rank.blocks)
        numel = self._updated_numel(rank.parameters)
        is_in_rows = sharded_states(step.layout.zero).parameters  # Whose sums travel when a backward has ended
        each = host_link_bytes_per_element(step.recipe, is_in_rows=is_in_rows)
        states = DTYPE_BYTES[step.recipe.master] + step.moments * DTYPE_BYTES.get(step.recipe.state, 1)
        disk_s = numel * states / host.disk_Bps if step.states == "disk" and host.disk_Bps else 0.0
        gather_s = 0.0 if self.is_sharded else self._gather_s(rank)
        seconds = (
            numel * each.to_host / host.link_Bps,
            disk_s,
            numel * states / host.update_Bps,
            disk_s,
            numel * each.to_device / host.link_Bps,
            gather_s,
        )
        reduction_s, hides = self.exposed_collectives.reduction_s, self.hides_data_parallel
        backward_s = self._rounds * rank.backward_s + reduction_s
        window_s = self._rounds * rank.forward_s if hides and step.communication.overlap == "forward" else 0.0
        return simulate_host_update(
            [PartSeconds(*(value / count for value in seconds))] * count,
            reduced=[backward_s * (index / count if hides and not is_in_rows else 1) for index in range(1, count + 1)],
            needed=[window_s * index / count for index in range(count)],
            norm_s=self.optimizer_s,
            delay_s=self._hiding_s if step.delays_update else None,
        )

    def _updated_numel(self, parameters: ParameterCounts) -> float:
        """Elements whose states a rank updates."""
        is_scattered = any(action.kind == "update" and scattered for action, scattered in self.actions)
        if not is_scattered:
            return parameters.trained
        return parameters.dense / self.step.shards + parameters.experts / self.groups.placement("expert shards")[0]

    @cached_property
    def _parameters_of_stages(self) -> list[ParameterCounts]:
        return self._values_of_stages(_sum_parameters)

    def parameters_of_rank(self, rank: int) -> ParameterCounts:
        """The parameters of the stages of a rank of the pipeline."""
        counts = [self._parameters_of_stages[stage] for stage in self.durations.stages_of_rank(rank)]
        return ParameterCounts(*map(sum, zip(*counts, strict=True)))

    @cached_property
    def optimizer_s(self) -> float:
        """Reads and writes of masters, moments and gradients by the rank with the most of them. Where the host updates
        states, the device reads gradients for the norm."""
        step, layout, recipe = self.step, self.step.layout, self.step.recipe
        state = DTYPE_BYTES.get(recipe.state, 1)
        each = 2 * DTYPE_BYTES[recipe.master] + 2 * step.moments * state
        each += 2 * DTYPE_BYTES[recipe.reduce] + DTYPE_BYTES[recipe.compute]  # The norm reads gradients too
        each = each if self.host is None else DTYPE_BYTES[recipe.reduce]
        worst = max(self._updated_numel(rank.parameters) for rank in self._distinct_ranks)
        memory_Bps = self.rates.for_ranks(layout.ranks, layout.ranks).memory_Bps  # noqa: N806 - a unit
        return worst * each * self.step.stack.optimizer_passes / memory_Bps

    def _work_of_slowest_rank(self) -> dict[str, float]:
        durations = self.durations

        def busy(rank: int) -> float:
            stages = durations.stages_of_rank(rank)
            return sum(durations.forward_s[s] + durations.backward_s[s] + 2 * durations.blocks_s for s in stages)

        stages = durations.stages_of_rank(max(range(durations.ranks), key=busy))
        parts = dict.fromkeys(("computation", "recomputation", "tensor parallelism", "expert parallelism"), 0.0)
        parts |= dict.fromkeys(("context parallelism", "data parallelism", "pipeline messages", "kernel launches"), 0.0)
        for stage in stages:
            for block, costs in self.stages[stage]:
                kernels, times = costs.kernels, block.repeat
                parts["computation"] += times * (kernels.forward_s + kernels.backward_s)
                parts["recomputation"] += times * kernels.recomputed_s
                parts["tensor parallelism"] += times * sum(costs.tensor_s)
                parts["expert parallelism"] += times * sum(costs.expert_s)
                parts["context parallelism"] += times * sum(costs.context_s)
                parts["kernel launches"] += times * costs.host_s
            busy_s = sum(block.repeat * (costs.forward_s + costs.backward_s) for block, costs in self.stages[stage])
            parts["data parallelism"] += durations.forward_s[stage] + durations.backward_s[stage] - busy_s
            parts["pipeline messages"] += 2 * durations.blocks_s
        return parts


def _sum_parameters(blocks: Blocks) -> ParameterCounts:
    return count_parameters((block, block.repeat) for block, _ in blocks)
