"""One bidirectional encoder, BERT, with a head for masked tokens or for a class of the whole row.

Norms come after the residual sums. The masked head is a further layer, then scores by the embedding table.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from motet.models.activations import activate
from motet.models.attention import Pattern, full_pattern
from motet.models.decoder import check_length
from motet.models.layers import Attention, AttentionShape, Bias, FeedForward, FeedForwardShape
from motet.models.norms import make_norm
from motet.models.settings import EncoderSettings


class Encoder(nn.Module):
    """tokens [R, T] -> logits [R, T, V], or [R, classes] of the first token. All tokens are of the first type."""

    def __init__(self, settings: EncoderSettings) -> None:
        super().__init__()
        s = self.settings = settings
        self.embedding = nn.Embedding(s.vocab_size, s.hidden)
        self.positions = nn.Embedding(s.context, s.hidden)
        if s.token_types:
            self.token_types = nn.Embedding(s.token_types, s.hidden)
        self.embedding_norm = _norm(s)
        self.dropout = nn.Dropout(s.dropout)
        self.blocks = nn.ModuleList(EncoderBlock(s) for _ in range(s.layers))
        self.head: nn.Module
        if s.head == "masked":
            self.transform = nn.Linear(s.hidden, s.hidden)
            self.transform_norm = _norm(s)
            self.head = Bias(s.vocab_size)
        else:
            self.pooler = nn.Linear(s.hidden, s.hidden)
            self.head = nn.Linear(s.hidden, s.classes)

    def forward(self, tokens: Tensor, positions: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        features = self.features(tokens, positions, documents)
        if self.settings.head == "masked":
            return F.linear(self.transformed(features), self.head_weight(), self.head_bias())
        logits: Tensor = self.head(self.dropout(torch.tanh(self.pooler(features[:, 0]))))
        return logits

    def features(self, tokens: Tensor, positions: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        """[R, T, H]"""
        check_length(tokens, self.settings.context)
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embedding(tokens) + self.positions(positions)
        if self.settings.token_types:
            x = x + self.token_types.weight[0]
        features: Tensor = self.dropout(self.embedding_norm(x))
        pattern = full_pattern(documents, documents, x.dtype)
        for block in self.blocks:
            features = block(features, pattern)
        return features

    def transformed(self, features: Tensor) -> Tensor:
        """[..., H]: what the masked head's matrix reads."""
        hidden: Tensor = self.transform_norm(activate(self.transform(features), self.settings.activation))
        return hidden

    def head_weight(self) -> Tensor:
        return self.embedding.weight

    def head_bias(self) -> Tensor | None:
        assert isinstance(self.head, Bias)
        return self.head.bias


class EncoderBlock(nn.Module):
    """norm(x + attention(x)), then norm(x + ffn(x))."""

    def __init__(self, settings: EncoderSettings) -> None:
        super().__init__()
        s = settings
        self.attention = Attention(
            AttentionShape(
                hidden=s.hidden,
                heads=s.heads,
                kv_heads=s.heads,
                head_dim=s.dim_per_head,
                qkv_bias=True,
                output_bias=True,
                dropout=s.dropout,
            )
        )
        self.attention_norm = _norm(s)
        self.ffn = FeedForward(FeedForwardShape(s.hidden, s.ffn_hidden, s.activation, gated=s.gated, bias=True))
        self.ffn_norm = _norm(s)
        self.dropout = nn.Dropout(s.dropout)

    def forward(self, x: Tensor, pattern: Pattern) -> Tensor:
        x = self.attention_norm(x + self.dropout(self.attention(x, pattern)))
        y: Tensor = self.ffn_norm(x + self.dropout(self.ffn(x)))
        return y


def _norm(s: EncoderSettings) -> nn.Module:
    return make_norm(s.norm, s.hidden, s.norm_eps, bias=True)
