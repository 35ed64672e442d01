"""Attention and its masks: causal, within a window, within a document.
A mask that is only causal stays a flag, which every fast kernel knows. Any other mask is a bias that is added to the
scores, made once per forward for all layers."""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from motet.models.arch.amx_attention import is_amx_faster, tiled_attention


@dataclass(frozen=True)
class AttentionMask:
    """The keys that each query sees."""

    causal: bool = False  # No query sees a key after it
    # [R or 1, heads or 1, T, S], added to the scores; -inf hides a key. Hides later keys too if `causal`.
    bias: Tensor | None = None

    def with_bias(self, bias: Tensor) -> "AttentionMask":
        """The same mask with learned biases [1, heads, T, S], which are added to the scores of visible keys."""
        if self.bias is not None:
            bias = bias + self.bias
        elif self.causal:
            bias = bias + _additive_mask(_causal_window(bias.shape[-1], None, bias.device), bias.dtype)
        return replace(self, bias=bias)


def causal_mask(tokens: Tensor, window: int | None, documents: Tensor | None, *, dtype: torch.dtype) -> AttentionMask:
    """Each query sees itself and at most `window - 1` tokens before it, of the same document. tokens [R, T]."""
    length = tokens.shape[1]
    window = None if window is None or window >= length else window
    if documents is None and window is None:
        return AttentionMask(causal=True)
    is_visible = _causal_window(length, window, tokens.device)
    if documents is not None:
        is_visible = is_visible & _same_document(documents, documents)
    return AttentionMask(causal=True, bias=_additive_mask(is_visible, dtype))


def bidirectional_mask(documents: Tensor | None, sources: Tensor | None, dtype: torch.dtype) -> AttentionMask:
    """Queries see every key of the same document. documents [R, T], sources [R, S]; both or neither."""
    if documents is None or sources is None:
        return AttentionMask()
    is_visible = _same_document(documents, sources)
    # Padding may belong to a document without a source. It has weight 0, but must not become NaN.
    return AttentionMask(bias=_additive_mask(is_visible | ~is_visible.any(-1, keepdim=True), dtype))


def dot_product_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, *, scale: float, dropout: float = 0.0
) -> Tensor:
    """q [R, T, h, D], k and v [R, S, kv, D] -> [R, T, h D]. `dropout` is applied to the probabilities."""
    q, k, v, bias = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask.bias
    if dropout == 0 and is_amx_faster(q, k, bias):
        out = tiled_attention(q, k, v, bias, causal=mask.causal, scale=scale)
    else:
        groups = q.shape[1] // k.shape[1]
        if groups > 1 and bias is not None and q.is_cuda:
            # Assumed from its sources, not tried: the kernel that takes a bias does not take groups.
            k, v, groups = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1), 1
        causal = mask.causal and bias is None
        out = F.scaled_dot_product_attention(q, k, v, bias, dropout, causal, scale=scale, enable_gqa=groups > 1)
    return out.transpose(1, 2).flatten(2)


def _causal_window(length: int, window: int | None, device: torch.device) -> Tensor:
    """[T, T], true where the key is neither after the query nor before its window."""
    is_visible = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    return is_visible if window is None else is_visible.triu(1 - window)


def _same_document(documents: Tensor, sources: Tensor) -> Tensor:
    return (documents.unsqueeze(2) == sources.unsqueeze(1)).unsqueeze(1)


def _additive_mask(is_visible: Tensor, dtype: torch.dtype) -> Tensor:
    """[..., T, S] with four dims."""
    bias = torch.zeros(is_visible.shape, dtype=dtype, device=is_visible.device).masked_fill_(~is_visible, float("-inf"))
    return bias if bias.ndim == 4 else bias[None, None]
