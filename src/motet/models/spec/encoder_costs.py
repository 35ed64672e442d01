"""The sizes of the encoder and of the encoder-decoder by their settings."""

from motet.models.settings import EncoderDecoderSettings, EncoderSettings, TransformerSettings
from motet.models.spec.flops_and_memory import (
    AttentionSpec,
    BlockSpec,
    CountedPer,
    LayerSpec,
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
    score_bias_spec,
)


def encoder_block_specs(settings: EncoderSettings) -> tuple[BlockSpec, ...]:
    """Embedding, blocks that end in a norm, and the head for masked tokens or for a class."""
    s = settings
    embedding = embedding_spec("embedding", s.vocab_size, s.hidden, "token")
    embedding += embedding_spec("positions", s.context, s.hidden, "position")
    if s.token_types:  # every token is of the first type: a row of the table, looked up by nobody
        embedding += LayerSpec((ParameterSpec("token_types.weight", (s.token_types, s.hidden)),))
    embedding += norm_spec(s, "embedding_norm", bias=True) + dropout_spec(s, "dropout", s.hidden)
    block = (
        _self_attention(s, bias=True, per="token")
        + norm_spec(s, "attention_norm", bias=True)
        + feed_forward_spec(s, bias=True)
        + norm_spec(s, "ffn_norm", bias=True)
    )
    return (
        BlockSpec(
            "embedding", embedding + score_bias_spec(s, SavedAttentionMatrix("seen", when="unusual", rows="packed"))
        ),
        BlockSpec("block", block, "blocks.{i}.", repeat=s.layers),
        BlockSpec("head", _masked_head(s) if s.head == "masked" else _classify_head(s)),
    )


def encoder_decoder_block_specs(settings: EncoderDecoderSettings) -> tuple[BlockSpec, ...]:
    """The encoder runs over the source, the decoder over the tokens; both read one embedding table."""
    s = settings
    embedding = embedding_spec("embedding", s.vocab_size, s.hidden, "token")
    embedding += LayerSpec(saved=(SavedActivation("embedding.sources", 1, "source", "int64"),))
    embedding += score_bias_spec(s, SavedAttentionMatrix("seen", when="unusual", rows="packed", keys="source"))
    embedding += dropout_spec(s, "dropout", s.hidden) + dropout_spec(s, "dropout.source", s.hidden, "source")
    encoder = (
        norm_spec(s, "attention_norm", bias=False, per="source")
        + _self_attention(s, bias=False, per="source")
        + norm_spec(s, "ffn_norm", bias=False, per="source")
        + feed_forward_spec(s, bias=False, per="source", has_inner_dropout=True)
    )
    decoder = (
        norm_spec(s, "attention_norm", bias=False)
        + _self_attention(s, bias=False, per="token", causal=True)
        + norm_spec(s, "cross_norm", bias=False)
        + _cross_attention(s)
        + norm_spec(s, "ffn_norm", bias=False)
        + feed_forward_spec(s, bias=False, has_inner_dropout=True)
    )
    # Every block of the decoder reads the encoder's output; it is kept once.
    encoded = LayerSpec(saved=(SavedActivation("output", s.hidden, "source"),))
    return (
        BlockSpec("embedding", embedding),
        BlockSpec("encoder block", encoder, "encoder.blocks.{i}.", repeat=s.layers),
        BlockSpec("encoder end", _stack_end(s, "source") + encoded, "encoder."),
        BlockSpec("decoder block", decoder, "decoder.blocks.{i}.", repeat=s.decoder_layers or s.layers),
        BlockSpec("decoder end", _stack_end(s, "token"), "decoder."),
        BlockSpec("head", output_head_spec(s, s.tied)),
    )


def _self_attention(s: TransformerSettings, bias: bool, per: CountedPer, causal: bool = False) -> LayerSpec:
    width = s.heads * s.dim_per_head
    attention = AttentionSpec("attention", s.heads, s.dim_per_head, s.dim_per_head, causal, queries=per, keys=per)
    return (
        linear_spec("attention.qkv", s.hidden, 3 * width, bias, per)
        + attention_spec(s, attention, (SavedActivation("attention.qkv", 3 * width, per),))
        + linear_spec("attention.output", width, s.hidden, bias, per)
        + dropout_spec(s, "dropout.attention", s.hidden, per)
    )


def _cross_attention(s: EncoderDecoderSettings) -> LayerSpec:
    """Queries from the tokens, keys and values from the encoded source."""
    width = s.heads * s.dim_per_head
    attention = AttentionSpec("cross", s.heads, s.dim_per_head, s.dim_per_head, keys="source")
    saved = (SavedActivation("cross.query", width), SavedActivation("cross.key_value", 2 * width, "source"))
    return (
        linear_spec("cross.query", s.hidden, width, bias=False)
        + linear_spec("cross.key_value", s.hidden, 2 * width, bias=False, per="source", is_input_saved=True)
        + attention_spec(s, attention, saved)
        + linear_spec("cross.output", width, s.hidden, bias=False)
        + dropout_spec(s, "dropout.cross", s.hidden)
    )


def _stack_end(s: EncoderDecoderSettings, per: CountedPer) -> LayerSpec:
    """A norm, and the relative positions that all blocks of the stack share: a bucket for each pair of positions.

    A learned bias is counted as fused attention keeps it. torch's on a CPU cannot learn one: there each block keeps
    the probabilities of all pairs instead of sums.
    """
    score_bias = SavedAttentionMatrix("relative.bias", s.heads, rows="packed", queries=per, keys=per)
    buckets = SavedAttentionMatrix("relative.buckets", queries=per, keys=per, dtype="int64")
    relative = ParameterSpec("relative.weight", (s.relative_buckets, s.heads))
    layer = LayerSpec((relative,), saved=(buckets,)) + score_bias_spec(s, score_bias)
    return layer + norm_spec(s, "norm", bias=False, per=per) + dropout_spec(s, "dropout", s.hidden, per)


def _masked_head(s: EncoderSettings) -> LayerSpec:
    """A further layer, then scores by the embedding table, of the tokens that are to be predicted alone."""
    chosen = SavedActivation("transform.chosen", 1, "target", "int64")
    output = SavedActivation("transform.output", s.hidden, "target")
    return (
        linear_spec("transform", s.hidden, s.hidden, bias=True, per="target")
        + LayerSpec(saved=(chosen,) if s.activation == "relu" else (chosen, output))
        + norm_spec(s, "transform_norm", bias=True, per="target")
        + output_head_spec(s, tied=True, bias=True, per="target")
    )


def _classify_head(s: EncoderSettings) -> LayerSpec:
    """Reads the first token of each row, a view of all tokens, which are kept."""
    features = LayerSpec(saved=(SavedActivation("pooler.input", s.hidden),))
    pooler = linear_spec("pooler", s.hidden, s.hidden, bias=True, per="row", is_input_saved=True)
    if s.dropout:
        pooler += LayerSpec(saved=(SavedActivation("pooler.output", s.hidden, "row"),))
    loss = LayerSpec(
        saved=(
            SavedActivation("loss.probabilities", s.classes, "row", "wide"),
            SavedActivation("loss.targets", 1, "row", "int64"),
            SavedActivation("loss.weights", 1, "row", "wide"),
            SavedActivation("loss.total", 1, "step", "wide"),
        )
    )
    head = linear_spec("head", s.hidden, s.classes, bias=True, per="row")
    return features + pooler + dropout_spec(s, "dropout.head", s.hidden, "row") + head + loss
