"""Attention layers and the feed-forward network that all architectures share.
Projections that read the same input are one matrix product: queries, keys and values; gate and up."""

from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from motet.models.arch.attention_core import dot_product_attention
from motet.models.arch.attention_mask import AttentionMask
from motet.models.arch.key_value_cache import LayerCache
from motet.models.arch.layers import RMSNorm, add_norm, apply_activation, apply_rotary, build_norm, gated_activation
from motet.models.settings import TransformerSettings


class SelfAttention(nn.Module):
    """Self-attention with grouped queries, optional norms of queries and keys, and optional rotary positions."""

    tensor_parallel_plan: ClassVar = {"qkv": "columns", "output": "rows"}

    def __init__(
        self,
        s: TransformerSettings,
        *,
        kv_heads: int | None = None,
        qkv_bias: bool = False,
        output_bias: bool = False,
        query_key_norm: bool = False,
        scale_scores: bool = True,
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim, self.dropout = s.heads, kv_heads or s.heads, s.dim_per_head, s.dropout
        self.scale = self.head_dim**-0.5 if scale_scores else 1.0
        self.qkv = nn.Linear(s.hidden, (s.heads + 2 * self.kv_heads) * self.head_dim, bias=qkv_bias)
        self.has_query_key_norm = query_key_norm
        if query_key_norm:
            self.query_norm = RMSNorm(self.head_dim, s.norm_eps)
            self.key_norm = RMSNorm(self.head_dim, s.norm_eps)
        self.output = nn.Linear(s.heads * self.head_dim, s.hidden, bias=output_bias)

    def forward(
        self, x: Tensor, mask: AttentionMask, rotary: Tensor | None = None, *, cache: LayerCache | None = None
    ) -> Tensor:
        # [R, T, heads + kv_heads, head_dim] and [R, T, kv_heads, head_dim]
        qk, v = self.qkv(x).unflatten(-1, (-1, self.head_dim)).split((self.heads + self.kv_heads, self.kv_heads), dim=2)
        if self.has_query_key_norm:
            q, k = qk.split((self.heads, self.kv_heads), dim=2)
            qk = torch.cat((self.query_norm(q), self.key_norm(k)), dim=2)
        if rotary is not None:
            qk = apply_rotary(qk, rotary)
        q, k = qk.split((self.heads, self.kv_heads), dim=2)
        if cache is not None:
            k, v = cache.extend(k, v)
        dropout = self.dropout if self.training else 0.0
        return cast(Tensor, self.output(dot_product_attention(q, k, v, mask, scale=self.scale, dropout=dropout)))


class CrossAttention(nn.Module):
    """Unscaled attention with queries from one sequence, keys and values from another."""

    tensor_parallel_plan: ClassVar = {"query": "columns", "key_value": "columns", "output": "rows"}

    def __init__(self, s: TransformerSettings) -> None:
        super().__init__()
        self.head_dim, self.dropout, width = s.dim_per_head, s.dropout, s.heads * s.dim_per_head
        self.query = nn.Linear(s.hidden, width, bias=False)
        self.key_value = nn.Linear(s.hidden, 2 * width, bias=False)
        self.output = nn.Linear(width, s.hidden, bias=False)

    def forward(self, x: Tensor, source: Tensor, mask: AttentionMask) -> Tensor:
        q = self.query(x).unflatten(-1, (-1, self.head_dim))
        k, v = self.key_value(source).unflatten(-1, (-1, self.head_dim)).chunk(2, dim=2)
        dropout = self.dropout if self.training else 0.0
        return cast(Tensor, self.output(dot_product_attention(q, k, v, mask, scale=1.0, dropout=dropout)))


class FeedForward(nn.Module):
    """down(act(up x)), or down(act(gate x) * up x) with gate and up in one matrix, in this order."""

    tensor_parallel_plan: ClassVar = {"up": "columns", "down": "rows"}

    def __init__(self, s: TransformerSettings, *, bias: bool = False, inner_dropout: float = 0.0) -> None:
        super().__init__()
        self.activation, self.inner_dropout = s.activation, inner_dropout
        self.activate = gated_activation if s.gated else apply_activation
        self.up = nn.Linear(s.hidden, s.ffn_hidden * (2 if s.gated else 1), bias=bias)
        self.down = nn.Linear(s.ffn_hidden, s.hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.activate(self.up(x), self.activation)
        is_dropped = self.training and self.inner_dropout
        return cast(Tensor, self.down(F.dropout(inner, self.inner_dropout) if is_dropped else inner))


class PreNormBlock(nn.Module):
    """x + attention(norm(x)), in a T5 decoder x + cross(norm(x), encoded), then x + ffn(norm(x))."""

    def __init__(
        self, s: TransformerSettings, attention: nn.Module, ffn: nn.Module, *, norm_bias: bool, has_cross: bool
    ) -> None:
        super().__init__()
        self.attention_norm, self.attention = build_norm(s, bias=norm_bias), attention
        if has_cross:
            self.cross_norm, self.cross = build_norm(s, bias=norm_bias), CrossAttention(s)
        self.ffn_norm, self.ffn = build_norm(s, bias=norm_bias), ffn
        self.dropout = nn.Dropout(s.dropout)

    def forward(
        self,
        x: Tensor,
        mask: AttentionMask,
        rotary: Tensor | None = None,
        *encoded: Any,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """`encoded` is the output of the encoder and its mask. With a cache, x are the tokens after those in it."""
        options = {} if cache is None else {"cache": cache}
        # No name holds the output of attention, which the addition ends: the feed-forward network needs the memory
        norm = self.cross_norm if encoded else self.ffn_norm
        x, normed = add_norm(x, self.dropout(self.attention(self.attention_norm(x), mask, rotary, **options)), norm)
        if encoded:
            x, normed = add_norm(x, self.dropout(self.cross(normed, *encoded)), self.ffn_norm)
        return cast(Tensor, x + self.dropout(self.ffn(normed)))
