"""All samples of a job, as arrays: corpora are opened, split, packed, mixed and shuffled, without torch.

Synthetic classification samples, `synthetic:RULE`, whose class follows from a rule that can be learned.

Sample i of a split depends only on (seed, split, i): a model that does well on held-out samples has learned the rule.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from motet.core.errors import check_input
from motet.core.seeds import derive_seed
from motet.data.corpus.token_store import (
    CorpusKind,
    PreparedCorpus,
    TokenStore,
    describe_skipped,
    open_built_corpus,
    open_megatron,
)
from motet.data.corpus.tokenizer import Tokenizer
from motet.data.samples import packing
from motet.data.samples.packing import (
    IntArray,
    PackedTokenStream,
    TokenWindows,
    span_corruption_lengths,
    split_documents,
)
from motet.data.samples.shuffle_and_mix import (
    DataMixtureSchedule,
    UInt64Array,
    build_mixture_schedule,
    derive_keys,
    permute,
    shuffled_samples,
    uniform_floats,
)
from motet.data.settings import DataSettings

DEFAULT_SAMPLES = 10_000
LOWERCASE, UPPERCASE = "abcdefghijklmnopqrstuvwxyz", "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
NUM_CLASSES = 2


def majority(row_keys: UInt64Array, num_letters: int) -> tuple[IntArray, IntArray]:
    """Letters in any order; the class is 1 if there are more capital letters than small ones, else 0.
    51 to 75 % of the letters belong to the larger kind."""
    label, margin = (uniform_floats(row_keys, 2, 0) * [2, -(-num_letters // 4)]).astype(np.int64).T
    majority_count = np.minimum(num_letters // 2 + 1 + margin, num_letters)
    letter_order = uniform_floats(row_keys, num_letters, 1).argsort(axis=1).argsort(axis=1)
    is_capital = (letter_order < majority_count[:, None]) == (label == 1)[:, None]
    letter = (uniform_floats(row_keys, num_letters, 2) * len(LOWERCASE)).astype(np.int64)
    return letter + np.where(is_capital, len(LOWERCASE), 0), label


RULES: dict[str, Callable[[UInt64Array, int], tuple[IntArray, IntArray]]] = {"majority": majority}


@dataclass(frozen=True)
class SyntheticClassificationData:
    """The samples of a rule, spelled in the tokens of a tokenizer."""

    rule: str
    seed: int
    width: int
    letter_ids: IntArray  # [52] the tokens of a-z and A-Z
    begin_id: int | None  # First token of every sample, if the tokenizer has one
    samples_per_split: dict[str, int]

    @property
    def fingerprint(self) -> str:
        return f"made:{self.rule}"

    @property
    def remarks(self) -> tuple[str, ...]:
        return ()

    def count(self, split: str) -> int:
        return self.samples_per_split[split]

    def rows(self, split: str, samples: IntArray) -> TokenWindows:
        """Windows of these samples, which are all full."""
        row_keys = derive_keys(derive_seed(self.seed, "made", self.rule, split), samples)
        begin = 0 if self.begin_id is None else 1
        letters, label = RULES[self.rule](row_keys, self.width - begin)
        tokens = np.full((len(samples), self.width), self.begin_id or 0, dtype=np.int64)
        tokens[:, begin:] = self.letter_ids[letters]
        size, eligible = np.full(len(samples), self.width), np.ones(tokens.shape, np.bool_)
        return TokenWindows(tokens, size, np.zeros_like(tokens), eligible, label)


def check_synthetic_source(source: str, settings: DataSettings) -> str:
    """The rule of `synthetic:RULE`; raises if it is unknown or the settings do not fit it."""
    rule, length = source.removeprefix("synthetic:"), settings.sequence_length
    check_input(rule in RULES, f"data source {source!r}: there is no rule {rule!r}; known: {', '.join(RULES)}")
    remedy = f'but data.objective = {settings.objective!r}; set data.objective = "classify"'
    check_input(settings.objective == "classify", f"data source {source!r} makes samples with a class, {remedy}")
    check_input(length >= 4, f"data.sequence_length = {length} is too short for {source!r}; use at least 4")
    return rule


def open_synthetic_source(
    source: str, settings: DataSettings, tokenizer: Tokenizer, *, seed: int, width: int
) -> SyntheticClassificationData:
    """The samples of `synthetic:RULE` in windows of `width` tokens."""
    count, rule = settings.samples or DEFAULT_SAMPLES, check_synthetic_source(source, settings)
    fractions = {"train": 1.0, "validation": settings.validation_fraction, "test": settings.test_fraction}
    counts = {split: max(1, round(count * fraction)) if fraction else 0 for split, fraction in fractions.items()}
    letter_ids = np.array([tokenizer.encode(letter)[-1] for letter in LOWERCASE + UPPERCASE])
    begin_id = tokenizer.begin_ids[0] if tokenizer.begin_ids else None
    return SyntheticClassificationData(rule, seed, width, letter_ids, begin_id, samples_per_split=counts)


@dataclass(frozen=True)
class PackedTokenSource:
    """Samples cut from stored tokens."""

    store: TokenStore
    streams: dict[str, PackedTokenStream]
    max_training_samples: int | None
    tokenizer: Tokenizer
    remarks: tuple[str, ...] = ()  # Records that are cut or left out, for the user

    @property
    def fingerprint(self) -> str:
        return self.store.fingerprint

    def count(self, split: str) -> int:
        count = self.streams[split].num_samples
        return min(count, self.max_training_samples) if split == "train" and self.max_training_samples else count

    def rows(self, split: str, samples: IntArray) -> TokenWindows:
        rows = packing.gather_windows(
            self.streams[split],
            samples,
            self.store.read,
            pad_id=self.tokenizer.pad_id,
            read_targets=self.store.read_targets if self.store.has_masks else None,
        )
        last = self.tokenizer.vocab_size - 1
        remedy = f"but the tokenizer has only 0 to {last}; set data.tokenizer to the one that the corpus was made with"
        for token in (rows.tokens.max(initial=0), rows.tokens.min(initial=0)):
            check_input(0 <= token <= last, f"{self.store.name} holds the token {token}, {remedy}")
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

    @property
    def remarks(self) -> list[str]:
        """Records that are cut or left out, for the user."""
        return [remark for source in self.sources for remark in source.remarks]

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
        parts = zip(*(vars(window).values() for window in windows), strict=True)
        return TokenWindows(*(np.concatenate(part)[order] for part in parts))


def open_mixture_dataset(
    corpora: tuple[PreparedCorpus, ...], settings: DataSettings, tokenizer: Tokenizer, *, seed: int
) -> MixtureDataset:
    """Open, split and pack every corpus; raises if one does not fill a single sample."""
    _, width = window_sizes(settings, tokenizer)
    sources = tuple(
        open_synthetic_source(corpus.location, settings, tokenizer, seed=seed, width=width)
        if corpus.kind == "synthetic"
        else _open_packed_source(open_token_store(corpus.kind, corpus.location), settings, tokenizer)
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


def _open_packed_source(store: TokenStore, settings: DataSettings, tokenizer: Tokenizer) -> PackedTokenSource:
    (stride, width), objective = window_sizes(settings, tokenizer), settings.objective
    classify, records = objective == "classify", objective == "classify" or store.loss_mask
    no_classes = f"{store.name} has no classes; objective `classify` needs records with a label, built for it"
    check_input(store.classes or not classify, no_classes)
    kind = "conversations" if store.has_masks else "prompts and answers"
    prompts = f"{store.name} holds {kind}, which data.objective = {objective!r} does not support"
    check_input(not store.loss_mask or objective not in ("masked", "spans"), f"{prompts}; use `causal`")
    splits = split_documents(store.documents, settings, has_records=records, window=width)
    if store.loss_mask:
        # A longer record loses its end, and one that loses all of its targets has nothing to learn.
        splits = {name: part.take(part.skip < width) for name, part in splits.items()}
        least = f"its first answer starts at token {int(store.documents['skip'].min()) + 1}; use a longer one"
        check_input(
            any(map(len, splits.values())),
            f"data.sequence_length = {settings.sequence_length} ends before the first answer of each record of "
            f"{store.name}: {least}",
        )
    if records:
        streams = {n: packing.pack_records(part, width, one_per_window=classify) for n, part in splits.items()}
    else:  # training rows are full, and span corruption needs full rows
        partial = {"validation", "test"} if objective != "spans" else set()
        streams = {
            n: packing.cut_into_windows(part, stride, width, keep_partial=n in partial) for n, part in splits.items()
        }
    check_input(
        streams["train"].num_samples,
        f"data.sequence_length = {settings.sequence_length} is longer than the corpus: {store.name} has "
        f"{streams['train'].segments.length.sum()} tokens for training and one sample needs {width}; "
        "use a shorter sequence_length or more text",
    )
    return PackedTokenSource(store, streams, settings.samples, tokenizer, _remarks_on_records(store, settings, width))


def _remarks_on_records(store: TokenStore, settings: DataSettings, width: int) -> tuple[str, ...]:
    """Records that the build left out, and those of fine-tuning data that a sample cannot hold."""
    remarks, documents = [], store.documents
    if reasons := describe_skipped(store.skipped):
        remarks.append(f"{store.name} leaves out {reasons}")
    cut = int((documents["length"] > width).sum()) if store.loss_mask else 0
    if cut:
        no_target = int((documents["skip"] >= width).sum())
        left_out = f"; {no_target} of them, whose first answer comes later, are left out" if no_target else ""
        remarks.append(
            f"{cut} of {len(documents)} records of {store.name} are longer than data.sequence_length = "
            f"{settings.sequence_length} and lose their end{left_out}"
        )
    return tuple(remarks)


def dataset_fingerprint(
    samples: MixtureDataset, corpora: tuple[PreparedCorpus, ...], settings: DataSettings, *, tokenizer: Tokenizer
) -> str:
    """A hash of everything that decides the samples of every step."""
    sources, weights = [source.fingerprint for source in samples.sources], [corpus.weight for corpus in corpora]
    # The contents of the corpora matter, not their paths.
    values = settings.model_dump(exclude={"source", "mixture", "tokenizer", "prefetch", "workers", "cache"})
    parts = [sources, weights, tokenizer.fingerprint, values, samples.seed]
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()
