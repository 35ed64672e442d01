"""The sizes of the encoder and of the encoder-decoder by their settings."""

from motet.models.layer_specs import added_to_scores, attend, dropout, feed_forward, linear, norm, scores, table
from motet.models.pieces import Attention, Block, Parameter, Part, Per, Saved, SavedPairs
from motet.models.settings import Architecture, EncoderDecoderSettings, EncoderSettings


def encoder_blocks(settings: EncoderSettings) -> tuple[Block, ...]:
    """Embedding, blocks that end in a norm, and the head for masked tokens or for a class."""
    s = settings
    embedding = table("embedding", s.vocab_size, s.hidden, "token")
    embedding += table("positions", s.context, s.hidden, "position")
    if s.token_types:  # every token is of the first type: a row of the table, looked up by nobody
        embedding += Part((Parameter("token_types.weight", (s.token_types, s.hidden)),))
    embedding += norm(s, "embedding_norm", bias=True) + dropout(s, "dropout", s.hidden)
    block = (
        _self_attention(s, bias=True, per="token")
        + norm(s, "attention_norm", bias=True)
        + feed_forward(s, bias=True)
        + norm(s, "ffn_norm", bias=True)
    )
    return (
        Block("embedding", embedding + added_to_scores(s, SavedPairs("seen", when="unusual", rows="packed"))),
        Block("block", block, "blocks.{i}.", repeat=s.layers),
        Block("head", _masked_head(s) if s.head == "masked" else _classify_head(s)),
    )


def encoder_decoder_blocks(settings: EncoderDecoderSettings) -> tuple[Block, ...]:
    """The encoder runs over the source, the decoder over the tokens; both read one embedding table."""
    s = settings
    embedding = table("embedding", s.vocab_size, s.hidden, "token")
    embedding += Part(saved=(Saved("embedding.sources", 1, "source", "int64"),))
    embedding += added_to_scores(s, SavedPairs("seen", when="unusual", rows="packed", keys="source"))
    embedding += dropout(s, "dropout", s.hidden) + dropout(s, "dropout.source", s.hidden, "source")
    encoder = (
        norm(s, "attention_norm", bias=False, per="source")
        + _self_attention(s, bias=False, per="source")
        + norm(s, "ffn_norm", bias=False, per="source")
        + feed_forward(s, bias=False, per="source", inner_dropout=True)
    )
    decoder = (
        norm(s, "attention_norm", bias=False)
        + _self_attention(s, bias=False, per="token", causal=True)
        + norm(s, "cross_norm", bias=False)
        + _cross_attention(s)
        + norm(s, "ffn_norm", bias=False)
        + feed_forward(s, bias=False, inner_dropout=True)
    )
    # Every block of the decoder reads the encoder's output; it is kept once.
    encoded = Part(saved=(Saved("output", s.hidden, "source"),))
    return (
        Block("embedding", embedding),
        Block("encoder block", encoder, "encoder.blocks.{i}.", repeat=s.layers),
        Block("encoder end", _stack_end(s, "source") + encoded, "encoder."),
        Block("decoder block", decoder, "decoder.blocks.{i}.", repeat=s.decoder_layers or s.layers),
        Block("decoder end", _stack_end(s, "token"), "decoder."),
        Block("head", scores(s, s.tied)),
    )


def _self_attention(s: Architecture, bias: bool, per: Per, causal: bool = False) -> Part:
    width = s.heads * s.dim_per_head
    attention = Attention("attention", s.heads, s.dim_per_head, s.dim_per_head, causal, queries=per, keys=per)
    return (
        linear("attention.qkv", s.hidden, 3 * width, bias, per)
        + attend(s, attention, (Saved("attention.qkv", 3 * width, per),))
        + linear("attention.output", width, s.hidden, bias, per)
        + dropout(s, "dropout.attention", s.hidden, per)
    )


def _cross_attention(s: EncoderDecoderSettings) -> Part:
    """Queries from the tokens, keys and values from the encoded source."""
    width = s.heads * s.dim_per_head
    attention = Attention("cross", s.heads, s.dim_per_head, s.dim_per_head, keys="source")
    saved = (Saved("cross.query", width), Saved("cross.key_value", 2 * width, "source"))
    return (
        linear("cross.query", s.hidden, width, bias=False)
        + linear("cross.key_value", s.hidden, 2 * width, bias=False, per="source", shared=True)
        + attend(s, attention, saved)
        + linear("cross.output", width, s.hidden, bias=False)
        + dropout(s, "dropout.cross", s.hidden)
    )


def _stack_end(s: EncoderDecoderSettings, per: Per) -> Part:
    """A norm, and the relative positions that all blocks of the stack share: a bucket for each pair of positions.

    A learned bias is counted as fused attention keeps it. torch's on a CPU cannot learn one: there each block keeps
    the probabilities of all pairs instead of sums.
    """
    added = SavedPairs("relative.bias", s.heads, rows="packed", queries=per, keys=per)
    buckets = SavedPairs("relative.buckets", queries=per, keys=per, dtype="int64")
    relative = Parameter("relative.weight", (s.relative_buckets, s.heads))
    part = Part((relative,), saved=(buckets,)) + added_to_scores(s, added)
    return part + norm(s, "norm", bias=False, per=per) + dropout(s, "dropout", s.hidden, per)


def _masked_head(s: EncoderSettings) -> Part:
    """A further layer, then scores by the embedding table, of the tokens that are to be predicted alone."""
    chosen = Saved("transform.chosen", 1, "target", "int64")
    output = Saved("transform.output", s.hidden, "target")
    return (
        linear("transform", s.hidden, s.hidden, bias=True, per="target")
        + Part(saved=(chosen,) if s.activation == "relu" else (chosen, output))
        + norm(s, "transform_norm", bias=True, per="target")
        + scores(s, tied=True, bias=True, per="target")
    )


def _classify_head(s: EncoderSettings) -> Part:
    """Reads the first token of each row, a view of all tokens, which are kept."""
    features = Part(saved=(Saved("pooler.input", s.hidden),))
    pooler = linear("pooler", s.hidden, s.hidden, bias=True, per="row", shared=True)
    if s.dropout:
        pooler += Part(saved=(Saved("pooler.output", s.hidden, "row"),))
    loss = Part(
        saved=(
            Saved("loss.probabilities", s.classes, "row", "wide"),
            Saved("loss.targets", 1, "row", "int64"),
            Saved("loss.weights", 1, "row", "wide"),
            Saved("loss.total", 1, "step", "wide"),
        )
    )
    head = linear("head", s.hidden, s.classes, bias=True, per="row")
    return features + pooler + dropout(s, "dropout.head", s.hidden, "row") + head + loss
