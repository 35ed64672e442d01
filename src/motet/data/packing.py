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

from motet.data.splits import Segments

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Rows:
    """Windows of tokens as the objectives take them; R rows of W places."""

    tokens: Ints
    """[R, W]; what is behind the end of a window holds the pad token."""
    size: Ints
    """[R] tokens that are there."""
    segment: Ints
    """[R, W] the number of each place's document within its row, from 0; what is behind the end counts as one more."""
    eligible: NDArray[np.bool_]
    """[R, W] whether the token may be a target."""
    label: Ints
    """[R] the class of the first document."""


@dataclass(frozen=True)
class Stream:
    """The segments of a split one after the other, and where each sample lies in them."""

    segments: Segments
    begin: Ints | None
    """[samples] where each window begins; None when that is every `stride` tokens."""
    end: Ints | None
    stride: int
    width: int
    """Tokens of a full window; more than `stride` when a window looks at the first token of the next."""
    count: int
    """Samples."""

    @cached_property
    def borders(self) -> Ints:
        """[segments + 1] where each segment begins in the stream."""
        return np.concatenate([[0], np.cumsum(self.segments.length)]).astype(np.int64)

    @cached_property
    def masked(self) -> bool:
        """Whether some tokens are no targets."""
        return bool(self.segments.skip.any())

    @cached_property
    def runs(self) -> tuple[Ints, Ints]:
        """Where stretches begin that are gapless in the corpus too: in the stream, and in the corpus."""
        start, length = self.segments.start, self.segments.length
        first = np.ones(len(start), np.bool_)
        first[1:] = start[1:] != start[:-1] + length[:-1]
        return self.borders[:-1][first], start[first]

    def window(self, samples: Ints) -> tuple[Ints, Ints]:
        """Where the windows of these samples begin and end in the stream."""
        if self.begin is not None and self.end is not None:
            return self.begin[samples], self.end[samples]
        begin = samples * self.stride
        return begin, np.minimum(begin + self.width, self.borders[-1])


def cut_stream(segments: Segments, stride: int, width: int, partial: bool) -> Stream:
    """A window every `stride` tokens, `width` long; with `partial` the last one may be shorter."""
    total = int(segments.length.sum())
    # A window of one token more than its stride has nothing to predict when only that token is left.
    extra = width - stride
    count = -(-(total - extra) // stride) if partial else (total - extra) // stride
    return Stream(segments, None, None, stride, width, max(0, count))


def pack_records(segments: Segments, width: int, alone: bool) -> Stream:
    """Windows of whole segments in order, as many as fit into `width`, or each one `alone`."""
    ends = np.cumsum(segments.length)
    begins = ends - segments.length
    first: Ints
    after: Ints
    if alone:
        first = np.arange(len(segments))
        after = first + 1
    else:
        edges: Ints = np.array([*_fill(ends, width), len(segments)], dtype=np.int64)
        first, after = edges[:-1], edges[1:]
    if not len(first):
        return Stream(segments, begins, ends, width, width, 0)
    begin = begins[first]
    return Stream(segments, begin, np.minimum(ends[after - 1], begin + width), width, width, len(first))


def _fill(ends: Ints, width: int) -> list[int]:
    """The first segment of each window."""
    firsts, first, begin = [], 0, 0
    while first < len(ends):
        firsts.append(first)
        first = max(first + 1, int(ends.searchsorted(begin + width, "right")))
        begin = int(ends[first - 1])
    return firsts


def gather(stream: Stream, samples: Ints, read: Callable[[int, int], NDArray[Any]], pad: int) -> Rows:
    """The tokens of these samples, with the borders of documents in them."""
    begin, end = stream.window(samples)
    size = end - begin
    tokens = np.full((len(samples), stream.width), pad, dtype=np.int64)
    for out, here, there in zip(tokens, begin.tolist(), end.tolist(), strict=True):
        _copy(stream, here, there, read, out)
    place = np.arange(stream.width)
    first = stream.borders.searchsorted(begin, "right") - 1
    last = stream.borders.searchsorted(end - 1, "right") - 1
    segment = np.zeros_like(tokens)
    inside = last - first
    if inside.any():
        row = np.repeat(np.arange(len(samples)), inside)
        nth = np.arange(len(row)) - np.repeat(np.cumsum(inside) - inside, inside)
        segment[row, stream.borders[first[row] + 1 + nth] - begin[row]] = 1
    short = size < stream.width
    segment[short, size[short]] = 1
    np.cumsum(segment, axis=1, out=segment)
    eligible = place < size[:, None]
    if stream.masked:
        owner = np.minimum(first[:, None] + segment, last[:, None])
        eligible &= begin[:, None] + place - stream.borders[owner] >= stream.segments.skip[owner]
    return Rows(tokens, size, segment, eligible, stream.segments.label[first])


def _copy(stream: Stream, begin: int, end: int, read: Callable[[int, int], NDArray[Any]], out: Ints) -> None:
    """Copy a stretch of the stream, run by run."""
    at, where = stream.runs
    run = int(at.searchsorted(begin, "right")) - 1
    done = begin
    while done < end:
        stop = min(end, int(at[run + 1])) if run + 1 < len(at) else end
        out[done - begin : stop - begin] = read(int(where[run]) + done - int(at[run]), stop - done)
        done, run = stop, run + 1
