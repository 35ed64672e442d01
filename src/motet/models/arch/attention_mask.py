"""Attention and its masks as values: causal, within a window, within a document, with learned biases.
A mask that is only causal stays a flag, which every fast kernel knows. Any other mask is made dense where a kernel
needs it: a tensor that is added to the scores, made once per forward for all layers.

The gradient of attention in 16 bits on a CPU with matrix tiles, where torch's own is slow.
The forward pass is torch's and keeps only queries, keys and values. Backward computes the scores again, in float32, for
blocks of queries that fit the cache, and does its other four products on the tiles. Measured against torch on one AMX
thread: 2.2-2.5x as fast at 64 and 128 tokens, 1.3-1.5x at 256, 1.15-1.6x at 512, slower at 1024; equal in float32.
"""

from copy import copy
from dataclasses import dataclass
from functools import reduce
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from motet.models.arch.layers import accumulation_dtype
from motet.models.torch_private import is_amx_supported, softmax_backward

QUERIES_PER_BLOCK = 128
MAX_KEY_LENGTH = 512
SCORES_PER_TILE = 1 << 18  # The float32 scores and their 16-bit copies stay within 2 MiB of cache


def is_amx_faster(q: Tensor, k: Tensor, bias: Tensor | None) -> bool:
    """Whether backward will run, and is faster here. q [R, h, T, D], k [R, kv, S, D]."""
    needs_gradient = torch.is_grad_enabled() and q.requires_grad and not (bias is not None and bias.requires_grad)
    is_fit = q.device.type == "cpu" and q.dtype == torch.bfloat16 and k.shape[2] <= MAX_KEY_LENGTH
    return is_fit and needs_gradient and is_amx_supported()


def tiled_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *, causal: bool, scale: float) -> Tensor:
    """q [R, h, T, D], k and v [R, kv, S, D], bias [R or 1, h or 1, T, S] without gradient -> [R, h, T, D].
    `causal` hides the keys after each query; a bias must hide them too."""
    return cast(Tensor, _TiledAttentionFunction.apply(q, k, v, bias, causal, scale))  # type: ignore[no-untyped-call]  # untyped in torch


class _TiledAttentionFunction(torch.autograd.Function):
    @staticmethod
    def forward(  # the signature of an autograd function is that of the operation
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float
    ) -> Tensor:
        ctx.save_for_backward(q, k, v, bias)
        ctx.causal, ctx.scale = causal, scale
        return F.scaled_dot_product_attention(
            q, k, v, bias, is_causal=causal and bias is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, bias = ctx.saved_tensors
        # The layout of the projections, [R, T, heads, D], saves a copy later.
        grads = [torch.empty_like(x.transpose(1, 2), memory_format=torch.contiguous_format) for x in (q, k, v)]
        grad_q, grad_k, grad_v = (g.transpose(1, 2) for g in grads)
        kv_heads, group, block = k.shape[1], q.shape[1] // k.shape[1], min(QUERIES_PER_BLOCK, q.shape[2])
        tile_heads = max(1, SCORES_PER_TILE // (group * block * k.shape[2]))
        later_keys = q.new_full((block, block), float("-inf"), dtype=accumulation_dtype(q)).triu(1)
        for row in range(q.shape[0]):
            for start in range(0, kv_heads, tile_heads):
                kv = slice(start, min(start + tile_heads, kv_heads))
                heads = slice(kv.start * group, kv.stop * group)
                bias_tile = None if bias is None else bias.expand(*q.shape[:2], -1, -1)[row, heads]
                tile = q[row, heads], k[row, kv], v[row, kv]
                grad_q[row, heads], grad_k[row, kv], grad_v[row, kv] = _tile_gradients(
                    tile, grad[row, heads], bias_tile, causal_bias=later_keys if ctx.causal else None, scale=ctx.scale
                )
        return grad_q, grad_k, grad_v, None, None, None


def _tile_gradients(
    tile: tuple[Tensor, Tensor, Tensor], grad: Tensor, bias: Tensor | None, *, causal_bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of some heads of one row, q [h, T, D], k and v [kv, S, D], from that of the output, [h, T, D].
    bias [h, T, S]; causal_bias [B, B] hides the keys after each query of a block if attention is causal."""
    q, k, v = tile[0], tile[1].contiguous(), tile[2].contiguous()
    kv_heads, length, _ = k.shape
    scaled_k = (k.to(accumulation_dtype(k)) * scale).mT
    grad_q = torch.empty_like(q)
    grad_k, grad_v = (torch.zeros_like(x, dtype=accumulation_dtype(x)) for x in (k, v))
    for start in range(0, q.shape[1], QUERIES_PER_BLOCK):
        queries = slice(start, start + QUERIES_PER_BLOCK)
        visible = min(queries.stop, length) if causal_bias is not None else length
        # The query heads of a key head are more queries to it: [h, B, D] -> [kv, group x B, D].
        q_block, grad_block = (x[:, queries].reshape(kv_heads, -1, x.shape[-1]) for x in (q, grad))
        # Scores and softmax are in float32, as in torch's forward.
        scores = torch.bmm(q_block.to(scaled_k.dtype), scaled_k[..., :visible])
        by_head = scores.view(q.shape[0], -1, visible)
        if bias is not None:
            by_head.add_(bias[:, queries, :visible])
        elif causal_bias is not None:
            by_head[..., start:].add_(causal_bias[: by_head.shape[1], : by_head.shape[1]])
        p = scores.softmax(-1).to(q.dtype)
        grad_scores = softmax_backward(torch.bmm(grad_block, v[:, :visible].mT), p)
        grad_v[:, :visible].add_(torch.bmm(p.mT, grad_block))
        grad_k[:, :visible].add_(torch.bmm(grad_scores.mT, q_block))
        grad_q[:, queries] = torch.bmm(grad_scores, k[:, :visible]).mul_(scale).view_as(grad_q[:, queries])
    return grad_q, grad_k.mul_(scale), grad_v


@dataclass(frozen=True, eq=False)
class AttentionTokens:
    """The queries of a mask, or its keys."""

    places: Tensor | None = None  # [T] int64: the place of each token in its row; None means 0..T-1, the whole row
    documents: Tensor | None = None  # [R, T] int64; None means that each row is one document

    def select(self, indices: Tensor) -> "AttentionTokens":
        """The tokens at these indices [t]."""
        places = indices if self.places is None else self.places[indices]
        return AttentionTokens(places, None if self.documents is None else self.documents[:, indices])


class AttentionMask:
    """The keys that each query sees, and a bias of their scores. It is not a dataclass, because FSDP2 copies the
    dataclasses that are arguments of a block, and each block would then make another dense form."""

    def __init__(
        self,
        queries: AttentionTokens | None = None,
        keys: AttentionTokens | None = None,
        *,
        causal: bool = False,
        window: int | None = None,
        sees_all: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> None:
        self.queries, self.keys = queries or AttentionTokens(), keys or AttentionTokens()
        self.causal = causal  # No query sees a key at a later place
        self.window = window  # A query sees at most `window - 1` places before its own
        self.sees_all = sees_all  # [R, T] bool: queries that see the keys of every document
        self.bias = bias  # [1, heads, T, S], learned: added to the scores of visible keys
        self._dense: dict[torch.dtype, Tensor | None] = {}

    @property
    def has_kernel_order(self) -> bool:
        """Whether queries and keys are whole rows, where a later place is a larger index, as kernels expect it."""
        return self.queries.places is None and self.keys.places is None

    def block(self, queries: Tensor, keys: Tensor) -> "AttentionMask":
        """The mask of the queries and keys at these indices: its dense form is that part of the dense form here.
        A query that sees no key of a block is normal: it has -inf for each key. Its softmax over the block is then NaN,
        or in some kernels zero with a log-sum-exp of zero. Code that joins blocks must skip it by the mask."""
        return AttentionMask(
            self.queries.select(queries),
            self.keys.select(keys),
            causal=self.causal,
            window=self.window,
            sees_all=None if self.sees_all is None else self.sees_all[:, queries],
            bias=None if self.bias is None else self.bias[:, :, queries][..., keys],
        )

    def with_bias(self, bias: Tensor) -> "AttentionMask":
        """The same mask with a learned bias."""
        mask = copy(self)
        mask.bias, mask._dense = bias, {}
        return mask

    def dense(self, length: int, key_length: int, *, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """[R or 1, heads or 1, T, S], added to the scores; -inf hides a key. Made in the first call with a dtype.
        None where a kernel needs no tensor: every key is visible, or rows are complete and `causal` hides the rest."""
        if dtype not in self._dense:
            is_visible, bias = self._is_visible(length, key_length, device), self.bias
            additive = None if is_visible is None else _additive_mask(is_visible, dtype)
            self._dense[dtype] = additive if bias is None else bias if additive is None else bias + additive
        return self._dense[dtype]

    def _is_visible(self, length: int, key_length: int, device: torch.device) -> Tensor | None:
        """[T, S] or [R, 1, T, S]; None where no tensor is needed."""
        documents, key_documents = self.queries.documents, self.keys.documents
        window = None if self.has_kernel_order and self.window is not None and self.window >= length else self.window
        has_others = documents is not None or window is not None or self.bias is not None
        conditions = []
        if window is not None or (self.causal and (has_others or not self.has_kernel_order)):
            places = places_in_row(self.queries.places, length, device).unsqueeze(1)
            key_places = places_in_row(self.keys.places, key_length, device)
            conditions += [key_places <= places] if self.causal else []
            conditions += [] if window is None else [key_places > places - window]
        if documents is not None and key_documents is not None:
            is_same = _same_document(documents, key_documents)
            conditions.append(is_same if self.sees_all is None else is_same | self.sees_all[:, None, :, None])
        return reduce(torch.logical_and, conditions) if conditions else None


def causal_mask(
    documents: Tensor | None = None, places: Tensor | None = None, window: int | None = None
) -> AttentionMask:
    """Each query sees itself and at most `window - 1` places before it, of the same document. documents [R, T]."""
    tokens = AttentionTokens(places, documents)
    return AttentionMask(tokens, tokens, causal=True, window=window)


def bidirectional_mask(documents: Tensor | None, sources: Tensor | None) -> AttentionMask:
    """Queries see every key of the same document. documents [R, T], sources [R, S] of the whole row; both or neither.
    A query whose document has no key sees every key: it is padding of weight 0, but must not become NaN."""
    if documents is None or sources is None:
        return AttentionMask()
    sees_all = None if sources is documents else ~_same_document(documents, sources).any(-1).squeeze(1)
    return AttentionMask(AttentionTokens(None, documents), AttentionTokens(None, sources), sees_all=sees_all)


def dot_product_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, *, scale: float, dropout: float = 0.0
) -> Tensor:
    """q [R, T, h, D], k and v [R, S, kv, D] -> [R, T, h D]. `dropout` is applied to the probabilities."""
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    bias = mask.dense(q.shape[2], k.shape[2], dtype=q.dtype, device=q.device)
    is_causal = mask.causal and mask.has_kernel_order
    if dropout == 0 and is_amx_faster(q, k, bias):
        out = tiled_attention(q, k, v, bias, causal=is_causal, scale=scale)
    else:
        groups = q.shape[1] // k.shape[1]
        if groups > 1 and bias is not None and q.is_cuda:
            # Assumed from its sources, not tried: the kernel that takes a bias does not take groups.
            k, v, groups = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1), 1
        causal = is_causal and bias is None
        out = F.scaled_dot_product_attention(q, k, v, bias, dropout, causal, scale=scale, enable_gqa=groups > 1)
    return out.transpose(1, 2).flatten(2)


def places_in_row(places: Tensor | None, length: int, device: torch.device) -> Tensor:
    """The place of each token in its row: 0..length-1 where they are not given."""
    return torch.arange(length, device=device) if places is None else places


def _same_document(documents: Tensor, sources: Tensor) -> Tensor:
    """[R, 1, T, S]"""
    return (documents.unsqueeze(2) == sources.unsqueeze(1)).unsqueeze(1)


def _additive_mask(is_visible: Tensor, dtype: torch.dtype) -> Tensor:
    """[..., T, S] with four dims."""
    bias = torch.zeros(is_visible.shape, dtype=dtype, device=is_visible.device).masked_fill_(~is_visible, float("-inf"))
    return bias if bias.ndim == 4 else bias[None, None]
