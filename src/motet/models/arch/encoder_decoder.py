"""One encoder-decoder, T5: relative positions, norms without biases, scores that are not scaled.
The encoder reads the source. The decoder reads the tokens and attends to the encoded source of the same document."""

import math
from typing import Any, cast

import torch
from torch import Tensor, nn

from motet.core.errors import check_input
from motet.models.arch.attention_and_feed_forward import FeedForward, PreNormBlock, SelfAttention
from motet.models.arch.attention_core import attention_exchange
from motet.models.arch.attention_mask import AttentionMask, bidirectional_mask, causal_mask, places_in_row
from motet.models.arch.layers import build_norm
from motet.models.arch.loss import LogitsProjection
from motet.models.settings import EncoderDecoderSettings
from motet.models.user_module import check_sequence_length


class EncoderDecoderModel(nn.Module):
    """tokens [R, T] and source [R, S] -> logits [R, T, V]."""

    def __init__(self, settings: EncoderDecoderSettings) -> None:
        super().__init__()
        s = self.settings = settings
        buckets = f"model.relative_buckets = {s.relative_buckets}"
        far = f"model.relative_distance = {s.relative_distance} is not above half of {buckets}; raise the distance"
        check_input(s.relative_buckets >= 4, f"{buckets} is too few: the encoder halves them twice, so at least 4")
        check_input(s.relative_distance > s.relative_buckets // 2, far)
        self.embedding = nn.Embedding(s.vocab_size, s.hidden)
        self.encoder = T5Stack(s, s.layers, is_decoder=False)
        self.decoder = T5Stack(s, s.decoder_layers or s.layers, is_decoder=True)
        self.dropout = nn.Dropout(s.dropout)
        if not s.tied:  # a bare matrix, since the loss never holds all logits
            self.head = nn.ParameterDict({"weight": torch.empty(s.vocab_size, s.hidden)})
        self.projection = LogitsProjection()

    def forward(
        self,
        tokens: Tensor,
        source: Tensor,
        documents: Tensor | None = None,
        source_documents: Tensor | None = None,
        *,
        places: Tensor | None = None,
    ) -> Tensor:
        features = self.features(tokens, source, documents, source_documents, places=places)
        return cast(Tensor, self.projection(features, self.head_weight()))

    def features(
        self,
        tokens: Tensor,
        source: Tensor,
        documents: Tensor | None = None,
        source_documents: Tensor | None = None,
        *,
        places: Tensor | None = None,
    ) -> Tensor:
        """[R, T, H], the input of the head. Both kinds of documents are passed, or neither.
        By default tokens are whole rows; `places` [T] are those of a part. The source is always whole."""
        assert (documents is None) == (source_documents is None)
        check_sequence_length(tokens, self.settings.context)
        check_sequence_length(source, self.settings.context)
        x = self.dropout(self.embedding(source))
        encoded = self.encoder(x, bidirectional_mask(source_documents, source_documents))
        x = self.dropout(self.embedding(tokens))
        cross_mask = bidirectional_mask(documents, source_documents)
        if attention_exchange.get() is None:
            cross_mask.dense(tokens.shape[1], source.shape[1], dtype=x.dtype, device=x.device)
        decoded: Tensor = self.decoder(x, causal_mask(documents, places), encoded, cross_mask)
        # A table that is also the head has the scale of an embedding, so logits are scaled down.
        return decoded * self.settings.hidden**-0.5 if self.settings.tied else decoded

    def get_input_embeddings(self) -> nn.Embedding:
        """The table of the tokens, by the name that models of transformers use."""
        return self.embedding

    def head_weight(self) -> Tensor:
        return self.embedding.weight if self.settings.tied else self.head["weight"]


class T5Stack(nn.Module):
    """Blocks that share one table of relative positions, and a norm at the end."""

    def __init__(self, s: EncoderDecoderSettings, layers: int, is_decoder: bool) -> None:
        super().__init__()
        self.settings, self.is_decoder = s, is_decoder
        self.blocks = nn.ModuleList(_build_block(s, is_decoder) for _ in range(layers))
        self.relative = nn.Embedding(s.relative_buckets, s.heads)
        self.norm = build_norm(s, bias=False)
        self.dropout = nn.Dropout(s.dropout)

    def forward(self, x: Tensor, mask: AttentionMask, *encoded: Any) -> Tensor:
        length, device = x.shape[1], x.device
        mask = mask.with_bias(self._relative_bias(places_in_row(mask.queries.places, length, device)))
        # Made outside of the blocks, so that a block which is computed again does not make it again.
        mask.dense(length, length, dtype=x.dtype, device=device)
        for block in self.blocks:
            x = block(x, mask, None, *encoded)
        return cast(Tensor, self.dropout(self.norm(x)))

    def _relative_bias(self, places: Tensor) -> Tensor:
        """[1, heads, T, T]"""
        distance = places - places.unsqueeze(1)  # from query to key
        buckets, max_distance = self.settings.relative_buckets, self.settings.relative_distance
        if self.is_decoder:
            bucket = relative_bucket((-distance).clamp(min=0), buckets, max_distance)
        else:
            half = buckets // 2
            bucket = relative_bucket(distance.abs(), half, max_distance) + half * (distance > 0)
        return cast(Tensor, self.relative(bucket).permute(2, 0, 1).unsqueeze(0))


def _build_block(s: EncoderDecoderSettings, is_decoder: bool) -> PreNormBlock:
    attention, ffn = SelfAttention(s, scale_scores=False), FeedForward(s, inner_dropout=s.dropout)
    return PreNormBlock(s, attention, ffn, norm_bias=False, has_cross=is_decoder)


def relative_bucket(distance: Tensor, buckets: int, max_distance: int) -> Tensor:
    """The first half of the buckets hold one distance each; the others grow in size up to `max_distance` and beyond."""
    exact = buckets // 2
    # Computed in float32, as in every published T5: another dtype may put a distance at a border into the next bucket.
    growth = torch.log(distance.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    coarse = exact + (growth * (buckets - exact)).long()
    return torch.where(distance < exact, distance, coarse.clamp(max=buckets - 1))
