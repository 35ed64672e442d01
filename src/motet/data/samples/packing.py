"""Documents packed into windows: the segments of a split form one stream, and a sample is a slice of it.
Text is cut at a fixed stride, across documents. A window of records (prompt and answer, conversations, or text and
class) holds as many whole ones as fit; a longer record loses its end.

Documents of the training, validation and test splits, by a hash of each, so that adding more moves none.
An empty split of plain text gets the end of the longest training document; an empty split of records (prompt and
answer, or text and class) the record with the smallest hash. It stays empty if too little would be left to train on.

Inputs and targets from windows of tokens, as arrays: the next token, masked tokens, or a class.

Span corruption (T5): sentinels replace spans of a text, and the decoder predicts the spans.

    raw     a b c d e f g h          source  a b <0> e f <1> END
    spans       c d     g h          targets <0> c d <1> g h END

All rows have the same number of tokens, spans and noise tokens, so the shapes are fixed.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from motet.core.errors import check_input
from motet.data.corpus.tokenizer import Tokenizer
from motet.data.samples.shuffle_and_mix import UInt64Array, uniform_floats
from motet.data.settings import DataSettings

SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class SplitTokenRanges:
    """Token ranges of a split: complete documents, except for one that may be cut."""

    start: NDArray[np.int64]  # Begin of each range in the stream of all tokens
    length: NDArray[np.int64]
    skip: NDArray[np.int64]  # Tokens at its start that are never targets
    label: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.start)

    def take(self, chosen: NDArray[Any]) -> "SplitTokenRanges":
        """The segments of a mask or of indices."""
        return SplitTokenRanges(self.start[chosen], self.length[chosen], self.skip[chosen], self.label[chosen])


def split_documents(
    documents: NDArray[Any], settings: DataSettings, *, has_records: bool, window: int
) -> dict[str, SplitTokenRanges]:
    """The segments of each split of a table of documents; `window` is the size of a sample of plain text."""
    length, skip, label = (documents[name].astype(np.int64) for name in ("length", "skip", "label"))
    all_segments = SplitTokenRanges(np.cumsum(length) - length, length, skip, label)
    fractions = {"validation": settings.validation_fraction, "test": settings.test_fraction}
    split_ids = assign_splits(documents["hash"], **fractions)
    if not (split_ids == 0).any():
        split_ids[:] = 0  # too few documents to split by hash
    for split_id in [SPLITS.index(name) for name, fraction in fractions.items() if fraction and has_records]:
        train = np.flatnonzero(split_ids == 0)
        if not (split_ids == split_id).any() and len(train) > 2:
            split_ids[train[np.argmin(documents["hash"][train])]] = split_id
    splits = {name: all_segments.take(split_ids == split_id) for split_id, name in enumerate(SPLITS)}
    for name, fraction in fractions.items():
        if not has_records and fraction and not len(splits[name]):
            size = max(window, round(fraction * int(length.sum())))
            splits["train"], splits[name] = _cut_tail(splits["train"], size, keep=window)
    return splits


def assign_splits(hashes: NDArray[np.uint64], validation: float, test: float) -> NDArray[np.int8]:
    """[documents] the index of each document's split in SPLITS, by its hash as a number in 0..1."""
    hash_fraction = hashes.astype(np.float64) * 2.0**-64
    return np.where(hash_fraction < test, 2, np.where(hash_fraction < test + validation, 1, 0)).astype(np.int8)


def _cut_tail(train: SplitTokenRanges, size: int, keep: int) -> tuple[SplitTokenRanges, SplitTokenRanges]:
    """Cut `size` tokens off the end of the longest segment, if at least `keep` stay."""
    longest = int(np.argmax(train.length))
    remaining = int(train.length[longest]) - size
    if remaining < keep:
        return train, train.take(np.empty(0, np.int64))
    zero, label = np.zeros(1, np.int64), train.label[[longest]]
    tail = SplitTokenRanges(train.start[[longest]] + remaining, np.array([size]), skip=zero, label=label)
    return replace(train, length=np.where(np.arange(len(train)) == longest, remaining, train.length)), tail


IntArray = NDArray[np.int64]
TokenReader = Callable[[int, int], NDArray[Any]]  # `TokenStore.read` or `TokenStore.read_targets`


@dataclass(frozen=True)
class TokenWindows:
    """R windows of W tokens, the input of the objectives."""

    tokens: IntArray  # [R, W]; padding holds the pad token
    size: IntArray  # [R] tokens without padding
    segment: IntArray  # [R, W] index of each token's document within its row; padding counts as one more
    eligible: NDArray[np.bool_]  # [R, W] whether the token may be a target
    label: IntArray  # [R] the class of the first document


@dataclass(frozen=True)
class PackedTokenStream:
    """The segments of a split in order, and the window of each sample."""

    segments: SplitTokenRanges
    stride: int
    width: int  # Tokens of a full window; above `stride` if a window includes the first token of the next
    num_samples: int
    bounds: tuple[IntArray, IntArray] | None = None  # [samples] begin and end of each window; None for a fixed stride

    @cached_property
    def segment_borders(self) -> IntArray:
        """[segments + 1] begin of each segment in the stream."""
        return np.concatenate([[0], np.cumsum(self.segments.length)]).astype(np.int64)

    @cached_property
    def has_non_targets(self) -> bool:
        return bool(self.segments.skip.any())

    @cached_property
    def contiguous_runs(self) -> tuple[IntArray, IntArray]:
        """Begins of the runs that have no gap in the corpus: in the stream, and in the corpus."""
        start = self.segments.start
        first = np.append(-1, (start + self.segments.length)[:-1]) != start
        return self.segment_borders[:-1][first], start[first]


def cut_into_windows(segments: SplitTokenRanges, stride: int, width: int, *, keep_partial: bool) -> PackedTokenStream:
    """A window every `stride` tokens, `width` long; with `keep_partial` the last one may be shorter."""
    # A window of one token more than its stride has nothing to predict when only that token is left.
    total = int(segments.length.sum()) - (width - stride)
    return PackedTokenStream(segments, stride, width, max(0, -(-total // stride) if keep_partial else total // stride))


def pack_records(segments: SplitTokenRanges, width: int, one_per_window: bool) -> PackedTokenStream:
    """Windows of unsplit segments in order, as many as fit into `width`, or one per window."""
    ends = np.cumsum(segments.length)
    firsts = range(len(segments)) if one_per_window else _first_segments(ends, width)
    edges: IntArray = np.array([*firsts, len(segments)], dtype=np.int64)
    begin = (ends - segments.length)[edges[:-1]]
    bounds = (begin, np.minimum(ends[edges[1:] - 1], begin + width))
    return PackedTokenStream(segments, width, width, len(begin), bounds)


def _first_segments(ends: IntArray, width: int) -> list[int]:
    firsts, first, begin = [], 0, 0
    while first < len(ends):
        firsts.append(first)
        first = max(first + 1, int(ends.searchsorted(begin + width, "right")))
        begin = int(ends[first - 1])
    return firsts


def gather_windows(
    stream: PackedTokenStream,
    samples: IntArray,
    read: TokenReader,
    *,
    pad_id: int,
    read_targets: TokenReader | None = None,
) -> TokenWindows:
    """The tokens of these samples, with the borders of documents in them, and the tokens that may be targets."""
    borders, begin = stream.segment_borders, samples * stream.stride
    end = np.minimum(begin + stream.width, borders[-1])
    if stream.bounds is not None:
        begin, end = (bound[samples] for bound in stream.bounds)
    size, positions = end - begin, np.arange(stream.width)
    tokens = np.full((len(samples), stream.width), pad_id, dtype=np.int64)
    for row, window_begin, length in zip(tokens, begin.tolist(), size.tolist(), strict=True):
        _copy_tokens(stream, window_begin, row[:length], read=read)
    first, last = (borders.searchsorted(places, "right") - 1 for places in (begin, end - 1))
    segment, inner_borders = np.zeros_like(tokens), last - first
    if inner_borders.any():
        row = np.repeat(np.arange(len(samples)), inner_borders)
        nth = np.arange(len(row)) - np.repeat(np.cumsum(inner_borders) - inner_borders, inner_borders)
        segment[row, borders[first[row] + 1 + nth] - begin[row]] = 1
    is_partial = size < stream.width
    segment[is_partial, size[is_partial]] = 1
    np.cumsum(segment, axis=1, out=segment)
    eligible = positions < size[:, None]
    if stream.has_non_targets:
        segment_ids = np.minimum(first[:, None] + segment, last[:, None])
        eligible &= begin[:, None] + positions - borders[segment_ids] >= stream.segments.skip[segment_ids]
    if read_targets is not None:
        for targets, window_begin, length in zip(eligible, begin.tolist(), size.tolist(), strict=True):
            in_mask = np.empty(length, np.bool_)
            _copy_tokens(stream, window_begin, in_mask, read=read_targets)
            targets[:length] &= in_mask
    return TokenWindows(tokens, size, segment, eligible, stream.segments.label[first])


def _copy_tokens(stream: PackedTokenStream, begin: int, out: NDArray[Any], *, read: TokenReader) -> None:
    run_begins, corpus_begins = stream.contiguous_runs
    run = int(run_begins.searchsorted(begin, "right")) - 1
    done, end = begin, begin + len(out)
    while done < end:
        stop = min(end, int(run_begins[run + 1])) if run + 1 < len(run_begins) else end
        start = int(corpus_begins[run]) + done - int(run_begins[run])
        out[done - begin : stop - begin] = read(start, stop - done)
        done, run = stop, run + 1


@dataclass(frozen=True)
class BatchArrays:
    """The fields of a `core.batch.Batch` as arrays."""

    tokens: IntArray
    targets: IntArray
    weights: NDArray[np.bool_]
    documents: IntArray | None = None
    positions: IntArray | None = None
    source: IntArray | None = None
    source_documents: IntArray | None = None


def causal_objective(rows: TokenWindows, isolate_documents: bool) -> BatchArrays:
    """The next token; with `isolate_documents` the end of a document does not predict the start of another."""
    tokens, targets, weights = rows.tokens[:, :-1], rows.tokens[:, 1:], rows.eligible[:, 1:]
    if not isolate_documents:
        return BatchArrays(tokens, targets, weights)
    segment = rows.segment[:, :-1]
    weights = weights & (rows.segment[:, 1:] == segment)
    # Padding comes after all targets: causal attention needs no border before it.
    is_token = np.arange(tokens.shape[1]) < rows.size[:, None]
    documents = segment * (segment * is_token).any(axis=1, keepdims=True)
    if not documents.any():
        return BatchArrays(tokens, targets, weights)
    return BatchArrays(tokens, targets, weights, documents=documents, positions=positions_within_documents(documents))


def masked_objective(
    rows: TokenWindows, row_keys: UInt64Array, tokenizer: Tokenizer, *, fraction: float, isolate_documents: bool
) -> BatchArrays:
    """The originals of tokens that are chosen independently, by the row's key: 80 % are masked, 10 % replaced."""
    assert tokenizer.mask_id is not None, "checked by prepare"
    choice, replacement, random_token = (uniform_floats(row_keys, rows.tokens.shape[1], stream) for stream in range(3))
    unmasked = (tokenizer.end_id, tokenizer.pad_id, *tokenizer.begin_ids)
    is_chosen = rows.eligible & (choice < fraction) & ~np.isin(rows.tokens, unmasked)
    replaced = np.where(replacement < 0.8, tokenizer.mask_id, (random_token * tokenizer.vocab_size).astype(np.int64))
    tokens = np.where(is_chosen & (replacement < 0.9), replaced, rows.tokens)
    documents, positions = documents_and_positions(rows, isolate_documents)
    return BatchArrays(tokens, rows.tokens, is_chosen, documents, positions)


def classification_objective(rows: TokenWindows, first_id: int | None) -> BatchArrays:
    """The class of each row, predicted at its first token: `first_id`, unless the text starts with a special one."""
    tokens, size = rows.tokens, rows.size
    if first_id is not None:
        tokens = np.concatenate([np.full((len(tokens), 1), first_id), tokens], axis=1)
        size = size + 1
    padding = (np.arange(tokens.shape[1]) >= size[:, None]).astype(np.int64)
    return BatchArrays(tokens, rows.label, np.ones(len(tokens), np.bool_), documents=padding if padding.any() else None)


def documents_and_positions(rows: TokenWindows, isolate_documents: bool) -> tuple[IntArray | None, IntArray | None]:
    """Documents and positions for bidirectional attention, which must not see padding."""
    padding: IntArray = (np.arange(rows.segment.shape[1]) >= rows.size[:, None]).astype(np.int64)
    segment = rows.segment if isolate_documents else padding
    if not segment.any():
        return None, None
    return segment, positions_within_documents(segment) if isolate_documents else None


def positions_within_documents(segment: IntArray) -> IntArray:
    """Positions that restart at each document."""
    position = np.arange(segment.shape[1])
    start = np.where(np.diff(segment, axis=1, prepend=0) != 0, position, 0)
    return position - np.maximum.accumulate(start, axis=1)


MEAN_SPAN_TOKENS = 3  # The mean of T5; spans are longer if there are too few sentinels


@dataclass(frozen=True)
class SpanCorruptionLengths:
    """Lengths of a row, in tokens."""

    raw_tokens: int  # Text of the row
    noise_tokens: int
    noise_spans: int

    @property
    def source_tokens(self) -> int:
        """Tokens of the encoder's input, with the end."""
        return self.raw_tokens - self.noise_tokens + self.noise_spans + 1

    @property
    def target_tokens(self) -> int:
        """Tokens of the decoder's output, with the end."""
        return self.noise_tokens + self.noise_spans + 1

    def fit_into(self, sequence_length: int) -> bool:
        """Whether both source and targets fit."""
        return max(self.source_tokens, self.target_tokens) <= sequence_length


def span_corruption_lengths(sequence_length: int, fraction: float, sentinels: int) -> SpanCorruptionLengths:
    """The longest raw text whose source and targets both fit into `sequence_length`."""
    lengths = _lengths_for_raw(2, fraction, sentinels)
    short = f"data.sequence_length = {sequence_length} is too short for spans; use at least {lengths.source_tokens}"
    check_input(lengths.fit_into(sequence_length), short)
    while (longer := _lengths_for_raw(lengths.raw_tokens + 1, fraction, sentinels)).fit_into(sequence_length):
        lengths = longer
    return lengths


def _lengths_for_raw(raw_tokens: int, fraction: float, sentinels: int) -> SpanCorruptionLengths:
    noise_tokens = min(max(1, round(raw_tokens * fraction)), raw_tokens - 1)
    spans = min(max(1, round(noise_tokens / MEAN_SPAN_TOKENS)), noise_tokens, raw_tokens - noise_tokens, sentinels)
    return SpanCorruptionLengths(raw_tokens, noise_tokens, spans)


def corrupt_spans(
    rows: TokenWindows, row_keys: UInt64Array, lengths: SpanCorruptionLengths, *, tokenizer: Tokenizer, isolate: bool
) -> BatchArrays:
    """Replace spans, which depend only on the row's key, by sentinels; the decoder's input starts with the pad token.

    To `isolate` documents, a span belongs to that of its first token; its tokens of the next document are not targets.
    """
    count, spans = len(rows.tokens), lengths.noise_spans
    noise_length = _random_partition(row_keys, lengths.noise_tokens, spans, stream=0)
    kept_length = _random_partition(row_keys, lengths.raw_tokens - lengths.noise_tokens, spans, stream=1)
    before = np.cumsum(noise_length, axis=1) - noise_length
    start = np.cumsum(kept_length, axis=1) + before
    row = np.arange(count)[:, None]
    starts = np.zeros((count, lengths.raw_tokens), np.int64)
    starts[row, start] = 1
    step, span = starts.copy(), np.cumsum(starts, axis=1) - 1
    step[row, (start + noise_length)[:, :-1]] = -1  # the last span ends with the row
    is_noise = np.cumsum(step, axis=1) > 0
    sentinels = np.array(tokenizer.sentinel_ids[:spans])

    segment = rows.segment if isolate else np.zeros_like(rows.segment)
    in_source = ~is_noise | (starts > 0)
    source = np.where(starts > 0, sentinels[span], rows.tokens)[in_source].reshape(count, -1)
    source = np.append(source, np.full((count, 1), tokenizer.end_id), axis=1)
    source_segment = np.pad(segment[in_source].reshape(count, -1), ((0, 0), (0, 1)), mode="edge")

    targets = np.full((count, lengths.target_tokens), tokenizer.end_id)
    documents, weights = np.empty_like(targets), np.ones(targets.shape, np.bool_)
    span_segment, noise_span = segment[row, start], span[is_noise].reshape(count, -1)
    target_position = np.arange(lengths.noise_tokens) + noise_span + 1
    targets[row, target_position] = rows.tokens[is_noise].reshape(count, -1)
    documents[row, target_position] = span_segment[row, noise_span]
    weights[row, target_position] = segment[is_noise].reshape(count, -1) == documents[row, target_position]
    sentinel_position = before + np.arange(spans)
    targets[row, sentinel_position] = sentinels
    documents[row, sentinel_position] = span_segment
    documents[:, -1] = span_segment[:, -1]
    # The decoder's input is the targets, shifted right by one, with the pad token at the start of each document.
    tokens = np.full_like(targets, tokenizer.pad_id)
    tokens[:, 1:] = np.where(documents[:, 1:] == documents[:, :-1], targets[:, :-1], tokenizer.pad_id)
    if not documents.any() and not source_segment.any():
        return BatchArrays(tokens, targets, weights, source=source)
    positions = positions_within_documents(documents)
    return BatchArrays(tokens, targets, weights, documents, positions, source, source_segment)


def _random_partition(row_keys: UInt64Array, total: int, num_parts: int, *, stream: int) -> IntArray:
    """[R, parts] lengths of at least 1 that sum to `total`, each partition equally likely."""
    if num_parts == 1:
        return np.full((len(row_keys), 1), total)
    scores = uniform_floats(row_keys, total - 1, stream)
    cuts = np.sort(scores.argpartition(num_parts - 2, axis=1)[:, : num_parts - 1], axis=1) + 1
    return np.diff(cuts, axis=1, prepend=0, append=total)
