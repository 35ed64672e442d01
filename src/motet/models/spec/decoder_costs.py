"""The decoder's sizes by its settings: plain or latent attention, a plain feed-forward network or experts.

What latent attention and experts keep for backward is assumed: the same rules applied to layers not yet written.
"""

from fractions import Fraction

from motet.models.settings import DecoderSettings, LatentAttentionSettings, MixtureOfExpertsSettings
from motet.models.spec.flops_and_memory import (
    AttentionSpec,
    BlockSpec,
    LayerSpec,
    MatmulSpec,
    ParameterSpec,
    SavedActivation,
    SavedAttentionMatrix,
)
from motet.models.spec.layer_costs import (
    attention_spec,
    dropout_spec,
    embedding_spec,
    feed_forward_spec,
    linear_spec,
    norm_spec,
    output_head_spec,
    rms_norm_spec,
    score_bias_spec,
)


def decoder_block_specs(settings: DecoderSettings) -> tuple[BlockSpec, ...]:
    """Embedding, blocks (plain ones first where later ones have experts), and head."""
    s, experts = settings, settings.experts
    dense = s.layers if experts is None else min(experts.first_dense_layers, s.layers)
    attention = _attention(s) if s.latent_attention is None else _latent_attention(s, s.latent_attention)
    head = _norm(s, "norm") + output_head_spec(s, s.tied)
    blocks = [BlockSpec("embedding", _embedding(s))]
    if dense:
        layer = attention + _norm(s, "ffn_norm") + feed_forward_spec(s, s.has_ffn_bias)
        blocks.append(BlockSpec("block", layer, "blocks.{i}.", repeat=dense))
    if experts is not None and s.layers > dense:
        layer = attention + _norm(s, "ffn_norm") + _experts(s, experts)
        blocks.append(BlockSpec("expert block", layer, "blocks.{i}.", repeat=s.layers - dense, first_index=dense))
    return (*blocks, BlockSpec("head", head))


def _norm(s: DecoderSettings, name: str) -> LayerSpec:
    return norm_spec(s, name, s.has_norm_bias)


def _embedding(s: DecoderSettings) -> LayerSpec:
    """Tokens, positions, and what all blocks share: the turns of rotary positions and the bias of attention."""
    layer = embedding_spec("embedding", s.vocab_size, s.hidden, "token")
    if s.positions == "learned":
        layer += embedding_spec("positions", s.context, s.hidden, "position")
    if s.positions == "rotary":
        latent = s.latent_attention
        dims = int(s.dim_per_head * s.rotary_fraction) if latent is None else latent.rotary_head_dim
        layer += LayerSpec(saved=(SavedActivation("turns", dims, "position", "wide"),))
    document_mask = SavedAttentionMatrix("seen", window=s.sliding_window, when="unusual", rows="packed")
    return layer + dropout_spec(s, "dropout", s.hidden) + score_bias_spec(s, document_mask)


def _attention(s: DecoderSettings) -> LayerSpec:
    heads, kv_heads, dim = s.heads, s.kv_heads or s.heads, s.dim_per_head
    width = (heads + 2 * kv_heads) * dim
    saved, norms = [SavedActivation("attention.qkv", width)], LayerSpec()
    if s.query_key_norm:  # the first of the norms keeps what queries, keys and values are cut from
        norms = rms_norm_spec("attention.query_norm", dim, saved_elements=width, groups=heads)
        norms += rms_norm_spec("attention.key_norm", dim, saved_elements=0, groups=kv_heads)
        saved.clear()
    if s.query_key_norm or s.positions == "rotary":  # these are made anew; the values stay where they are
        saved.append(SavedActivation("attention.queries_keys", (heads + kv_heads) * dim))
    attention = AttentionSpec("attention", heads, dim, dim, causal=True, window=s.sliding_window)
    return (
        _norm(s, "attention_norm")
        + linear_spec("attention.qkv", s.hidden, width, bias=s.qkv_bias or s.bias)
        + norms
        + attention_spec(s, attention, tuple(saved))
        + _causal_mask_spec(s)
        + linear_spec("attention.output", heads * dim, s.hidden, bias=s.bias)
        + dropout_spec(s, "dropout.attention", s.hidden)
    )


def _causal_mask_spec(s: DecoderSettings) -> LayerSpec:
    """Attention in the open marks the keys that come later."""
    causal_mask = SavedAttentionMatrix("attention.later", window=s.sliding_window, when="usual", dtype="bool")
    return LayerSpec(saved=(causal_mask,)) if s.dropout else LayerSpec()


def _latent_attention(s: DecoderSettings, latent: LatentAttentionSettings) -> LayerSpec:
    """Queries, and keys with values, each from a short vector per token; one rotated key is shared by all heads."""
    key_dim, value_dim = latent.plain_head_dim + latent.rotary_head_dim, latent.value_head_dim
    bias, key_value_rank = s.qkv_bias or s.bias, latent.key_value_rank
    down, up = key_value_rank + latent.rotary_head_dim, s.heads * (latent.plain_head_dim + value_dim)
    if latent.query_rank is None:
        queries = linear_spec("attention.query", s.hidden, s.heads * key_dim, bias=False)
    else:
        queries = (
            linear_spec("attention.query_down", s.hidden, latent.query_rank, bias)
            + rms_norm_spec("attention.query_norm", latent.query_rank)
            + linear_spec("attention.query_up", latent.query_rank, s.heads * key_dim, bias=False)
        )
    saved = (
        SavedActivation("attention.queries_keys", 2 * s.heads * key_dim),
        SavedActivation("attention.key_value_up", up),
    )
    attention = AttentionSpec("attention", s.heads, key_dim, value_dim, causal=True, window=s.sliding_window)
    return (
        _norm(s, "attention_norm")
        + queries
        + linear_spec("attention.key_value_down", s.hidden, down, bias, is_input_saved=True)
        + rms_norm_spec("attention.key_value_norm", key_value_rank, saved_elements=down)
        + linear_spec("attention.key_value_up", key_value_rank, up, bias=False)
        + attention_spec(s, attention, saved)
        + _causal_mask_spec(s)
        + linear_spec("attention.output", s.heads * value_dim, s.hidden, bias=s.bias)
        + dropout_spec(s, "dropout.attention", s.hidden)
    )


def _experts(s: DecoderSettings, experts: MixtureOfExpertsSettings) -> LayerSpec:
    """A router, and experts of which each token visits a few; shared experts are one wider network for all tokens."""
    experts_per_token, expert_hidden, gates = experts.per_token, experts.hidden, 2 if s.gated else 1
    used = Fraction(experts_per_token, experts.count)
    up = ParameterSpec("ffn.experts.up", (experts.count, gates * expert_hidden, s.hidden), used)
    down = ParameterSpec("ffn.experts.down", (experts.count, s.hidden, expert_hidden), used)
    routed = LayerSpec(
        (up, down),
        (
            MatmulSpec(up.name, s.hidden, gates * expert_hidden, uses_per_token=experts_per_token),
            MatmulSpec(down.name, expert_hidden, s.hidden, uses_per_token=experts_per_token),
        ),
        (
            SavedActivation("ffn.router.scores", experts.count, dtype="wide"),
            SavedActivation("ffn.router.chosen", experts_per_token, dtype="int64"),
            SavedActivation("ffn.router.weights", experts_per_token, dtype="wide"),
            # Inputs and results are in the order of experts and are kept, since the results are weighted.
            SavedActivation("ffn.experts.tokens", experts_per_token * 2 * s.hidden),
            SavedActivation("ffn.experts.inside", experts_per_token * (gates + 1) * expert_hidden),
        ),
    )
    layer = linear_spec("ffn.router", s.hidden, experts.count, bias=False) + routed
    if experts.shared:
        width = experts.shared * expert_hidden
        layer += linear_spec("ffn.shared.up", s.hidden, gates * width, bias=False, is_input_saved=True)
        layer += LayerSpec(saved=(SavedActivation("ffn.shared.inside", gates * width),))
        layer += linear_spec("ffn.shared.down", width, s.hidden, bias=False)
    return layer + dropout_spec(s, "dropout.ffn", s.hidden)
