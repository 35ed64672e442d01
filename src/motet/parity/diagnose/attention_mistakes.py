"""Attention of whole rows on one device, computed with a mistake that ranks which share each row may make.

A mistake changes the inputs of one call of attention, or the gradients of its keys and values. Each follows from the
places of the ranks alone, and not from the code by which ranks compute attention.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import NamedTuple

import torch
from torch import Tensor

from motet.models.arch.attention_core import ScoreOptions, attend, attend_by_scores
from motet.models.arch.attention_mask import AttentionMask, AttentionTokens
from motet.parallel.context_parallel.context_partition import ContextPartition
from motet.parallel.context_parallel.head_split import HeadSplit

MOST_KEY_HEADS = 16  # Key heads beyond them are not tried


class Attention(NamedTuple):
    """The inputs of a call of attention of whole rows."""

    q: Tensor  # [R, h, T, D]
    k: Tensor
    v: Tensor
    bias: Tensor  # [R or 1, 1, T, T], added to the scores; -inf hides a key
    options: ScoreOptions
    mask: AttentionMask


def bias_of(mask: AttentionMask, q: Tensor) -> Tensor:
    """The dense form of a mask of whole rows, also where kernels need none."""
    places, dtype = torch.arange(q.shape[2]), torch.promote_types(q.dtype, torch.float32)
    dense = mask.block(places, places).dense(len(places), len(places), dtype=dtype, device=q.device)
    return torch.zeros(1, 1, len(places), len(places), dtype=dtype) if dense is None else dense


@dataclass(frozen=True)
class AttentionMistake:
    """A change of the inputs of attention, or of the gradients of keys from the queries of each rank."""

    words: str
    change: Callable[[Attention], Attention | None] | None = None  # None is returned where it cannot happen
    gradient_factors: Tensor | None = None  # [ranks of queries, ranks of keys]


@dataclass
class MistakenAttention:
    """Attention as one device computes it, with a mistake in one of its calls."""

    partition: ContextPartition
    documents: Tensor | None = None  # [R, T]
    mistake: AttentionMistake | None = None
    at_call: int = -1
    calls: int = 0  # Calls so far in the forward
    is_possible: bool = True

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, mask: AttentionMask, options: ScoreOptions) -> Tensor:
        """Compute attention, without the exchange of ranks."""
        self.calls += 1
        tokens = AttentionTokens(None, self.documents)
        mask = AttentionMask(tokens, tokens, causal=mask.causal, window=mask.window)
        if self.mistake is None or self.calls - 1 != self.at_call:
            return attend(q, k, v, mask=mask, options=options)
        if self.mistake.gradient_factors is not None:
            return self._with_wrong_gradients(q, k, v, mask=mask, options=options)
        assert self.mistake.change is not None
        inputs = Attention(q, k, v, bias_of(mask, q), options, mask)
        changed = self.mistake.change(inputs)
        self.is_possible = changed is not None and (not options.dropout or changed.k.shape[2] == k.shape[2])
        changed = changed if changed is not None and self.is_possible else inputs
        return attend_by_scores(changed.q, changed.k, changed.v, bias=changed.bias, options=changed.options)

    def _with_wrong_gradients(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: AttentionMask, options: ScoreOptions
    ) -> Tensor:
        assert self.mistake is not None and self.mistake.gradient_factors is not None
        self.is_possible = not options.dropout  # Its masks are drawn once in a call
        places, output = torch.arange(q.shape[2]), torch.zeros_like(q[..., : v.shape[3]])
        for rank, factors in enumerate(self.mistake.gradient_factors):
            here = places_of(self.partition, rank)
            by_place = torch.zeros(len(places), 1, dtype=q.dtype)
            for other, factor in enumerate(factors.tolist()):
                by_place[places_of(self.partition, other)] = factor
            keys = (_with_scaled_gradient(x, by_place) for x in (k, v))
            part = attend(q[:, :, here], *keys, mask=mask.block(here, places), options=options)
            output = output.index_copy(2, here, part)
        return output


def _with_scaled_gradient(x: Tensor, factors: Tensor) -> Tensor:
    x = x.clone()
    if x.requires_grad:
        x.register_hook(lambda gradient: gradient * factors)
    return x


def places_of(partition: ContextPartition, rank: int) -> Tensor:
    """The places of a rank, in the order in which it has them."""
    return torch.cat([torch.arange(*span) for span in partition.spans(rank)])


@dataclass(frozen=True)
class PossibleMistakes:
    """The mistakes that are tried, for the places of some ranks. The more special ones come first."""

    partition: ContextPartition
    head_ranks: int = 1  # Ranks that exchange tokens for heads

    def output_mistakes(self) -> Iterator[AttentionMistake]:
        """Mistakes that show in the output of attention."""
        yield AttentionMistake("the scale of its scores is applied twice", _with_squared_scale)
        yield from self._masks()
        yield from self._keys()
        yield from self._hidden_keys()
        for words, blocks in (("the keys of a rank", self._by_rank), ("a span of keys", self._by_span)):
            text = f"a query that sees none of {words} counts it as a score of 0 (a log-sum-exp of 0) in its softmax"
            yield AttentionMistake(text, partial(_with_zero_scores, blocks=blocks))
        yield from self._key_heads()

    def gradient_mistakes(self) -> Iterator[AttentionMistake]:
        """Mistakes that show in the gradients of keys and values alone."""
        ranks = self.partition.ranks
        every, each_own = torch.ones(ranks, ranks), torch.eye(ranks)
        words = "the gradients of keys and values"
        yield AttentionMistake(
            f"{words} are not added over the ranks: a rank has those from its own queries alone",
            gradient_factors=each_own,
        )
        yield AttentionMistake(
            f"{words} from its own queries are missing on each rank", gradient_factors=every - each_own
        )
        for factor in dict.fromkeys((2, ranks)):
            yield AttentionMistake(f"{words} are added {factor} times", gradient_factors=factor * every)
        for factor in dict.fromkeys((2, ranks)):
            text = f"{words} from its own queries are added {factor} times on each rank"
            yield AttentionMistake(text, gradient_factors=every + (factor - 1) * each_own)
        for rank in range(ranks):
            only = torch.zeros(ranks, ranks)
            only[rank] = 1
            for text, factors in (("are missing", every - only), ("count twice", every + only)):
                yield AttentionMistake(f"{words} from queries of rank {rank} {text}", gradient_factors=factors)

    # --- masks -------------------------------------------------------------------------------------------

    def _masks(self) -> Iterator[AttentionMistake]:
        rank_of, span_of, index_of = self._by_rank, self._by_span, self._index
        cut = "documents end at the cut: queries see no keys of other spans of the row"
        ranks = "keys of other ranks are missing"
        is_same = bool((_differ(span_of) == _differ(rank_of)).all())
        for words, numbers in ((f"{ranks}, or {cut}" if is_same else cut, span_of), (ranks, rank_of)):
            yield AttentionMistake(words, partial(_without_pairs, hidden=_differ(numbers)))
        yield AttentionMistake(
            "documents are compared within the part of a rank alone: keys of other ranks are seen from every document",
            lambda a: _with_bias(a, torch.where(_differ(rank_of), _without_documents(a), a.bias)),
        )
        yield AttentionMistake(
            "the mask compares the indices of queries and keys within the parts of ranks, and not their places",
            lambda a: _with_bias(a, a.bias[..., index_of, :][..., index_of]),
        )
        first = "queries have the mask of the first places of the row"
        yield AttentionMistake(first, partial(_with_rows_of_mask, rows=index_of))
        for rank in range(self.partition.ranks):
            other, last = places_of(self.partition, rank), self.partition.length(rank) - 1
            rows = other[index_of.clamp(max=last)]
            yield AttentionMistake(
                f"queries have the mask of the part of rank {rank}",
                partial(_with_rows_of_mask, rows=rows),
            )

    def _keys(self) -> Iterator[AttentionMistake]:
        for words, where in self._key_places():
            yield AttentionMistake(f"{words} are missing", partial(_at_keys, where=where, addend=float("-inf")))
        for words, where in self._key_places():
            yield AttentionMistake(f"{words} count twice", partial(_at_keys, where=where, addend=math.log(2)))

    def _hidden_keys(self) -> Iterator[AttentionMistake]:
        """Keys of a later span, or of later places, that a causal mask should hide."""
        later = self._by_span[:, None] < self._by_span
        anywhere = torch.arange(self.partition.tokens)
        places = [("later keys", anywhere), *self._key_places()]
        for is_hidden in (later, anywhere[:, None] < anywhere):
            for words, where in places:
                is_key = torch.zeros(self.partition.tokens, dtype=torch.bool).index_fill(0, where, True)
                counted = is_hidden & is_key
                for sees_documents in (True, False):
                    words_of_keys = f"a hidden block is counted: queries see {words} of places after their own"
                    yield AttentionMistake(
                        words_of_keys, partial(_with_hidden, counted=counted, sees_all=not sees_documents)
                    )

    def _key_heads(self) -> Iterator[AttentionMistake]:
        """Query heads of a rank that use another key head than their own."""
        ranks, after = self.head_ranks, "after the exchange of tokens for heads"
        if ranks == 1:
            return
        yield AttentionMistake(
            f"query heads of the ranks use key heads in turn {after}: rank r has key head r modulo their number",
            lambda a: _with_key_heads(a, {rank: rank % a.k.shape[1] for rank in range(ranks)}, ranks=ranks),
        )
        for rank in range(ranks):
            for head in range(MOST_KEY_HEADS):
                yield AttentionMistake(
                    f"query heads of rank {rank} use key head {head} {after}",
                    partial(_with_key_heads, chosen={rank: head}, ranks=ranks),
                )

    # --- places ------------------------------------------------------------------------------------------

    def _key_places(self) -> Iterator[tuple[str, Tensor]]:
        for rank, spans in enumerate(self.partition.spans_by_rank):
            yield f"keys of rank {rank}", places_of(self.partition, rank)
            for first, stop in spans if len(spans) > 1 else ():
                yield f"keys of rank {rank} at places {first} to {stop - 1}", torch.arange(first, stop)

    @cached_property
    def _by_rank(self) -> Tensor:
        """The rank of each place."""
        ranks = torch.zeros(self.partition.tokens, dtype=torch.int64)
        for rank in range(self.partition.ranks):
            ranks[places_of(self.partition, rank)] = rank
        return ranks

    @cached_property
    def _by_span(self) -> Tensor:
        """The number of the span of each place, in the order of the row."""
        starts = sorted(first for spans in self.partition.spans_by_rank for first, _ in spans)
        return torch.bucketize(torch.arange(self.partition.tokens), torch.tensor(starts[1:]), right=True)

    @cached_property
    def _index(self) -> Tensor:
        """The index of each place in the part of its rank."""
        index = torch.zeros(self.partition.tokens, dtype=torch.int64)
        for rank in range(self.partition.ranks):
            index[places_of(self.partition, rank)] = torch.arange(self.partition.length(rank))
        return index


def _differ(numbers: Tensor) -> Tensor:
    return numbers[:, None] != numbers


def _with_bias(attention: Attention, bias: Tensor) -> Attention:
    return attention._replace(bias=bias)


def _without_pairs(attention: Attention, hidden: Tensor) -> Attention:
    return _with_bias(attention, attention.bias.masked_fill(hidden, float("-inf")))


def _with_rows_of_mask(attention: Attention, rows: Tensor) -> Attention:
    return _with_bias(attention, attention.bias[..., rows, :])


def _with_hidden(attention: Attention, counted: Tensor, *, sees_all: bool) -> Attention | None:
    """Pairs of query and key are seen though attention is causal, perhaps also those of other documents."""
    if not attention.mask.causal:
        return None
    seen = torch.zeros_like(attention.bias) if sees_all else _without_causality(attention)
    return _with_bias(attention, torch.where(counted, seen, attention.bias))


def _without_causality(attention: Attention) -> Tensor:
    mask = attention.mask
    return bias_of(AttentionMask(mask.queries, mask.keys, window=mask.window), attention.q)


def _at_keys(attention: Attention, where: Tensor, addend: float) -> Attention:
    columns = torch.zeros(attention.bias.shape[-1], dtype=attention.bias.dtype).index_fill(0, where, addend)
    return _with_bias(attention, attention.bias + columns)


def _without_documents(attention: Attention) -> Tensor:
    mask = attention.mask
    return bias_of(AttentionMask(causal=mask.causal, window=mask.window), attention.q)


def _with_squared_scale(attention: Attention) -> Attention:
    return attention._replace(options=replace(attention.options, scale=attention.options.scale**2))


def _with_zero_scores(attention: Attention, blocks: Tensor) -> Attention | None:
    """Keys without a value and with a score of 0: one for each block of which a query sees no key, though another
    query of its block, or the same query in another row, sees one."""
    sees = attention.bias > float("-inf")
    in_block = torch.nn.functional.one_hot(blocks).bool()
    seen_blocks = torch.stack([sees[..., keys].any(-1) for keys in in_block.T], -1)  # [R, 1, T, blocks]
    by_query_block = torch.stack([seen_blocks[:, :, queries].any(2).any(0)[0] for queries in in_block.T])
    counts = (by_query_block[blocks] & ~seen_blocks).sum(-1)
    most = int(counts.max())
    if not most:
        return None
    extra = torch.where(torch.arange(most) < counts[..., None], 0.0, float("-inf")).to(attention.bias.dtype)
    k, v = (torch.nn.functional.pad(x, (0, 0, 0, most)) for x in (attention.k, attention.v))
    return attention._replace(k=k, v=v, bias=torch.cat((attention.bias, extra), -1))


def _with_key_heads(attention: Attention, chosen: Mapping[int, int], *, ranks: int) -> Attention | None:
    """Query heads of each of these ranks use one key head."""
    heads, key_heads = attention.q.shape[1], attention.k.shape[1]
    if heads < ranks or max(chosen.values()) >= key_heads:
        return None
    key_head, split = torch.arange(heads) // (heads // key_heads), HeadSplit(heads, key_heads, ranks)
    for rank, head in chosen.items():
        key_head[slice(*split.queries(rank))] = head
    return attention._replace(k=attention.k[:, key_head], v=attention.v[:, key_head])
