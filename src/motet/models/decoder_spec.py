"""The decoder's sizes by its settings: plain or latent attention, a plain feed-forward network or experts.

What latent attention and experts keep for backward is assumed: the same rules applied to layers not yet written.
"""

from fractions import Fraction

from motet.models.layer_specs import (
    added_to_scores,
    attend,
    dropout,
    feed_forward,
    linear,
    norm,
    rms_norm,
    scores,
    table,
)
from motet.models.pieces import Attention, Block, Matmul, Parameter, Part, Saved, SavedPairs
from motet.models.settings import DecoderSettings, ExpertSettings, LatentAttention


def decoder_blocks(settings: DecoderSettings) -> tuple[Block, ...]:
    """Embedding, blocks (plain ones first where later ones have experts), and head."""
    s, experts = settings, settings.experts
    dense = s.layers if experts is None else min(experts.first_dense_layers, s.layers)
    attention = _attention(s) if s.latent_attention is None else _latent_attention(s, s.latent_attention)
    head = _norm(s, "norm") + scores(s, s.tied)
    blocks = [Block("embedding", _embedding(s))]
    if dense:
        part = attention + _norm(s, "ffn_norm") + feed_forward(s, s.has_ffn_bias)
        blocks.append(Block("block", part, "blocks.{i}.", repeat=dense))
    if experts is not None and s.layers > dense:
        part = attention + _norm(s, "ffn_norm") + _experts(s, experts)
        blocks.append(Block("expert block", part, "blocks.{i}.", repeat=s.layers - dense, first=dense))
    return (*blocks, Block("head", head))


def _norm(s: DecoderSettings, name: str) -> Part:
    return norm(s, name, s.has_norm_bias)


def _embedding(s: DecoderSettings) -> Part:
    """Tokens, positions, and what all blocks share: the turns of rotary positions and the bias of attention."""
    part = table("embedding", s.vocab_size, s.hidden, "token")
    if s.positions == "learned":
        part += table("positions", s.context, s.hidden, "position")
    if s.positions == "rotary":
        latent = s.latent_attention
        dims = int(s.dim_per_head * s.rotary_fraction) if latent is None else latent.rotary_head_dim
        part += Part(saved=(Saved("turns", dims, "position", "wide"),))
    seen = SavedPairs("seen", window=s.sliding_window, when="unusual", rows="packed")
    return part + dropout(s, "dropout", s.hidden) + added_to_scores(s, seen)


def _attention(s: DecoderSettings) -> Part:
    heads, kv_heads, dim = s.heads, s.kv_heads or s.heads, s.dim_per_head
    width = (heads + 2 * kv_heads) * dim
    saved, norms = [Saved("attention.qkv", width)], Part()
    if s.query_key_norm:  # the first of the norms keeps what queries, keys and values are cut from
        norms = rms_norm("attention.query_norm", dim, cut_from=width, groups=heads)
        norms += rms_norm("attention.key_norm", dim, cut_from=0, groups=kv_heads)
        saved.clear()
    if s.query_key_norm or s.positions == "rotary":  # these are made anew; the values stay where they are
        saved.append(Saved("attention.queries_keys", (heads + kv_heads) * dim))
    attention = Attention("attention", heads, dim, dim, causal=True, window=s.sliding_window)
    return (
        _norm(s, "attention_norm")
        + linear("attention.qkv", s.hidden, width, bias=s.qkv_bias or s.bias)
        + norms
        + attend(s, attention, tuple(saved))
        + _hidden_keys(s)
        + linear("attention.output", heads * dim, s.hidden, bias=s.bias)
        + dropout(s, "dropout.attention", s.hidden)
    )


def _hidden_keys(s: DecoderSettings) -> Part:
    """Attention in the open marks the keys that come later."""
    later = SavedPairs("attention.later", window=s.sliding_window, when="usual", dtype="bool")
    return Part(saved=(later,)) if s.dropout else Part()


def _latent_attention(s: DecoderSettings, latent: LatentAttention) -> Part:
    """Queries, and keys with values, each from a short vector per token; one rotated key is shared by all heads."""
    key_dim, value_dim = latent.plain_head_dim + latent.rotary_head_dim, latent.value_head_dim
    bias, short = s.qkv_bias or s.bias, latent.key_value_rank
    down, up = short + latent.rotary_head_dim, s.heads * (latent.plain_head_dim + value_dim)
    if latent.query_rank is None:
        queries = linear("attention.query", s.hidden, s.heads * key_dim, bias=False)
    else:
        queries = (
            linear("attention.query_down", s.hidden, latent.query_rank, bias)
            + rms_norm("attention.query_norm", latent.query_rank)
            + linear("attention.query_up", latent.query_rank, s.heads * key_dim, bias=False)
        )
    saved = (Saved("attention.queries_keys", 2 * s.heads * key_dim), Saved("attention.key_value_up", up))
    attention = Attention("attention", s.heads, key_dim, value_dim, causal=True, window=s.sliding_window)
    return (
        _norm(s, "attention_norm")
        + queries
        + linear("attention.key_value_down", s.hidden, down, bias, shared=True)
        + rms_norm("attention.key_value_norm", short, cut_from=down)
        + linear("attention.key_value_up", short, up, bias=False)
        + attend(s, attention, saved)
        + _hidden_keys(s)
        + linear("attention.output", s.heads * value_dim, s.hidden, bias=s.bias)
        + dropout(s, "dropout.attention", s.hidden)
    )


def _experts(s: DecoderSettings, experts: ExpertSettings) -> Part:
    """A router, and experts of which each token visits a few; shared experts are one wider network for all tokens."""
    visits, inner, gates = experts.per_token, experts.hidden, 2 if s.gated else 1
    used = Fraction(visits, experts.count)
    up = Parameter("ffn.experts.up", (experts.count, gates * inner, s.hidden), used)
    down = Parameter("ffn.experts.down", (experts.count, s.hidden, inner), used)
    routed = Part(
        (up, down),
        (
            Matmul(up.name, s.hidden, gates * inner, times=visits),
            Matmul(down.name, inner, s.hidden, times=visits),
        ),
        (
            Saved("ffn.router.scores", experts.count, dtype="wide"),
            Saved("ffn.router.chosen", visits, dtype="int64"),
            Saved("ffn.router.weights", visits, dtype="wide"),
            # Inputs and results are in the order of experts and are kept, since the results are weighted.
            Saved("ffn.experts.tokens", visits * 2 * s.hidden),
            Saved("ffn.experts.inside", visits * (gates + 1) * inner),
        ),
    )
    part = linear("ffn.router", s.hidden, experts.count, bias=False) + routed
    if experts.shared:
        width = experts.shared * inner
        part += linear("ffn.shared.up", s.hidden, gates * width, bias=False, shared=True)
        part += Part(saved=(Saved("ffn.shared.inside", gates * width),))
        part += linear("ffn.shared.down", width, s.hidden, bias=False)
    return part + dropout(s, "dropout.ffn", s.hidden)
