"""Bytes that a rank sends inside of attention, and pairs of query and key that it computes, by the descriptions that
the exchanges follow."""

from functools import lru_cache

from motet.models.spec.layer_specs import MicroBatchShape
from motet.parallel.context_parallel.attention_calls import AttentionCall
from motet.parallel.context_parallel.attention_tiles import PlaceVisibility
from motet.parallel.context_parallel.context_partition import ContextPartition, ContextSplit, Spans, count_tokens
from motet.parallel.context_parallel.head_split import HeadSplit
from motet.parallel.context_parallel.ring_schedule import shared_ring_schedule


def sent_bytes(
    call: AttentionCall, context: ContextSplit, rank: int, *, shape: MicroBatchShape, itemsize: int
) -> tuple[int, int]:
    """Bytes that a rank of context parallelism sends in the forward and in the backward of a call of attention, for
    complete rows of this shape and elements of `itemsize` bytes. The call has the heads that the rank computes: fewer
    than the model has under tensor parallelism. A forward that is computed again in backward sends again.

    An all-gather and a reduce-scatter count each rank's part, padded to the longest, once for every other rank.
    """
    if context.ranks == 1:
        return 0, 0
    partition, element, inner = context.partition(shape.length), shape.rows * itemsize, context.head_ranks
    if context.kind == "all-gather":
        token_size = element * call.key_heads * (call.key_dim + call.value_dim)
        gathered = (partition.ranks - 1) * partition.longest * token_size
        return gathered, 2 * gathered
    heads = HeadSplit(call.query_heads, call.key_heads, inner)
    forward, backward = _all_to_all_elements(call, partition, rank, heads=heads)
    token_size = element * heads.key_counts[rank % inner] * (call.key_dim + call.value_dim)
    keys, gradients = _ring_tokens(ring_spans(partition, inner), rank // inner, PlaceVisibility.in_call(call))
    return element * forward + token_size * keys, element * backward + token_size * (keys + gradients)


def ring_spans(partition: ContextPartition, inner: int) -> tuple[Spans, ...]:
    """The places of each rank of a ring, where `inner` neighbours have exchanged tokens for heads."""
    if inner == 1:
        return partition.spans_by_rank
    spans_by_rank = []
    for first in range(0, partition.ranks, inner):
        joined = list[tuple[int, int]]()
        for span in sorted(span for rank in range(first, first + inner) for span in partition.spans(rank)):
            if joined and joined[-1][1] == span[0]:
                joined[-1] = joined[-1][0], span[1]
            else:
                joined.append(span)
        spans_by_rank.append(tuple(joined))
    return tuple(spans_by_rank)


@lru_cache(maxsize=1 << 12)
def fullest_share(partition: ContextPartition, visible: PlaceVisibility, head_ranks: int) -> float:
    """The visible pairs of the rank that has the most, over the mean of all ranks; `head_ranks` neighbours exchange
    tokens for heads, and so have their tokens together."""
    counts = [visible.pairs(spans, partition.tokens) for spans in ring_spans(partition, head_ranks)]
    return max(counts) * len(counts) / sum(counts)


def _all_to_all_elements(
    call: AttentionCall, partition: ContextPartition, rank: int, *, heads: HeadSplit
) -> tuple[int, int]:
    """Elements of a row that a rank sends to the neighbours with which it exchanges tokens for heads: in forward
    inputs to their heads and outputs to their tokens, in backward the gradients of both, the other way."""
    place, first = rank % heads.ranks, rank - rank % heads.ranks
    tokens = [partition.length(other) for other in range(first, first + heads.ranks)]
    outputs = [call.value_dim * count for count in heads.query_counts]
    inputs = [
        call.key_dim * queries + (call.key_dim + call.value_dim) * keys
        for queries, keys in zip(heads.query_counts, heads.key_counts, strict=True)
    ]

    def sent(widths: list[int], other_widths: list[int]) -> int:
        """Elements to the heads of others, and to their tokens."""
        to_heads, to_tokens = sum(widths) - widths[place], sum(tokens) - tokens[place]
        return tokens[place] * to_heads + other_widths[place] * to_tokens

    return sent(inputs, outputs), sent(outputs, inputs)


def _ring_tokens(spans_by_rank: tuple[Spans, ...], rank: int, visible: PlaceVisibility) -> tuple[int, int]:
    """Tokens whose keys a rank of a ring sends, and tokens whose gradients it sends."""
    schedule = shared_ring_schedule(spans_by_rank, visible)
    ranks, keys, gradients = schedule.ranks, 0, 0
    for hop in range(ranks):
        owner = (rank - hop) % ranks
        keys += count_tokens(schedule.keys_in_hop(owner, hop + 1)) if hop + 1 < ranks else 0
        if hop and count_tokens(schedule.keys_in_hop(owner, hop)):
            gradients += count_tokens(schedule.gradients_after_hop(owner, hop))
    return keys, gradients
