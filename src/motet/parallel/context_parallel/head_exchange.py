"""The all-to-all that gives each rank a part of the heads for all tokens of its neighbours, and its way back."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from motet.collectives.execute.api import all_to_all
from motet.models.arch.layers import accumulation_dtype
from motet.parallel.context_parallel.attention_tiles import Span
from motet.parallel.context_parallel.context_partition import Spans, count_tokens, shared_slices
from motet.parallel.context_parallel.head_split import HeadSplit
from motet.parallel.context_parallel.key_exchange import Direction, count_sent
from motet.parallel.process.process_group import RankGroup


@dataclass(frozen=True)
class HeadExchange:
    """The ranks that exchange, the places of each of them, and the places of all in the order of a row."""

    group: RankGroup
    heads: HeadSplit
    spans_by_rank: tuple[Spans, ...]
    all_spans: Spans

    @property
    def input_heads(self) -> tuple[list[Span], ...]:
        """The heads of each rank in queries, keys and values. Several ranks may have the same key head."""
        queries, keys = (
            [each(rank) for rank in range(self.group.world)] for each in (self.heads.queries, self.heads.keys)
        )
        return queries, keys, keys

    def to_heads(self, tensors: Sequence[Tensor], heads: Sequence[list[Span]], direction: Direction) -> list[Tensor]:
        """Tensors [R, heads, local tokens, D] of all heads -> [R, local heads, tokens, D]. `heads` has, for each
        tensor, the heads of each rank."""
        ranks, rank = self.group.world, self.group.rank
        sent = [[x[:, slice(*spans[to])] for x, spans in zip(tensors, heads, strict=True)] for to in range(ranks)]
        widths = [[_numel(x, spans[to]) for x, spans in zip(tensors, heads, strict=True)] for to in range(ranks)]
        lengths = [*map(count_tokens, self.spans_by_rank)]
        sizes = [[length * sum(widths[to]) for to in range(ranks)] for length in lengths]
        parts = self._exchange(sent, sizes, direction)
        results = [
            x.new_empty(x.shape[0], spans[rank][1] - spans[rank][0], sum(lengths), x.shape[3])
            for x, spans in zip(tensors, heads, strict=True)
        ]
        for source, part in enumerate(parts):
            pieces = part.split([lengths[source] * width for width in widths[rank]])
            for result, piece in zip(results, pieces, strict=True):
                tokens = piece.view(*result.shape[:2], lengths[source], result.shape[3])
                self._put_tokens(result, tokens, source)
        return results

    def to_tokens(self, tensors: Sequence[Tensor], heads: Sequence[list[Span]], direction: Direction) -> list[Tensor]:
        """Tensors [R, local heads, tokens, D] -> [R, heads, local tokens, D], in which the parts of ranks that share
        a head are added in float32 or float64."""
        ranks, rank = self.group.world, self.group.rank
        sent = [[self._take_tokens(x, to) for x in tensors] for to in range(ranks)]
        widths = [
            [_numel(x, spans[source]) for x, spans in zip(tensors, heads, strict=True)] for source in range(ranks)
        ]
        lengths = [*map(count_tokens, self.spans_by_rank)]
        sizes = [[sum(widths[source]) * length for length in lengths] for source in range(ranks)]
        parts = self._exchange(sent, sizes, direction)
        results = [
            x.new_zeros(x.shape[0], spans[-1][1], lengths[rank], x.shape[3], dtype=accumulation_dtype(x))
            for x, spans in zip(tensors, heads, strict=True)
        ]
        for source, part in enumerate(parts):
            pieces = part.split([lengths[rank] * width for width in widths[source]])
            for result, piece, spans in zip(results, pieces, heads, strict=True):
                share = result[:, slice(*spans[source])]
                share.add_(piece.view(share.shape))
        return [result.to(x.dtype) for result, x in zip(results, tensors, strict=True)]

    def _exchange(self, sent: list[list[Tensor]], sizes: list[list[int]], direction: Direction) -> list[Tensor]:
        """The part of each rank, from lists of tensors for each rank."""
        rank, buffer = self.group.rank, torch.cat([x.reshape(-1) for tensors in sent for x in tensors])
        received = [row[rank] for row in sizes]
        output = buffer.new_empty(sum(received))
        count_sent(direction, buffer.numel() - sizes[rank][rank], buffer.itemsize)
        all_to_all(output, buffer, self.group, sizes)
        return list(output.split(received))

    def _take_tokens(self, x: Tensor, rank: int) -> Tensor:
        return torch.cat([x[:, :, place] for place, _ in shared_slices(self.all_spans, self.spans_by_rank[rank])], 2)

    def _put_tokens(self, result: Tensor, tokens: Tensor, rank: int) -> None:
        for place, here in shared_slices(self.all_spans, self.spans_by_rank[rank]):
            result[:, :, place] = tokens[:, :, here]


def _numel(x: Tensor, heads: Span) -> int:
    """The elements of some heads of a token, in all rows."""
    return x.shape[0] * (heads[1] - heads[0]) * x.shape[3]
