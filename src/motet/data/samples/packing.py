"""Documents packed into windows: the segments of a split form one stream, and a sample is a stretch of it.

Plain text is cut every so many tokens, whatever document that falls into. Records (prompt and answer, or text and
class) stay whole: a window holds as many as fit, and one that is longer than a window loses its end.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from motet.data.samples.splits import DocumentSegments

IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class TokenWindows:
    """Windows of tokens as the objectives take them; R rows of W places."""

    tokens: IntArray  # [R, W]; what is behind the end of a window holds the pad token
    size: IntArray  # [R] tokens that are there
    # [R, W] the number of each place's document within its row, from 0; what is behind the end counts as one more.
    segment: IntArray
    eligible: NDArray[np.bool_]  # [R, W] whether the token may be a target
    label: IntArray  # [R] the class of the first document


@dataclass(frozen=True)
class PackedTokenStream:
    """The segments of a split one after the other, and where each sample lies in them."""

    segments: DocumentSegments
    window_begins: IntArray | None  # [samples] where each window begins; None when that is every `stride` tokens
    window_ends: IntArray | None
    stride: int
    width: int  # Tokens of a full window; more than `stride` when a window looks at the first token of the next
    num_samples: int  # Samples

    @cached_property
    def segment_borders(self) -> IntArray:
        """[segments + 1] where each segment begins in the stream."""
        return np.concatenate([[0], np.cumsum(self.segments.length)]).astype(np.int64)

    @cached_property
    def has_non_targets(self) -> bool:
        """Whether some tokens are no targets."""
        return bool(self.segments.skip.any())

    @cached_property
    def contiguous_runs(self) -> tuple[IntArray, IntArray]:
        """Where stretches begin that are gapless in the corpus too: in the stream, and in the corpus."""
        start, length = self.segments.start, self.segments.length
        first = np.ones(len(start), np.bool_)
        first[1:] = start[1:] != start[:-1] + length[:-1]
        return self.segment_borders[:-1][first], start[first]

    def window_bounds(self, samples: IntArray) -> tuple[IntArray, IntArray]:
        """Where the windows of these samples begin and end in the stream."""
        if self.window_begins is not None and self.window_ends is not None:
            return self.window_begins[samples], self.window_ends[samples]
        begin = samples * self.stride
        return begin, np.minimum(begin + self.width, self.segment_borders[-1])


def cut_into_windows(segments: DocumentSegments, stride: int, width: int, keep_partial: bool) -> PackedTokenStream:
    """A window every `stride` tokens, `width` long; with `partial` the last one may be shorter."""
    total = int(segments.length.sum())
    # A window of one token more than its stride has nothing to predict when only that token is left.
    extra = width - stride
    count = -(-(total - extra) // stride) if keep_partial else (total - extra) // stride
    return PackedTokenStream(segments, None, None, stride, width, max(0, count))


def pack_records(segments: DocumentSegments, width: int, one_per_window: bool) -> PackedTokenStream:
    """Windows of whole segments in order, as many as fit into `width`, or each one `alone`."""
    ends = np.cumsum(segments.length)
    begins = ends - segments.length
    first: IntArray
    after: IntArray
    if one_per_window:
        first = np.arange(len(segments))
        after = first + 1
    else:
        edges: IntArray = np.array([*_first_segments(ends, width), len(segments)], dtype=np.int64)
        first, after = edges[:-1], edges[1:]
    if not len(first):
        return PackedTokenStream(segments, begins, ends, width, width, 0)
    begin = begins[first]
    return PackedTokenStream(segments, begin, np.minimum(ends[after - 1], begin + width), width, width, len(first))


def _first_segments(ends: IntArray, width: int) -> list[int]:
    """The first segment of each window."""
    firsts, first, begin = [], 0, 0
    while first < len(ends):
        firsts.append(first)
        first = max(first + 1, int(ends.searchsorted(begin + width, "right")))
        begin = int(ends[first - 1])
    return firsts


def gather_windows(
    stream: PackedTokenStream, samples: IntArray, read_tokens: Callable[[int, int], NDArray[Any]], pad: int
) -> TokenWindows:
    """The tokens of these samples, with the borders of documents in them."""
    begin, end = stream.window_bounds(samples)
    size = end - begin
    tokens = np.full((len(samples), stream.width), pad, dtype=np.int64)
    for out, window_begin, window_end in zip(tokens, begin.tolist(), end.tolist(), strict=True):
        _copy_tokens(stream, window_begin, window_end, read_tokens, out)
    positions = np.arange(stream.width)
    first = stream.segment_borders.searchsorted(begin, "right") - 1
    last = stream.segment_borders.searchsorted(end - 1, "right") - 1
    segment = np.zeros_like(tokens)
    inner_borders = last - first
    if inner_borders.any():
        row = np.repeat(np.arange(len(samples)), inner_borders)
        nth = np.arange(len(row)) - np.repeat(np.cumsum(inner_borders) - inner_borders, inner_borders)
        segment[row, stream.segment_borders[first[row] + 1 + nth] - begin[row]] = 1
    is_partial = size < stream.width
    segment[is_partial, size[is_partial]] = 1
    np.cumsum(segment, axis=1, out=segment)
    eligible = positions < size[:, None]
    if stream.has_non_targets:
        segment_ids = np.minimum(first[:, None] + segment, last[:, None])
        eligible &= (
            begin[:, None] + positions - stream.segment_borders[segment_ids] >= stream.segments.skip[segment_ids]
        )
    return TokenWindows(tokens, size, segment, eligible, stream.segments.label[first])


def _copy_tokens(
    stream: PackedTokenStream, begin: int, end: int, read_tokens: Callable[[int, int], NDArray[Any]], out: IntArray
) -> None:
    """Copy a stretch of the stream, run by run."""
    run_begins, corpus_begins = stream.contiguous_runs
    run = int(run_begins.searchsorted(begin, "right")) - 1
    done = begin
    while done < end:
        stop = min(end, int(run_begins[run + 1])) if run + 1 < len(run_begins) else end
        out[done - begin : stop - begin] = read_tokens(
            int(corpus_begins[run]) + done - int(run_begins[run]), stop - done
        )
        done, run = stop, run + 1
