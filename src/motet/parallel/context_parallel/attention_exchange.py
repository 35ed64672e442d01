"""Attention of a part of each row, by the ranks that share the rows: one autograd function for all three kinds.

`all-gather` and `ring` bring keys and values of all ranks to the queries of each. `all-to-all` gives each rank a part
of the heads for all tokens; inside of a ring it does so among neighbours, and their keys travel around the ring. Keys
and values travel in their heads, never repeated for the query heads that share them.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor

from motet.core.errors import InputError, check_input
from motet.models.arch.attention_core import ScoreOptions
from motet.models.arch.attention_mask import AttentionMask
from motet.models.layout_invariant_dropout import AttentionDropout, AttentionPart, active_dropout_mode
from motet.parallel.context_parallel.attention_blocks import (
    AttendedPart,
    BlockwiseAttention,
    KeyBlock,
    finite,
    pack_keys,
)
from motet.parallel.context_parallel.attention_tiles import PlaceVisibility
from motet.parallel.context_parallel.context_bytes import ring_spans
from motet.parallel.context_parallel.context_partition import ContextParallelKind, ContextPartition, Spans
from motet.parallel.context_parallel.head_exchange import HeadExchange
from motet.parallel.context_parallel.head_split import HeadSplit
from motet.parallel.context_parallel.key_exchange import GatheredKeys, KeyExchange, RingKeys
from motet.parallel.context_parallel.ring_schedule import shared_ring_schedule
from motet.parallel.process.process_group import RankGroup


@dataclass(frozen=True)
class ContextGroup:
    """The ranks that share rows of one length, and the way in which they compute attention."""

    partition: ContextPartition
    rank: int  # This process in the group
    group: RankGroup
    kind: ContextParallelKind
    inner: RankGroup | None = None  # Neighbours that exchange tokens for heads inside of a ring
    overlaps: bool = True  # Keys of a ring travel while others are computed

    @property
    def exchanging(self) -> RankGroup | None:
        """The ranks that exchange tokens for heads."""
        return self.group if self.kind == "all-to-all" else self.inner

    @property
    def neighbours(self) -> int:
        """The number of ranks that exchange tokens for heads; 1 where none do."""
        return 1 if self.exchanging is None else self.exchanging.world

    @cached_property
    def spans_of_ring(self) -> tuple[Spans, ...]:
        """The places of each rank of the ring of keys."""
        return ring_spans(self.partition, self.neighbours)

    @property
    def queries(self) -> Spans:
        """The places whose attention this rank computes, for all heads or a part of them."""
        return self.spans_of_ring[self.rank // self.neighbours]

    def head_exchange(self, query_heads: int, key_heads: int) -> HeadExchange | None:
        """The all-to-all of this rank; None where each rank computes all heads."""
        if self.exchanging is None:
            return None
        first = self.rank - self.rank % self.neighbours
        spans = self.partition.spans_by_rank[first : first + self.neighbours]
        return HeadExchange(
            self.exchanging, HeadSplit(query_heads, key_heads, self.neighbours), spans, all_spans=self.queries
        )

    def key_exchange(self, visible: PlaceVisibility) -> KeyExchange:
        """The way of keys to the queries of this rank."""
        if self.kind == "all-gather":
            return GatheredKeys(self.partition, self.group)
        schedule = shared_ring_schedule(self.spans_of_ring, visible)
        return RingKeys(schedule, self.group, self.neighbours, self.overlaps)


@dataclass(frozen=True, eq=False)
class ContextAttention:
    """The exchange of one micro-batch, an AttentionExchange."""

    group: ContextGroup
    documents: Tensor | None  # [R, T] of complete rows; None means that each row is one document

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, mask: AttentionMask, options: ScoreOptions) -> Tensor:
        """Attention of this rank's queries to the keys of all ranks. Of the mask it reads `causal` and `window`."""
        self._check(q, k, mask)
        visible = PlaceVisibility(mask.causal, mask.window)
        heads = self.group.head_exchange(q.shape[1], k.shape[1])
        local_heads = (0, q.shape[1]) if heads is None else heads.heads.queries(heads.group.rank)
        blockwise = BlockwiseAttention(
            self.group.queries,
            visible,
            self.documents,
            options,
            self._dropout(options, q, local_heads),
            [((0, q.shape[1]), (0, k.shape[1]))] if heads is None else heads.heads.groups(heads.group.rank),
        )
        sinks = None if options.sinks is None else options.sinks[slice(*local_heads)]
        call = _AttentionOfPart(blockwise, self.group.key_exchange(visible), heads, k.shape[3])
        apply: Any = _PartAttentionFunction.apply
        return cast(Tensor, apply(call, q, k, v, sinks))

    def _check(self, q: Tensor, k: Tensor, mask: AttentionMask) -> None:
        length = self.group.partition.length(self.group.rank)
        check_input(
            q.shape[2] == k.shape[2] == length,
            f"attention of {q.shape[2]} queries to {k.shape[2]} keys, on a rank that has {length} tokens of each row: "
            "context parallelism splits self-attention of complete rows alone; set layout.cp = 1",
        )
        if mask.bias is not None:
            raise InputError(
                f"attention with a bias of shape {list(mask.bias.shape)} for pairs of query and key: with context "
                "parallelism a rank has it for its tokens alone; set layout.cp = 1"
            )

    def _dropout(self, options: ScoreOptions, q: Tensor, local_heads: tuple[int, int]) -> AttentionDropout | None:
        if options.dropout == 0:
            return None
        mode = active_dropout_mode()
        if mode is None:
            raise InputError(
                f"attention with dropout {options.dropout} on parts of rows, without a LayoutInvariantDropoutMode that "
                "draws the masks of complete rows; run the module within its `for_rows`, or set the dropout to 0"
            )
        part = AttentionPart(q.shape[1], self.group.partition.tokens, local_heads, self.group.queries)
        return mode.attention_dropout(options.dropout, part, q.device)


@dataclass(frozen=True, eq=False)
class _AttentionOfPart:
    """One call of attention, in the forward and the backward."""

    blockwise: BlockwiseAttention
    keys: KeyExchange
    heads: HeadExchange | None
    key_dim: int

    def forward(self, inputs: tuple[Tensor, Tensor, Tensor], sinks: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The output of this rank's tokens, and the tensors that backward needs."""
        (q, k, v), heads = inputs, self.heads
        if heads is not None:
            q, k, v = heads.to_heads((q, k, v), heads.input_heads, "forward")
        local = pack_keys(k, v, self.blockwise.queries)
        output, log_sum_exp = self.blockwise.attend(q, self.keys.blocks(local), v.shape[3])
        if sinks is not None:
            total = torch.logaddexp(log_sum_exp, sinks.to(log_sum_exp.dtype).view(1, -1, 1))
            output.mul_((log_sum_exp - total).exp_().unsqueeze(-1))
            log_sum_exp = total
        output = output.to(q.dtype)
        saved = q, k, v, output, finite(log_sum_exp)
        if heads is not None:
            (output,) = heads.to_tokens((output,), heads.input_heads[:1], "forward")
        return output, saved

    def backward(
        self, grad: Tensor, saved: tuple[Tensor, ...], sinks: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Gradients of queries, keys and values of this rank's tokens, and of the sinks of its heads."""
        q, k, v, output, log_sum_exp = saved
        heads, part = self.heads, AttendedPart(q, output, log_sum_exp)
        grad = grad.contiguous()
        if heads is not None:
            (grad,) = heads.to_heads((grad,), heads.input_heads[:1], "backward")
        grad_sinks = None
        if sinks is not None:
            probability = (sinks.to(log_sum_exp.dtype).view(1, -1, 1) - log_sum_exp).exp_()
            mean = (grad.to(log_sum_exp.dtype) * output).sum(-1)
            grad_sinks = -(probability * mean).sum((0, 2)).to(sinks.dtype)
        grad_q = torch.zeros_like(q, dtype=log_sum_exp.dtype)

        def gradients_of(block: KeyBlock) -> Tensor:
            return self.blockwise.gradients(grad, part, block, grad_q=grad_q)

        local = pack_keys(k, v, self.blockwise.queries)
        packed = self.keys.gradients(local, gradients_of).to(k.dtype)
        grad_k, grad_v = KeyBlock(packed, local.spans, self.key_dim).keys_and_values
        gradients = [grad_q.to(q.dtype), grad_k, grad_v]
        if heads is not None:
            gradients = heads.to_tokens(gradients, heads.input_heads, "backward")
        return gradients[0], gradients[1], gradients[2], grad_sinks


class _PartAttentionFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _AttentionOfPart, *inputs: Tensor | None) -> Tensor:
        *queries_and_keys, sinks = inputs
        output, saved = call.forward(cast(Any, queries_and_keys), sinks)
        ctx.save_for_backward(*saved, sinks)
        ctx.call = call
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *saved, sinks = ctx.saved_tensors
        return None, *ctx.call.backward(grad, tuple(saved), sinks)
