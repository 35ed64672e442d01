"""The bytes that ranks of context parallelism take inside of attention, by the way in which keys reach queries.

A forward keeps what attention of complete rows keeps, without any matrix of scores: queries, keys and values of the
tokens of the rank, the output and its log-sum-exp. Keys of other ranks are there while one layer computes.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

from motet.core.units import DTYPE_BYTES
from motet.models.spec.layer_specs import (
    AttentionSpec,
    BlockSpec,
    ExchangeBytes,
    SavedActivation,
    SavedAttentionMatrix,
)
from motet.models.spec.model_spec import ModelSpec
from motet.parallel.context_parallel.context_bytes import ring_spans
from motet.parallel.context_parallel.context_partition import ContextPartition
from motet.parallel.context_parallel.head_split import HeadSplit
from motet.parallel.context_parallel.ring_schedule import count_tokens
from motet.parallel.layout import ContextParallelKind
from motet.parallel.model_sharding import CONTEXT_DIMENSION
from motet.parallel.step_plan.plan import StepPlan


@dataclass(frozen=True)
class _AttentionOfRank:
    """One call of attention on a rank, with the sizes of a row."""

    call: AttentionSpec
    partition: ContextPartition
    rank: int
    kind: ContextParallelKind
    head_ranks: int  # Neighbours that exchange tokens for heads
    dtype: str

    @property
    def _widths(self) -> tuple[int, int]:
        """Bytes of an element, and of one of a sum."""
        return DTYPE_BYTES[self.dtype], max(DTYPE_BYTES[self.dtype], DTYPE_BYTES["float32"])

    @property
    def _heads(self) -> tuple[int, int]:
        """Query heads and key heads that the rank computes."""
        call, place = self.call, self.rank % self.head_ranks
        split = HeadSplit(call.heads, call.kv_heads or call.heads, self.head_ranks)
        return split.query_counts[place], split.key_counts[place]

    @property
    def _queries(self) -> tuple[int, int]:
        """Tokens whose attention the rank computes, and the most of them that are computed together."""
        spans = ring_spans(self.partition, self.head_ranks)[self.rank // self.head_ranks]
        return count_tokens(spans), max(stop - first for first, stop in spans)

    def bytes(self) -> ExchangeBytes:
        """Bytes of a row in addition to the stream."""
        (narrow, wide), (heads, _), (tokens, together) = self._widths, self._heads, self._queries
        key_dim, value_dim = self.call.key_dim, self.call.value_dim
        forward, backward = self._keys_forward(), self._keys_backward()
        forward = max(forward[0], forward[1] + (narrow + wide) * heads * together * value_dim)
        forward += wide * heads * tokens * value_dim * (wide > narrow)  # The sum of the output over blocks of keys
        grads = 2 * narrow * heads * tokens * value_dim + wide * heads * tokens * key_dim
        backward = max(backward[0], backward[1] + narrow * heads * together * key_dim)
        return self._with_head_exchange(ExchangeBytes(forward, backward + grads))

    def _keys_forward(self) -> tuple[int, int]:
        """Keys and values of a row that are there while they arrive, and while a block of them is computed."""
        narrow, _ = self._widths
        size, own = narrow * self._key_width, self._queries[0]
        if self.kind == "all-gather":
            parts, tokens = self.partition.ranks * self.partition.longest, self.partition.tokens
            return size * (own + self.partition.longest + parts + tokens), size * (own + tokens)
        in_turn = size * (own + self._travelling_tokens)
        return in_turn, in_turn

    def _keys_backward(self) -> tuple[int, int]:
        """The same in backward, with gradients of keys."""
        (narrow, wide), width, own = self._widths, self._key_width, self._queries[0]
        arriving, computing = self._keys_forward()
        if self.kind == "all-gather":
            parts, tokens = self.partition.ranks * self.partition.longest, self.partition.tokens
            returning = width * (narrow * (own + parts) + wide * tokens)
            return max(arriving, returning), computing + width * tokens * (narrow + wide)
        longest = max(map(count_tokens, ring_spans(self.partition, self.head_ranks)))
        is_ring = self.partition.ranks > self.head_ranks
        sums = wide * (3 * longest if is_ring else 2 * own)  # Of this rank's keys, passing ones, and those of the block
        messages = 3 * narrow * longest * is_ring
        return arriving + width * (sums + messages), computing + width * (sums + messages + narrow * longest)

    @property
    def _key_width(self) -> int:
        return self._heads[1] * (self.call.key_dim + self.call.value_dim)

    @property
    def _travelling_tokens(self) -> int:
        """Tokens of other ranks whose keys are there: of the block that is computed, and of the next one."""
        parts = [count_tokens(spans) for spans in ring_spans(self.partition, self.head_ranks)]
        return max(parts) * min(2, len(parts) - 1)

    def _with_head_exchange(self, keys: ExchangeBytes) -> ExchangeBytes:
        """The same with the all-to-all of tokens for heads, whose results are kept for backward."""
        if self.head_ranks == 1:
            return keys
        call, (narrow, wide), (heads, key_heads) = self.call, self._widths, self._heads
        all_keys, local = call.kv_heads or call.heads, self.partition.length(self.rank)
        tokens, queries = self._queries[0], heads * call.key_dim
        inputs = tokens * (queries + key_heads * (call.key_dim + call.value_dim))
        sent = local * (call.heads * call.key_dim + max(all_keys, self.head_ranks) * (call.key_dim + call.value_dim))
        kept = inputs + tokens * heads * call.value_dim - local * (call.heads + all_keys) * call.key_dim
        arriving = narrow * (sent + inputs)
        output = narrow * 2 * tokens * heads * call.value_dim + (narrow + wide) * local * call.heads * call.value_dim
        returning = 2 * narrow * inputs + (narrow + wide) * sent
        return ExchangeBytes(max(keys.forward, arriving, output), max(keys.backward, returning), max(0, kept) * narrow)


def spec_on_context_rank(spec: ModelSpec, plan: StepPlan, rank: int, *, tokens: int, dtype: str) -> ModelSpec:
    """The model with the bytes that its attention takes on a rank, for rows of a number of tokens."""
    if plan.dims.size(CONTEXT_DIMENSION) == 1:
        return spec
    index = plan.dims.coordinates(rank)[CONTEXT_DIMENSION]
    how = plan.context_partition(tokens), index, plan.context_kind, plan.head_ranks, dtype
    return replace(spec, blocks=tuple(_block_on_rank(block, how) for block in spec.blocks))


_HowRanksShare = tuple[ContextPartition, int, ContextParallelKind, int, str]


def _block_on_rank(block: BlockSpec, how: _HowRanksShare) -> BlockSpec:
    operations, saved = list(block.layer.operations), [each for each in block.layer.saved if not _is_matrix(each)]
    for index, each in enumerate(operations):
        if isinstance(each, AttentionSpec):
            exchange, name = _exchange_bytes(each, how), f"{each.name}.exchanged"
            reads = each.reads
            if exchange.kept:
                place = next((i for i, tensor in enumerate(saved) if tensor.name in reads), len(saved))
                saved.insert(place, SavedActivation(name, exchange.kept // DTYPE_BYTES[how[-1]], "row"))
                reads = (*reads, name)
            operations[index] = replace(each, exchange=exchange, reads=reads)
    layer = replace(block.layer, operations=tuple(operations), saved=tuple(saved))
    arguments = tuple(each for each in block.arguments if not _is_matrix(each))
    return replace(block, layer=layer, arguments=arguments)


@lru_cache(maxsize=1 << 10)
def _exchange_bytes(call: AttentionSpec, how: _HowRanksShare) -> ExchangeBytes:
    return _AttentionOfRank(call, *how).bytes()


def _is_matrix(tensor: object) -> bool:
    return isinstance(tensor, SavedAttentionMatrix)
