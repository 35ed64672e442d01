"""One causal decoder: GPT-2 and 3, Llama 2 and 3, Qwen 2 and 3, Mistral, Nemotron, Mixtral, DeepSeek-V3, by its
settings."""

from typing import cast

import torch
from torch import Tensor, nn

from motet.core.errors import InputError, check_input
from motet.models.arch.attention_and_feed_forward import FeedForward, PreNormBlock, SelfAttention
from motet.models.arch.attention_core import choose_kernel
from motet.models.arch.attention_mask import causal_mask, places_in_row
from motet.models.arch.key_value_cache import KeyValueCache
from motet.models.arch.latent_attention import LatentAttention
from motet.models.arch.layers import RotaryEmbedding, build_norm
from motet.models.arch.loss import LogitsProjection
from motet.models.arch.mixture.mixture_of_experts import MixtureOfExperts
from motet.models.settings import DecoderSettings
from motet.models.user_module import check_sequence_length


class CausalDecoder(nn.Module):
    """tokens [R, T] -> logits [R, T, V]."""

    def __init__(self, settings: DecoderSettings) -> None:
        super().__init__()
        s = self.settings = settings
        self.rotary = _build_rotary(s)
        self.embedding = nn.Embedding(s.vocab_size, s.hidden)
        if s.positions == "learned":
            self.positions = nn.Embedding(s.context, s.hidden)
        self.dropout = nn.Dropout(s.dropout)
        self.blocks = nn.ModuleList(_build_block(s, layer) for layer in range(s.layers))
        self.norm = build_norm(s, bias=s.has_norm_bias)
        if not s.tied:  # a bare matrix, since the loss never holds all logits
            self.head = nn.ParameterDict({"weight": torch.empty(s.vocab_size, s.hidden)})
        self.projection = LogitsProjection()

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
        return cast(Tensor, self.projection(features, self.head_weight()))

    def features(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        *,
        places: Tensor | None = None,
        document_count: int | None = None,
    ) -> Tensor:
        """[R, T, H], the input of the head. By default each row is one document, and positions are places in the row.
        By default tokens are whole rows; `places` [T] are those of a part, which attends to itself. With the
        number of documents in all rows, no kernel waits for it."""
        s = self.settings
        check_sequence_length(tokens, s.context)
        if positions is None:
            positions = places_in_row(places, tokens.shape[1], tokens.device)
        x = self.embedding(tokens)
        x = self.dropout(x + self.positions(positions) if s.positions == "learned" else x)
        rotary = None if self.rotary is None else self.rotary.rotations_at(positions, x.dtype)
        mask = choose_kernel(
            causal_mask(documents, places, s.sliding_window), x, tokens.shape, document_count=document_count
        )
        for block in self.blocks:
            x = block(x, mask, rotary)
        return cast(Tensor, self.norm(x))

    def next_logits(self, tokens: Tensor, cache: KeyValueCache) -> Tensor:
        """[R, V], the logits after the last of these tokens [R, T], which follow those in the cache and join them."""
        s, places = self.settings, cache.places(tokens.shape[1], tokens.device)
        check_sequence_length(tokens, s.context - cache.length)
        x = self.embedding(tokens)
        x = self.dropout(x + self.positions(places) if s.positions == "learned" else x)
        rotary = None if self.rotary is None else self.rotary.rotations_at(places, x.dtype)
        mask = cache.mask(places, s.sliding_window)
        for index, block in enumerate(self.blocks):
            x = block(x, mask, rotary, cache=cache.layer(index))
        cache.length += tokens.shape[1]
        return cast(Tensor, self.projection(self.norm(x[:, -1:]), self.head_weight()))[:, 0]

    def get_input_embeddings(self) -> nn.Embedding:
        """The table of the tokens, by the name that models of transformers use."""
        return self.embedding

    def head_weight(self) -> Tensor:
        return self.embedding.weight if self.settings.tied else self.head["weight"]


def _build_block(s: DecoderSettings, layer: int) -> PreNormBlock:
    experts = s.experts_of(layer)
    ffn = FeedForward(s, bias=s.has_ffn_bias) if experts is None else MixtureOfExperts(s, experts)
    return PreNormBlock(s, _build_attention(s), ffn, norm_bias=s.has_norm_bias, has_cross=False)


def _build_attention(s: DecoderSettings) -> nn.Module:
    if s.latent_attention is not None:
        return LatentAttention(s, s.latent_attention)
    return SelfAttention(
        s, kv_heads=s.kv_heads, qkv_bias=s.qkv_bias or s.bias, output_bias=s.bias, query_key_norm=s.query_key_norm
    )


def _build_rotary(s: DecoderSettings) -> RotaryEmbedding | None:
    if s.positions != "rotary":
        return None
    scaling, latent = s.rope_scaling, s.latent_attention
    dims = latent.rotary_head_dim if latent else int(s.dim_per_head * s.rotary_fraction)
    check_input(
        latent or not (s.dim_per_head % 2 or dims % 2 or dims == 0),
        f"model.rotary_fraction = {s.rotary_fraction} rotates {dims} components of model.head_dim = {s.dim_per_head}, "
        "but rotary positions rotate pairs; make both numbers even and above 0",
    )
    if scaling and scaling.high_frequency_factor <= scaling.low_frequency_factor:
        raise InputError(
            f"model.rope_scaling.high_frequency_factor = {scaling.high_frequency_factor} is not above "
            f"low_frequency_factor = {scaling.low_frequency_factor}; raise the first or lower the second"
        )
    return RotaryEmbedding(dims, s.rope_theta, scaling)
