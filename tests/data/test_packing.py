"""Packing: every token once, borders where documents end, and nothing behind the end."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from motet.data.samples.packing import (
    PackedTokenStream,
    SplitTokenRanges,
    cut_into_windows,
    gather_windows,
    pack_records,
)

LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=12)
WIDTHS = st.integers(1, 20)
PAD = -1


def segments(lengths: list[int], gaps: list[int], skips: list[int] | None = None) -> SplitTokenRanges:
    """Segments with `gaps` tokens of others before each."""
    starts = np.cumsum(np.array(gaps) + np.array([0, *lengths[:-1]]))
    skip = np.array(skips) if skips else np.zeros(len(lengths), np.int64)
    return SplitTokenRanges(starts, np.array(lengths), skip, np.arange(len(lengths)))


def read(start: int, count: int) -> np.ndarray:
    """A corpus in which each token is its own place."""
    return np.arange(start, start + count)


def plain(segments: SplitTokenRanges) -> list[tuple[int, int]]:
    """The stream written out: token and segment."""
    spans = enumerate(zip(segments.start.tolist(), segments.length.tolist(), strict=True))
    return [(start + i, number) for number, (start, length) in spans for i in range(length)]


@st.composite
def some_segments(draw: st.DrawFn) -> SplitTokenRanges:
    lengths = draw(LENGTHS)
    count = len(lengths)
    gaps = draw(st.lists(st.integers(0, 2), min_size=count, max_size=count))
    return segments(lengths, gaps, draw(st.lists(st.integers(0, 6), min_size=count, max_size=count)))


def check_rows(stream: PackedTokenStream, expected: list[list[tuple[int, int]]]) -> None:
    rows = gather_windows(stream, np.arange(stream.num_samples), read, pad_id=PAD)
    assert rows.tokens.shape == (stream.num_samples, stream.width)
    starts = stream.segments.start
    for row, window in enumerate(expected):
        size = len(window)
        assert rows.size[row] == size
        assert rows.tokens[row].tolist() == [token for token, _ in window] + [PAD] * (stream.width - size)
        inside = [number - window[0][1] for _, number in window]
        assert rows.segment[row].tolist() == inside + [inside[-1] + 1] * (stream.width - size)
        skip = stream.segments.skip
        wanted = [token - starts[number] >= skip[number] for token, number in window]
        assert rows.eligible[row].tolist() == wanted + [False] * (stream.width - size)
        assert rows.label[row] == window[0][1]


@given(some_segments(), WIDTHS, st.integers(0, 1), st.booleans())
def test_a_stream_is_cut_every_stride(segments: SplitTokenRanges, stride: int, extra: int, partial: bool) -> None:
    tokens = plain(segments)
    expected = [tokens[at : at + stride + extra] for at in range(0, len(tokens), stride)]
    least = extra + 1 if partial else stride + extra
    expected = [window for window in expected if len(window) >= least]
    stream = cut_into_windows(segments, stride, stride + extra, keep_partial=partial)
    assert stream.num_samples == len(expected)
    check_rows(stream, expected)


@given(some_segments(), WIDTHS)
def test_records_stay_whole_while_they_fit(segments: SplitTokenRanges, width: int) -> None:
    expected: list[list[tuple[int, int]]] = []
    filled: list[tuple[int, int]] = []
    for number in range(len(segments)):
        record = [(token, of) for token, of in plain(segments) if of == number]
        if filled and len(filled) + len(record) > width:
            expected.append(filled[:width])
            filled = []
        filled = filled + record
    expected.append(filled[:width])
    stream = pack_records(segments, width, one_per_window=False)
    assert stream.num_samples == len(expected)
    check_rows(stream, expected)


@given(some_segments(), WIDTHS)
def test_records_alone_have_a_row_each(segments: SplitTokenRanges, width: int) -> None:
    numbers = range(len(segments))
    expected = [[(token, of) for token, of in plain(segments) if of == number][:width] for number in numbers]
    check_rows(pack_records(segments, width, one_per_window=True), expected)


@given(some_segments(), WIDTHS, st.data())
def test_rows_do_not_depend_on_others(segments: SplitTokenRanges, width: int, data: st.DataObject) -> None:
    stream = cut_into_windows(segments, width, width + 1, keep_partial=True)
    if stream.num_samples == 0:
        return
    chosen = np.array(data.draw(st.lists(st.integers(0, stream.num_samples - 1), min_size=1, max_size=6)))
    every = np.arange(stream.num_samples)
    everything, some = (gather_windows(stream, which, read, pad_id=PAD) for which in (every, chosen))
    for name in ("tokens", "size", "segment", "eligible", "label"):
        assert (getattr(some, name) == getattr(everything, name)[chosen]).all()


def test_neighbouring_documents_are_read_in_one_go() -> None:
    calls = []

    def counted(start: int, count: int) -> np.ndarray:
        calls.append((start, count))
        return read(start, count)

    stream = cut_into_windows(segments([3, 4, 5, 4], [2, 0, 0, 7]), 16, 16, keep_partial=False)
    gather_windows(stream, np.array([0]), counted, pad_id=PAD)
    assert calls == [(2, 12), (21, 4)]


def test_no_records_make_no_windows() -> None:
    nothing = segments([4], [0]).take(np.array([], np.int64))
    assert all(pack_records(nothing, 4, one_per_window=alone).num_samples == 0 for alone in (False, True))
    assert cut_into_windows(nothing, 4, 5, keep_partial=True).num_samples == 0
