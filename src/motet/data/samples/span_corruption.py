"""Span corruption (T5): sentinels replace spans of a text, and the decoder predicts the spans.

    raw     a b c d e f g h          source  a b <0> e f <1> END
    spans       c d     g h          targets <0> c d <1> g h END

All rows have the same number of tokens, spans and noise tokens, so the shapes are fixed.
"""

from dataclasses import dataclass

import numpy as np

from motet.core.errors import check_input
from motet.data.corpus.tokenizer import Tokenizer
from motet.data.samples.objectives import BatchArrays, positions_within_documents
from motet.data.samples.packing import IntArray, TokenWindows
from motet.data.samples.shuffle_and_mix import UInt64Array, uniform_floats

MEAN_SPAN_TOKENS = 3  # As in T5; spans are longer if there are too few sentinels


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

    To `isolate` documents, a span belongs to that of its first token; its tokens of the next document are no targets.
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
