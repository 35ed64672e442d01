"""Attention, and which keys each query sees: earlier ones, near ones, those of its own document.

A pattern that is plainly causal stays a flag, which every fast kernel knows; anything else is a bias that is added to
the scores, made once per forward for all layers.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from motet.models.attention_cpu import tiled_attention, tiles_help


@dataclass(frozen=True)
class Pattern:
    """Which keys each query sees."""

    causal: bool = False
    """No query sees a key after it."""
    bias: Tensor | None = None
    """[R or 1, heads or 1, T, S], added to the scores; -inf hides a key. It says all, `causal` included."""

    def plus(self, bias: Tensor) -> "Pattern":
        """With learned biases [1, heads, T, S] added to the scores of the keys that are seen."""
        hidden = self.bias
        if hidden is None and self.causal:
            hidden = _as_bias(_earlier(bias.shape[-1], None, bias.device), bias.dtype)
        return replace(self, bias=bias if hidden is None else bias + hidden)


def causal_pattern(tokens: Tensor, window: int | None, documents: Tensor | None, dtype: torch.dtype) -> Pattern:
    """Each query sees itself and at most `window - 1` tokens before it, of its own document. tokens [R, T]."""
    length = tokens.shape[1]
    window = None if window is None or window >= length else window
    if documents is None and window is None:
        return Pattern(causal=True)
    seen = _earlier(length, window, tokens.device)
    if documents is not None:
        seen = seen & _same(documents, documents)
    return Pattern(causal=True, bias=_as_bias(seen, dtype))


def full_pattern(documents: Tensor | None, sources: Tensor | None, dtype: torch.dtype) -> Pattern:
    """Queries see every key of their own document. documents [R, T], sources [R, S]; both or neither."""
    if documents is None or sources is None:
        return Pattern()
    seen = _same(documents, sources)
    # A filling position may belong to a document without a source; it has weight 0, but must not become NaN.
    return Pattern(bias=_as_bias(seen | ~seen.any(-1, keepdim=True), dtype))


def attend(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, scale: float, dropout: float = 0.0) -> Tensor:
    """q [R, T, h, D], k and v [R, S, kv, D] -> [R, T, h D]. `dropout` is applied to the probabilities."""
    q, k, v, bias = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), pattern.bias
    if dropout == 0 and tiles_help(q, k, bias):
        out = tiled_attention(q, k, v, bias, pattern.causal, scale)
    else:
        groups = q.shape[1] // k.shape[1]
        if groups > 1 and bias is not None and q.is_cuda:
            # Assumed from its sources, not tried: the kernel that takes a bias does not take groups.
            k, v, groups = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1), 1
        causal = pattern.causal and bias is None
        out = F.scaled_dot_product_attention(q, k, v, bias, dropout, causal, scale=scale, enable_gqa=groups > 1)
    return out.transpose(1, 2).flatten(2)


def _earlier(length: int, window: int | None, device: torch.device) -> Tensor:
    """[T, T], true where the key is not after the query, nor before its window."""
    seen = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    return seen if window is None else seen.triu(1 - window)


def _same(documents: Tensor, sources: Tensor) -> Tensor:
    """[R, 1, T, S]"""
    return (documents.unsqueeze(2) == sources.unsqueeze(1)).unsqueeze(1)


def _as_bias(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """[..., T, S] with four dims."""
    bias = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))
    return bias if bias.ndim == 4 else bias[None, None]
