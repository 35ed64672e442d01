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
from motet.train.engine import Engine, Update


class Model(Protocol):
    """What a step needs of a model; `models.build.Trainee` is one."""

    @property
    def loss_sum(self) -> Callable[[Batch], Tensor]: ...

    @property
    def randomness(self) -> Callable[[int, Tensor], AbstractContextManager[object]]: ...


class Samples(Protocol):
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
    finite: bool
    """False: the update was not applied."""
    stop_requested: bool
    """Some rank was asked to stop, and all know it."""
    skipped: int
    """Steps in a row that were not applied, as far as all know it."""
    server: ParameterServerStepStats | None = None
    """Of a run with a parameter server."""
    compared: ReplicaCheckDone | None = None
    """Of a step that is watched."""


@dataclass(frozen=True)
class Done:
    """What a rank has done in a step before the update."""

    losses: list[float]
    """Sums over its targets: one, or one for each row of the global batch."""
    targets: float
    tokens: int
    batches: list[Batch]
    """Micro-batches, as they were read; of a step that is watched."""
    first_loss: float
    """Sum over the targets of the first."""


Seen = TypeVar("Seen")


class Watcher(Protocol[Seen]):
    """Compares ranks in some steps; `watch.Watch` is one."""

    def due(self, number: int) -> bool: ...

    def look(self, number: int, done: Done) -> Seen:
        """Before the update."""

    def compare(self, number: int, seen: Seen, update: Update) -> ReplicaCheckDone:
        """After it."""


@dataclass(frozen=True)
class Stepper:
    """What the steps of a run have in common."""

    model: Model
    samples: Samples
    engine: Engine
    layout: Layout
    batch_sequences: int
    watcher: Watcher[Any] | None = None

    def step(self, number: int, learning_rate: float, stop: bool = False, last: bool = False) -> StepResult:
        """Do step `number` (from 0), the last of the run maybe. What is not finite updates nothing."""
        watcher = self.watcher if self.watcher is not None and self.watcher.due(number) else None
        self.engine.begin()
        own = self._forward_and_backward(number, keep=watcher is not None)
        seen = watcher.look(number, own) if watcher else None
        done = self.engine.update(learning_rate, own.losses, own.targets, float(own.tokens), stop=stop)
        compared = watcher.compare(number, seen, done) if watcher else None
        met = self.engine.finish() if last else None
        total_tokens = int(done.sums[0]) * self._replicas
        stopped, skipped = (
            done.stop or (met is not None and met.stop_requested),
            max(done.skipped, met.max_consecutive_skips if met else 0),
        )
        result = StepResult(
            done.loss, done.grad_norm, done.count, total_tokens, learning_rate, done.finite, stopped, skipped
        )
        return replace(result, compared=compared)

    @property
    def _replicas(self) -> int:
        """Of those that train apart. They read equally many rows, so the tokens of one say those of all."""
        return self.engine.outer.replicas.count if self.engine.outer else 1

    def _forward_and_backward(self, number: int, keep: bool) -> Done:
        """Gradients are summed over micro-batches and ranks. `keep`: what was read."""
        losses, targets, tokens, kept = [], 0.0, 0, []
        group = self.engine.group
        shares = microbatches_of_rank(self.layout, group.rank, self.batch_sequences)
        for part, share in enumerate(shares):
            with span("read"):
                batch = self.samples.batch(number, share.rows)
                if share.contributes_gradients:
                    targets += batch.weights.sum(dtype=torch.float64).item()
                    tokens += batch.tokens.numel()
                    kept += [batch] if keep else []
            with span("move"):
                batch = batch.to(group.device)
            with self.model.randomness(number, batch.rows):
                with span("forward"):
                    loss = self.model.loss_sum(batch)
                self.engine.backward(loss, part == 0, part == len(shares) - 1)
            losses.append(loss.detach())
        found = torch.stack(losses).to(torch.float64)
        return Done(self._loss_sums(found, shares), targets, tokens, kept, found[0].item() if keep else 0.0)

    def _loss_sums(self, losses: Tensor, shares: list[MicroBatchRows]) -> list[float]:
        """One, or one for each row of the global batch, so that all can be added in one way."""
        if self.layout.reproducible_batch_size is None:
            return [losses.sum().item()]
        sums = [0.0] * self.layout.reproducible_batch_size
        for loss, share in zip(losses.tolist(), shares, strict=True):
            if share.contributes_gradients:
                sums[share.rows.start] = loss
        return sums
