"""The samples of a step as tensors: the rows that a rank asks for, of the global batch of a step.

Whichever ranks ask for whichever rows, the same row of the same step holds the same numbers.
"""

from dataclasses import fields

import numpy as np
import torch
from numpy.typing import NDArray

from motet.core.batch import Batch
from motet.core.errors import InputError
from motet.core.seeds import derive_seed
from motet.data.draws import keys
from motet.data.objectives import Arrays, Masking, causal, classify, masked
from motet.data.order import samples_for_epochs, steps_for_epochs
from motet.data.packing import Ints, Rows
from motet.data.prepared import Prepared
from motet.data.samples import fingerprint, open_samples
from motet.data.settings import DataSettings
from motet.data.spans import Special, corrupt, span_shape
from motet.data.tokens import load_tokenizer


class Loader:
    """Reads what `prepare` made ready.

    With `epochs` the stream of training samples ends after so many: rows of the last batch that lie behind the end
    have weight 0. Without, it goes on for ever.
    """

    def __init__(self, prepared: Prepared, settings: DataSettings, seed: int, epochs: float | None = None) -> None:
        self.tokenizer = load_tokenizer(prepared.tokenizer, prepared.sentinels)
        self._settings = settings
        self._seed = seed
        self.samples = open_samples(prepared.corpora, settings, self.tokenizer, seed)
        self.fingerprint = fingerprint(self.samples, prepared.corpora, settings, self.tokenizer)
        """A hash over everything that decides the samples."""
        self.train_samples = self.samples.count("train")
        """Samples of one epoch; for a mixture those of all its corpora."""
        self._end = None if epochs is None else samples_for_epochs(epochs, self.train_samples)

    def steps_for_epochs(self, epochs: float) -> int:
        """Steps in so many passes; the last one may be incomplete."""
        return steps_for_epochs(epochs, self.train_samples, self._settings.batch_sequences)

    def epoch_at(self, step: int) -> float:
        """Passes that are done before this step."""
        done = step * self._settings.batch_sequences
        return (done if self._end is None else min(done, self._end)) / self.train_samples

    def batch(self, step: int, rows: range) -> Batch:
        """Rows of the global batch of a step, counted from 0."""
        places = step * self._settings.batch_sequences + self._numbers(rows)
        live = places < (self._end if self._end is not None else np.iinfo(np.int64).max)
        window = self.samples.train(places)
        return self._to_batch(window, keys(derive_seed(self._seed, "train"), places), rows, live)

    def evaluation_batches(self, split: str) -> int:
        """Global batches in a split; 0 when it is empty."""
        return -(-self.samples.count(split) // self._settings.batch_sequences)

    def evaluation_batch(self, split: str, index: int, rows: range) -> Batch:
        """Rows of a global batch of a split; rows behind the end of the split have weight 0."""
        count, batches = self.samples.count(split), self.evaluation_batches(split)
        if not 0 <= index < batches:
            remedy = "" if batches else f"; set data.{split}_fraction higher or give more text"
            raise InputError(
                f"no batch {index} to evaluate: the {split} split has {count} samples in {batches} batches{remedy}"
            )
        places = index * self._settings.batch_sequences + self._numbers(rows)
        live = places < count
        # Rows behind the end repeat earlier ones: they are read, but weigh nothing.
        window = self.samples.held_out(split, places % count)
        return self._to_batch(window, keys(derive_seed(self._seed, split), places), rows, live)

    def _numbers(self, rows: range) -> Ints:
        assert len(rows) and min(rows) >= 0 and max(rows) < self._settings.batch_sequences, rows
        return np.arange(rows.start, rows.stop, rows.step)

    def _to_batch(self, window: Rows, row_keys: NDArray[np.uint64], rows: range, live: NDArray[np.bool_]) -> Batch:
        arrays = self._arrays(window, row_keys)
        weights = arrays.weights if live.all() else arrays.weights & live.reshape(-1, *[1] * (arrays.weights.ndim - 1))
        tensors = {
            field.name: torch.from_numpy(np.ascontiguousarray(value))
            for field in fields(Arrays)
            if field.name != "weights" and (value := getattr(arrays, field.name)) is not None
        }
        return Batch(
            weights=torch.from_numpy(weights.astype(np.float32)),
            rows=torch.arange(rows.start, rows.stop, rows.step),
            **tensors,
        )

    def _arrays(self, window: Rows, row_keys: NDArray[np.uint64]) -> Arrays:
        settings, tokenizer = self._settings, self.tokenizer
        match settings.objective:
            case "causal":
                return causal(window, settings.restart_documents)
            case "classify":
                return classify(window, None if tokenizer.begin_ids else tokenizer.end_id)
            case "masked":
                assert tokenizer.mask_id is not None, "checked by prepare"
                never = (tokenizer.end_id, tokenizer.pad_id, *tokenizer.begin_ids)
                masking = Masking(settings.mask_fraction, tokenizer.mask_id, tokenizer.vocab_size, never)
                return masked(window, row_keys, masking, settings.restart_documents)
            case "spans":
                shape = span_shape(settings.sequence_length, settings.mask_fraction, len(tokenizer.sentinel_ids))
                special = Special(tokenizer.sentinel_ids, tokenizer.end_id, tokenizer.pad_id)
                return corrupt(window, row_keys, shape, special, settings.restart_documents)
