"""The tokens of a row that each rank of context parallelism computes."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal

from motet.models.spec.layer_specs import AttentionSpec

ContextOrder = Literal["head-tail", "contiguous"]
ContextParallelKind = Literal["ring", "all-to-all", "all-gather"]
Spans = tuple[tuple[int, int], ...]  # (first, stop) of places in a row


def default_order(attention: Iterable[AttentionSpec]) -> ContextOrder:
    """The order that gives ranks equally much work: head-tail where every layer is causal and has no window."""
    return "head-tail" if all(each.causal and each.window is None for each in attention) else "contiguous"


@dataclass(frozen=True)
class ContextPartition:
    """A cut of rows of `tokens` places into parts, one for each of `ranks` ranks.

    In head-tail order a row has twice as many pieces as there are ranks, and rank i has the i-th from the front and the
    i-th from the back: under a causal mask every rank then has as many pairs of query and key, give or take the lengths
    of pieces, which differ by one token at most.
    """

    tokens: int
    ranks: int
    order: ContextOrder

    @cached_property
    def spans_by_rank(self) -> tuple[Spans, ...]:
        """The places of each rank, in ascending order."""
        count = self.ranks * (1 + (self.order == "head-tail"))
        pieces = list(pairwise(index * self.tokens // count for index in range(count + 1)))
        if self.order == "contiguous":
            return tuple((piece,) for piece in pieces)
        return tuple(_joined(pieces[rank], pieces[-1 - rank]) for rank in range(self.ranks))

    def spans(self, rank: int) -> Spans:
        """The places of a rank."""
        return self.spans_by_rank[rank]

    def length(self, rank: int) -> int:
        """The number of tokens of a rank in each row."""
        return count_tokens(self.spans(rank))

    @cached_property
    def longest(self) -> int:
        """The most tokens that a rank has of a row."""
        return max(map(self.length, range(self.ranks)))


@dataclass(frozen=True)
class ContextSplit:
    """The way in which ranks share each row, and exchange keys and values."""

    ranks: int = 1
    order: ContextOrder = "head-tail"
    kind: ContextParallelKind = "all-gather"
    inner: int = 1  # Neighbours that exchange by all-to-all inside of a ring

    @property
    def head_ranks(self) -> int:
        """Neighbours that exchange a part of the tokens for a part of the heads inside of attention; 1: none do."""
        return self.ranks if self.kind == "all-to-all" else self.inner

    def partition(self, tokens: int) -> ContextPartition:
        """The places of rows with a number of tokens on the ranks."""
        return ContextPartition(tokens, self.ranks, self.order)


def count_tokens(spans: Spans) -> int:
    """The number of tokens of some spans."""
    return sum(stop - first for first, stop in spans)


def shared_slices(spans: Spans, others: Spans) -> Iterator[tuple[slice, slice]]:
    """Tokens that two lists of spans share: where they are in a tensor of the tokens of each list."""
    start = 0
    for first, stop in spans:
        other_start = 0
        for other_first, other_stop in others:
            low, high = max(first, other_first), min(stop, other_stop)
            if low < high:
                here, other = low + start - first, low + other_start - other_first
                yield slice(here, here + high - low), slice(other, other + high - low)
            other_start += other_stop - other_first
        start += stop - first


def _joined(head: tuple[int, int], tail: tuple[int, int]) -> Spans:
    return ((head[0], tail[1]),) if head[1] == tail[0] else (head, tail)
