"""Inputs and targets of each objective, checked position by position."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from motet.data.samples import packing
from motet.data.samples.packing import SplitTokenRanges, TokenWindows, cut_into_windows, gather_windows
from motet.data.samples.shuffle_and_mix import derive_keys

MASK, PAD, END = 900, 901, 902


@st.composite
def some_rows(draw: st.DrawFn, width: int = 9) -> TokenWindows:
    """Windows over short documents, the last of them not full."""
    lengths = np.array(draw(st.lists(st.integers(1, 12), min_size=1, max_size=8)))
    skips = np.array([draw(st.integers(0, 3)) for _ in lengths])
    segments = SplitTokenRanges(np.cumsum(lengths) - lengths, lengths, skips, np.arange(len(lengths)))
    stream = cut_into_windows(segments, width - 1, width, keep_partial=True)
    assume(stream.num_samples)
    samples = np.arange(stream.num_samples)
    return gather_windows(stream, samples, lambda start, count: np.arange(start, start + count), pad_id=PAD)


def places(rows: TokenWindows) -> list[tuple[int, int]]:
    return [(row, place) for row in range(len(rows.tokens)) for place in range(rows.tokens.shape[1])]


@given(some_rows(), st.booleans())
def test_causal(rows: TokenWindows, restart: bool) -> None:
    arrays, bordered = packing.causal_objective(rows, restart), False
    for row, place in places(rows):
        if place == rows.tokens.shape[1] - 1:
            continue
        assert arrays.tokens[row, place] == rows.tokens[row, place]
        assert arrays.targets[row, place] == rows.tokens[row, place + 1]
        same = rows.segment[row, place] == rows.segment[row, place + 1]
        assert arrays.weights[row, place] == (rows.eligible[row, place + 1] and (same or not restart))
        bordered |= bool(restart and place < rows.size[row] and rows.segment[row, place])
    assert (arrays.documents is not None) == (arrays.positions is not None) == bordered
    if arrays.documents is not None and arrays.positions is not None:
        segment = rows.segment[:, :-1]
        within = np.arange(segment.shape[1]) < rows.size[:, None]
        read = segment * (segment * within).any(axis=1, keepdims=True)  # what fills up a row alone is no border
        assert (arrays.documents == read).all() and (arrays.positions == packing.positions_within_documents(read)).all()


def test_positions_start_anew_with_each_document() -> None:
    found = packing.positions_within_documents(np.array([[0, 0, 1, 1, 1, 2], [0, 0, 0, 0, 0, 0]]))
    assert found.tolist() == [[0, 1, 0, 1, 2, 0], [0, 1, 2, 3, 4, 5]]


TOKENIZER: Any = SimpleNamespace(mask_id=MASK, vocab_size=40, end_id=0, pad_id=7, begin_ids=[])


@given(some_rows(), st.integers(0, 2**60), st.booleans())
def test_masked(rows: TokenWindows, seed: int, restart: bool) -> None:
    row_keys = derive_keys(seed, np.arange(len(rows.tokens)))
    arrays = packing.masked_objective(rows, row_keys, TOKENIZER, fraction=0.5, isolate_documents=restart)
    assert (arrays.targets == rows.tokens).all()
    changed = arrays.tokens != rows.tokens
    assert not (changed & ~arrays.weights).any() and not (arrays.weights & ~rows.eligible).any()
    assert not (arrays.weights & np.isin(rows.tokens, [0, 7])).any()
    assert ((arrays.tokens == MASK) | (arrays.tokens < 40) | ~changed).all()
    # A row alone gives the same.
    last = len(rows.tokens) - 1
    alone = TokenWindows(*(getattr(rows, name)[last:] for name in ("tokens", "size", "segment", "eligible", "label")))
    again = packing.masked_objective(alone, row_keys[last:], TOKENIZER, fraction=0.5, isolate_documents=restart)
    assert (again.tokens[0] == arrays.tokens[last]).all()


def test_shares_of_masked_tokens() -> None:
    count, width = 500, 200
    tokens = np.full((count, width), 1000)
    size, eligible = np.full(count, width), np.ones(tokens.shape, bool)
    rows = TokenWindows(tokens, size, np.zeros_like(tokens), eligible, np.zeros(count))
    keys = derive_keys(1, np.arange(count))
    arrays = packing.masked_objective(rows, keys, TOKENIZER, fraction=0.15, isolate_documents=True)
    chosen = arrays.weights.sum()
    shares = np.array([(arrays.tokens == MASK).sum(), (arrays.tokens < 40).sum()]) / chosen
    # Five standard deviations each, of 100,000 and of 15,000 draws.
    assert abs(chosen / tokens.size - 0.15) < 0.0057 and abs(shares - [0.8, 0.1]).max() < 0.0164
    assert len(np.unique(arrays.tokens[arrays.tokens < 40])) == 40


@given(some_rows(), st.booleans())
def test_borders_in_both_directions(rows: TokenWindows, restart: bool) -> None:
    documents, positions = packing.documents_and_positions(rows, restart)
    there = np.arange(rows.tokens.shape[1]) < rows.size[:, None]
    expected = rows.segment if restart else (~there).astype(int)
    if documents is None:
        assert not expected.any() and positions is None
    else:
        assert (documents == expected).all()
        # What fills up a row is never in a document of the row.
        assert not (documents[~there][:, None] == documents[there]).any() or len(rows.tokens) > 1
        assert (positions is not None) == restart


@pytest.mark.parametrize("first", [None, END])
def test_classify(first: int | None) -> None:
    tokens = np.array([[1, 2, 3], [4, PAD, PAD]])
    rows = TokenWindows(tokens, np.array([3, 1]), np.array([[0, 0, 0], [0, 1, 1]]), tokens != PAD, np.array([1, 0]))
    arrays = packing.classification_objective(rows, first)
    begin = [] if first is None else [END]
    assert arrays.tokens.tolist() == [[*begin, 1, 2, 3], [*begin, 4, PAD, PAD]]
    assert arrays.targets.tolist() == [1, 0] and arrays.weights.tolist() == [True, True]
    zeros = [0] * len(begin)
    assert arrays.documents is not None and arrays.documents.tolist() == [[*zeros, 0, 0, 0], [*zeros, 0, 1, 1]]
    full = TokenWindows(*(getattr(rows, name)[:1] for name in ("tokens", "size", "segment", "eligible", "label")))
    assert packing.classification_objective(full, first).documents is None
