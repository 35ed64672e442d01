"""Span corruption (T5): spans of a text are cut out, each leaves a sentinel, and the decoder writes them down.

    raw     a b c d e f g h          source  a b <0> e f <1> END
    spans       c d     g h          targets <0> c d <1> g h END

All rows have the same number of tokens, spans and cut-out tokens, so the shapes are fixed.
"""

from dataclasses import dataclass

import numpy as np

from motet.core.errors import InputError
from motet.data.draws import Words, uniforms
from motet.data.objectives import Arrays, restarted
from motet.data.packing import Ints, Rows

MEAN_SPAN = 3
"""Tokens of a span on average, as T5 uses; more when there are fewer sentinels than that needs."""


@dataclass(frozen=True)
class SpanShape:
    """Lengths of a row, in tokens."""

    raw: int
    """Text that the row is made from."""
    cut: int
    spans: int

    @property
    def source(self) -> int:
        """What the encoder reads, with the end."""
        return self.raw - self.cut + self.spans + 1

    @property
    def target(self) -> int:
        """What the decoder writes, with the end."""
        return self.cut + self.spans + 1


def span_shape(sequence_length: int, fraction: float, sentinels: int) -> SpanShape:
    """The longest raw text whose source and targets both fit into `sequence_length`."""
    shape = _shape(2, fraction, sentinels)
    if max(shape.source, shape.target) > sequence_length:
        raise InputError(
            f"data.sequence_length = {sequence_length} is too short for spans; use at least {shape.source}"
        )
    while max((longer := _shape(shape.raw + 1, fraction, sentinels)).source, longer.target) <= sequence_length:
        shape = longer
    return shape


def _shape(raw: int, fraction: float, sentinels: int) -> SpanShape:
    cut = min(max(1, round(raw * fraction)), raw - 1)
    spans = min(max(1, round(cut / MEAN_SPAN)), cut, raw - cut, sentinels)
    return SpanShape(raw, cut, spans)


@dataclass(frozen=True)
class Special:
    """The tokens that span corruption puts in."""

    sentinel_ids: tuple[int, ...]
    end_id: int
    start_id: int
    """What the decoder reads first."""


def corrupt(rows: Rows, row_keys: Words, shape: SpanShape, special: Special, restart: bool) -> Arrays:
    """Which spans are cut out depends on the row's key alone.

    With `restart`, a span belongs to the document that it starts in, and what it holds of the next one is no target.
    """
    count, spans = len(rows.tokens), shape.spans
    cut_length = _partition(row_keys, shape.cut, spans, stream=0)
    kept_length = _partition(row_keys, shape.raw - shape.cut, spans, stream=1)
    before = np.cumsum(cut_length, axis=1) - cut_length
    start = np.cumsum(kept_length, axis=1) + before
    row = np.arange(count)[:, None]
    starts = np.zeros((count, shape.raw), np.int64)
    starts[row, start] = 1
    step = starts.copy()
    step[row, (start + cut_length)[:, :-1]] = -1  # the last span ends with the row
    is_cut = np.cumsum(step, axis=1) > 0
    span = np.cumsum(starts, axis=1) - 1
    sentinels = np.array(special.sentinel_ids[:spans])

    segment = rows.segment if restart else np.zeros_like(rows.segment)
    in_source = ~is_cut | (starts > 0)
    shown = np.where(starts > 0, sentinels[span], rows.tokens)
    source = _ended(shown[in_source].reshape(count, -1), special.end_id)
    source_segment = segment[in_source].reshape(count, -1)
    source_segment = np.append(source_segment, source_segment[:, -1:], axis=1)

    targets = np.empty((count, shape.target), np.int64)
    owner = np.empty_like(targets)
    weights = np.ones(targets.shape, np.bool_)
    span_segment = segment[row, start]
    cut_span = span[is_cut].reshape(count, -1)
    place = np.arange(shape.cut) + cut_span + 1
    targets[row, place] = rows.tokens[is_cut].reshape(count, -1)
    owner[row, place] = span_segment[row, cut_span]
    weights[row, place] = segment[is_cut].reshape(count, -1) == owner[row, place]
    head = before + np.arange(spans)
    targets[row, head] = sentinels
    owner[row, head] = span_segment
    targets[:, -1] = special.end_id
    owner[:, -1] = span_segment[:, -1]
    return _shifted(Arrays(targets, targets, weights, owner, None, source, source_segment), special.start_id)


def _shifted(arrays: Arrays, start_id: int) -> Arrays:
    """The decoder reads the targets one place later; at the start of each document it reads `start_id`."""
    targets, owner = arrays.targets, arrays.documents
    assert owner is not None and arrays.source_documents is not None
    tokens = np.full_like(targets, start_id)
    tokens[:, 1:] = np.where(owner[:, 1:] == owner[:, :-1], targets[:, :-1], start_id)
    bordered = bool(owner.any() or arrays.source_documents.any())
    return Arrays(
        tokens=tokens,
        targets=targets,
        weights=arrays.weights,
        documents=owner if bordered else None,
        positions=restarted(owner) if bordered else None,
        source=arrays.source,
        source_documents=arrays.source_documents if bordered else None,
    )


def _ended(tokens: Ints, end_id: int) -> Ints:
    return np.append(tokens, np.full((len(tokens), 1), end_id), axis=1)


def _partition(row_keys: Words, total: int, parts: int, stream: int) -> Ints:
    """[R, parts] lengths of at least 1 that sum to `total`, each way of cutting equally likely."""
    if parts == 1:
        return np.full((len(row_keys), 1), total)
    scores = uniforms(row_keys, total - 1, stream)
    cuts = np.sort(scores.argpartition(parts - 2, axis=1)[:, : parts - 1], axis=1) + 1
    edges = np.full((len(row_keys), parts + 1), total)
    edges[:, 0] = 0
    edges[:, 1:-1] = cuts
    return np.diff(edges, axis=1)
