"""The engine of a step: it runs backward, sums loss, norm and counts over ranks, clips, and updates a module.
A custom loop calls `parallelize`, then `step` or the parts of a step. Jobs use the same parts (train/step.py)."""

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from motet.checkpoint.background_writer import CheckpointSaver
from motet.checkpoint.publication import Retention
from motet.checkpoint.settings import CheckpointSettings
from motet.collectives.execute.api import all_reduce, sum_scalars
from motet.core.batch import Batch
from motet.core.errors import InputError, check_input
from motet.core.trace import span
from motet.memory.tiers.device_limit import DeviceLimit, count_batch
from motet.memory.tiers.optimizer_states import FileStates
from motet.models.compilation.compiled_blocks import CompiledBlocks
from motet.models.parameter_values import ParameterValues
from motet.parallel.context_parallel.context_step import ContextRanks, join_context_ranks
from motet.parallel.context_parallel.gathered_rows import RowRanks, join_row_ranks
from motet.parallel.data_parallel.communication.shard_replica_mesh import join_subgroup
from motet.parallel.data_parallel.composite import CompositeDataParallel
from motet.parallel.data_parallel.flat_parameters import BroadcastValues
from motet.parallel.layout import Layout
from motet.parallel.linear import LinearProducts
from motet.parallel.local_sgd.outer_optimizer import OuterOptimizer, OuterStepStatus, split_into_replicas
from motet.parallel.model_sharding import ModelSharding
from motet.parallel.process.module_inventory import persistent_buffers
from motet.parallel.process.process_group import RankGroup, broadcast_buffers
from motet.parallel.reproducible.tree_reduce import exact_sum, sum_on_device
from motet.parallel.step_plan.check import check_rank_matches_plan
from motet.parallel.step_plan.plan import StepPlan
from motet.parallel.sync_groups import module_part_groups, reports, same_loss_groups
from motet.parallel.tensor_parallel.sharded_module import shard_module
from motet.precision.numerics import cast_frozen_parameters
from motet.train.balance.expert_balance import ExpertBalance, ExpertLoads, RoutedRows
from motet.train.compiled_job import compile_blocks_of_job
from motet.train.job import Job
from motet.train.memory_check.rank_memory import RecomputedSteps
from motet.train.optimizer.module_plan import ParallelizeSettings, plan_of_module
from motet.train.optimizer.sharded_optimizer import ShardedOptimizer, build_sharded_optimizer
from motet.train.pipeline.custom_batches import (
    LossFunction,
    check_same_batches,
    check_same_loss,
    loss_and_count,
    sizes_of_batch,
)
from motet.train.pipeline.pipeline_step import MicroBatchWork, PipelineEngine, build_pipeline
from motet.train.proof.custom_rows import rows_of_batch, tokens_at
from motet.train.state import TrainingState, newest_checkpoint


@dataclass(frozen=True)
class StepStats:
    """The outcome of a step: the same on every rank, or with `outer` on every rank of a replica."""

    loss: float  # The mean over all ranks and micro-batches, per count
    grad_norm: float  # The norm before clipping
    count: float
    is_finite: bool  # False: the loss or a gradient is not finite, and nothing was updated
    extra_sums: tuple[float, ...]  # Sums over the ranks of the extra values
    stop_requested: bool  # Some rank was asked to stop; with `outer`, replicas learn it at the outer step
    # Consecutive steps that updated nothing; with `outer`, the most of any replica, and 0 between outer steps.
    skipped_steps: int
    loss_scale: int = 1  # Scale of the mean loss in this step; loss and norm are divided by it
    next_loss_scale: int = 1  # Smaller after an overflow, with which nothing was updated
    is_overflow: bool = False  # The loss is finite, and a gradient is not: no divergence
    save_requested: bool = False  # Some rank asked for a checkpoint; with `outer`, replicas learn it like a stop
    experts: ExpertLoads | None = None  # Set for a mixture of experts


@dataclass
class TrainingEngine:
    """A module, its optimizer, and the ranks that train it together."""

    module: nn.Module
    optimizer: ShardedOptimizer
    group: RankGroup
    plan: StepPlan
    clip_norm: float | None = None
    loss_function: LossFunction | None = None
    learning_rate: float = 0.0  # The default of `step`
    outer_optimizer: OuterOptimizer | None = None  # Synchronises independent replicas
    recomputation: RecomputedSteps = field(default_factory=RecomputedSteps)  # Blocks that backward computes again
    compiled: CompiledBlocks | None = None  # Blocks that torch.compile makes graphs of, or the reason why it does not
    pipeline: PipelineEngine | None = None  # The stages of this rank, where ranks split the blocks of the module
    context: ContextRanks | None = None  # Ranks that share each row with this one
    row_ranks: RowRanks | None = None  # Ranks from which limits of rows gather tokens
    balance: ExpertBalance | None = None  # The routers of a mixture of experts
    data_rank: int = 0  # Ranks of a custom loop with the same data rank read the same batches
    data_ranks: int = 1
    reproducible: bool = False  # Every layout must have the same bits
    step_limit: DeviceLimit | None = None  # In a custom loop it holds from begin_step to update; a job has its own
    backward_scale: float = 1.0  # Backward of a loss sum begins with it in the current step
    buffers_at_step_start: dict[str, Tensor] = field(default_factory=dict)  # The same on all ranks
    _skipped_steps: int = 0

    def __post_init__(self) -> None:
        self._initial_parameters = self._trainable_parameters()
        self.module_part_group = join_subgroup(self.step_group, module_part_groups(self.plan.dims)) or self.step_group
        losses = same_loss_groups(self.plan.dims)
        self._same_loss_group = join_subgroup(self.step_group, losses) if len(losses[0]) > 1 else None
        if any(action.overlaps and action.moment == "step" for u in self.plan.comm_units for action in u.schedule):
            self.module.register_state_dict_pre_hook(partial(_synchronize, weakref.ref(self)))

    @property
    def step_group(self) -> RankGroup:
        """The ranks that take a step together."""
        return self.group if self.outer_optimizer is None else self.outer_optimizer.replicas.mesh.shard_group

    def part_of(self, batch: Batch) -> Batch:
        """The part of a batch of whole rows that this rank computes."""
        return batch if self.context is None else self.context.part_of(batch)

    def counting(self, rows: RoutedRows | None) -> AbstractContextManager[None]:
        """A context for the forward and the backward of rows, in which the routers of a mixture count them."""
        return nullcontext() if self.balance is None else self.balance.rows(rows)

    @contextmanager
    def attention_of(self, batch: Batch) -> Iterator[None]:
        """A context for the forward and the backward of a batch, which may be a part of each row."""
        rows = self.row_ranks.rows_of(batch) if self.row_ranks else nullcontext()
        with rows, self.context.attention_of(batch) if self.context else nullcontext():
            yield

    def reports(self, metric: str) -> bool:
        """Whether the number of this rank is added to a sum over the ranks; others have the same number."""
        return reports(metric, self.plan.dims.coordinates(self.step_group.rank), self.plan.dims)

    def step(self, *batches: Any, learning_rate: float | None = None) -> StepStats:
        """One update from this rank's micro-batches; a rank may have fewer than others."""
        if self.loss_function is None:
            raise InputError("step: there is no loss; give parallelize a loss=..., or use begin_step, backward, update")
        with self.step_limit.active() if self.step_limit else nullcontext():
            count_batch(batches)
            return self._step(self.loss_function, batches, learning_rate)

    def _step(self, run: LossFunction, batches: Sequence[Any], learning_rate: float | None) -> StepStats:
        self._begin_step()
        counts, max_microbatches = dict[int, float](), self._max_microbatches(len(batches))
        for sharing in (self.pipeline, self.context):
            if sharing is not None:
                check_same_batches(batches, sharing.group)

        def microbatch_at(index: int) -> MicroBatchWork:
            batch, context = self._tokens_of_rank(batches[index])
            sizes = sizes_of_batch(batch) if self.pipeline else {}
            return MicroBatchWork(partial(compute, index, batch), sizes, context)

        def compute(index: int, batch: Any) -> Tensor:
            loss, counts[index] = loss_and_count(run(self.module, batch))
            return loss

        losses = self.run_microbatches(microbatch_at, len(batches), most=max_microbatches)
        total = sum_on_device([loss.double() for loss in losses], self.group.device)
        if self._same_loss_group is not None:
            check_same_loss(total, self._same_loss_group)
        rate = self.learning_rate if learning_rate is None else learning_rate
        return self._update(rate, total, sum(counts.values()))

    def _tokens_of_rank(self, batch: Any) -> tuple[Any, Callable[[], AbstractContextManager[None]]]:
        """The tokens of a custom loop's batch that this rank computes, and the context in which it does."""
        if self.context is None:
            return batch, nullcontext
        part = self.context.part_of(rows_of_batch(batch))
        return tokens_at(batch, part.places), partial(self.attention_of, part)

    def run_microbatches(
        self, microbatch_at: Callable[[int], MicroBatchWork], count: int, *, most: int = 0
    ) -> list[Tensor]:
        """The forwards and backwards of a step, one micro-batch after another or in the order of a pipeline. Returns
        the losses, which the last stage of a pipeline has. `most` is the largest count of a rank, if that differs."""
        if self.pipeline is not None:
            return self.pipeline.step(microbatch_at, count, backward_scale=self.backward_scale)
        losses, backwards = list[Tensor](), max(count, most)
        for index in range(count):
            microbatch = microbatch_at(index)
            with microbatch.context():
                with span("forward"):
                    loss = microbatch.compute()
                self.backward(loss, index == 0, index == backwards - 1)
            losses.append(loss.detach())
        for index in range(count, backwards):
            self.backward(None, index == 0, index == backwards - 1)
        return losses

    def _refuse_by_hand(self, call: str) -> None:
        """Refuse parts of a step in a custom loop over a pipeline, where only `step` knows when each stage runs."""
        check_input(
            self.pipeline is None or self.loss_function is None,
            f"{call}: ranks of a pipeline hold some of the blocks, and run them in the order of layout.schedule; give "
            "all micro-batches to step",
        )

    def begin_step(self) -> None:
        """Begin a step, with buffers that are the same on all ranks."""
        self._refuse_by_hand("begin_step")
        check_input(
            self.context is None or self.loss_function is None,
            "begin_step: ranks that share rows (layout.cp) compute some tokens of each; give complete batches to step",
        )
        if self.step_limit is not None:
            self.step_limit.start()
        self._begin_step()

    def _begin_step(self) -> None:
        now, initial = self._trainable_parameters(), self._initial_parameters
        if changed_keys := now.keys() ^ initial.keys():
            name = next(name for key, name in (*now.items(), *initial.items()) if key in changed_keys)
            raise InputError(
                f"parameter {name} was replaced, added, frozen or released after the module was parallelized; do that "
                "before, and change values in place afterwards"
            )
        broadcast_buffers(self.module, self.module_part_group, with_loads=False)
        self.buffers_at_step_start = {name: buffer.clone() for name, buffer in persistent_buffers(self.module).items()}
        scaler = self.optimizer.loss_scaler
        self.backward_scale = scaler.backward_scale if scaler else 1.0
        if self.balance is not None:
            self.balance.begin_step()
        self.recomputation.begin_step()
        self.optimizer.begin_step()

    def backward(self, loss: Tensor | None, first: bool = True, last: bool = True) -> None:
        """Backward of the loss sum of a micro-batch, None where this rank has none. Ranks must agree on `last`."""
        self._refuse_by_hand("backward")
        parameters = self.optimizer.sharded_parameters
        parameters.begin_backward(first, last)
        with span("backward"):
            if loss is not None:
                loss.backward(torch.full_like(loss, self.backward_scale))
        parameters.end_backward()

    def update(
        self,
        learning_rate: float,
        loss: float | Sequence[float] | Tensor,
        count: float,
        *extra: float,
        stop: bool = False,
        save: bool = False,
    ) -> StepStats:
        """Divide loss and gradients by the count over all ranks, clip and update, unless something is not finite.
        `loss` is the sum on this rank, or equally many partial sums on each rank, which are added exactly. The host
        does not wait for a loss that is a tensor before it waits for the sums of all ranks, once a step."""
        self._refuse_by_hand("update")
        try:
            return self._update(learning_rate, loss, count, *extra, stop=stop, save=save)
        finally:
            if self.step_limit is not None:
                self.step_limit.stop()

    def _update(
        self,
        learning_rate: float,
        loss: float | Sequence[float] | Tensor,
        count: float,
        *extra: float,
        stop: bool = False,
        save: bool = False,
    ) -> StepStats:
        self.recomputation.end_backwards()
        self._check_buffers_unchanged()
        group, device = self.step_group, self.group.device
        partial_losses = torch.as_tensor(loss, dtype=torch.float64, device=device).detach().view(-1)
        with span("norm"):
            squared_norm = self.optimizer.squared_norm()
        count = count if self.reports("targets") else 0.0
        partial_losses = partial_losses if self.reports("loss") else torch.zeros_like(partial_losses)
        with span("agree"):
            host_numbers = torch.tensor([count, float(stop), float(save), *extra], dtype=torch.float64)
            host_numbers = host_numbers.to(device, non_blocking=True)
            local_sums = [host_numbers[:1], squared_norm.view(1), host_numbers[1:3], partial_losses, host_numbers[3:]]
            local_sums += [self.balance.local_numbers()] if self.balance else []
            count, total_square, stops, saves, *sums = sum_scalars(torch.cat(local_sums), group, device)
            stop_of_extra = len(partial_losses) + len(extra)
            experts, terms = self.balance.loads_of(sums[stop_of_extra:]) if self.balance else (None, ())
            total = exact_sum([*sums[: len(partial_losses)], *terms])
        with span("clip"):
            divisor = count if count > 0 else 1.0  # a step without targets has loss and gradient zero
            norm, scale = math.sqrt(total_square) / (divisor * self.backward_scale), self.optimizer.loss_scale
            is_finite, gradient_scale = math.isfinite(total) and math.isfinite(norm), self.gradient_scale(norm, count)
            is_overflow = self.optimizer.loss_scaler is not None and math.isfinite(total) and not is_finite
        with span("update"):
            if is_finite:
                self.optimizer.update(learning_rate, gradient_scale)
                if self.balance is not None and experts is not None:
                    self.balance.apply(experts)
            else:
                self.optimizer.skip()
                for name, buffer in persistent_buffers(self.module).items():
                    buffer.data.copy_(self.buffers_at_step_start[name])
        if math.isfinite(total):  # No scale makes the loss finite
            self.optimizer.rescale(is_overflow, count)
        self.recomputation.end_step()
        status = self._advance_step(stops > 0, saves > 0, is_finite=None if is_overflow else is_finite)
        extra_sums, skipped = tuple(sums[len(partial_losses) : stop_of_extra]), status.max_consecutive_skips
        rest = scale, self.optimizer.loss_scale, is_overflow, status.save_requested, experts
        return StepStats(total / divisor, norm, count, is_finite, extra_sums, status.stop_requested, skipped, *rest)

    def gradient_scale(self, norm: float, count: float) -> float:
        """The factor that turns scaled sums of gradients into the clipped gradient of the mean loss."""
        clip_factor = 1.0 if self.clip_norm is None or norm <= self.clip_norm else self.clip_norm / norm
        return clip_factor / ((count if count > 0 else 1.0) * self.backward_scale)

    def finalize(self) -> OuterStepStatus | None:
        """Synchronise the replicas of `outer` into one model; called after the last step."""
        return None if self.outer_optimizer is None else self.outer_optimizer.finish()

    def synchronize(self) -> None:
        """Wait until the module has all values of the last step; with `overlap = "forward"` some may still arrive."""
        self.optimizer.sharded_parameters.wait_for_pending()

    def load_assigned_values(self) -> None:
        """Continue from values that you assigned to parameters, the same on all ranks, since the last step.
        Without this call they are lost if master parameters have a higher precision, or after `p.data = ...`."""
        check_input(
            self.outer_optimizer is None,
            "load_assigned_values: independent replicas (outer.every) would take the change for something that they "
            "have learned; assign values before parallelize",
        )
        self.optimizer.sharded_parameters.load_assigned_values()

    def consensus_parameters(self) -> AbstractContextManager[None]:
        """A context in which the module is the same on all ranks: with `outer`, it has the outer parameters."""
        self.synchronize()
        return nullcontext() if self.outer_optimizer is None else self.outer_optimizer.using_outer_parameters()

    def _advance_step(self, stop: bool, save: bool, *, is_finite: bool | None) -> OuterStepStatus:
        """`is_finite` is None after an overflow, which is not counted among the steps that a run may skip."""
        if self.outer_optimizer is not None:
            with span("meet"):
                return self.outer_optimizer.advance(is_finite is not False, stop, save) or OuterStepStatus(False, 0)
        if is_finite is not None:
            self._skipped_steps = 0 if is_finite else self._skipped_steps + 1
        return OuterStepStatus(stop, self._skipped_steps, save)

    def _check_buffers_unchanged(self) -> None:
        for name, buffer in persistent_buffers(self.module).items() if self.reproducible else ():
            check_input(
                torch.equal(buffer, self.buffers_at_step_start[name]),
                f"run.reproducible = 'layout', but training changes the buffer {name!r} (running statistics, say), "
                "which depends on the rows of a rank; use a model without such buffers, or leave run.reproducible out",
            )

    def save(self, folder: str | Path, step: int) -> Path:
        """Write a checkpoint, which any layout can read. Every rank calls it."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        return self.training_state(folder).save(step)

    def restore(self, folder: str | Path) -> int:
        """Load the newest checkpoint of the folder. Returns its step, or 0 if there is none."""
        newest = newest_checkpoint(Path(folder))
        return self.training_state(folder).restore(newest)[0] if newest else 0

    def training_state(
        self, folder: str | Path, settings: CheckpointSettings | None = None, data_fingerprint: str = ""
    ) -> TrainingState:
        """The state that a checkpoint in the folder holds. Without settings, all checkpoints stay."""
        settings = settings or CheckpointSettings(keep=2**31)
        saver = CheckpointSaver(
            Path(folder),
            self.group.process_group,
            Retention(settings.keep, settings.keep_every),
            device=self.group.device,
            staging_bytes=settings.staging,
            slices_are_in_files=isinstance(self.optimizer.states, FileStates),
        )
        rest = saver, data_fingerprint, self.module_part_group, self.plan, self.outer_optimizer
        reproducible = "layout" if self.reproducible else None
        return TrainingState(self.module, self.optimizer, self.group, *rest, reproducible)

    def _trainable_parameters(self) -> dict[object, str]:
        """The name of each parameter; by name if FSDP2 replaces the parameter while it is unsharded."""
        replaced = self.optimizer.sharded_parameters.replaced_parameters
        return {n if n in replaced else p: n for n, p in self.module.named_parameters() if p.requires_grad}

    def _max_microbatches(self, local_microbatches: int) -> int:
        bounds = torch.tensor([local_microbatches, -local_microbatches], device=self.step_group.device)
        all_reduce(bounds, self.step_group, op="max")
        max_count, min_count = int(bounds[0]), -int(bounds[1])
        check_input(
            min_count >= max(1, max_count) or not self.optimizer.sharded_parameters.needs_even_microbatches,
            f"step: a rank has {min_count} micro-batches and another {max_count}; at stage 3 every rank runs "
            "forward equally often, and at least once, so give all of them as many or use zero=2",
        )
        check_input(
            self.pipeline is None or max_count == min_count > 0,
            f"step: a rank has {min_count} micro-batches and another {max_count}; in a pipeline give all ranks as "
            "many, and at least one",
        )
        return max(1, max_count)


def _synchronize(engine: "weakref.ref[TrainingEngine]", *call: object) -> None:
    """Let a state dict have all values of the last step. A hook of the module keeps no engine alive."""
    if (alive := engine()) is not None:
        alive.synchronize()


def build_engine(
    module: nn.Module,
    group: RankGroup,
    *,
    layout: Layout,
    settings: ParallelizeSettings | Job,
    batch_sequences: int,
    loss: LossFunction | None = None,
    model_sharding: ModelSharding | None = None,
    values: ParameterValues | None = None,
) -> TrainingEngine:
    """Shard a module over all ranks or those of each replica; parameters get `values`, or those of the first rank."""
    broadcast_buffers(module, group)
    recipe, communication = settings.precision.resolved, settings.communication
    cast_frozen_parameters(module, recipe)
    plan = plan_of_module(
        module, group, layout=layout, settings=settings, batch_sequences=batch_sequences, model_sharding=model_sharding
    )
    replicas = split_into_replicas(group, layout.sharding, communication) if settings.outer.every else None
    step_group = replicas.mesh.shard_group if replicas else group
    recomputation = RecomputedSteps.for_module(module, settings.memory, group, stages=plan.model_sharding.stages)
    held = {name for name, specs in plan.specs.items() if step_group.rank in specs}
    products = LinearProducts()  # Products of all linear layers that are split or queue weight gradients
    split = partial(shard_module, group=step_group, products=products, pieces=communication.tp_pieces, held=held)
    with span("groups of split layers"):
        sequences = split(module, plan.model_sharding, plan.dims)
    compiled = compile_blocks_of_job(module, settings, group.device) if isinstance(settings, Job) else None
    with span("groups of data parallelism, parameters and optimizer"):
        optimizer = build_sharded_optimizer(
            module,
            plan,
            settings.optimizer,
            recipe,
            group=step_group,
            communication=communication,
            values=values or BroadcastValues(module, group),
            memory=settings.memory,
        )
    optimizer.loss_scaler = settings.precision.make_loss_scaler()
    _check_shards(parameters := optimizer.sharded_parameters, plan, step_group.rank)
    make_outer = partial(OuterOptimizer, settings=settings.outer, communication=communication)
    make_pipeline = partial(build_pipeline, settings=settings, layout=layout, sequences=sequences, products=products)
    engine = TrainingEngine(
        module,
        optimizer,
        group,
        plan,
        clip_norm=settings.optimizer.clip_norm,
        loss_function=loss,
        learning_rate=settings.optimizer.learning_rate,
        outer_optimizer=make_outer(module, parameters, replicas) if replicas else None,
        pipeline=make_pipeline(module, plan, parameters, group=step_group),
        context=join_context_ranks(layout, step_group, module),
        row_ranks=join_row_ranks(layout, step_group, module),
        reproducible=layout.sharding.reproducible_batch_size is not None,
        recomputation=recomputation,
        compiled=compiled,
    )
    recomputation.roots = module, optimizer, engine.outer_optimizer, engine.pipeline
    return engine


def _check_shards(parameters: CompositeDataParallel, plan: StepPlan, rank: int) -> None:
    shards = parameters.local_shards(parameters.local_masters).items()
    held_ranges = {name: (shard.start, shard.start + shard.values.numel()) for name, shard in shards}
    check_rank_matches_plan(plan, rank, held_ranges, counted_names=parameters.counted_names)
