"""One step of training on one rank: read, move, forward, backward, communicate, clip, update.

The loss is the sum over all target tokens of the global batch divided by their number, so gradients are summed over
micro-batches and ranks first and divided once. Every rank computes the same norm and takes the same decision.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from motet.collectives.execute import sum_scalars
from motet.core.batch import Batch
from motet.core.trace import span
from motet.parallel.data import agree_on_buffers, saved_buffers
from motet.parallel.group import Group
from motet.parallel.layout import Layout
from motet.train.optimizer import Updater


class Model(Protocol):
    """What a step needs of a model; `models.build.Trainee` is one."""

    @property
    def module(self) -> nn.Module: ...

    @property
    def loss_sum(self) -> Callable[[Batch], Tensor]: ...

    @property
    def randomness(self) -> Callable[[int, Tensor], AbstractContextManager[object]]: ...


class Samples(Protocol):
    """What a step needs of the data; `data.loader.Loader` is one."""

    def batch(self, step: int, rows: range) -> Batch: ...


@dataclass(frozen=True)
class StepResult:
    """The same on every rank."""

    loss: float
    grad_norm: float
    targets: float
    tokens: int
    learning_rate: float
    finite: bool
    """False: the update was not applied."""
    stop_requested: bool
    """Some rank was asked to stop."""


@dataclass(frozen=True)
class Stepper:
    """What the steps of a run have in common."""

    model: Model
    samples: Samples
    updater: Updater
    group: Group
    layout: Layout
    batch_sequences: int
    clip_norm: float | None

    def step(self, number: int, learning_rate: float, stop: bool = False) -> StepResult:
        """Do step `number` (from 0). With a loss or gradient that is not finite, nothing is updated."""
        agree_on_buffers(self.model.module, self.group)
        before = {name: buffer.clone() for name, buffer in saved_buffers(self.model.module).items()}
        loss_sum, targets, tokens = self._forward_and_backward(number)
        with span("norm"):
            squares = self.updater.squares()
        with span("agree"):
            loss_sum, targets, total_tokens, stops, squares = sum_scalars(
                [loss_sum, targets, float(tokens), float(stop), squares], self.group, self.group.device
            )
        with span("clip"):
            count = max(targets, 1.0)  # a step without any target has loss and gradient zero
            norm = math.sqrt(squares) / count
            finite = math.isfinite(loss_sum) and math.isfinite(norm)
            clipped = 1.0 if self.clip_norm is None or norm <= self.clip_norm else self.clip_norm / norm
            if finite:
                self.updater.scale_gradients(clipped / count)
        with span("update"):
            if finite:
                self.updater.update(learning_rate)
            else:
                for name, buffer in saved_buffers(self.model.module).items():
                    buffer.data.copy_(before[name])
        return StepResult(loss_sum / count, norm, targets, int(total_tokens), learning_rate, finite, stops > 0)

    def _forward_and_backward(self, number: int) -> tuple[float, float, int]:
        """Loss sum, number of targets and tokens of this rank; gradients are summed over micro-batches and ranks."""
        self.updater.spread.begin_step()
        losses, targets, tokens = [], 0.0, 0
        portions = rows_of_rank(self.layout, self.group.rank, self.batch_sequences)
        for part, rows in enumerate(portions):
            with span("read"):
                batch = self.samples.batch(number, rows)
                targets += batch.weights.sum(dtype=torch.float64).item()
                tokens += batch.tokens.numel()
            with span("move"):
                batch = batch.to(self.group.device)
            self.updater.spread.begin_backward(part == 0, part == len(portions) - 1)
            with self.model.randomness(number, batch.rows):
                with span("forward"):
                    loss = self.model.loss_sum(batch)
                with span("backward"):
                    loss.backward()
            self.updater.spread.end_backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum(dtype=torch.float64).item(), targets, tokens


def rows_of_rank(layout: Layout, rank: int, batch_sequences: int) -> list[range]:
    """The rows of the global batch that a rank reads, one range per micro-batch."""
    size = layout.rows_per_microbatch(batch_sequences)
    first = rank * layout.microbatches * size
    return [range(first + i * size, first + (i + 1) * size) for i in range(layout.microbatches)]
