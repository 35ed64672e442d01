"""One step of training on one rank: read, move, forward, backward, communicate, clip, update.
The loss is the sum over all target tokens of the global batch divided by their number, so gradients are summed over
micro-batches and ranks first and divided once. Every rank computes the same norm and takes the same decision."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from motet.core.batch import Batch, BatchSource
from motet.core.trace import span
from motet.data.samples.input_queue import InputQueue
from motet.memory.tiers.device_limit import count_batch
from motet.monitor.events import (
    GradientsOverflowed,
    NumericsMeasured,
    ParameterServerStepStats,
    RecomputationChosen,
    ReplicaCheckDone,
)
from motet.parallel.data_parallel.data_sharding import MicroBatchRows
from motet.parallel.layout import Layout, microbatches_of_rank
from motet.train.balance.expert_balance import ExpertLoads, RoutedRows
from motet.train.engine import TrainingEngine
from motet.train.numerics_monitor.monitor import NumericsMonitor
from motet.train.pipeline.pipeline_step import MicroBatchWork
from motet.train.pipeline.stage_usage import StepUsage, local_usage, usage_of_ranks
from motet.train.replica_check.checker import LocalStepResult, ReplicaChecker


class TrainableModelProtocol(Protocol):
    """A model that can be trained; `TrainableModel` is one."""

    @property
    def loss_sum(self) -> Callable[[Batch], Tensor]: ...

    @property
    def randomness(self) -> Callable[[int, Tensor], AbstractContextManager[object]]: ...


@dataclass(frozen=True)
class StepResult:
    """The outcome of a step: the same on every rank; with independent replicas, on every rank of a replica."""

    loss: float
    grad_norm: float
    targets: float
    tokens: int
    learning_rate: float
    is_finite: bool  # False: the update was not applied
    stop_requested: bool  # Some rank was asked to stop, and all ranks know it
    skipped_steps: int  # Consecutive steps without an update, as far as all ranks know
    usage: StepUsage | None = None  # None with a parameter server
    server_work: ParameterServerStepStats | None = None  # Set with a parameter server
    replica_check: ReplicaCheckDone | None = None  # Set in steps with a replica check
    loss_scale: int | None = None  # Set in fp16
    overflow: GradientsOverflowed | None = None  # Set if the update was skipped because of the scale
    recomputation: RecomputationChosen | None = None  # Set in the step after which the policies were chosen
    numerics: NumericsMeasured | None = None  # Set in steps that the numerics monitor measures
    save_requested: bool = False  # Rank 0 asked for a checkpoint, and all ranks know it
    experts: ExpertLoads | None = None  # Set for a mixture of experts


class _ReadMicroBatch(NamedTuple):
    """A micro-batch as it was read."""

    rows: Batch
    batch: Batch  # The tokens of the rows that the rank computes


@dataclass(frozen=True)
class MicroBatchLoop:
    """The forwards and backwards of a step on one rank, one after another or in the order of a pipeline."""

    model: TrainableModelProtocol
    batch_source: BatchSource
    engine: TrainingEngine
    layout: Layout
    batch_sequences: int
    queue: InputQueue[_ReadMicroBatch] | None = None

    def microbatches(self) -> list[MicroBatchRows]:
        """The rows that the rank reads in each step."""
        return microbatches_of_rank(self.layout, self.engine.group.rank, self.batch_sequences)

    def read(self, step: int, microbatch: MicroBatchRows) -> _ReadMicroBatch:
        rows = self.batch_source.batch(step, microbatch.rows)
        return _ReadMicroBatch(rows, microbatch.select(rows))

    def run(self, step: int, *, keep_batches: bool) -> LocalStepResult:
        microbatches = self.microbatches()
        read = _MicroBatchReader(self, step, microbatches)
        losses = self.engine.run_microbatches(partial(self._microbatch, step, read), len(microbatches))
        device = self.engine.group.device
        stacked = torch.stack(losses or [torch.zeros((), device=device) for _ in microbatches]).to(torch.float64)
        kept, first_loss = read.contributing if keep_batches else [], stacked[0].item() if keep_batches else 0.0
        return LocalStepResult(self._loss_sums(stacked, microbatches), read.targets, read.tokens, kept, first_loss)

    def _microbatch(self, step: int, read: "_MicroBatchReader", index: int) -> MicroBatchWork:
        batch = read(index)
        sizes, rows = batch.sizes if self.engine.pipeline else {}, read.routed_rows.get(index)
        return MicroBatchWork(partial(self.model.loss_sum, batch), sizes, partial(self._context, step, batch, rows))

    @contextmanager
    def _context(self, step: int, batch: Batch, rows: RoutedRows | None) -> Iterator[None]:
        engine = self.engine
        with self.model.randomness(step, batch.rows), engine.attention_of(batch), engine.counting(rows):
            yield

    def _loss_sums(self, losses: Tensor, microbatches: list[MicroBatchRows]) -> Tensor:
        """One sum; a reproducible run has one for each row, so the order of addition does not depend on the layout."""
        if self.layout.sharding.reproducible_batch_size is None:
            return losses.sum().view(1)
        sums = losses.new_zeros(self.layout.sharding.reproducible_batch_size)
        for loss, microbatch in zip(losses, microbatches, strict=True):
            if microbatch.contributes_gradients:
                sums[microbatch.rows.start] = loss
        return sums


class _MicroBatchReader:
    """Reads the micro-batches of a rank, each once, and counts their targets and tokens."""

    def __init__(self, loop: MicroBatchLoop, step: int, microbatches: Sequence[MicroBatchRows]) -> None:
        self._loop, self._device, self._step = loop, loop.engine.group.device, step
        self._microbatches, self.targets, self.tokens = microbatches, 0.0, 0
        self.contributing = list[Batch]()  # Batches as they were read
        self.routed_rows = dict[int, RoutedRows]()  # By micro-batch; only contributing ones

    def __call__(self, index: int) -> Batch:
        microbatch, balance = self._microbatches[index], self._loop.engine.balance
        with span("read"):  # With a queue, the time that the step waits for it
            queue, step = self._loop.queue, self._step
            rows, batch = queue.take(step, index) if queue else self._loop.read(step, microbatch)
            if microbatch.contributes_gradients:
                self.targets += batch.weights.sum(dtype=torch.float64).item()
                self.tokens += rows.tokens.numel()  # Whole rows, which one of the ranks that share them reports
                self.contributing.append(batch)
                if balance is not None:
                    self.routed_rows[index] = balance.rows_of(rows, self._loop.engine.backward_scale)
        with span("move"):
            if batch.tokens.device != self._device:
                return batch.to(self._device)
            count_batch(batch.tensors())
            return batch


@dataclass(frozen=True)
class TrainStep:
    """Everything that the steps of a run share."""

    engine: TrainingEngine
    runner: MicroBatchLoop
    replica_checker: ReplicaChecker | None = None
    numerics_monitor: NumericsMonitor | None = None

    @contextmanager
    def reading_ahead(self, depth: int, steps: range) -> Iterator["TrainStep"]:
        """The same for these steps, whose micro-batches a thread reads, up to `depth` of them ahead."""
        runner, device, microbatches = self.runner, self.engine.group.device, self.runner.microbatches()
        if depth == 0:
            yield self
            return

        def read(step: int, index: int) -> _ReadMicroBatch:
            rows, batch = runner.read(step, microbatches[index])
            return _ReadMicroBatch(rows, batch.pinned() if device.type == "cuda" else batch)

        start_thread = partial(torch.cuda.set_device, device) if device.type == "cuda" else None
        with InputQueue(read, steps, len(microbatches), depth=depth, start_thread=start_thread) as queue:
            yield replace(self, runner=replace(runner, queue=queue))

    def step(
        self, step: int, learning_rate: float, stop: bool = False, last: bool = False, save: bool = False
    ) -> StepResult:
        """Do a step (from 0), the `last` of the run or not. Nothing is updated if a loss or gradient is not finite."""
        checker, engine = self.replica_checker, self.engine
        is_checked = checker is not None and checker.is_due(step)
        engine.begin_step()
        monitor = self.numerics_monitor if self.numerics_monitor and self.numerics_monitor.is_due(step) else None
        activations = monitor.begin() if monitor else None
        local = self.runner.run(step, keep_batches=is_checked)
        numerics = monitor.finish(step, activations) if monitor and activations else None
        compare = checker.digest_before_update(step, local) if checker and is_checked else None
        stats = engine.update(
            learning_rate,
            local.loss_sums,
            local.targets,
            float(local.tokens if engine.reports("tokens") else 0),
            *local_usage(engine),
            stop=stop,
            save=save,
        )
        replica_check = compare(stats) if compare else None
        overflow = None
        if stats.is_overflow:
            scales = stats.loss_scale, stats.next_loss_scale
            overflow = GradientsOverflowed(step=step + 1, loss_scale=scales[0], next_loss_scale=scales[1])
        final_status = engine.finalize() if last else None
        # Independent replicas read equally many rows, and the sums are those of one replica.
        replicas = engine.outer_optimizer.replicas.mesh.replica_group.world if engine.outer_optimizer else 1
        return StepResult(
            loss=stats.loss,
            grad_norm=stats.grad_norm,
            targets=stats.count,
            tokens=int(stats.extra_sums[0]) * replicas,
            usage=usage_of_ranks(stats.extra_sums[1:], engine),
            learning_rate=learning_rate,
            is_finite=stats.is_finite,
            stop_requested=stats.stop_requested or (final_status is not None and final_status.stop_requested),
            skipped_steps=max(stats.skipped_steps, final_status.max_consecutive_skips if final_status else 0),
            replica_check=replica_check,
            loss_scale=stats.loss_scale if engine.optimizer.loss_scaler else None,
            overflow=overflow,
            recomputation=engine.recomputation.take_choice(step + 1),
            numerics=numerics,
            save_requested=stats.save_requested,
            experts=stats.experts,
        )
