"""The one core of attention: queries, keys and values of heads, a mask and options of the scores.
Modules of ours and modules of a user that are intercepted call `attend`. While a module runs on a part of each row, an
exchange between ranks is set, which computes attention in its place.

The gradient of attention in 16 bits on a CPU with matrix tiles, where torch's own is slow.
The forward pass is torch's and keeps only queries, keys and values. Backward computes the scores again, in float32, for
blocks of queries that fit the cache, and does its other four products on the tiles. Measured against torch on one AMX
thread: 2.2-2.5x as fast at 64 and 128 tokens, 1.3-1.5x at 256, 1.15-1.6x at 512, slower at 1024; equal in float32.
"""

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from motet.models.arch.attention_mask import AttentionMask
from motet.models.arch.layers import accumulation_dtype
from motet.models.kernels.autograd_backward import single_backward
from motet.models.kernels.choice import kernel_device
from motet.models.kernels.head_sizes import MAX_HEAD_DIM, takes_heads
from motet.models.kernels.variable_length import variable_length_kernel
from motet.models.torch_private import constant_in_graphs, is_amx_supported, softmax_backward, softmax_or_zeros

QUERIES_PER_BLOCK = 128
MAX_KEY_LENGTH = 512
SCORES_PER_TILE = 1 << 18  # The float32 scores and their 16-bit copies stay within 2 MiB of cache


@dataclass(frozen=True, eq=False)
class ScoreOptions:
    """The scores of queries and keys, and the probabilities made from them."""

    scale: float
    softcap: float | None = None  # Scores s become softcap * tanh(s / softcap), before the mask
    sinks: Tensor | None = None  # [heads]: learned logits that join each softmax and have no value
    dropout: float = 0.0  # Applied to the probabilities


class AttentionExchange(Protocol):
    """Attention of a part of each row, whose keys other ranks have too."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, mask: AttentionMask, options: ScoreOptions) -> Tensor:
        """The arguments and the result are those of the function `attend`, for the tokens of this rank."""


# Set around the forward and the backward of a module that runs on a part of each row: recomputation reads it too.
attention_exchange: ContextVar[AttentionExchange | None] = ContextVar("attention_exchange", default=None)
_has_exchange = constant_in_graphs(lambda: attention_exchange.get() is not None)


def attend(q: Tensor, k: Tensor, v: Tensor, *, mask: AttentionMask, options: ScoreOptions) -> Tensor:
    """q [R, h, T, D], k [R, kv, S, D], v [R, kv, S, Dv] -> [R, h, T, Dv]. kv divides h."""
    # torch.compile cannot trace a context variable. Where one holds an exchange, attention is in no graph.
    exchange = None if torch.compiler.is_compiling() and not _has_exchange() else attention_exchange.get()
    if exchange is None:
        return _attend_locally(q, k, v, mask=mask, options=options)
    running = attention_exchange.set(None)  # Attention that the exchange itself calls is that of this rank alone
    try:
        return exchange.attend(q, k, v, mask=mask, options=options)
    finally:
        attention_exchange.reset(running)


def choose_kernel(
    mask: AttentionMask, x: Tensor, shape: torch.Size, *, document_count: int | None = None
) -> AttentionMask:
    """The mask, which knows the kernel of variable length for activations like x if there is one, or has its dense form
    for them. Called before the blocks, for all of them; only heads or scores that the kernel does not take make a dense
    form later. `shape` is [R, T]."""
    if attention_exchange.get() is None:
        if (kernel := variable_length_kernel(x)) is not None:
            mask.use_kernel(kernel, *shape, device=x.device, count=document_count)
        if mask.sequence is None:
            mask.dense(shape[1], shape[1], dtype=x.dtype, device=x.device)
    return mask


def dot_product_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, *, scale: float, dropout: float = 0.0
) -> Tensor:
    """q [R, T, h, D], k and v [R, S, kv, D] -> [R, T, h D]. `dropout` is applied to the probabilities."""
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return attend(q, k, v, mask=mask, options=ScoreOptions(scale, dropout=dropout)).transpose(1, 2).flatten(2)


def _attend_locally(q: Tensor, k: Tensor, v: Tensor, *, mask: AttentionMask, options: ScoreOptions) -> Tensor:
    is_plain = options.softcap is None and options.sinks is None and options.dropout == 0
    if mask.sequence is not None and is_plain and takes_heads(k.shape[3], v.shape[3]):
        return _attend_by_documents(q, k, v, mask=mask, scale=options.scale)
    bias = mask.dense(q.shape[2], k.shape[2], dtype=q.dtype, device=q.device)
    is_causal = mask.causal and mask.has_kernel_order
    if options.softcap is not None or options.sinks is not None:
        if is_causal and bias is None:
            hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
            bias = torch.zeros((), dtype=q.dtype, device=q.device).masked_fill(hidden, float("-inf"))
        return attend_by_scores(q, k, v, bias=bias, options=options)
    is_compiled = torch.compiler.is_compiling()  # The tiles are a function of Python, which is no part of a graph
    if not is_compiled and options.dropout == 0 and is_amx_faster(q, k, bias):
        return tiled_attention(q, k, v, bias, causal=is_causal, scale=options.scale)
    groups, value_dim = q.shape[1] // k.shape[1], v.shape[3]
    if kernel_device(q) == "cpu" and value_dim != k.shape[3] and options.dropout == 0:
        # The fused kernel of a CPU takes values of the size of keys alone; without it, all probabilities are kept.
        size = max(value_dim, k.shape[3])
        q, k, v = (_lengthened(x, size) for x in (q, k, v))
    if groups > 1 and q.is_cuda and (bias is not None or not _takes_groups(q, k.shape[3], value_dim)):
        # Assumed from its sources, not tried: the memory-efficient kernel, which takes a bias, does not take groups.
        k, v, groups = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1), 1
    causal = is_causal and bias is None
    output = F.scaled_dot_product_attention(
        q, k, v, bias, options.dropout, causal, scale=options.scale, enable_gqa=groups > 1
    )
    return output if output.shape[3] == value_dim else output[..., :value_dim]


_has_efficient_kernel = constant_in_graphs(lambda: torch.backends.cuda.mem_efficient_sdp_enabled())
_has_kernel_of_groups = constant_in_graphs(
    lambda: torch.backends.cuda.flash_sdp_enabled() or torch.backends.cuda.cudnn_sdp_enabled()
)


def _takes_groups(q: Tensor, key_dim: int, value_dim: int) -> bool:
    """Whether a fused kernel of a GPU takes groups of query heads, or none would take repeated keys either."""
    if q.dtype == torch.float64 or not _has_efficient_kernel():
        return True
    return _has_kernel_of_groups() and q.dtype.itemsize == 2 and key_dim == value_dim <= MAX_HEAD_DIM


def _attend_by_documents(q: Tensor, k: Tensor, v: Tensor, *, mask: AttentionMask, scale: float) -> Tensor:
    assert mask.sequence is not None
    rows, value_dim = len(q), v.shape[3]
    window = (-1 if mask.window is None else mask.window - 1, 0 if mask.causal else -1)
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, _lengthened(v, k.shape[3])))
    starts, longest = mask.sequence.starts, len(q) // rows
    output = mask.sequence.kernel(q, k, v, starts=starts, longest=longest, scale=scale, window=window)
    return cast(Tensor, output[..., :value_dim].unflatten(0, (rows, -1))).transpose(1, 2)


def _lengthened(x: Tensor, size: int) -> Tensor:
    """[R, h, T, D] -> [R, h, T, size], with zeros; in the layout of the projections, [R, T, h, size]."""
    return x if x.shape[3] == size else F.pad(x.transpose(1, 2), (0, size - x.shape[3])).transpose(1, 2)


def attend_by_scores(q: Tensor, k: Tensor, v: Tensor, *, bias: Tensor | None, options: ScoreOptions) -> Tensor:
    """Attention by its formula, for scores that no fused kernel computes. Softmax is in float32 or float64.
    A query that sees no key has the output 0. bias [R or 1, h or 1, T, S] or [T, S]."""
    scores = capped_scores(q, k, options)
    if bias is not None:
        scores = scores + bias
    if options.sinks is not None:
        sinks = options.sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        probabilities = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
    else:
        probabilities = scores.softmax(-1) if bias is None else softmax_or_zeros(scores)
    probabilities = probabilities.to(v.dtype)
    kept = F.dropout(probabilities, options.dropout) if options.dropout else probabilities
    return by_key_head(kept, v)


def capped_scores(q: Tensor, k: Tensor, options: ScoreOptions) -> Tensor:
    """[R, h, T, S] in float32 or float64, before the mask."""
    scores = by_key_head(q, k.mT).to(accumulation_dtype(q)) * options.scale
    return scores if options.softcap is None else (scores / options.softcap).tanh() * options.softcap


def by_key_head(x: Tensor, y: Tensor) -> Tensor:
    """The product of x [R, h, T, M] with y [R, kv, M, N] of each query head's key head: [R, h, T, N]."""
    kv, length = y.shape[1], x.shape[2]
    # The query heads of a key head are more rows of its product.
    return (x.reshape(x.shape[0], kv, -1, x.shape[3]) @ y).view(*x.shape[:2], length, y.shape[3])


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
    @single_backward
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
