"""The keys that the queries of a span see by their places, and the tiles of queries and keys that ranks compute."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import isqrt
from typing import Literal

from motet.parallel.context_parallel.attention_calls import AttentionCall
from motet.parallel.context_parallel.context_partition import Spans

Span = tuple[int, int]  # (first, stop) of places in a row; first equals stop where it is empty
TileMask = Literal["none", "causal", "dense"]
# Elements of a dense mask, or of scores: 4 MiB in float32, whatever the length of rows
TILE_ELEMENTS = 1 << 20
# Tokens of a tile where a window or documents hide keys: measured at rows of 4,096 tokens, 512 computes a third more
# pairs, and 128 takes as long in twice as many calls
MASKED_EDGE = 256
SMALLEST_EDGE = 64  # Tokens of a tile along each side; for a window, twice that


@dataclass(frozen=True)
class AttentionTile:
    """Queries and keys that are computed together. Mask `none`: each query sees each key; `causal`: the places of
    queries and keys are the same, and no query sees a later key; `dense`: neither."""

    queries: Span
    keys: Span
    mask: TileMask

    @property
    def pairs(self) -> int:
        """Pairs of query and key that are computed."""
        count, keys = self.queries[1] - self.queries[0], self.keys[1] - self.keys[0]
        return count * (count + 1) // 2 if self.mask == "causal" else count * keys


@dataclass(frozen=True)
class TileLimits:
    """The tokens of a tile along each side, where a tile is limited."""

    edge: int
    has_documents: bool = False  # Each tile has a dense mask, because documents hide keys too
    limits_all: bool = False  # Also tiles without a dense mask, for code that keeps the scores of a tile


@dataclass(frozen=True)
class PlaceVisibility:
    """The visibility of keys by places alone: documents hide more."""

    causal: bool  # No query sees a key at a later place
    window: int | None = None  # A query sees at most `window - 1` places before its own

    @classmethod
    def in_call(cls, call: AttentionCall) -> "PlaceVisibility":
        """The visibility in a call of attention."""
        return cls(call.causal, call.window)

    def seen(self, queries: Span, keys: Span) -> Span:
        """The smallest span of the keys that has all keys which any of these queries sees."""
        (first_query, stop_query), (first, stop) = queries, keys
        if first_query == stop_query:
            return first, first
        first = first if self.window is None else max(first, first_query - self.window + 1)
        stop = min(stop, stop_query) if self.causal else stop
        return (first, stop) if first < stop else (keys[0], keys[0])

    def sees_all(self, queries: Span, keys: Span) -> bool:
        """Whether each query sees each of these keys."""
        is_past = not self.causal or keys[1] <= queries[0] + 1
        return is_past and self.is_within_window(queries, keys)

    def is_within_window(self, queries: Span, keys: Span) -> bool:
        """Whether the window hides none of these keys from a query."""
        return self.window is None or keys[0] > queries[1] - 1 - self.window

    def pairs(self, queries: Spans, tokens: int) -> int:
        """Pairs of a query of these spans and a key of a row that it sees."""
        total = 0
        for first, stop in queries:
            # Keys up to the place of each query, without those up to the last place before its window
            total += _sum_of_clamped(first + 1, stop + 1, tokens) if self.causal else (stop - first) * tokens
            if self.window is not None:
                total -= _sum_of_clamped(first + 1 - self.window, stop + 1 - self.window, tokens)
        return total

    def limits(self, elements: int, *, has_documents: bool, keeps_scores: bool) -> TileLimits:
        """The limits of tiles with this many elements of a matrix."""
        edge = isqrt(elements)
        if has_documents or self.window is not None:
            edge = min(edge, MASKED_EDGE)
        if self.window is not None:
            edge = min(edge, max(self.window, 2 * SMALLEST_EDGE))  # Fewer pairs outside of the window
        return TileLimits(max(edge, SMALLEST_EDGE), has_documents, limits_all=keeps_scores)

    def tiles(self, queries: Span, keys: Span, limits: TileLimits) -> Iterator[AttentionTile]:
        """The tiles that have each visible pair of these queries and keys once."""
        keys = self.seen(queries, keys)
        if keys[0] == keys[1]:
            return
        if not (limits.has_documents or limits.limits_all):
            if self.sees_all(queries, keys):
                yield AttentionTile(queries, keys, "none")
                return
            rest = max(keys[0], queries[0]), keys[1]
            if self.is_within_window(queries, keys) and rest == queries:
                if keys[0] < queries[0]:
                    yield AttentionTile(queries, (keys[0], queries[0]), "none")
                yield AttentionTile(queries, rest, "causal")
                return
        yield from self._limited_tiles(queries, keys, limits)

    def _limited_tiles(self, queries: Span, keys: Span, limits: TileLimits) -> Iterator[AttentionTile]:
        edge = limits.edge
        if queries[1] - queries[0] > edge:
            for part in _cut(queries, edge):
                yield from self.tiles(part, keys, limits)
            return
        for part in _cut(keys, edge):
            seen = self.seen(queries, part)
            if seen[0] < seen[1]:
                is_dense = limits.has_documents or not self.sees_all(queries, seen)
                yield AttentionTile(queries, seen, "dense" if is_dense else "none")


def _cut(span: Span, edge: int) -> Iterator[Span]:
    for first in range(*span, edge):
        yield first, min(first + edge, span[1])


def _sum_of_clamped(first: int, stop: int, height: int) -> int:
    """The sum of the numbers from `first` to `stop - 1`, each clamped to 0..height."""

    def sum_below(x: int) -> int:
        rising = max(0, min(x, height + 1))
        return rising * (rising - 1) // 2 + max(0, x - 1 - height) * height

    return sum_below(stop) - sum_below(first)
