"""The loss of the model on a split that is not trained on, divided over the ranks like a training step."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from motet.collectives.execute.api import sum_scalars
from motet.core.batch import Batch
from motet.models.arch.loss import cross_entropy, gather_whole_logits
from motet.models.build import TrainableModel
from motet.parallel.layout import Layout, microbatches_of_rank
from motet.parallel.process.process_group import RankGroup
from motet.parallel.reproducible.tree_reduce import exact_sum
from motet.parallel.sync_groups import reports

ForwardFunction = Callable[[Callable[[], Tensor], Batch], Tensor | None]


def compute_here(compute: Callable[[], Tensor], batch: Batch) -> Tensor:
    return compute()


class EvaluationBatchSource(Protocol):
    """The held-out data; `BatchLoader` is one."""

    def evaluation_batches(self, split: str) -> int: ...

    def evaluation_batch(self, split: str, index: int, rows: range) -> Batch: ...


@dataclass(frozen=True)
class EvaluationResult:
    """The result of an evaluation, the same on every rank."""

    loss: float
    targets: float
    accuracy: float | None  # Fraction of rows whose class the model puts first; None when targets are tokens

    @property
    def perplexity(self) -> float | None:
        return None if self.accuracy is not None else math.exp(min(self.loss, 700.0))


@torch.no_grad()
def evaluate(
    model: TrainableModel,
    data: EvaluationBatchSource,
    split: str,
    *,
    max_batches: int,
    group: RankGroup,
    layout: Layout,
    batch_sequences: int,
    forward: ForwardFunction = compute_here,
) -> EvaluationResult:
    """The loss over up to `max_batches` global batches of `batch_sequences` each. `forward` returns the model's result
    for a batch, which may be a part of each row, or None on a rank without the last blocks."""
    batches, has_classes = min(max_batches, data.evaluation_batches(split)), False
    # One loss for each row where the sum must not depend on the layout.
    losses = [0.0] * (batches * batch_sequences if layout.sharding.reproducible_batch_size else 1)
    sums = torch.zeros(2, dtype=torch.float64)
    was_training, is_reporter = model.module.training, reports("loss", layout.dims.coordinates(group.rank), layout.dims)
    model.module.eval()
    try:
        for index in range(batches):
            for microbatch in microbatches_of_rank(layout, group.rank, batch_sequences):
                batch = microbatch.select(data.evaluation_batch(split, index, microbatch.rows)).to(group.device)
                has_classes = batch.targets.ndim == 1 and not model.has_own_loss
                with model.randomness(index, batch.rows):  # for modules that drop in evaluation, too
                    loss, *counts = _loss_sums(model, batch, has_classes, forward=forward)
                if microbatch.contributes_gradients and is_reporter:
                    row = index * batch_sequences + microbatch.rows.start
                    losses[row if layout.sharding.reproducible_batch_size else 0] += loss
                    sums += torch.tensor(counts, dtype=torch.float64)
    finally:
        model.module.train(was_training)
    targets, correct, *losses = sum_scalars([*sums.tolist(), *losses], group, group.device)
    divisor = max(targets, 1.0)
    return EvaluationResult(exact_sum(losses) / divisor, targets, correct / divisor if has_classes else None)


def _loss_sums(model: TrainableModel, batch: Batch, has_classes: bool, *, forward: ForwardFunction) -> list[float]:
    """Sums of the losses, of the weights, and of the weights of rows that are classified correctly."""
    result = forward(partial(model.logits if has_classes else model.loss_sum, batch), batch)
    weights = batch.weights.sum(dtype=torch.float64).item()
    if result is None or not has_classes:
        return [0.0 if result is None else result.item(), weights, 0.0]
    logits = gather_whole_logits(result, model.module)
    correct = ((logits.argmax(dim=-1) == batch.targets) * batch.weights).sum(dtype=torch.float64)
    return [cross_entropy(logits, batch.targets, batch.weights).item(), weights, correct.item()]
