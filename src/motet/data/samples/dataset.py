"""All samples of a job: a window of tokens for each split and position, without torch.

Corpora are opened, split, packed, mixed and shuffled, as arrays.
"""

import hashlib
import json
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from motet.core.errors import InputError, check_input
from motet.core.seeds import derive_seed
from motet.data.corpus.megatron import open_megatron
from motet.data.corpus.token_store import CorpusKind, PreparedCorpus, TokenStore, open_built_corpus
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
from motet.data.samples.synthetic import SyntheticClassificationData, open_synthetic_source
from motet.data.settings import DataSettings


@dataclass(frozen=True)
class PackedTokenSource:
    """Samples cut from stored tokens."""

    store: TokenStore
    streams: dict[str, PackedTokenStream]
    max_training_samples: int | None
    pad_id: int
    vocab_size: int

    @property
    def fingerprint(self) -> str:
        return self.store.fingerprint

    def count(self, split: str) -> int:
        count = self.streams[split].num_samples
        return min(count, self.max_training_samples) if split == "train" and self.max_training_samples else count

    def rows(self, split: str, samples: IntArray) -> TokenWindows:
        rows = gather_windows(self.streams[split], samples, self.store.read, pad_id=self.pad_id)
        for token in (rows.tokens.max(initial=0), rows.tokens.min(initial=0)):
            check_input(
                0 <= token < self.vocab_size,
                f"{self.store.name} holds the token {token}, but the tokenizer has only 0 to "
                f"{self.vocab_size - 1}; set data.tokenizer to the one that the corpus was made with",
            )
        return rows


@dataclass(frozen=True)
class MixtureDataset:
    """The samples of a job's mixture."""

    sources: tuple[PackedTokenSource | SyntheticClassificationData, ...]
    mixture: DataMixtureSchedule
    seed: int

    def count(self, split: str) -> int:
        """Samples of a split over all corpora; for training, in one epoch."""
        return sum(source.count(split) for source in self.sources)

    def training_windows(self, positions: IntArray) -> TokenWindows:
        """The samples at these positions of the endless stream of training samples."""
        corpus, source_positions = self.mixture.locate(positions)
        sample_ids = np.empty_like(positions)
        for source_id in np.unique(corpus):
            chosen, size = corpus == source_id, self.sources[source_id].count("train")
            seed = derive_seed(self.seed, "order", int(source_id))
            sample_ids[chosen] = shuffled_samples(source_positions[chosen], size, seed)
        return self._rows("train", corpus, sample_ids)

    def held_out_windows(self, split: str, positions: IntArray) -> TokenWindows:
        """The samples at these positions of a split, in an order that mixes the corpora and ignores the seed."""
        shuffled = permute(positions, self.count(split), derive_seed("held out", split))
        source_ends = np.cumsum([source.count(split) for source in self.sources])
        corpus = source_ends.searchsorted(shuffled, "right")
        return self._rows(split, corpus, shuffled - np.append(0, source_ends)[corpus])

    def _rows(self, split: str, corpus: IntArray, samples: IntArray) -> TokenWindows:
        source_ids: list[int] = np.unique(corpus).tolist()
        if len(source_ids) == 1:
            return self.sources[source_ids[0]].rows(split, samples)
        windows = [self.sources[source_id].rows(split, samples[corpus == source_id]) for source_id in source_ids]
        order = np.argsort(np.concatenate([np.flatnonzero(corpus == source_id) for source_id in source_ids]))
        names = [field.name for field in fields(TokenWindows)]
        return TokenWindows(**{name: np.concatenate([getattr(w, name) for w in windows])[order] for name in names})


def open_mixture_dataset(
    corpora: tuple[PreparedCorpus, ...], settings: DataSettings, tokenizer: Tokenizer, *, seed: int
) -> MixtureDataset:
    """Open, split and pack every corpus; raises if one does not fill a single sample."""
    stride, width = window_sizes(settings, tokenizer)
    sources = tuple(
        open_synthetic_source(corpus.location, settings, tokenizer, seed=seed, width=width)
        if corpus.kind == "synthetic"
        else _open_packed_source(
            open_token_store(corpus.kind, corpus.location), settings, tokenizer, stride=stride, width=width
        )
        for corpus in corpora
    )
    return MixtureDataset(sources, build_mixture_schedule([corpus.weight for corpus in corpora]), seed)


def open_token_store(kind: CorpusKind, location: str) -> TokenStore:
    """The stored tokens of a corpus that is not synthetic."""
    return open_megatron(Path(location)) if kind == "megatron" else open_built_corpus(Path(location))


def window_sizes(settings: DataSettings, tokenizer: Tokenizer) -> tuple[int, int]:
    """Tokens from the start of one sample to the next, and tokens of a sample."""
    length, objective = settings.sequence_length, settings.objective
    if objective == "spans":
        length = span_corruption_lengths(length, settings.mask_fraction, len(tokenizer.sentinel_ids)).raw_tokens
    if objective == "classify" and not tokenizer.begin_ids:
        length -= 1
    check_input(length >= 1, "data.sequence_length = 1 leaves no room for a text to classify; use at least 2")
    return length, length + (objective == "causal")


def _open_packed_source(
    store: TokenStore, settings: DataSettings, tokenizer: Tokenizer, *, stride: int, width: int
) -> PackedTokenSource:
    classify = settings.objective == "classify"
    no_classes = f"{store.name} has no classes; objective `classify` needs records with a label, built for it"
    check_input(store.classes or not classify, no_classes)
    prompts = f"{store.name} holds prompts and answers, which data.objective = {settings.objective!r} does not support"
    check_input(not store.loss_mask or settings.objective not in ("masked", "spans"), f"{prompts}; use `causal`")
    records = classify or store.loss_mask
    splits = split_documents(store.documents, settings, has_records=records, window=width)
    if records:
        streams = {name: pack_records(segments, width, one_per_window=classify) for name, segments in splits.items()}
    else:  # training rows are full, and span corruption needs full rows
        partial = {"validation", "test"} if settings.objective != "spans" else set()
        streams = {n: cut_into_windows(part, stride, width, keep_partial=n in partial) for n, part in splits.items()}
    if streams["train"].num_samples == 0:
        tokens = int(streams["train"].segments.length.sum())
        raise InputError(
            f"data.sequence_length = {settings.sequence_length} is longer than the corpus: {store.name} has {tokens} "
            f"tokens for training and one sample needs {width}; use a shorter sequence_length or more text"
        )
    return PackedTokenSource(store, streams, settings.samples, tokenizer.pad_id, tokenizer.vocab_size)


def dataset_fingerprint(
    samples: MixtureDataset, corpora: tuple[PreparedCorpus, ...], settings: DataSettings, *, tokenizer: Tokenizer
) -> str:
    """A hash of everything that decides the samples of every step."""
    sources, weights = [source.fingerprint for source in samples.sources], [corpus.weight for corpus in corpora]
    # The contents of the corpora matter, not their paths.
    values = settings.model_dump(exclude={"source", "mixture", "tokenizer", "workers", "cache"})
    parts = [sources, weights, tokenizer.fingerprint, values, samples.seed]
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()
