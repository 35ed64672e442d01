"""Documents packed into windows: the segments of a split form one stream, and a sample is a slice of it.
Text is cut at a fixed stride, across documents. A window of records (prompt and answer, or text and class) holds as
many whole ones as fit; a longer record loses its end."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from motet.data.samples.splits import SplitTokenRanges

IntArray = NDArray[np.int64]
TokenReader = Callable[[int, int], NDArray[Any]]  # `TokenStore.read`


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


def gather_windows(stream: PackedTokenStream, samples: IntArray, read: TokenReader, *, pad_id: int) -> TokenWindows:
    """The tokens of these samples, with the borders of documents in them."""
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
    return TokenWindows(tokens, size, segment, eligible, stream.segments.label[first])


def _copy_tokens(stream: PackedTokenStream, begin: int, out: IntArray, *, read: TokenReader) -> None:
    run_begins, corpus_begins = stream.contiguous_runs
    run = int(run_begins.searchsorted(begin, "right")) - 1
    done, end = begin, begin + len(out)
    while done < end:
        stop = min(end, int(run_begins[run + 1])) if run + 1 < len(run_begins) else end
        start = int(corpus_begins[run]) + done - int(run_begins[run])
        out[done - begin : stop - begin] = read(start, stop - done)
        done, run = stop, run + 1
