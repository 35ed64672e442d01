"""The stages of a rank of a pipeline: the forwards and backwards of a step, and forwards alone for evaluation."""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial, reduce
from math import prod

import torch
from torch import Tensor, nn

from motet.collectives.execute.api import all_gather, broadcast
from motet.core.batch import Batch
from motet.parallel.data_parallel.bucketed_zero import BucketedDataParallel
from motet.parallel.data_parallel.communication.shard_replica_mesh import join_subgroup
from motet.parallel.data_parallel.composite import CompositeDataParallel, DataParallelEngine
from motet.parallel.layout import Layout
from motet.parallel.linear import LinearProducts, WeightGradientQueue, take_weight_gradients
from motet.parallel.model_sharding import TENSOR_DIMENSION, ModelSharding
from motet.parallel.parallel_dims import ParallelDims
from motet.parallel.pipeline.border_bytes import sends_slices
from motet.parallel.pipeline.pipeline_schedule import PipelineAction, PipelineSchedule
from motet.parallel.pipeline.player import ComputeClock, PipelinePlayer, WireShape
from motet.parallel.pipeline.stages.stage_module import PipelineStages
from motet.parallel.process.process_group import RankGroup
from motet.parallel.step_plan.plan import StepPlan
from motet.parallel.sync_groups import pipeline_groups, ranks_of_stages
from motet.parallel.tensor_parallel.boundary_hooks import SequenceState
from motet.train.job import Job
from motet.train.optimizer.module_plan import ParallelizeSettings


@dataclass(frozen=True)
class MicroBatchWork:
    """The computation of one micro-batch, of which a stage of a pipeline does a part."""

    compute: Callable[[], Tensor]  # The model's own forward, to the loss
    sizes: Mapping[str, int]  # Sizes from which the shapes of activations follow, such as `{"rows": 2, "tokens": 128}`
    context: Callable[[], AbstractContextManager[object]] = nullcontext  # Entered for each forward and backward


class PipelineEngine:
    """The stages that this rank holds, and the schedule of a step."""

    def __init__(
        self,
        stages: PipelineStages,
        sharding: ModelSharding,
        parameters: CompositeDataParallel,
        *,
        state: "PipelineState",
        schedule: Callable[[int], PipelineSchedule],
        group: RankGroup,
        dtype: torch.dtype,
    ) -> None:
        """`schedule` makes the schedule of a number of micro-batches; `group` are the ranks of the pipeline, in order;
        `dtype` is that of activations."""
        self.group, self.schedule, self.is_last = group, cache(schedule), sharding.stage_ranks[-1] == group.rank
        self._wires, self._stage_ranks, self._dtype = sharding.wires, sharding.stage_ranks, dtype
        self._wire_shapes = dict[tuple[int, tuple[tuple[str, int], ...]], Sequence[WireShape]]()  # By border and sizes
        self.last_stage = len(sharding.stages) - 1
        self._forward_schedule = _forward_schedule(sharding.stage_ranks)
        self.stages, self.state, self._parameters = stages, state, parameters
        self.clock = ComputeClock(group.device)  # Times of the last step
        self._runs = dict[int, Callable[..., Sequence[Tensor]]]()
        for stage in (stage for stage, rank in enumerate(sharding.stage_ranks) if rank == group.rank):
            run: Callable[..., Sequence[Tensor]] = partial(stages.run, stage)
            for engine in parameters.engines:
                is_needed = stage in engine.plan.group.stages
                run = engine.wrap_as_forward(run) if is_needed else engine.without_parameters(run)
            self._runs[stage] = run

    def step(
        self, microbatch_at: Callable[[int], MicroBatchWork], microbatches: int, *, backward_scale: float = 1.0
    ) -> list[Tensor]:
        """All forwards and backwards of a step, in which the gradient of each loss is the scale.
        Returns the losses of the micro-batches, unscaled, on the last stage."""
        schedule = self.schedule(microbatches)
        actions = schedule.actions[self.group.rank]
        gradients = {
            stage: _StageGradients(
                self._parameters.engines_of(stage), sum(a.stage == stage and a.kind in ("B", "W") for a in actions)
            )
            for stage in self._runs
        }
        for shared in self.state.shared:
            shared.begin()
        work = _PipelineWork(self, cache(microbatch_at), gradients, backward_scale)
        player = PipelinePlayer(schedule, work, self.group, early_stages=self.state.early_stages)
        player.play()
        self.clock = player.clock
        for stage in self._runs:
            gradients[stage].finish()
        for shared in self.state.shared:
            shared.finish()
        return [work.losses[index] for index in range(microbatches)] if self.is_last else []

    @torch.no_grad()
    def forward(self, compute: Callable[[], Tensor], batch: Batch) -> Tensor | None:
        """The result of a forward through all stages, on the rank of the last one."""
        microbatch = MicroBatchWork(compute, batch.sizes)
        work = _PipelineWork(self, lambda _: microbatch, {})
        PipelinePlayer(self._forward_schedule, work, self.group).play()
        return work.losses.get(0)

    def forward_on_all(self, compute: Callable[[], Tensor], batch: Batch) -> Tensor:
        """The result of a forward, in float64, on every rank of the pipeline."""
        result, device, last = self.forward(compute, batch), self.group.device, self._stage_ranks[-1]
        shape = torch.zeros(8, dtype=torch.int64, device=device)
        if result is not None:
            shape[0], shape[1 : 1 + result.ndim] = result.ndim, torch.tensor(result.shape)
        broadcast(shape, self.group, last)
        ndim, *sizes = shape.tolist()
        everywhere = torch.zeros(sizes[:ndim], dtype=torch.float64, device=device)
        if result is not None:
            everywhere.copy_(result)
        broadcast(everywhere, self.group, last)
        return everywhere

    def wires(self, border: int, sizes: Mapping[str, int]) -> Sequence[WireShape]:
        """The tensors that cross a border between stages."""
        key = border, tuple(sizes.items())
        if key not in self._wire_shapes:
            self._wire_shapes[key] = self._make_wire_shapes(border, sizes)
        return self._wire_shapes[key]

    def _make_wire_shapes(self, border: int, sizes: Mapping[str, int]) -> Sequence[WireShape]:
        dtypes, shapes = {"compute": self._dtype}, []
        for wire in self._wires[border]:
            shape, slices = wire.shape(sizes), self.state.slices
            is_sliced = slices is not None and wire.is_replicated and prod(shape) % slices.world == 0
            dtype = dtypes.get(wire.dtype) or getattr(torch, wire.dtype)
            shapes.append(WireShape(shape, dtype, wire.needs_gradient, slices if is_sliced else None))
        return shapes

    def run_stage(self, stage: int, microbatch: MicroBatchWork, received: Sequence[Tensor]) -> Sequence[Tensor]:
        """The forward of one stage."""
        if stage and self.state.sequences:
            wires = self._wires[stage - 1]
            lengths = [length for wire in wires for length in wire.split_lengths(microbatch.sizes)]
            for sequence in self.state.sequences if lengths else ():  # The stage begins where one is split already
                sequence.begin(lengths[0])
        return self._runs[stage](microbatch.compute, received)


class _StageGradients:
    """The backwards of one stage in a step: the last one starts the reductions that are left."""

    def __init__(self, engines: Sequence[DataParallelEngine], backwards: int) -> None:
        """`backwards` of inputs and weights; one of inputs alone is followed by that of its weights."""
        self._engines, self._left, self._has_reduced = engines, backwards, False

    def backward(self, action: PipelineAction, compute: Callable[[], None]) -> None:
        accumulates = action.kind == "I"
        self._left -= not accumulates
        is_last = self._left == 0 and not accumulates
        for engine in self._engines:
            engine.begin_backward(
                not self._has_reduced, is_last, accumulates=accumulates, is_deferred=action.kind == "W"
            )
        compute()
        self._has_reduced |= not accumulates
        for engine in self._engines:
            if is_last:  # Here on every rank: reductions of another stage can be on the same process group
                engine.start_remaining_reductions()
            else:
                engine.end_backward()

    def finish(self) -> None:
        """Wait for the reductions of the last backward."""
        for engine in self._engines:
            engine.end_backward()


class SharedGradients:
    """Gradients of parameters that several stages hold, such as tied embeddings: reduced after all backwards.

    In a reproducible run the gradients that stages compute from a row are added first, as on one device.
    """

    def __init__(self, engine: DataParallelEngine, stage_group: RankGroup | None) -> None:
        """`stage_group` has the ranks of the stages, in order, if their gradients from a row are added first."""
        assert isinstance(engine, BucketedDataParallel)  # Rows of parameters belong to one stage
        self.stages, self._engine, self._group = engine.plan.group.stages, engine, stage_group
        self._by_row = dict[int, list[Tensor]]()

    def begin(self) -> None:
        self._engine.begin_backward(True, False, accumulates=True)

    def end_backward(self, microbatch: int) -> None:
        """Called after each backward of one of the stages."""
        if self._group is not None:
            gradients = self._engine.take_gradients()
            before = self._by_row.setdefault(microbatch, [torch.zeros_like(each) for each in gradients])
            for total, gradient in zip(before, gradients, strict=True):
                total.add_(gradient)

    def finish(self) -> None:
        """Reduce the gradients."""
        if self._group is None:
            self._engine.begin_backward(True, True)
            self._engine.end_backward()
        for index, microbatch in enumerate(sorted(self._by_row)):
            self._engine.begin_backward(index == 0, index == len(self._by_row) - 1)
            self._engine.put_gradients([self._sum_of_stages(each) for each in self._by_row[microbatch]])
            self._engine.end_backward()
        self._by_row.clear()

    def _sum_of_stages(self, gradient: Tensor) -> Tensor:
        """The sum in the order of a backward: from the last stage to the first."""
        assert self._group is not None
        gathered = gradient.new_empty(self._group.world, gradient.numel())
        all_gather(gathered.view(-1), gradient, self._group)
        return reduce(torch.add, gathered.flip(0).unbind())


@dataclass(frozen=True)
class PipelineState:
    """Parts of a pipeline that its stages share."""

    shared: Sequence[SharedGradients]
    weight_gradients: WeightGradientQueue
    sequences: Sequence[SequenceState]
    early_stages: Collection[int]  # Stages whose weight gradients can wait until a gradient is sent
    slices: RankGroup | None  # The tensor-parallel ranks, if each sends a slice of an activation that all of them have


@dataclass
class _PipelineWork:
    """The computations of the player in one step."""

    engine: PipelineEngine
    microbatch_at: Callable[[int], MicroBatchWork]
    gradients: Mapping[int, _StageGradients]
    backward_scale: float = 1.0
    losses: dict[int, Tensor] = field(default_factory=dict)
    _wires: dict[tuple[int, int], Sequence[WireShape]] = field(default_factory=dict)

    def wires(self, border: int, microbatch: int) -> Sequence[WireShape]:
        key = border, microbatch
        if key not in self._wires:
            self._wires[key] = self.engine.wires(border, self.microbatch_at(microbatch).sizes)
        return self._wires[key]

    def forward(self, stage: int, microbatch: int, received: Sequence[Tensor]) -> Sequence[Tensor]:
        work = self.microbatch_at(microbatch)
        with work.context():
            outputs = self.engine.run_stage(stage, work, received)
        if stage == self.engine.last_stage:
            self.losses[microbatch] = outputs[0].detach()
        return outputs

    def backward(self, action: PipelineAction, outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        differentiated = [tensor for tensor in outputs if tensor.requires_grad]
        if action.stage == self.engine.last_stage:
            gradients = [torch.full_like(loss, self.backward_scale) for loss in differentiated]
        key, queue = (action.stage, action.microbatch), self.engine.state.weight_gradients

        def compute() -> None:
            if action.kind == "W":
                queue.compute(key)
                return
            with queue.deferring(key) if action.kind == "I" else nullcontext():
                torch.autograd.backward(differentiated, gradients or None)

        with self.microbatch_at(action.microbatch).context():
            self.gradients[action.stage].backward(action, compute)
        for shared in self.engine.state.shared:
            if action.stage in shared.stages:
                shared.end_backward(action.microbatch)


def _forward_schedule(stage_ranks: tuple[int, ...]) -> PipelineSchedule:
    """One micro-batch through all stages."""
    orders: list[list[PipelineAction]] = [[] for _ in set(stage_ranks)]
    for stage, rank in enumerate(stage_ranks):
        orders[rank].append(PipelineAction("F", stage, 0))
        if stage + 1 < len(stage_ranks) and stage_ranks[stage + 1] != rank:
            send = PipelineAction("send_activation", stage, 0)
            orders[rank].append(send)
            orders[stage_ranks[stage + 1]].append(send.other_end)
    return PipelineSchedule("forward", 1, stage_ranks, tuple(map(tuple, orders)), tuple(0 for _ in orders))


def _slicing_group(dims: ParallelDims, group: RankGroup, *, setting: bool | None) -> RankGroup | None:
    """The tensor-parallel ranks that send activations in slices; by default where these links are the faster ones."""
    degree, local = dims.size(TENSOR_DIMENSION), len(group.local_ranks or range(group.world))
    if not sends_slices(setting, degree=degree, local_ranks=local, ranks=group.world):
        return None
    return join_subgroup(group, dims.groups(TENSOR_DIMENSION))


def build_pipeline(
    module: nn.Module,
    plan: StepPlan,
    parameters: CompositeDataParallel,
    *,
    layout: Layout,
    settings: ParallelizeSettings | Job,
    group: RankGroup,
    sequences: Sequence[SequenceState],
    products: LinearProducts,
) -> PipelineEngine | None:
    """The stages of this rank, or None if the ranks do not split the blocks of the module. All ranks call this."""
    sharding = plan.model_sharding
    if not sharding.stages:
        return None
    pipeline_group = join_subgroup(group, pipeline_groups(plan.dims))
    assert pipeline_group is not None  # Each rank has an index in every dimension
    is_by_row, shared = layout.sharding.reproducible_batch_size is not None, []
    for stages in sorted({each.group.stages for each in plan.groups if len(each.group.stages) > 1}):
        stage_group = join_subgroup(group, ranks_of_stages(sharding, stages, plan.dims)) if is_by_row else None
        shared += [SharedGradients(engine, stage_group) for engine in parameters.engines_of(*stages)]
    queue, early_stages = WeightGradientQueue(products, parameters.gradient_sums), set[int]()
    if not is_by_row:  # Where bits count, products are rounded before they are added, as on one rank
        take_weight_gradients(module, queue)
        early_stages = {i for i in range(len(sharding.stages)) if parameters.keeps_gradients(i)}
    return PipelineEngine(
        PipelineStages(module, sharding),
        sharding,
        parameters,
        state=PipelineState(
            shared,
            queue,
            sequences,
            early_stages,
            _slicing_group(plan.dims, group, setting=settings.communication.slice_activations),
        ),
        schedule=layout.pipeline_schedule,
        group=pipeline_group,
        dtype=getattr(torch, settings.precision.resolved.compute),
    )
