"""Samples that expose mistakes: rows with fewer targets, extra document boundaries, and rows in another order.

With equal counts of targets, a wrong divisor would go unnoticed.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from motet.core.batch import Batch
from motet.data.samples.dataset import MixtureDataset
from motet.data.samples.loader import BatchLoader
from motet.data.samples.packing import IntArray, TokenWindows
from motet.data.settings import DataSettings


@dataclass(frozen=True)
class UnevenTargetSamples:
    """Samples in which up to half of the targets at the end of a row have weight 0, or every fifth class label."""

    inner: BatchLoader
    settings: DataSettings

    def batch(self, step: int, rows: range) -> Batch:
        batch = _with_optional_tensors(self.inner.batch(step, rows), self.settings)
        return replace(batch, weights=_zero_some_weights(batch.weights, torch.tensor(rows), step))

    def evaluation_batches(self, split: str) -> int:
        return self.inner.evaluation_batches(split)

    def evaluation_batch(self, split: str, index: int, rows: range) -> Batch:
        batch = self.inner.evaluation_batch(split, index, rows)
        return replace(batch, weights=_zero_some_weights(batch.weights, torch.tensor(rows), index))


def with_extra_boundaries(loader: BatchLoader, rows: int) -> BatchLoader:
    """Samples with an extra document boundary in two of three rows, and two batches of evaluation, the last not full.

    Windows of a few tokens seldom have a boundary, so restarted positions and attention masks would go untested.
    """
    wrapped_loader = copy(loader)
    sample_fields = {each.name: getattr(loader.samples, each.name) for each in fields(MixtureDataset)}
    wrapped_loader.samples = _ExtraDocumentBoundarySamples(**sample_fields, max_evaluation_rows=2 * rows - 1)
    return wrapped_loader


@dataclass(frozen=True)
class _ExtraDocumentBoundarySamples(MixtureDataset):
    max_evaluation_rows: int

    def count(self, split: str) -> int:
        return super().count(split) if split == "train" else min(super().count(split), self.max_evaluation_rows)

    def training_windows(self, positions: IntArray) -> TokenWindows:
        return _add_boundaries(super().training_windows(positions), positions)

    def held_out_windows(self, split: str, positions: IntArray) -> TokenWindows:
        return _add_boundaries(super().held_out_windows(split, positions), positions)


def _add_boundaries(rows: TokenWindows, positions: IntArray) -> TokenWindows:
    width = rows.segment.shape[1]
    border = np.where(positions % 3 == 2, width, 1 + 7 * positions % width)
    return replace(rows, segment=rows.segment + (np.arange(width) >= border[:, None]))


@dataclass(frozen=True)
class ReorderedRowSamples:
    """The rows of a batch in another order; each keeps its row number."""

    inner: UnevenTargetSamples
    row_order: Sequence[int]

    def batch(self, step: int, rows: range) -> Batch:
        batch = self.inner.batch(step, range(len(self.row_order)))
        row_indices = torch.tensor(self.row_order[rows.start : rows.stop])
        by_row = {name: value[row_indices] for name, value in batch_tensors(batch).items() if name != "places"}
        return replace(batch, **by_row)


def batch_tensors(batch: Batch) -> dict[str, Any]:
    """The tensors that a batch has, by name."""
    return batch.tensors()


def _with_optional_tensors(batch: Batch, settings: DataSettings) -> Batch:
    """A batch leaves out documents and positions if no row needs them. Here all have them, and so have equal shapes."""
    isolates, objective, tokens = settings.restart_documents, settings.objective, batch.tokens
    values = dict[str, Any]()
    if isolates or objective in ("masked", "classify"):
        values["documents"] = torch.zeros_like(tokens)
    if isolates and objective != "classify":
        values["positions"] = torch.arange(tokens.shape[1]).expand_as(tokens)
        values |= {} if batch.source is None else {"source_documents": torch.zeros_like(batch.source)}
    return replace(batch, **values | batch_tensors(batch))


def _zero_some_weights(weights: Tensor, rows: Tensor, step: int) -> Tensor:
    if weights.ndim == 1:
        return weights * ((rows + step) % 5 != 3)
    positions = torch.arange(weights.shape[1])
    zeroed_count = (5 * rows + 3 * step) % (weights.shape[1] // 2 + 1)
    return weights * (positions[None, :] < weights.shape[1] - zeroed_count[:, None])
