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
LONGEST = 512
# Scores per tile: the float32 scores, with their 16-bit copies, stay within 2 MiB of cache.
SCORES_PER_TILE = 1 << 18


def tiles_help(q: Tensor, k: Tensor, bias: Tensor | None) -> bool:
    """Whether this gradient will be wanted, and is faster here. q [R, h, T, D], k [R, kv, S, D]."""
    if q.device.type != "cpu" or q.dtype != torch.bfloat16 or not (torch.is_grad_enabled() and q.requires_grad):
        return False
    learned = bias is not None and bias.requires_grad
    return not learned and k.shape[2] <= LONGEST and _has_tiles()


@cache
def _has_tiles() -> bool:
    """Whether this processor multiplies matrices of bfloat16 in hardware."""
    return bool(torch.cpu._is_amx_tile_supported())


def tiled_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float) -> Tensor:
    """q [R, h, T, D], k and v [R, kv, S, D], bias [R or 1, h or 1, T, S] without gradient -> [R, h, T, D].

    `causal`: no query sees a key after it; a bias, where there is one, says so too.
    """
    out: Tensor = _TiledAttention.apply(q, k, v, bias, causal, scale)  # type: ignore[no-untyped-call]  # torch's
    return out


class _TiledAttention(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0913  # the signature of an autograd function is that of the operation
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
        of_q, of_k, of_v = (g.transpose(1, 2) for g in grads)
        kv_heads, group = k.shape[1], q.shape[1] // k.shape[1]
        block = min(QUERIES_PER_BLOCK, q.shape[2])
        at_once = max(1, SCORES_PER_TILE // (group * block * k.shape[2]))
        later = q.new_full((block, block), float("-inf"), dtype=_wide(q)).triu(1) if ctx.causal else None
        for row in range(q.shape[0]):
            for start in range(0, kv_heads, at_once):
                kv = slice(start, min(start + at_once, kv_heads))
                heads = slice(kv.start * group, kv.stop * group)
                tile = _Tile(q[row, heads], k[row, kv], v[row, kv], _bias_of(bias, row, heads), later, ctx.scale)
                of_q[row, heads], of_k[row, kv], of_v[row, kv] = tile.gradients(grad[row, heads])
        return of_q, of_k, of_v, None, None, None


def _bias_of(bias: Tensor | None, row: int, heads: slice) -> Tensor | None:
    """[h or 1, T, S] of one row."""
    if bias is None:
        return None
    of_row = bias[row if bias.shape[0] > 1 else 0]
    return of_row[heads] if of_row.shape[0] > 1 else of_row


@dataclass(frozen=True)
class _Tile:
    """Some heads of one row: q [h, T, D], k and v [kv, S, D], bias [h or 1, T, S]."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    later: Tensor | None
    """[B, B]: hides the keys after each query of a block, if attention is causal."""
    scale: float

    def gradients(self, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of q, k and v from that of the output, [h, T, D]."""
        k, v = self.k.contiguous(), self.v.contiguous()
        kv, length, _ = k.shape
        wide_k = (k.to(_wide(k)) * self.scale).mT
        of_q = torch.empty_like(self.q)
        of_k, of_v = (torch.zeros_like(x, dtype=_wide(x)) for x in (k, v))
        for start in range(0, self.q.shape[1], QUERIES_PER_BLOCK):
            queries = slice(start, start + QUERIES_PER_BLOCK)
            seen = min(queries.stop, length) if self.later is not None else length
            q, g = _grouped(self.q[:, queries], kv), _grouped(grad[:, queries], kv)
            p = self._probabilities(q, wide_k[..., :seen], queries)
            of_p = torch.bmm(g, v[:, :seen].mT)
            of_scores = torch._softmax_backward_data(of_p, p, -1, p.dtype)
            of_v[:, :seen].add_(torch.bmm(p.mT, g))
            of_k[:, :seen].add_(torch.bmm(of_scores.mT, q))
            of_q[:, queries] = torch.bmm(of_scores, k[:, :seen]).mul_(self.scale).view_as(of_q[:, queries])
        return of_q, of_k.mul_(self.scale), of_v

    def _probabilities(self, q: Tensor, wide_k: Tensor, queries: slice) -> Tensor:
        """[kv, group x block, seen]: scores and softmax in float32, as in torch's forward."""
        scores = torch.bmm(q.to(wide_k.dtype), wide_k)
        seen = scores.shape[-1]
        by_head = scores.view(self.q.shape[0], -1, seen)
        if self.bias is not None:
            by_head.add_(self.bias[:, queries, :seen])
        elif self.later is not None:
            block = by_head.shape[1]
            by_head[..., queries.start :].add_(self.later[:block, :block])
        return scores.softmax(-1).to(q.dtype)


def _grouped(x: Tensor, kv: int) -> Tensor:
    """[h, B, D] -> [kv, group x B, D]: the query heads of a key head are more queries to it."""
    return x.reshape(kv, -1, x.shape[-1])


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
