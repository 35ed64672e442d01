"""Span corruption: source and targets together hold the text, shapes are fixed, documents do not see one another."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.core.errors import InputError
from motet.data.corpus.tokenizer import Tokenizer
from motet.data.samples.packing import (
    BatchArrays,
    SpanCorruptionLengths,
    TokenWindows,
    corrupt_spans,
    span_corruption_lengths,
)
from motet.data.samples.shuffle_and_mix import derive_keys

SENTINELS = tuple(range(1000, 1100))
END, START = 2000, 2001
TOKENIZER = Tokenizer(None, END, pad_id=START, mask_id=None, sentinel_ids=SENTINELS)
FRACTIONS = st.sampled_from([0.05, 0.15, 0.3, 0.5, 0.9])


def text(count: int, raw: int, starts: list[int]) -> TokenWindows:
    """Rows of ascending numbers, with documents that start at these places."""
    tokens = np.arange(count * raw).reshape(count, raw)
    segment = np.zeros_like(tokens)
    segment[:, [place for place in starts if 0 < place < raw]] = 1
    documents, eligible = np.cumsum(segment, axis=1), np.ones_like(tokens, bool)
    return TokenWindows(tokens, np.full(count, raw), documents, eligible, np.zeros(count))


def corrupt(rows: TokenWindows, seed: int, shape: SpanCorruptionLengths, isolate: bool = True) -> BatchArrays:
    keys = derive_keys(seed, np.arange(len(rows.tokens)))
    return corrupt_spans(rows, keys, shape, tokenizer=TOKENIZER, isolate=isolate)


def spans_of(targets: list[int]) -> dict[int, list[int]]:
    """Sentinel -> the tokens that it stands for."""
    assert targets[-1] == END
    spans: dict[int, list[int]] = {}
    for token in targets[:-1]:
        if token in SENTINELS:
            spans[token] = []
        else:
            spans[list(spans)[-1]].append(token)
    return spans


@given(st.integers(5, 300), FRACTIONS, st.integers(1, 100))
def test_shapes_fit_as_well_as_they_can(length: int, fraction: float, sentinels: int) -> None:
    shape = span_corruption_lengths(length, fraction, sentinels)
    assert shape.source_tokens <= length and shape.target_tokens <= length
    assert 1 <= shape.noise_spans <= min(sentinels, shape.noise_tokens, shape.raw_tokens - shape.noise_tokens)
    assert shape.source_tokens + shape.target_tokens == shape.raw_tokens + 2 * shape.noise_spans + 2
    if 0.1 < fraction < 0.5 and sentinels == 100:
        assert shape.source_tokens >= length - 1


def test_the_shape_of_t5() -> None:
    # 512 tokens of source with 15 % cut out in spans of 3 are made from 568, with 114 targets, as published.
    shape = span_corruption_lengths(512, 0.15, 100)
    assert (shape.raw_tokens, shape.source_tokens, shape.target_tokens) == (568, 512, 114)


def test_too_short() -> None:
    with pytest.raises(InputError, match=r"sequence_length = 2 is too short for spans; use at least 3"):
        span_corruption_lengths(2, 0.15, 100)


@given(st.integers(3, 120), FRACTIONS, st.integers(0, 2**60), st.integers(1, 4))
def test_source_and_targets_hold_the_text(length: int, fraction: float, seed: int, count: int) -> None:
    shape = span_corruption_lengths(length, fraction, len(SENTINELS))
    rows = text(count, shape.raw_tokens, [])
    arrays = corrupt(rows, seed, shape)
    assert arrays.source is not None and arrays.source.shape == (count, shape.source_tokens)
    assert arrays.tokens.shape == arrays.targets.shape == (count, shape.target_tokens)
    assert arrays.documents is arrays.positions is arrays.source_documents is None and arrays.weights.all()
    for row in range(count):
        source, targets = arrays.source[row].tolist(), arrays.targets[row].tolist()
        spans = spans_of(targets)
        assert list(spans) == list(SENTINELS[: shape.noise_spans]) and all(spans.values()) and source[-1] == END
        whole = [t for token in source[:-1] for t in spans.get(token, [token])]
        assert whole == rows.tokens[row].tolist() and arrays.tokens[row].tolist() == [START, *targets[:-1]]


def owners(arrays: BatchArrays, row: int, starts: list[int]) -> None:
    """Check one row of a text of several documents: what is a target can be known from its own document."""
    assert arrays.source is not None and arrays.documents is not None and arrays.source_documents is not None

    def document(token: int) -> int:
        return sum(token >= start for start in starts)

    for token, owner in zip(arrays.source[row].tolist(), arrays.source_documents[row].tolist(), strict=True):
        if token < 1000:
            assert owner == document(token)
    span_owner = {}
    for place, token in enumerate(arrays.targets[row].tolist()):
        owner, before = int(arrays.documents[row, place]), int(arrays.tokens[row, place])
        continues = place > 0 and owner == arrays.documents[row, place - 1]
        assert before == (arrays.targets[row, place - 1] if continues else START)
        if token in SENTINELS:
            span_owner[token] = owner
            assert arrays.weights[row, place]
        elif token != END:
            assert owner == span_owner[list(span_owner)[-1]]
            assert arrays.weights[row, place] == (document(token) == owner)
    for token, owner in zip(arrays.source[row].tolist(), arrays.source_documents[row].tolist(), strict=True):
        if token in span_owner:
            assert owner == span_owner[token]


@given(st.integers(0, 2**60), st.lists(st.integers(1, 60), min_size=1, max_size=6, unique=True))
def test_documents_do_not_see_one_another(seed: int, starts: list[int]) -> None:
    shape = span_corruption_lengths(64, 0.4, len(SENTINELS))
    rows = text(1, shape.raw_tokens, starts)
    owners(corrupt(rows, seed, shape), 0, [s for s in starts if s < shape.raw_tokens])
    together = corrupt(rows, seed, shape, isolate=False)
    assert together.documents is None and together.weights.all()


def test_every_place_is_cut_about_as_often() -> None:
    shape = span_corruption_lengths(40, 0.3, len(SENTINELS))
    count = 4000
    arrays = corrupt(text(count, shape.raw_tokens, []), 3, shape)
    cut = arrays.targets[arrays.targets < count * shape.raw_tokens]
    cut = cut[(cut < 1000) | (cut > 2001)] % shape.raw_tokens
    often = np.bincount(cut, minlength=shape.raw_tokens) / count
    # The first token is never cut and the last always, because a row starts with text and ends with a span.
    assert often[0] == 0 and often[-1] > 0.99 and abs(often[3:-3].mean() - 0.3) < 0.03
