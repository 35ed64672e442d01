"""The gradient of attention in 16 bits on a CPU with matrix tiles, where torch's own is slow.

The forward pass is torch's; it keeps queries, keys and values only. Backward computes the scores again, in float32 from
blocks of queries that fit the cache, and does its other four products on the tiles. Measured on one thread of a
processor with AMX, against torch's: 2.2-2.5x as fast at 64 and 128 tokens, 1.3-1.5x at 256, 1.15-1.6x at 512, slower at
1024; 13-18 ms instead of 22 for 8 rows of 256, 8 heads of 32. In float32 torch's is as fast, and is used.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

QUERIES_PER_BLOCK = 128
MAX_KEY_LENGTH = 512
# Scores per tile: the float32 scores, with their 16-bit copies, stay within 2 MiB of cache.
SCORES_PER_TILE = 1 << 18


def is_amx_faster(q: Tensor, k: Tensor, bias: Tensor | None) -> bool:
    """Whether this gradient will be wanted, and is faster here. q [R, h, T, D], k [R, kv, S, D]."""
    if q.device.type != "cpu" or q.dtype != torch.bfloat16 or not (torch.is_grad_enabled() and q.requires_grad):
        return False
    is_bias_learned = bias is not None and bias.requires_grad
    return not is_bias_learned and k.shape[2] <= MAX_KEY_LENGTH and _has_amx()


@cache
def _has_amx() -> bool:
    """Whether this processor multiplies matrices of bfloat16 in hardware."""
    return bool(torch.cpu._is_amx_tile_supported())


def tiled_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float) -> Tensor:
    """q [R, h, T, D], k and v [R, kv, S, D], bias [R or 1, h or 1, T, S] without gradient -> [R, h, T, D].

    `causal`: no query sees a key after it; a bias, where there is one, says so too.
    """
    out: Tensor = _TiledAttentionFunction.apply(q, k, v, bias, causal, scale)  # type: ignore[no-untyped-call]  # torch's
    return out


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
        # The layout of the projections, [R, T, heads, D], so that nobody has to copy them into it later.
        grads = [torch.empty_like(x.transpose(1, 2), memory_format=torch.contiguous_format) for x in (q, k, v)]
        grad_q, grad_k, grad_v = (g.transpose(1, 2) for g in grads)
        kv_heads, group = k.shape[1], q.shape[1] // k.shape[1]
        block = min(QUERIES_PER_BLOCK, q.shape[2])
        kv_heads_per_tile = max(1, SCORES_PER_TILE // (group * block * k.shape[2]))
        causal_bias = q.new_full((block, block), float("-inf"), dtype=_score_dtype(q)).triu(1) if ctx.causal else None
        for row in range(q.shape[0]):
            for start in range(0, kv_heads, kv_heads_per_tile):
                kv = slice(start, min(start + kv_heads_per_tile, kv_heads))
                heads = slice(kv.start * group, kv.stop * group)
                tile = _AttentionTile(
                    q[row, heads], k[row, kv], v[row, kv], _select_bias(bias, row, heads), causal_bias, ctx.scale
                )
                grad_q[row, heads], grad_k[row, kv], grad_v[row, kv] = tile.gradients(grad[row, heads])
        return grad_q, grad_k, grad_v, None, None, None


def _select_bias(bias: Tensor | None, row: int, heads: slice) -> Tensor | None:
    """[h or 1, T, S] of one row."""
    if bias is None:
        return None
    row_bias = bias[row if bias.shape[0] > 1 else 0]
    return row_bias[heads] if row_bias.shape[0] > 1 else row_bias


@dataclass(frozen=True)
class _AttentionTile:
    """Some heads of one row: q [h, T, D], k and v [kv, S, D], bias [h or 1, T, S]."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    causal_bias: Tensor | None  # [B, B]: hides the keys after each query of a block, if attention is causal
    scale: float

    def gradients(self, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of q, k and v from that of the output, [h, T, D]."""
        k, v = self.k.contiguous(), self.v.contiguous()
        kv, length, _ = k.shape
        scaled_k = (k.to(_score_dtype(k)) * self.scale).mT
        grad_q = torch.empty_like(self.q)
        grad_k, grad_v = (torch.zeros_like(x, dtype=_score_dtype(x)) for x in (k, v))
        for start in range(0, self.q.shape[1], QUERIES_PER_BLOCK):
            queries = slice(start, start + QUERIES_PER_BLOCK)
            visible_keys = min(queries.stop, length) if self.causal_bias is not None else length
            q, g = _fold_query_groups(self.q[:, queries], kv), _fold_query_groups(grad[:, queries], kv)
            p = self._probabilities(q, scaled_k[..., :visible_keys], queries)
            grad_p = torch.bmm(g, v[:, :visible_keys].mT)
            grad_scores = torch._softmax_backward_data(grad_p, p, -1, p.dtype)
            grad_v[:, :visible_keys].add_(torch.bmm(p.mT, g))
            grad_k[:, :visible_keys].add_(torch.bmm(grad_scores.mT, q))
            grad_q[:, queries] = (
                torch.bmm(grad_scores, k[:, :visible_keys]).mul_(self.scale).view_as(grad_q[:, queries])
            )
        return grad_q, grad_k.mul_(self.scale), grad_v

    def _probabilities(self, q: Tensor, scaled_k: Tensor, queries: slice) -> Tensor:
        """[kv, group x block, seen]: scores and softmax in float32, as in torch's forward."""
        scores = torch.bmm(q.to(scaled_k.dtype), scaled_k)
        visible_keys = scores.shape[-1]
        by_head = scores.view(self.q.shape[0], -1, visible_keys)
        if self.bias is not None:
            by_head.add_(self.bias[:, queries, :visible_keys])
        elif self.causal_bias is not None:
            block = by_head.shape[1]
            by_head[..., queries.start :].add_(self.causal_bias[:block, :block])
        return scores.softmax(-1).to(q.dtype)


def _fold_query_groups(x: Tensor, kv: int) -> Tensor:
    """[h, B, D] -> [kv, group x B, D]: the query heads of a key head are more queries to it."""
    return x.reshape(kv, -1, x.shape[-1])


def _score_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
