"""One bidirectional encoder, BERT, with a head for masked tokens or for a class of the row.
Norms come after the residual sums. The masked head is a further layer, then scores by the embedding table."""

from typing import Any, cast

import torch
from torch import Tensor, nn

from motet.models.arch.attention_and_feed_forward import FeedForward, SelfAttention
from motet.models.arch.attention_core import choose_kernel
from motet.models.arch.attention_mask import AttentionMask, bidirectional_mask, places_in_row
from motet.models.arch.layers import apply_activation, build_norm
from motet.models.arch.loss import LogitsProjection
from motet.models.settings import EncoderSettings
from motet.models.user_module import check_sequence_length


class BidirectionalEncoder(nn.Module):
    """tokens [R, T] -> logits [R, T, V], or [R, classes] of the first token. All tokens are of the first type."""

    def __init__(self, settings: EncoderSettings) -> None:
        super().__init__()
        s = self.settings = settings
        self.embedding = nn.Embedding(s.vocab_size, s.hidden)
        self.positions = nn.Embedding(s.context, s.hidden)
        if s.token_types:
            self.token_types = nn.Embedding(s.token_types, s.hidden)
        self.embedding_norm = build_norm(s, bias=True)
        self.dropout = nn.Dropout(s.dropout)
        self.blocks = nn.ModuleList(EncoderBlock(s) for _ in range(s.layers))
        self.head: Any
        if s.head == "masked":  # the matrix is the embedding table
            self.transform, self.transform_norm = nn.Linear(s.hidden, s.hidden), build_norm(s, bias=True)
            self.head = nn.ParameterDict({"bias": torch.empty(s.vocab_size)})
            self.projection = LogitsProjection()
        else:
            self.pooler, self.head = nn.Linear(s.hidden, s.hidden), nn.Linear(s.hidden, s.classes)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        *,
        places: Tensor | None = None,
        document_count: int | None = None,
    ) -> Tensor:
        features = self.features(tokens, positions, documents, places=places, document_count=document_count)
        if self.settings.head == "masked":
            hidden = self.transform_features(features)
            return cast(Tensor, self.projection(hidden, self.head_weight(), self.head["bias"]))
        return cast(Tensor, self.head(self.dropout(torch.tanh(self.pooler(features[:, 0])))))

    def features(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        *,
        places: Tensor | None = None,
        document_count: int | None = None,
    ) -> Tensor:
        """[R, T, H], the output of the last block. Defaults are those of the decoder."""
        check_sequence_length(tokens, self.settings.context)
        if positions is None:
            positions = places_in_row(places, tokens.shape[1], tokens.device)
        x = self.embedding(tokens) + self.positions(positions)
        if self.settings.token_types:
            x = x + self.token_types.weight[0]
        features: Tensor = self.dropout(self.embedding_norm(x))
        mask = choose_kernel(
            bidirectional_mask(documents, documents), features, tokens.shape, document_count=document_count
        )
        for block in self.blocks:
            features = block(features, mask)
        return features

    def transform_features(self, features: Tensor) -> Tensor:
        """[..., H], the input of the masked head's matrix."""
        return cast(Tensor, self.transform_norm(apply_activation(self.transform(features), self.settings.activation)))

    def get_input_embeddings(self) -> nn.Embedding:
        """The table of the tokens, by the name that models of transformers use."""
        return self.embedding

    def head_weight(self) -> Tensor:
        return self.embedding.weight


class EncoderBlock(nn.Module):
    """norm(x + attention(x)), then norm(x + ffn(x))."""

    def __init__(self, s: EncoderSettings) -> None:
        super().__init__()
        self.attention = SelfAttention(s, qkv_bias=True, output_bias=True)
        self.attention_norm = build_norm(s, bias=True)
        self.ffn, self.ffn_norm = FeedForward(s, bias=True), build_norm(s, bias=True)
        self.dropout = nn.Dropout(s.dropout)

    def forward(self, x: Tensor, mask: AttentionMask) -> Tensor:
        x = self.attention_norm(x + self.dropout(self.attention(x, mask)))
        return cast(Tensor, self.ffn_norm(x + self.dropout(self.ffn(x))))
