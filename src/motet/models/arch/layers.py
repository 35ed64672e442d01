"""The two layers that all our models are made of, attention and feed-forward network, and a bare matrix.

Projections that read the same input are one matrix product: queries, keys and values; gate and up.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from motet.models.arch.activations import apply_activation, gated_activation
from motet.models.arch.attention import AttentionMask, dot_product_attention
from motet.models.arch.norms import RMSNorm
from motet.models.arch.rotary import apply_rotary
from motet.models.settings import ActivationName


@dataclass(frozen=True)
class AttentionLayerConfig:
    """How an attention layer is built."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    output_bias: bool = False
    query_key_norm_eps: float | None = None  # Norms of each query and key head, when given
    scales_scores: bool = True  # Scores are divided by sqrt(head_dim)
    dropout: float = 0.0

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5 if self.scales_scores else 1.0


class SelfAttention(nn.Module):
    """Self-attention."""

    def __init__(self, config: AttentionLayerConfig) -> None:
        super().__init__()
        self.config = config
        s, dim = config, config.head_dim
        self.qkv = nn.Linear(s.hidden, (s.heads + 2 * s.kv_heads) * dim, bias=s.qkv_bias)
        if s.query_key_norm_eps is not None:
            self.query_norm = RMSNorm(dim, s.query_key_norm_eps)
            self.key_norm = RMSNorm(dim, s.query_key_norm_eps)
        self.output = nn.Linear(s.heads * dim, s.hidden, bias=s.output_bias)

    def forward(self, x: Tensor, mask: AttentionMask, rotary: Tensor | None = None) -> Tensor:
        s = self.config
        # [R, T, heads + 2 kv_heads, head_dim]
        heads = self.qkv(x).unflatten(-1, (-1, s.head_dim))
        qk, v = heads.split((s.heads + s.kv_heads, s.kv_heads), dim=2)
        if s.query_key_norm_eps is not None:
            q, k = qk.split((s.heads, s.kv_heads), dim=2)
            qk = torch.cat((self.query_norm(q), self.key_norm(k)), dim=2)
        if rotary is not None:
            qk = apply_rotary(qk, rotary)
        q, k = qk.split((s.heads, s.kv_heads), dim=2)
        dropout = s.dropout if self.training else 0.0
        mixed: Tensor = self.output(dot_product_attention(q, k, v, mask, s.scale, dropout))
        return mixed


class CrossAttention(nn.Module):
    """Queries from one sequence, keys and values from another."""

    def __init__(self, config: AttentionLayerConfig) -> None:
        super().__init__()
        self.config = config
        width = config.heads * config.head_dim
        self.query = nn.Linear(config.hidden, width, bias=config.qkv_bias)
        self.key_value = nn.Linear(config.hidden, 2 * width, bias=config.qkv_bias)
        self.output = nn.Linear(width, config.hidden, bias=config.output_bias)

    def forward(self, x: Tensor, source: Tensor, mask: AttentionMask) -> Tensor:
        s = self.config
        q = self.query(x).unflatten(-1, (-1, s.head_dim))
        k, v = self.key_value(source).unflatten(-1, (-1, s.head_dim)).chunk(2, dim=2)
        dropout = s.dropout if self.training else 0.0
        mixed: Tensor = self.output(dot_product_attention(q, k, v, mask, s.scale, dropout))
        return mixed


@dataclass(frozen=True)
class FeedForwardConfig:
    """How a feed-forward network is built."""

    hidden: int
    inner: int
    activation: ActivationName
    gated: bool
    bias: bool = False
    dropout: float = 0.0  # Of the inner activations


class FeedForward(nn.Module):
    """down(act(up x)), or down(act(gate x) * up x) with gate and up in one matrix, in this order."""

    def __init__(self, config: FeedForwardConfig) -> None:
        super().__init__()
        self.config = config
        width = config.inner * (2 if config.gated else 1)
        self.up = nn.Linear(config.hidden, width, bias=config.bias)
        self.down = nn.Linear(config.inner, config.hidden, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        s = self.config
        inner = (gated_activation if s.gated else apply_activation)(self.up(x), s.activation)
        y: Tensor = self.down(F.dropout(inner, s.dropout) if self.training and s.dropout else inner)
        return y


class OutputHeadWeight(nn.Module):
    """A matrix that is used through its weight, as the head is by a loss that never holds all logits."""

    def __init__(self, out_features: int, in_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))


class OutputHeadBias(nn.Module):
    """A bias that is used through its value, beside a matrix that belongs to somebody else."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(size))
