"""Samples with fewer targets in some rows than in others: only so can be seen who divides by the wrong count."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from motet.core.batch import Batch
from motet.train.step import Samples


@dataclass(frozen=True)
class Uneven:
    """Up to half of the targets of a row count for nothing, at its end; of classes, every fifth row."""

    inner: Samples

    def batch(self, step: int, rows: range) -> Batch:
        batch = self.inner.batch(step, rows)
        return replace(batch, weights=_fewer(batch.weights, torch.tensor(rows), step))


def _fewer(weights: Tensor, rows: Tensor, step: int) -> Tensor:
    if weights.ndim == 1:
        return weights * ((rows + step) % 5 != 3)
    places = torch.arange(weights.shape[1])
    left_out = (5 * rows + 3 * step) % (weights.shape[1] // 2 + 1)
    return weights * (places[None, :] < weights.shape[1] - left_out[:, None])
