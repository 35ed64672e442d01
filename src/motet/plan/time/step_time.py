"""The time of a step: stages are simulated one after the other, then the pipeline, then what follows the last backward.

Each rank has a stream for kernels and one for collectives. `predict` is the simulation; `lower_bound` never exceeds it.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import inf
from typing import NamedTuple, TypeVar

from motet.core.dtypes import DTYPE_BYTES
from motet.models.spec.layer_specs import BlockSpec
from motet.parallel.data_parallel.zero import Moment
from motet.parallel.pipeline.border_bytes import sends_slices
from motet.parallel.pipeline.schedules import SCHEDULES
from motet.plan.planned_step import PlannedStep, is_expert
from motet.plan.same_object import SameObject
from motet.plan.time.communication import CollectiveCosts, GroupTimes, ParameterCounts
from motet.plan.time.kernel_times import DeviceRates
from motet.plan.time.pipeline_time import (
    PipelineDurations,
    pipeline_lower_bound,
    simulate_pipeline,
    splits_backward,
)
from motet.plan.time.sharded_block_times import ShardedBlock, simulate_backward, simulate_forward
from motet.plan.time.stage_times import PlannedBlock, StageTimes

_Value = TypeVar("_Value")
_BYTES_OF_STORED_TOKEN = 4
_REDUCED: tuple[Moment, ...] = ("microbatch", "last_microbatch")  # When gradients are
_ROUNDING = 1e-9  # Parts of a step that are smaller are what differences leave, also below zero


@dataclass(frozen=True)
class StepTime:
    """The seconds of a step, and the parts that add up to them."""

    seconds: float
    parts: Mapping[str, float]


@dataclass(frozen=True)
class StepTimes:
    """Predicts steps on devices that a network joins."""

    rates: DeviceRates
    devices_per_host: int
    costs: CollectiveCosts
    storage_Bps: float = inf  # noqa: N815 - a unit; of a host

    def predict(self, step: PlannedStep) -> StepTime:
        """The time of a step."""
        return _StepSimulation(self, step).run()

    def lower_bound(self, step: PlannedStep) -> float:
        """Seconds that the step takes at least."""
        return _StepSimulation(self, step).lower_bound()

    def lower_bounds(self, step: PlannedStep, schedules: Sequence[str], limit_s: float) -> list[float]:
        """Seconds that the step takes at least with each of these schedules, or a limit that all of them exceed."""
        simulation = _StepSimulation(self, step)
        work_s = simulation.lower_bound_of_schedules()
        if work_s >= limit_s:
            return [work_s] * len(schedules)
        bounds = dict[object, float]()  # Schedules with the same ranks of stages, split backwards or not, have one
        keys = [(SCHEDULES[name].is_v, splits_backward(name)) for name in schedules]
        for name, key in zip(schedules, keys, strict=True):
            if key not in bounds:
                bounds[key] = simulation.with_schedule(name).lower_bound()
        return [bounds[key] for key in keys]


class _RankWork(NamedTuple):
    """Parameters of a rank, and its seconds for one micro-batch."""

    parameters: ParameterCounts
    forward_s: float
    backward_s: float
    blocks: int


_Blocks = tuple[tuple[BlockSpec, PlannedBlock], ...]


class _StageSeconds(NamedTuple):
    """Seconds of a stage for one micro-batch."""

    forward: float
    backward: float
    weight: float  # The part of a backward that schedules with split backwards delay
    last_reduction: float = 0.0  # What the last backward takes longer where gradients are reduced once a step


def _plain_stage(blocks: _Blocks) -> _StageSeconds:
    """A stage whose parameters are not gathered."""
    return _StageSeconds(
        sum(block.repeat * costs.forward_s for block, costs in blocks),
        sum(block.repeat * costs.backward_s for block, costs in blocks),
        sum(block.repeat * costs.kernels.weight_s for block, costs in blocks),
    )


class _StepSimulation:
    def __init__(self, times: StepTimes, step: PlannedStep) -> None:
        self._times, self.step, self.rates = times, step, times.rates
        self.groups = GroupTimes(step.layout, times.devices_per_host, times.costs, step.shards)
        self.read_s = _data_bytes_of_host(step, times.devices_per_host) / times.storage_Bps
        self._stage_times = StageTimes(step, times.rates, self.groups)
        moments = {action.moment for action, _ in step.actions}
        self.reduces_once = "microbatch" not in moments
        # Otherwise parameters are gathered once a step, like those of stage 1
        self.is_sharded = "forward" in moments and ("backward" in moments or not self.reduces_once)
        self._sharded_of_kind = dict[tuple[str, int], ShardedBlock]()

    def lower_bound(self) -> float:
        return max(self.read_s, pipeline_lower_bound(self.durations) + self._outside_of_pipeline_s())

    def with_schedule(self, name: str) -> "_StepSimulation":
        """The same stages in another order."""
        if name == self.step.layout.schedule:
            return self
        layout = replace(self.step.layout, schedule=name)
        other = _StepSimulation(self._times, replace(self.step, layout=layout))
        other._stage_times, other._seconds_of_stages = self._stage_times, self._seconds_of_stages
        other._parameters_of_stages = self._parameters_of_stages
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

    def run(self) -> StepTime:
        step, layout = self.step, self.step.layout
        makespan = max(simulate_pipeline(self.durations), pipeline_lower_bound(self.durations), self._shared_cores_s())
        computed_s = makespan + self._outside_of_pipeline_s()
        seconds = max(self.read_s, computed_s)  # The data of the next step is read meanwhile
        work = self._work_of_slowest_rank()
        parts = {name: value * layout.microbatches for name, value in work.items()}
        parts["data parallelism"] = parts.get("data parallelism", 0.0) + self._data_parallel_s
        parts["pipeline bubble"] = max(0.0, makespan - layout.microbatches * sum(work.values()))
        parts["optimizer"] = self._optimizer_s
        parts["host"] = step.stack.step_overhead_s
        parts["data loading"] = seconds - computed_s
        parts = {name: value if value > _ROUNDING * seconds else 0.0 for name, value in parts.items()}
        total = sum(parts.values())
        return StepTime(seconds, {name: value * seconds / total for name, value in parts.items()})

    def _outside_of_pipeline_s(self) -> float:
        return self._data_parallel_s + self._optimizer_s + self.step.stack.step_overhead_s

    @cached_property
    def _data_parallel_s(self) -> float:
        """Exposed collectives, and the kernels that hidden ones slow down."""
        exposed_s, hidden_s = self._after_backward()
        return exposed_s + hidden_s * self.step.stack.contention

    @property
    def stages(self) -> tuple[_Blocks, ...]:
        return self._stage_times.stages

    @cached_property
    def durations(self) -> PipelineDurations:
        layout, stages = self.step.layout, self._seconds_of_stages
        forward, backward = (tuple(each.forward for each in stages), tuple(each.backward for each in stages))
        message = self._message_s() if layout.pp > 1 else 0.0
        names = (layout.schedule, layout.pp, layout.chunks, layout.microbatches)
        weight = tuple(each.weight for each in stages)
        return PipelineDurations(*names, forward, backward, weight, message, self._blocks_s())

    @cached_property
    def _seconds_of_stages(self) -> list[_StageSeconds]:
        return self._of_stages(self._sharded_stage if self.is_sharded else _plain_stage)

    def _of_stages(self, function: Callable[[_Blocks], _Value]) -> list[_Value]:
        """The values of a function for the blocks of each stage, which it gets once for all stages with the same."""
        kinds = self.step.stage_kinds
        of_kind = {kind: function(self.stages[kind]) for kind in {*kinds}}
        return [of_kind[kind] for kind in kinds]

    def _sharded_stage(self, blocks: _Blocks) -> _StageSeconds:
        contention = self.step.stack.contention
        sharded = [each for block, costs in blocks for each in [self._sharded_once(block, costs)] * block.repeat]
        forward, backward = simulate_forward(sharded, contention), simulate_backward(sharded, contention)
        seconds = _plain_stage(blocks)._replace(forward=forward, backward=backward)
        if not self.reduces_once:
            return seconds
        unreduced = [replace(each, scatter_s=0.0) for each in sharded]
        without = simulate_backward(unreduced, contention)
        return seconds._replace(backward=without, last_reduction=backward - without)

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
        is_block, widths = block.input is not None, {**self._widths}
        if self.step.matmul == "float8" and is_block:
            widths["parameters"] = 1
        # Less of the bandwidth is reached, which takes the time of more bytes.
        widths = {tensor: width / self.step.stack.sharded_efficiency for tensor, width in widths.items()}
        pieces, counts = self.step.stack.gathers_per_block if is_block else 1, _parameters(block)
        collectives = (
            self._collectives_s(counts, moments, widths, pieces=pieces)
            for moments in (("forward",), ("backward",), _REDUCED)
        )
        return ShardedBlock(costs.forward_s, costs.backward_s, *collectives)

    @cached_property
    def _widths(self) -> dict[str, float]:
        """Bytes of an element that is communicated."""
        recipe = self.step.recipe
        return {"parameters": DTYPE_BYTES[recipe.compute], "gradients": DTYPE_BYTES[recipe.reduce]}

    def _collectives_s(
        self, counts: ParameterCounts, moments: Collection[Moment], widths: Mapping[str, float], *, pieces: int = 1
    ) -> float:
        """Seconds of all collectives on parameters and their gradients at these moments."""
        return sum(
            self.groups.action_s(action, counts, widths[action.tensor], is_scattered=is_scattered, pieces=pieces)
            for action, is_scattered in self.step.actions
            if action.over and action.moment in moments
        )

    def _after_backward(self) -> tuple[float, float]:
        """(Exposed, hidden) seconds of collectives of data parallelism for the rank with the most, once a step."""
        layout = self.step.layout
        if self.is_sharded:
            ranks = map(self.durations.stages_of_rank, range(self.durations.ranks))
            return max(sum(self._seconds_of_stages[stage].last_reduction for stage in stages) for stages in ranks), 0.0
        if layout.dp * layout.cp == 1:
            return 0.0, 0.0
        return max(map(self._rank_after_backward, self._distinct_ranks))

    @cached_property
    def _distinct_ranks(self) -> "set[_RankWork]":
        """The ranks of the pipeline, without repetitions."""
        durations, kinds = self.durations, self.step.stage_kinds
        of_kinds = {
            tuple([kinds[stage] for stage in durations.stages_of_rank(rank)]): rank for rank in range(durations.ranks)
        }
        return {
            _RankWork(
                self._parameters_of_rank(rank),
                sum(durations.forward_s[stage] for stage in stages),
                sum(durations.backward_s[stage] for stage in stages),
                sum(block.repeat for stage in stages for block, _ in self.stages[stage]),
            )
            for stages, rank in of_kinds.items()
        }

    def _rank_after_backward(self, rank: "_RankWork") -> tuple[float, float]:
        step, layout = self.step, self.step.layout
        reduce_s = self._collectives_s(rank.parameters, _REDUCED, self._widths)
        gather_s = self._collectives_s(rank.parameters, ("forward", "step"), self._widths)
        # A chunk is complete while the last micro-batches pass through the chunks before it.
        rounds = min(layout.pp, layout.microbatches) if layout.chunks > 1 else 1
        exposed = reduce_s + gather_s
        hides = step.stack.hides_data_parallel and step.overlap != "none"
        if hides:
            last = 1 / max(1, rank.blocks)  # The part of the first block
            exposed = max(last * reduce_s, reduce_s - rounds * rank.backward_s)
            exposed += max(last * gather_s, gather_s - rounds * rank.forward_s)
        if not self.reduces_once:
            more = (layout.microbatches - 1) * reduce_s
            exposed += (layout.microbatches - 1) * max(0.0, reduce_s - rank.backward_s) if hides else more
            reduce_s += more
        return exposed, reduce_s + gather_s - exposed

    @cached_property
    def _parameters_of_stages(self) -> list[ParameterCounts]:
        return self._of_stages(_sum_parameters)

    def _parameters_of_rank(self, rank: int) -> ParameterCounts:
        counts = [self._parameters_of_stages[stage] for stage in self.durations.stages_of_rank(rank)]
        return ParameterCounts(sum(each.dense for each in counts), sum(each.experts for each in counts))

    @cached_property
    def _optimizer_s(self) -> float:
        """Reads and writes of masters, moments and gradients by the rank with the most of them."""
        step, layout, recipe = self.step, self.step.layout, self.step.recipe
        state = DTYPE_BYTES.get(recipe.state, 1)
        each = 2 * DTYPE_BYTES[recipe.master] + 2 * step.moments * state
        each += 2 * DTYPE_BYTES[recipe.reduce] + DTYPE_BYTES[recipe.compute]  # The norm reads gradients too
        worst = 0.0
        is_scattered = any(action.kind == "update" and scattered for action, scattered in step.actions)
        shards, expert_shards = (step.shards, self.groups.placement("expert shards")[0]) if is_scattered else (1, 1)
        for rank in self._distinct_ranks:
            worst = max(worst, rank.parameters.dense / shards + rank.parameters.experts / expert_shards)
        memory_Bps = self.rates.of_ranks(layout.ranks, layout.ranks).memory_Bps  # noqa: N806 - a unit
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


def _parameters(block: BlockSpec) -> ParameterCounts:
    """Parameters of one block on this rank."""
    return _parameters_of_block(SameObject(block))


@lru_cache(maxsize=1 << 14)
def _parameters_of_block(same: SameObject[BlockSpec]) -> ParameterCounts:
    block = same.value
    experts = sum(p.numel for p in block.layer.parameters if is_expert(p.name))
    return ParameterCounts(block.parameter_count - experts, experts)


def _sum_parameters(blocks: _Blocks) -> ParameterCounts:
    counts = [(block.repeat, _parameters(block)) for block, _ in blocks]
    return ParameterCounts(sum(n * each.dense for n, each in counts), sum(n * each.experts for n, each in counts))


def _data_bytes_of_host(step: PlannedStep, devices_per_host: int) -> float:
    """Bytes of the tokens that the ranks of a host need for a step; those of one replica read the same rows."""
    layout = step.layout
    replicas = min(layout.dp, -(-devices_per_host // (layout.tp * layout.cp)))
    return _BYTES_OF_STORED_TOKEN * step.tokens * replicas / layout.dp
