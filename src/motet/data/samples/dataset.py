"""All samples of a job: for each split and each place of the stream, the window of tokens that stands there.

This is the pure half of the loader: corpora opened, split, packed, mixed and put into order, as arrays.
"""

import hashlib
import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Protocol

import numpy as np

from motet.core.errors import InputError
from motet.core.seeds import derive_seed
from motet.data.corpus.megatron import open_megatron
from motet.data.corpus.prepared_data import CorpusKind, PreparedCorpus
from motet.data.corpus.token_store import TokenStore, open_built_corpus
from motet.data.corpus.tokenizer import Tokenizer
from motet.data.samples.packing import (
    IntArray,
    PackedTokenStream,
    TokenWindows,
    cut_into_windows,
    gather_windows,
    pack_records,
)
from motet.data.samples.shuffle_and_mix import DataMixtureSchedule, build_mixture_schedule, permute, shuffled_samples
from motet.data.samples.span_corruption import span_corruption_lengths
from motet.data.samples.splits import split_documents
from motet.data.samples.synthetic import open_synthetic_source
from motet.data.settings import DataSettings


class SampleSource(Protocol):
    """Samples of one corpus by number."""

    @property
    def fingerprint(self) -> str: ...

    def count(self, split: str) -> int: ...

    def rows(self, split: str, samples: IntArray) -> TokenWindows: ...


@dataclass(frozen=True)
class PackedTokenSource:
    """The samples of stored tokens."""

    store: TokenStore
    streams: dict[str, PackedTokenStream]
    max_training_samples: int | None  # Training samples that are used at most
    pad_id: int
    vocab_size: int

    @property
    def fingerprint(self) -> str:
        return self.store.fingerprint

    def count(self, split: str) -> int:
        count = self.streams[split].num_samples
        return min(count, self.max_training_samples) if split == "train" and self.max_training_samples else count

    def rows(self, split: str, samples: IntArray) -> TokenWindows:
        rows = gather_windows(self.streams[split], samples, self.store.read, self.pad_id)
        if len(rows.tokens) and not (rows.tokens.min() >= 0 and rows.tokens.max() < self.vocab_size):
            invalid_token = int(rows.tokens.max() if rows.tokens.max() >= self.vocab_size else rows.tokens.min())
            raise InputError(
                f"{self.store.name} holds the token {invalid_token}, but the tokenizer has only 0 to {self.vocab_size - 1}; "
                "set data.tokenizer to the one that the corpus was made with"
            )
        return rows


@dataclass(frozen=True)
class MixtureDataset:
    """The samples of a job."""

    sources: tuple[SampleSource, ...]
    mixture: DataMixtureSchedule
    seed: int

    def count(self, split: str) -> int:
        """Samples of a split over all corpora: for training, those of one epoch."""
        return sum(source.count(split) for source in self.sources)

    def training_windows(self, positions: IntArray) -> TokenWindows:
        """The samples at these places of the endless stream of training samples."""
        corpus, source_positions = self.mixture.locate(positions)
        sample_ids = np.empty_like(positions)
        for source_id in np.unique(corpus):
            is_from_source = corpus == source_id
            size = self.sources[source_id].count("train")
            sample_ids[is_from_source] = shuffled_samples(
                source_positions[is_from_source], size, derive_seed(self.seed, "order", int(source_id))
            )
        return self._rows("train", corpus, sample_ids)

    def held_out_windows(self, split: str, positions: IntArray) -> TokenWindows:
        """The samples at these places of a split, in an order that mixes the corpora and is the same for every seed."""
        shuffled = permute(positions, self.count(split), derive_seed("held out", split))
        source_ends = np.cumsum([source.count(split) for source in self.sources])
        corpus = source_ends.searchsorted(shuffled, "right")
        return self._rows(split, corpus, shuffled - np.append(0, source_ends)[corpus])

    def _rows(self, split: str, corpus: IntArray, samples: IntArray) -> TokenWindows:
        source_ids: list[int] = np.unique(corpus).tolist()
        if len(source_ids) == 1:
            return self.sources[int(source_ids[0])].rows(split, samples)
        rows_by_source = [self.sources[number].rows(split, samples[corpus == number]) for number in source_ids]
        original_order = np.argsort(np.concatenate([np.flatnonzero(corpus == number) for number in source_ids]))
        names = [field.name for field in fields(TokenWindows)]
        return TokenWindows(
            **{name: np.concatenate([getattr(part, name) for part in rows_by_source])[original_order] for name in names}
        )


def open_mixture_dataset(
    corpora: tuple[PreparedCorpus, ...], settings: DataSettings, tokenizer: Tokenizer, seed: int
) -> MixtureDataset:
    """Open, split and pack every corpus; refuses one that does not fill a single sample."""
    stride, width = window_sizes(settings, tokenizer)
    sources: list[SampleSource] = []
    for corpus in corpora:
        if corpus.kind == "synthetic":
            sources.append(open_synthetic_source(corpus.location, settings, tokenizer, seed, width))
        else:
            sources.append(
                _open_packed_source(open_token_store(corpus.kind, corpus.location), settings, tokenizer, stride, width)
            )
    return MixtureDataset(tuple(sources), build_mixture_schedule([corpus.weight for corpus in corpora]), seed)


def open_token_store(kind: CorpusKind, location: str) -> TokenStore:
    """The stored tokens of a corpus, which is not made."""
    return open_megatron(Path(location)) if kind == "megatron" else open_built_corpus(Path(location))


def window_sizes(settings: DataSettings, tokenizer: Tokenizer) -> tuple[int, int]:
    """Tokens from one sample to the next, and tokens that a sample looks at."""
    length = settings.sequence_length
    match settings.objective:
        case "causal":
            return length, length + 1
        case "masked":
            return length, length
        case "spans":
            raw = span_corruption_lengths(length, settings.mask_fraction, len(tokenizer.sentinel_ids)).raw_tokens
            return raw, raw
        case "classify":
            text_tokens = length if tokenizer.begin_ids else length - 1
            if text_tokens < 1:
                raise InputError(
                    f"data.sequence_length = {length} leaves no room for a text to classify; use at least 2"
                )
            return text_tokens, text_tokens


def _open_packed_source(
    store: TokenStore, settings: DataSettings, tokenizer: Tokenizer, stride: int, width: int
) -> PackedTokenSource:
    classify = settings.objective == "classify"
    if classify and not store.classes:
        raise InputError(f"{store.name} has no classes; objective `classify` needs records with a label, built for it")
    if store.loss_mask and settings.objective in ("masked", "spans"):
        raise InputError(
            f"{store.name} holds prompts and answers, which data.objective = {settings.objective!r} does not know; "
            "use `causal`"
        )
    records = classify or store.loss_mask
    streams: dict[str, PackedTokenStream] = {}
    for name, segments in split_documents(store.documents, settings, records, width).items():
        # Spans have no way to show that a row is short; in training all rows are full.
        partial = name != "train" and settings.objective != "spans"
        streams[name] = (
            pack_records(segments, width, one_per_window=classify)
            if records
            else cut_into_windows(segments, stride, width, partial)
        )
    if streams["train"].num_samples == 0:
        tokens = int(streams["train"].segments.length.sum())
        raise InputError(
            f"data.sequence_length = {settings.sequence_length} is longer than the corpus: {store.name} has {tokens} "
            f"tokens for training and one sample needs {width}; use a shorter sequence_length or more text"
        )
    return PackedTokenSource(store, streams, settings.samples, tokenizer.pad_id, tokenizer.vocab_size)


def dataset_fingerprint(
    samples: MixtureDataset, corpora: tuple[PreparedCorpus, ...], settings: DataSettings, tokenizer: Tokenizer
) -> str:
    """Changes with anything that changes a sample of some step."""
    stored = [source.fingerprint for source in samples.sources]
    weights = [corpus.weight for corpus in corpora]
    # Where the corpora come from does not matter, only what is in them.
    excluded_settings = {"source", "mixture", "tokenizer", "workers", "cache"}
    parts = [stored, weights, tokenizer.fingerprint, settings.model_dump(exclude=excluded_settings), samples.seed]
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()
