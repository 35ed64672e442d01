"""The samples of a step as tensors: the rows of the global batch that a rank requests.
A row of a step is the same for every rank and layout."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from motet.core.batch import Batch
from motet.core.errors import check_input
from motet.core.seeds import derive_seed
from motet.data.corpus.token_store import PreparedData
from motet.data.corpus.tokenizer import load_tokenizer
from motet.data.samples import packing
from motet.data.samples.dataset import dataset_fingerprint, open_mixture_dataset
from motet.data.samples.packing import IntArray, TokenWindows, corrupt_spans, span_corruption_lengths
from motet.data.samples.shuffle_and_mix import derive_keys, samples_for_epochs
from motet.data.settings import DataSettings

MAX_COUNTED_ROWS = 4096  # Rows of an evaluation whose targets are counted at the start of a run


class BatchLoader:
    """Batches of prepared data, which several threads may read. With `epochs` the training samples end, and rows after
    the end have weight 0."""

    def __init__(self, prepared: PreparedData, settings: DataSettings, seed: int, epochs: float | None = None) -> None:
        self.tokenizer = load_tokenizer(prepared.tokenizer, prepared.sentinels)
        self._settings, self._seed = settings, seed
        self.samples = open_mixture_dataset(prepared.corpora, settings, self.tokenizer, seed=seed)
        # A hash of everything that decides the samples.
        self.fingerprint = dataset_fingerprint(self.samples, prepared.corpora, settings, tokenizer=self.tokenizer)
        self.train_samples = self.samples.count("train")  # Samples of one epoch, over all corpora
        self._num_stream_samples = None if epochs is None else samples_for_epochs(epochs, self.train_samples)

    def steps_for_epochs(self, epochs: float) -> int:
        """Steps in this number of passes; the last one may be incomplete."""
        return -(-samples_for_epochs(epochs, self.train_samples) // self._settings.batch_sequences)

    def epoch_at(self, step: int) -> float:
        """Passes completed before this step."""
        samples = step * self._settings.batch_sequences
        return min(samples, self._num_stream_samples or samples) / self.train_samples

    def batch(self, step: int, rows: range) -> Batch:
        """Rows of the global batch of a step, counted from 0."""
        positions = self._positions(step, rows)
        arrays = self._apply_objective("train", self.samples.training_windows(positions), positions)
        return _to_batch(arrays, rows, positions < (self._num_stream_samples or np.iinfo(np.int64).max))

    def evaluation_batches(self, split: str) -> int:
        """Global batches in a split; 0 when it is empty."""
        return -(-self.samples.count(split) // self._settings.batch_sequences)

    def evaluation_batch(self, split: str, index: int, rows: range) -> Batch:
        """Rows of a global batch of a split; rows after the end of the split have weight 0."""
        count, batches = self.samples.count(split), self.evaluation_batches(split)
        remedy = "" if batches else f"; set data.{split}_fraction higher or give more text"
        has_split = f"the {split} split has {count} samples in {batches} batches{remedy}"
        check_input(0 <= index < batches, f"no batch {index} to evaluate: {has_split}")
        positions = self._positions(index, rows)
        # Rows after the end repeat earlier ones with weight 0.
        windows = self.samples.held_out_windows(split, positions % count)
        return _to_batch(self._apply_objective(split, windows, positions), rows, positions < count)

    def evaluation_targets(self, split: str, max_batches: int) -> float:
        """The targets of an evaluation: counted in its first 4,096 rows, and as many in each of the others."""
        size, rows = self._settings.batch_sequences, self.samples.count(split)
        rows = min(rows, max_batches * size)
        counted, targets = 0, 0.0
        while counted < min(rows, MAX_COUNTED_ROWS):
            stop = min(size, rows - counted, MAX_COUNTED_ROWS - counted)
            targets += self.evaluation_batch(split, counted // size, range(stop)).weights.sum().item()
            counted += stop
        return targets * rows / max(1, counted)

    def _positions(self, batch: int, rows: range) -> IntArray:
        assert len(rows) and min(rows) >= 0 and max(rows) < self._settings.batch_sequences, rows
        return batch * self._settings.batch_sequences + np.arange(rows.start, rows.stop, rows.step)

    def _apply_objective(self, split: str, window: TokenWindows, positions: IntArray) -> packing.BatchArrays:
        settings, tokenizer = self._settings, self.tokenizer
        fraction, isolate = settings.mask_fraction, settings.restart_documents
        row_keys = derive_keys(derive_seed(self._seed, split), positions)
        match settings.objective:
            case "causal":
                return packing.causal_objective(window, isolate)
            case "classify":
                return packing.classification_objective(window, None if tokenizer.begin_ids else tokenizer.end_id)
            case "masked":
                return packing.masked_objective(
                    window, row_keys, tokenizer, fraction=fraction, isolate_documents=isolate
                )
            case "spans":
                lengths = span_corruption_lengths(settings.sequence_length, fraction, len(tokenizer.sentinel_ids))
                return corrupt_spans(window, row_keys, lengths, tokenizer=tokenizer, isolate=isolate)


def _to_batch(arrays: packing.BatchArrays, rows: range, is_live: NDArray[np.bool_]) -> Batch:
    weights = arrays.weights & is_live.reshape(-1, *[1] * (arrays.weights.ndim - 1))
    values = {**vars(arrays), "weights": weights.astype(np.float32)}
    present = {name: value for name, value in values.items() if value is not None}
    tensors: dict[str, Any] = {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in present.items()}
    return Batch(rows=torch.arange(rows.start, rows.stop, rows.step), **tensors)
