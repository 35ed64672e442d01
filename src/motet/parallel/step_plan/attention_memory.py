"""The bytes that ranks of context parallelism take inside of attention, by the way in which keys reach queries.

A forward keeps what attention of complete rows keeps, without any matrix of scores: queries, keys and values of the
tokens of the rank, the output and its log-sum-exp. Keys of other ranks are there while one layer computes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import chain, product
from math import prod
from typing import NamedTuple

from motet.core.units import DTYPE_BYTES
from motet.models.spec.layer_specs import (
    AttentionSpec,
    BlockSpec,
    ExchangeBytes,
    LayerSpec,
    MicroBatchShape,
    SameBlock,
    SavedActivation,
    SavedAttentionMatrix,
)
from motet.models.spec.model_spec import ModelSpec
from motet.parallel.context_parallel.attention_tiles import TILE_ELEMENTS, PlaceVisibility, TileLimits
from motet.parallel.context_parallel.context_bytes import ring_spans
from motet.parallel.context_parallel.context_partition import ContextParallelKind, ContextPartition, count_tokens
from motet.parallel.context_parallel.head_split import HeadSplit
from motet.parallel.context_parallel.ring_schedule import RingSchedule, shared_ring_schedule
from motet.parallel.model_sharding import CONTEXT_DIMENSION
from motet.parallel.step_plan.plan import StepPlan

_MASK_BYTES = 2  # Bytes of an element of the conditions from which a mask is made
# Matrices of a tile that are there together: in forward scores, probabilities, and what dropout keeps before and after
# it is scaled; in backward the first three, gradients of probabilities and of scores, and dropped probabilities
_SCORES_FORWARD, _SCORES_BACKWARD = 4, 6
_DROPPED_BYTES = 1  # Bytes of an element of what dropout keeps, when it is drawn


class _RingHop(NamedTuple):
    """Tokens whose keys, or their gradients, a rank of a ring has while it computes the block of a hop."""

    travelling: int  # Tokens of other ranks, in the block that is computed and in the next one
    block: int
    passing: int  # Whose gradients the rank adds its part to; none in the first hop, whose keys are its own
    messages: int  # Gradients that were sent after the hop before, and arriving ones


class SharedRows(NamedTuple):
    """The complete rows of a micro-batch, of which a rank has a part."""

    partition: ContextPartition
    rank: int  # Its index among the ranks that share them
    kind: ContextParallelKind
    head_ranks: int  # Neighbours that exchange tokens for heads
    shape: MicroBatchShape
    dtype: str


@dataclass(frozen=True)
class _AttentionOfRank:
    """One call of attention on a rank."""

    call: AttentionSpec
    shared: SharedRows
    has_dropout: bool

    @property
    def _widths(self) -> tuple[int, int]:
        """Bytes of an element, and of one of a sum."""
        return DTYPE_BYTES[self.shared.dtype], max(DTYPE_BYTES[self.shared.dtype], DTYPE_BYTES["float32"])

    @property
    def _heads(self) -> tuple[int, int]:
        """Query heads and key heads that the rank computes."""
        call, place = self.call, self.shared.rank % self.shared.head_ranks
        split = HeadSplit(call.heads, call.kv_heads or call.heads, self.shared.head_ranks)
        return split.query_counts[place], split.key_counts[place]

    @cached_property
    def _schedule(self) -> RingSchedule:
        """The places of each group of ranks that exchange tokens for heads, and keys that travel between these."""
        spans = ring_spans(self.shared.partition, self.shared.head_ranks)
        return shared_ring_schedule(spans, PlaceVisibility(self.call.causal, self.call.window))

    @property
    def _index(self) -> int:
        return self.shared.rank // self.shared.head_ranks

    @property
    def _queries(self) -> tuple[int, int]:
        """Tokens whose attention the rank computes, and the most of them that are computed together."""
        spans = self._schedule.spans_by_rank[self._index]
        return count_tokens(spans), max(stop - first for first, stop in spans)

    def bytes(self) -> ExchangeBytes:
        """Bytes of the micro-batch."""
        each, (forward, backward), rows = self._bytes_of_row(), self._tile_bytes(), self.shared.shape.rows
        return ExchangeBytes(rows * each.forward + forward, rows * each.backward + backward, rows * each.kept)

    def _bytes_of_row(self) -> ExchangeBytes:
        (narrow, wide), (heads, _), (tokens, _), (together, _) = self._widths, self._heads, self._queries, self._tile
        key_dim, value_dim = self.call.key_dim, self.call.value_dim
        (arriving, computing), (arriving_back, computing_back) = self._keys_forward(), self._keys_backward()
        forward = max(arriving, computing + (narrow + wide) * heads * together * value_dim)
        forward += wide * heads * tokens * value_dim * (wide > narrow)  # The sum of the output over blocks of keys
        grads = 2 * narrow * heads * tokens * value_dim + wide * heads * tokens * key_dim
        backward = max(arriving_back, computing_back + narrow * heads * together * key_dim)
        return self._with_head_exchange(ExchangeBytes(forward, backward + grads))

    @cached_property
    def _limits(self) -> TileLimits:
        heads, visible = self._heads[0], self._schedule.visible
        matrices = self.shared.shape.rows * (heads if self.has_dropout else 1)
        return visible.limits(
            TILE_ELEMENTS // matrices, has_documents=self.shared.shape.packed, keeps_scores=self.has_dropout
        )

    @property
    def _limits_all(self) -> bool:
        """Whether the queries and keys that are computed together are limited, because they have a dense mask."""
        return self.shared.shape.packed or self.call.window is not None or self.has_dropout

    @property
    def _tile(self) -> tuple[int, int]:
        """Queries and keys that are computed together."""
        schedule, is_gathered = self._schedule, self.shared.kind == "all-gather"
        keys = [(0, self.shared.partition.tokens)] if is_gathered else [*chain(*schedule.spans_by_rank)]
        pairs = [*product(schedule.spans_by_rank[self._index], keys)]
        if self._limits_all:
            seen = (schedule.visible.seen(*pair) for pair in pairs)
            longest = max(stop - first for first, stop in seen)
            return min(self._limits.edge, self._queries[1]), min(self._limits.edge, longest)
        tiles = [tile for pair in pairs for tile in schedule.visible.tiles(*pair, self._limits)]
        return self._queries[1], max(tile.keys[1] - tile.keys[0] for tile in tiles)

    def _tile_bytes(self) -> tuple[int, int]:
        """The dense mask of a tile while it is made, or its scores, probabilities and their gradients."""
        narrow, wide = self._widths
        elements = prod(self._tile) * self.shared.shape.rows * (self._heads[0] if self.has_dropout else 1)
        if self.has_dropout:
            return (_SCORES_FORWARD * wide + _DROPPED_BYTES) * elements, _SCORES_BACKWARD * wide * elements
        return ((narrow + _MASK_BYTES) * elements * self._limits_all,) * 2

    def _keys_forward(self) -> tuple[int, int]:
        """Keys and values of a row that are there while they arrive, and while a block of them is computed."""
        narrow, _ = self._widths
        size, here = narrow * self._key_width, self._queries[0]
        if self.shared.kind == "all-gather":
            parts, tokens = self.shared.partition.ranks * self.shared.partition.longest, self.shared.partition.tokens
            return size * (here + self.shared.partition.longest + parts + tokens), size * (here + tokens)
        in_turn = size * (here + max(hop.travelling for hop in self._hops))
        return in_turn, in_turn

    def _keys_backward(self) -> tuple[int, int]:
        """The same in backward, with gradients of keys."""
        (narrow, wide), width, here = self._widths, self._key_width, self._queries[0]
        arriving, computing = self._keys_forward()
        if self.shared.kind == "all-gather":
            parts, tokens = self.shared.partition.ranks * self.shared.partition.longest, self.shared.partition.tokens
            returning = width * (narrow * (here + parts) + wide * tokens)
            return max(arriving, returning), computing + width * (wide * tokens + narrow * self._tile[1])
        if len(self._hops) == 1:
            sums = wide * 2 * here  # This rank's keys, and those of the block
            return arriving + width * sums, computing + width * (sums + narrow * min(here, self._tile[1]))
        most = max(
            narrow * (hop.travelling + hop.messages + min(hop.block, self._tile[1])) + wide * (hop.passing + hop.block)
            for hop in self._hops
        )
        return arriving, width * ((narrow + wide) * here + most)

    @property
    def _key_width(self) -> int:
        return self._heads[1] * (self.call.key_dim + self.call.value_dim)

    @cached_property
    def _hops(self) -> list[_RingHop]:
        """The hops of a ring, of which an all-to-all among all ranks has one."""
        schedule, index, ranks = self._schedule, self._index, self._schedule.ranks
        hops, messages = list[_RingHop](), 0
        for hop in range(ranks):
            owner, following = ((index - n) % ranks for n in (hop, hop + 1))
            travelling = count_tokens(schedule.keys_in_hop(owner, hop))
            block = travelling if hop else count_tokens(schedule.spans_by_rank[index])
            coming = count_tokens(schedule.keys_in_hop(following, hop + 1)) if hop + 1 < ranks else 0
            passing = count_tokens(schedule.gradients_after_hop(owner, hop))
            hops.append(_RingHop(travelling + coming, block, passing, messages))
            arriving = 0 < hop < schedule.last_hop(following), 0 < hop == schedule.last_hop(index)
            owners = [following] * arriving[0] + [index] * arriving[1]
            is_sent = 0 < hop <= schedule.last_hop(owner)
            messages = passing * is_sent + sum(count_tokens(schedule.gradients_after_hop(o, hop)) for o in owners)
        return hops

    def _with_head_exchange(self, keys: ExchangeBytes) -> ExchangeBytes:
        """The same with the all-to-all of tokens for heads, whose results are kept for backward."""
        if self.shared.head_ranks == 1:
            return keys
        call, (narrow, wide), (heads, key_heads) = self.call, self._widths, self._heads
        all_keys, local = call.kv_heads or call.heads, self.shared.partition.length(self.shared.rank)
        tokens, queries = self._queries[0], heads * call.key_dim
        inputs = tokens * (queries + key_heads * (call.key_dim + call.value_dim))
        sent = local * (
            call.heads * call.key_dim + max(all_keys, self.shared.head_ranks) * (call.key_dim + call.value_dim)
        )
        kept = inputs + tokens * heads * call.value_dim
        arriving = narrow * (sent + inputs)
        output = narrow * 2 * tokens * heads * call.value_dim + (narrow + wide) * local * call.heads * call.value_dim
        returning = 2 * narrow * inputs + (narrow + wide) * sent
        return ExchangeBytes(max(keys.forward, arriving, output), max(keys.backward, returning), kept * narrow)


def shared_rows(plan: StepPlan, rank: int, shape: MicroBatchShape, *, dtype: str) -> SharedRows | None:
    """The part of a rank of micro-batches of complete rows of this shape; None where each rank has complete rows."""
    if plan.dims.size(CONTEXT_DIMENSION) == 1:
        return None
    index, partition = plan.dims.coordinates(rank)[CONTEXT_DIMENSION], plan.context.partition(shape.length)
    return SharedRows(partition, index, plan.context.kind, plan.context.head_ranks, shape, dtype)


def spec_on_context_rank(spec: ModelSpec, shared: SharedRows) -> ModelSpec:
    """The model with the bytes that its attention takes on a rank."""
    return replace(spec, blocks=tuple(_block_on_rank(block, shared) for block in spec.blocks))


def _block_on_rank(block: BlockSpec, shared: SharedRows) -> BlockSpec:
    arguments = tuple(each for each in block.arguments if isinstance(each, SavedActivation))
    return replace(block, layer=_layer_on_rank(SameBlock(block), shared), arguments=arguments)


@lru_cache(maxsize=1 << 12)
def _layer_on_rank(same: SameBlock, shared: SharedRows) -> LayerSpec:
    layer = same.block.layer
    operations, saved = list(layer.operations), list(layer.saved)
    for index, each in enumerate(operations):
        if isinstance(each, AttentionSpec):
            operations[index], saved = _attention_on_rank(each, saved, shared)
    saved = [each for each in saved if isinstance(each, SavedActivation)]
    return replace(layer, operations=tuple(operations), saved=tuple(saved))


def _attention_on_rank(
    call: AttentionSpec, saved: Sequence[SavedActivation | SavedAttentionMatrix], shared: SharedRows
) -> tuple[AttentionSpec, list[SavedActivation | SavedAttentionMatrix]]:
    """A call of attention on a rank, and the saved tensors of its block."""
    name, kept, reads, has_dropout = call.name, list(saved), call.reads, not call.reads
    if has_dropout:  # A log-sum-exp stands for the probabilities, and key heads are not repeated
        reads = tuple(f"{name}.{part}" for part in ("queries", "keys_values", "output.input"))
        sums = SavedActivation(f"{name}.sums", call.heads, call.queries, "wide", kernel="attention")
        kept = [sums if each.name == f"{name}.probabilities" else each for each in kept]
        width = (call.kv_heads or call.heads) * (call.key_dim + call.value_dim)
        kept = [
            replace(each, elements=width) if isinstance(each, SavedActivation) and each.name == reads[1] else each
            for each in kept
        ]
    exchange = _exchange_bytes(call, shared, has_dropout=has_dropout)
    if exchange.kept:  # The output stays where the layer after attention reads it
        *inputs, _ = [i for i, tensor in enumerate(kept) if tensor.name in reads]
        for place in inputs:
            kept[place] = replace(kept[place], is_kept=False)
        elements = exchange.kept // (DTYPE_BYTES[shared.dtype] * shared.shape.rows)
        kept.insert(inputs[-1], SavedActivation(f"{name}.exchanged", elements, "row"))
        reads = (*reads, f"{name}.exchanged")
    return replace(call, exchange=exchange, reads=reads), kept


@lru_cache(maxsize=1 << 10)
def _exchange_bytes(call: AttentionSpec, shared: SharedRows, *, has_dropout: bool) -> ExchangeBytes:
    return _AttentionOfRank(call, shared, has_dropout).bytes()
