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
from motet.data.made import open_made
from motet.data.megatron import open_megatron
from motet.data.order import Mixture, mixture_of, permute, samples_at
from motet.data.packing import Ints, Rows, Stream, cut_stream, gather, pack_records
from motet.data.prepared import Kind, PreparedCorpus
from motet.data.settings import DataSettings
from motet.data.spans import span_shape
from motet.data.splits import split_documents
from motet.data.store import TokenStore, open_store
from motet.data.tokens import Tokenizer


class Source(Protocol):
    """Samples of one corpus by number."""

    @property
    def fingerprint(self) -> str: ...

    def count(self, split: str) -> int: ...

    def rows(self, split: str, samples: Ints) -> Rows: ...


@dataclass(frozen=True)
class Packed:
    """The samples of stored tokens."""

    store: TokenStore
    streams: dict[str, Stream]
    limit: int | None
    """Training samples that are used at most."""
    pad_id: int
    vocab_size: int

    @property
    def fingerprint(self) -> str:
        return self.store.fingerprint

    def count(self, split: str) -> int:
        count = self.streams[split].count
        return min(count, self.limit) if split == "train" and self.limit else count

    def rows(self, split: str, samples: Ints) -> Rows:
        rows = gather(self.streams[split], samples, self.store.read, self.pad_id)
        if len(rows.tokens) and not (rows.tokens.min() >= 0 and rows.tokens.max() < self.vocab_size):
            strange = int(rows.tokens.max() if rows.tokens.max() >= self.vocab_size else rows.tokens.min())
            raise InputError(
                f"{self.store.name} holds the token {strange}, but the tokenizer has only 0 to {self.vocab_size - 1}; "
                "set data.tokenizer to the one that the corpus was made with"
            )
        return rows


@dataclass(frozen=True)
class Samples:
    """The samples of a job."""

    sources: tuple[Source, ...]
    mixture: Mixture
    seed: int

    def count(self, split: str) -> int:
        """Samples of a split over all corpora: for training, those of one epoch."""
        return sum(source.count(split) for source in self.sources)

    def train(self, places: Ints) -> Rows:
        """The samples at these places of the endless stream of training samples."""
        corpus, place = self.mixture.locate(places)
        picked = np.empty_like(places)
        for number in np.unique(corpus):
            here = corpus == number
            size = self.sources[number].count("train")
            picked[here] = samples_at(place[here], size, derive_seed(self.seed, "order", int(number)))
        return self._rows("train", corpus, picked)

    def held_out(self, split: str, places: Ints) -> Rows:
        """The samples at these places of a split, in an order that mixes the corpora and is the same for every seed."""
        shuffled = permute(places, self.count(split), derive_seed("held out", split))
        ends = np.cumsum([source.count(split) for source in self.sources])
        corpus = ends.searchsorted(shuffled, "right")
        return self._rows(split, corpus, shuffled - np.append(0, ends)[corpus])

    def _rows(self, split: str, corpus: Ints, samples: Ints) -> Rows:
        numbers: list[int] = np.unique(corpus).tolist()
        if len(numbers) == 1:
            return self.sources[int(numbers[0])].rows(split, samples)
        parts = [self.sources[number].rows(split, samples[corpus == number]) for number in numbers]
        back = np.argsort(np.concatenate([np.flatnonzero(corpus == number) for number in numbers]))
        names = [field.name for field in fields(Rows)]
        return Rows(**{name: np.concatenate([getattr(part, name) for part in parts])[back] for name in names})


def open_samples(
    corpora: tuple[PreparedCorpus, ...], settings: DataSettings, tokenizer: Tokenizer, seed: int
) -> Samples:
    """Open, split and pack every corpus; refuses one that does not fill a single sample."""
    stride, width = window_of(settings, tokenizer)
    sources: list[Source] = []
    for corpus in corpora:
        if corpus.kind == "made":
            sources.append(open_made(corpus.place, settings, tokenizer, seed, width))
        else:
            sources.append(_pack(open_corpus(corpus.kind, corpus.place), settings, tokenizer, stride, width))
    return Samples(tuple(sources), mixture_of([corpus.weight for corpus in corpora]), seed)


def open_corpus(kind: Kind, place: str) -> TokenStore:
    """The stored tokens of a corpus, which is not made."""
    return open_megatron(Path(place)) if kind == "megatron" else open_store(Path(place))


def window_of(settings: DataSettings, tokenizer: Tokenizer) -> tuple[int, int]:
    """Tokens from one sample to the next, and tokens that a sample looks at."""
    length = settings.sequence_length
    match settings.objective:
        case "causal":
            return length, length + 1
        case "masked":
            return length, length
        case "spans":
            raw = span_shape(length, settings.mask_fraction, len(tokenizer.sentinel_ids)).raw
            return raw, raw
        case "classify":
            own = length if tokenizer.begin_ids else length - 1
            if own < 1:
                raise InputError(
                    f"data.sequence_length = {length} leaves no room for a text to classify; use at least 2"
                )
            return own, own


def _pack(store: TokenStore, settings: DataSettings, tokenizer: Tokenizer, stride: int, width: int) -> Packed:
    classify = settings.objective == "classify"
    if classify and not store.classes:
        raise InputError(f"{store.name} has no classes; objective `classify` needs records with a label, built for it")
    if store.loss_mask and settings.objective in ("masked", "spans"):
        raise InputError(
            f"{store.name} holds prompts and answers, which data.objective = {settings.objective!r} does not know; "
            "use `causal`"
        )
    records = classify or store.loss_mask
    streams: dict[str, Stream] = {}
    for name, segments in split_documents(store.documents, settings, records, width).items():
        # Spans have no way to show that a row is short; in training all rows are full.
        partial = name != "train" and settings.objective != "spans"
        streams[name] = (
            pack_records(segments, width, alone=classify) if records else cut_stream(segments, stride, width, partial)
        )
    if streams["train"].count == 0:
        tokens = int(streams["train"].segments.length.sum())
        raise InputError(
            f"data.sequence_length = {settings.sequence_length} is longer than the corpus: {store.name} has {tokens} "
            f"tokens for training and one sample needs {width}; use a shorter sequence_length or more text"
        )
    return Packed(store, streams, settings.samples, tokenizer.pad_id, tokenizer.vocab_size)


def fingerprint(
    samples: Samples, corpora: tuple[PreparedCorpus, ...], settings: DataSettings, tokenizer: Tokenizer
) -> str:
    """Changes with anything that changes a sample of some step."""
    stored = [source.fingerprint for source in samples.sources]
    weights = [corpus.weight for corpus in corpora]
    # Where the corpora come from does not matter, only what is in them.
    elsewhere = {"source", "mixture", "tokenizer", "workers", "cache"}
    parts = [stored, weights, tokenizer.fingerprint, settings.model_dump(exclude=elsewhere), samples.seed]
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()
