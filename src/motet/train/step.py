"""One step of training on one rank: read, move, forward, backward, communicate, clip, update.

The loss is the sum over all target tokens of the global batch divided by their number, so gradients are summed over
micro-batches and ranks first and divided once. Every rank computes the same norm and takes the same decision.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from motet.core.batch import Batch
from motet.core.trace import span
from motet.monitor.events import ParameterServerStepStats, ReplicaCheckDone
from motet.parallel.layout import Layout
from motet.parallel.row_assignment import MicroBatchRows, microbatches_of_rank
from motet.train.engine import StepStats, TrainingEngine


class StepModel(Protocol):
    """What a step needs of a model; `models.build.Trainee` is one."""

    @property
    def loss_sum(self) -> Callable[[Batch], Tensor]: ...

    @property
    def randomness(self) -> Callable[[int, Tensor], AbstractContextManager[object]]: ...


class BatchSource(Protocol):
    """What a step needs of the data; `data.loader.Loader` is one."""

    def batch(self, step: int, rows: range) -> Batch: ...


@dataclass(frozen=True)
class StepResult:
    """The same on every rank; with replicas that train apart, on every rank of a replica."""

    loss: float
    grad_norm: float
    targets: float
    tokens: int
    learning_rate: float
    is_finite: bool  # False: the update was not applied
    stop_requested: bool  # Some rank was asked to stop, and all know it
    skipped_steps: int  # Steps in a row that were not applied, as far as all know it
    server_work: ParameterServerStepStats | None = None  # Of a run with a parameter server
    replica_check: ReplicaCheckDone | None = None  # Of a step that is watched


@dataclass(frozen=True)
class LocalStepResult:
    """What a rank has done in a step before the update."""

    loss_sums: list[float]  # Sums over its targets: one, or one for each row of the global batch
    targets: float
    tokens: int
    batches: list[Batch]  # Micro-batches, as they were read; of a step that is watched
    first_loss: float  # Sum over the targets of the first


DigestsT = TypeVar("DigestsT")


class RankComparer(Protocol[DigestsT]):
    """Compares ranks in some steps; `watch.Watch` is one."""

    def is_due(self, step: int) -> bool: ...

    def digest_before_update(self, step: int, local_step: LocalStepResult) -> DigestsT:
        """Before the update."""

    def compare_ranks(self, step: int, pre_update: DigestsT, stats: StepStats) -> ReplicaCheckDone:
        """After it."""


@dataclass(frozen=True)
class TrainStep:
    """What the steps of a run have in common."""

    model: StepModel
    batch_source: BatchSource
    engine: TrainingEngine
    layout: Layout
    batch_sequences: int
    rank_comparer: RankComparer[Any] | None = None

    def step(self, step: int, learning_rate: float, stop: bool = False, last: bool = False) -> StepResult:
        """Do step `number` (from 0), the last of the run maybe. What is not finite updates nothing."""
        comparer = self.rank_comparer if self.rank_comparer is not None and self.rank_comparer.is_due(step) else None
        self.engine.begin_step()
        local_step = self._forward_and_backward(step, keep_batches=comparer is not None)
        pre_update = comparer.digest_before_update(step, local_step) if comparer else None
        stats = self.engine.update(
            learning_rate, local_step.loss_sums, local_step.targets, float(local_step.tokens), stop=stop
        )
        replica_check = comparer.compare_ranks(step, pre_update, stats) if comparer else None
        agreement = self.engine.finalize() if last else None
        total_tokens = int(stats.extra_sums[0]) * self._replica_count
        stop_requested, skipped_steps = (
            stats.stop_requested or (agreement is not None and agreement.stop_requested),
            max(stats.skipped_steps, agreement.max_consecutive_skips if agreement else 0),
        )
        result = StepResult(
            stats.loss,
            stats.grad_norm,
            stats.count,
            total_tokens,
            learning_rate,
            stats.is_finite,
            stop_requested,
            skipped_steps,
        )
        return replace(result, replica_check=replica_check)

    @property
    def _replica_count(self) -> int:
        """Of those that train apart. They read equally many rows, so the tokens of one say those of all."""
        return self.engine.outer_optimizer.replicas.count if self.engine.outer_optimizer else 1

    def _forward_and_backward(self, step: int, keep_batches: bool) -> LocalStepResult:
        """Gradients are summed over micro-batches and ranks. `keep`: what was read."""
        losses, targets, tokens, kept_batches = [], 0.0, 0, []
        group = self.engine.group
        microbatches = microbatches_of_rank(self.layout, group.rank, self.batch_sequences)
        for index, microbatch in enumerate(microbatches):
            with span("read"):
                batch = self.batch_source.batch(step, microbatch.rows)
                if microbatch.contributes_gradients:
                    targets += batch.weights.sum(dtype=torch.float64).item()
                    tokens += batch.tokens.numel()
                    kept_batches += [batch] if keep_batches else []
            with span("move"):
                batch = batch.to(group.device)
            with self.model.randomness(step, batch.rows):
                with span("forward"):
                    loss = self.model.loss_sum(batch)
                self.engine.backward(loss, index == 0, index == len(microbatches) - 1)
            losses.append(loss.detach())
        stacked_losses = torch.stack(losses).to(torch.float64)
        return LocalStepResult(
            self._loss_sums(stacked_losses, microbatches),
            targets,
            tokens,
            kept_batches,
            stacked_losses[0].item() if keep_batches else 0.0,
        )

    def _loss_sums(self, losses: Tensor, microbatches: list[MicroBatchRows]) -> list[float]:
        """One, or one for each row of the global batch, so that all can be added in one way."""
        if self.layout.reproducible_batch_size is None:
            return [losses.sum().item()]
        sums = [0.0] * self.layout.reproducible_batch_size
        for loss, microbatch in zip(losses.tolist(), microbatches, strict=True):
            if microbatch.contributes_gradients:
                sums[microbatch.rows.start] = loss
        return sums
