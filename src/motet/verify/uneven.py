"""Samples with fewer targets in some rows than in others: only so can be seen who divides by the wrong count.

And with borders of documents in some, and in another order.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, fields, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from motet.core.batch import Batch
from motet.data.samples.dataset import MixtureDataset
from motet.data.samples.loader import BatchLoader
from motet.data.samples.packing import IntArray, TokenWindows
from motet.train import step as read
from motet.train.evaluation import EvaluationBatchSource


class Read(read.BatchSource, EvaluationBatchSource, Protocol):
    """What there is to read."""


@dataclass(frozen=True)
class Uneven:
    """Up to half of the targets of a row count for nothing, at its end; of classes, every fifth row."""

    inner: Read

    def batch(self, step: int, rows: range) -> Batch:
        batch = self.inner.batch(step, rows)
        return replace(batch, weights=_fewer(batch.weights, torch.tensor(rows), step))

    def evaluation_batches(self, split: str) -> int:
        return self.inner.evaluation_batches(split)

    def evaluation_batch(self, split: str, index: int, rows: range) -> Batch:
        batch = self.inner.evaluation_batch(split, index, rows)
        return replace(batch, weights=_fewer(batch.weights, torch.tensor(rows), index))


def telling(loader: BatchLoader, rows: int) -> BatchLoader:
    """Samples that show more. Windows of a few tokens seldom have a border of documents in them; here two of three have
    one more, so that what comes of borders is looked at: positions that begin anew, and who sees whom. And what is held
    out is two batches, of which the last one is not full."""
    found = copy(loader)
    given = {each.name: getattr(loader.samples, each.name) for each in fields(MixtureDataset)}
    found.samples = _Telling(**given, most=2 * rows - 1)
    return found


@dataclass(frozen=True)
class _Telling(MixtureDataset):
    most: int

    def count(self, split: str) -> int:
        return super().count(split) if split == "train" else min(super().count(split), self.most)

    def train(self, places: IntArray) -> TokenWindows:
        return _parted(super().training_windows(places), places)

    def held_out(self, split: str, places: IntArray) -> TokenWindows:
        return _parted(super().held_out_windows(split, places), places)


def _parted(rows: TokenWindows, places: IntArray) -> TokenWindows:
    width = rows.segment.shape[1]
    border = np.where(places % 3 == 2, width, 1 + 7 * places % width)
    return replace(rows, segment=rows.segment + (np.arange(width) >= border[:, None]))


@dataclass(frozen=True)
class Ordered:
    """The rows of a batch in another order; each keeps its number."""

    inner: read.BatchSource
    order: Sequence[int]

    def batch(self, step: int, rows: range) -> Batch:
        batch = self.inner.batch(step, range(len(self.order)))
        mine = torch.tensor(self.order[rows.start : rows.stop])
        given = {part.name: value for part in fields(batch) if (value := getattr(batch, part.name)) is not None}
        return replace(batch, **{name: value[mine] for name, value in given.items()})


def _fewer(weights: Tensor, rows: Tensor, step: int) -> Tensor:
    if weights.ndim == 1:
        return weights * ((rows + step) % 5 != 3)
    places = torch.arange(weights.shape[1])
    left_out = (5 * rows + 3 * step) % (weights.shape[1] // 2 + 1)
    return weights * (places[None, :] < weights.shape[1] - left_out[:, None])
