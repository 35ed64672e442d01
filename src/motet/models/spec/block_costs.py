"""Costs of the layers in models/arch/attention_and_feed_forward.py, and of the blocks of the three architectures.
A tensor that two layers keep is counted once: by a linear layer or norm its input, by attention its queries, keys and
values, by a feed-forward network its inner activations. A view keeps its whole storage, so queries, keys and values
count as one tensor. Latent attention and experts, which are not written yet, are assumed to follow the same rules."""

from fractions import Fraction

from motet.models.settings import (
    DecoderSettings,
    EncoderDecoderSettings,
    EncoderSettings,
    LatentAttentionSettings,
    MixtureOfExpertsSettings,
    TransformerSettings,
)
from motet.models.spec.layer_specs import (
    AttentionSpec,
    BlockSpec,
    CountedPer,
    LayerSpec,
    MatmulSpec,
    ParameterSpec,
    SavedActivation,
    SavedAttentionMatrix,
)


def decoder_block_specs(s: DecoderSettings) -> tuple[BlockSpec, ...]:
    """Embedding, blocks (plain ones first where later ones have experts), and head."""
    experts, bias = s.experts, s.has_norm_bias
    dense = s.layers if experts is None else min(experts.first_dense_layers, s.layers)
    attention = _decoder_attention(s) if s.latent_attention is None else _latent_attention(s, s.latent_attention)
    layer = norm_spec(s, "attention_norm", bias=bias) + attention + norm_spec(s, "ffn_norm", bias=bias)
    blocks = [BlockSpec("embedding", _decoder_embedding(s))]
    if dense:
        blocks.append(BlockSpec("block", layer + feed_forward_spec(s, bias=s.has_ffn_bias), "blocks.{i}.", dense))
    if experts is not None and s.layers > dense:
        layer += _experts(s, experts)
        blocks.append(BlockSpec("expert block", layer, "blocks.{i}.", s.layers - dense, first_index=dense))
    return (*blocks, BlockSpec("head", norm_spec(s, "norm", bias=bias) + output_head_spec(s, tied=s.tied)))


def encoder_block_specs(s: EncoderSettings) -> tuple[BlockSpec, ...]:
    """Embedding, blocks that end in a norm, and the head for masked tokens or for a class."""
    embedding = embedding_spec("embedding", s.vocab_size, s.hidden)
    embedding += embedding_spec("positions", s.context, s.hidden, per="position")
    if s.token_types:  # every token is of the first type, so no index is kept
        embedding += LayerSpec((ParameterSpec("token_types.weight", (s.token_types, s.hidden)),))
    embedding += norm_spec(s, "embedding_norm", bias=True) + dropout_spec(s, "dropout", s.hidden)
    attention = _self_attention(s, bias=True) + norm_spec(s, "attention_norm", bias=True)
    ffn = feed_forward_spec(s, bias=True) + norm_spec(s, "ffn_norm", bias=True)
    return (
        BlockSpec("embedding", embedding + _document_mask(s)),
        BlockSpec("block", attention + ffn, "blocks.{i}.", s.layers),
        BlockSpec("head", _masked_head(s) if s.head == "masked" else _classification_head(s)),
    )


def encoder_decoder_block_specs(s: EncoderDecoderSettings) -> tuple[BlockSpec, ...]:
    """Encoder blocks over the source and decoder blocks over the tokens; both read one embedding table."""
    embedding = embedding_spec("embedding", s.vocab_size, s.hidden)
    embedding += saved_spec(SavedActivation("embedding.sources", 1, "source", "int64"))
    embedding += _document_mask(s, "source")
    embedding += dropout_spec(s, "dropout", s.hidden) + dropout_spec(s, "dropout.source", s.hidden, per="source")
    # Every block of the decoder reads the encoder's output; it is kept once.
    encoded = saved_spec(SavedActivation("output", s.hidden, "source"))
    return (
        BlockSpec("embedding", embedding),
        BlockSpec("encoder block", _t5_layer(s, "source"), "encoder.blocks.{i}.", s.layers),
        BlockSpec("encoder end", _stack_end(s, "source") + encoded, "encoder."),
        BlockSpec("decoder block", _t5_layer(s, "token"), "decoder.blocks.{i}.", s.decoder_layers or s.layers),
        BlockSpec("decoder end", _stack_end(s, "token"), "decoder."),
        BlockSpec("head", output_head_spec(s, tied=s.tied)),
    )


def _document_mask(s: TransformerSettings, keys: CountedPer = "token", window: int | None = None) -> LayerSpec:
    mask = SavedAttentionMatrix("document_mask", window=window, saved_with="explicit mask", rows="packed", keys=keys)
    return LayerSpec() if s.dropout else saved_spec(mask)  # only fused attention keeps it


# --- the decoder -----------------------------------------------------------------------------------


def _decoder_embedding(s: DecoderSettings) -> LayerSpec:
    layer = embedding_spec("embedding", s.vocab_size, s.hidden)
    if s.positions == "learned":
        layer += embedding_spec("positions", s.context, s.hidden, per="position")
    if s.positions == "rotary":
        latent = s.latent_attention
        dims = int(s.dim_per_head * s.rotary_fraction) if latent is None else latent.rotary_head_dim
        layer += saved_spec(SavedActivation("rotations", dims, "position", "wide"))
    return layer + dropout_spec(s, "dropout", s.hidden) + _document_mask(s, window=s.sliding_window)


def _decoder_attention(s: DecoderSettings) -> LayerSpec:
    heads, kv_heads, dim = s.heads, s.kv_heads or s.heads, s.dim_per_head
    width = (heads + 2 * kv_heads) * dim
    layer = linear_spec("attention.qkv", s.hidden, width, bias=s.qkv_bias or s.bias)
    saved = [SavedActivation("attention.qkv", width)]
    if s.query_key_norm:  # the first norm keeps the tensor of queries, keys and values
        layer += rms_norm_spec("attention.query_norm", dim, saved_elements=width, groups=heads)
        layer += rms_norm_spec("attention.key_norm", dim, saved_elements=0, groups=kv_heads)
        saved.clear()
    if s.query_key_norm or s.positions == "rotary":  # queries and keys are new tensors; the values stay views
        saved.append(SavedActivation("attention.queries_keys", (heads + kv_heads) * dim))
    return layer + _causal_attention(s, dim, dim, *saved)


def _latent_attention(s: DecoderSettings, latent: LatentAttentionSettings) -> LayerSpec:
    """Queries, and keys with values, each from a short vector per token; all heads share one rotated key."""
    key_dim, value_dim = latent.plain_head_dim + latent.rotary_head_dim, latent.value_head_dim
    bias, rank, query_rank = s.qkv_bias or s.bias, latent.key_value_rank, latent.query_rank
    down, up = rank + latent.rotary_head_dim, s.heads * (latent.plain_head_dim + value_dim)
    queries = (
        linear_spec("attention.query", s.hidden, s.heads * key_dim)
        if query_rank is None
        else linear_spec("attention.query_down", s.hidden, query_rank, bias=bias)
        + rms_norm_spec("attention.query_norm", query_rank)
        + linear_spec("attention.query_up", query_rank, s.heads * key_dim)
    )
    queries_keys = SavedActivation("attention.queries_keys", 2 * s.heads * key_dim)
    return (
        queries
        + linear_spec("attention.key_value_down", s.hidden, down, bias=bias, is_input_saved=True)
        + rms_norm_spec("attention.key_value_norm", rank, saved_elements=down)
        + linear_spec("attention.key_value_up", rank, up)
        + _causal_attention(s, key_dim, value_dim, queries_keys, SavedActivation("attention.key_value_up", up))
    )


def _causal_attention(s: DecoderSettings, key_dim: int, value_dim: int, *saved: SavedActivation) -> LayerSpec:
    window = s.sliding_window
    attention = AttentionSpec("attention", s.heads, key_dim, value_dim, causal=True, window=window)
    layer = attention_spec(s, attention, *saved, bias=s.bias)
    # Attention with explicit probabilities also keeps the mask of later keys.
    mask = SavedAttentionMatrix("attention.causal_mask", window=window, saved_with="implicit mask", dtype="bool")
    return layer + saved_spec(mask) if s.dropout else layer


def _experts(s: DecoderSettings, experts: MixtureOfExpertsSettings) -> LayerSpec:
    """A router, and experts of which each token visits a few; shared experts are one wider network for all tokens."""
    count, per_token, inner, gates = experts.count, experts.per_token, experts.hidden, 2 if s.gated else 1
    fraction, up, down = Fraction(per_token, count), "ffn.experts.up", "ffn.experts.down"
    layer = linear_spec("ffn.router", s.hidden, count) + LayerSpec(
        (
            ParameterSpec(up, (count, gates * inner, s.hidden), fraction),
            ParameterSpec(down, (count, s.hidden, inner), fraction),
        ),
        (
            MatmulSpec(up, s.hidden, gates * inner, uses_per_token=per_token),
            MatmulSpec(down, inner, s.hidden, uses_per_token=per_token),
        ),
        (
            SavedActivation("ffn.router.scores", count, dtype="wide"),
            SavedActivation("ffn.router.chosen", per_token, dtype="int64"),
            SavedActivation("ffn.router.weights", per_token, dtype="wide"),
            # Inputs and results, in the order of experts; the results are kept because they are weighted.
            SavedActivation("ffn.experts.tokens", per_token * 2 * s.hidden),
            SavedActivation("ffn.experts.inner", per_token * (gates + 1) * inner),
        ),
    )
    if experts.shared:
        width = experts.shared * inner
        layer += linear_spec("ffn.shared.up", s.hidden, gates * width, is_input_saved=True)
        layer += saved_spec(SavedActivation("ffn.shared.inner", gates * width))
        layer += linear_spec("ffn.shared.down", width, s.hidden)
    return layer + dropout_spec(s, "dropout.ffn", s.hidden)


# --- the encoder, and both stacks of the encoder-decoder -------------------------------------------


def _self_attention(
    s: TransformerSettings, *, bias: bool = False, per: CountedPer = "token", causal: bool = False
) -> LayerSpec:
    dim, width = s.dim_per_head, 3 * s.heads * s.dim_per_head
    attention = AttentionSpec("attention", s.heads, dim, dim, causal, queries=per, keys=per)
    qkv = linear_spec("attention.qkv", s.hidden, width, bias=bias, per=per)
    return qkv + attention_spec(s, attention, SavedActivation("attention.qkv", width, per), bias=bias)


def _t5_layer(s: EncoderDecoderSettings, per: CountedPer) -> LayerSpec:
    is_decoder = per == "token"
    return (
        norm_spec(s, "attention_norm", per=per)
        + _self_attention(s, per=per, causal=is_decoder)
        + (norm_spec(s, "cross_norm") + _cross_attention(s) if is_decoder else LayerSpec())
        + norm_spec(s, "ffn_norm", per=per)
        + feed_forward_spec(s, per=per, has_inner_dropout=True)
    )


def _cross_attention(s: EncoderDecoderSettings) -> LayerSpec:
    width = s.heads * s.dim_per_head
    attention = AttentionSpec("cross", s.heads, s.dim_per_head, s.dim_per_head, keys="source")
    saved = (SavedActivation("cross.query", width), SavedActivation("cross.key_value", 2 * width, "source"))
    return (
        linear_spec("cross.query", s.hidden, width)
        + linear_spec("cross.key_value", s.hidden, 2 * width, per="source", is_input_saved=True)
        + attention_spec(s, attention, *saved)
    )


def _stack_end(s: EncoderDecoderSettings, per: CountedPer) -> LayerSpec:
    """A norm, and the relative positions that all blocks of the stack share: a bucket for each pair of positions.
    A learned bias is counted as fused attention keeps it. On a CPU torch's fused attention cannot learn one, and each
    block keeps the probabilities of all pairs instead of sums."""
    bias = SavedAttentionMatrix("relative.bias", s.heads, rows="packed", queries=per, keys=per)
    buckets = SavedAttentionMatrix("relative.buckets", queries=per, keys=per, dtype="int64")
    relative = LayerSpec((ParameterSpec("relative.weight", (s.relative_buckets, s.heads)),), saved=(buckets,))
    norm = norm_spec(s, "norm", per=per) + dropout_spec(s, "dropout", s.hidden, per=per)
    return relative + norm if s.dropout else relative + saved_spec(bias) + norm


def _masked_head(s: EncoderSettings) -> LayerSpec:
    layer = linear_spec("transform", s.hidden, s.hidden, bias=True, per="target")
    layer += saved_spec(SavedActivation("transform.chosen", 1, "target", "int64"))
    if s.activation != "relu":
        layer += saved_spec(SavedActivation("transform.output", s.hidden, "target"))
    head = output_head_spec(s, tied=True, bias=True, per="target")
    return layer + norm_spec(s, "transform_norm", bias=True, per="target") + head


def _classification_head(s: EncoderSettings) -> LayerSpec:
    """The head reads the first token of each row, a view of all tokens, which are kept."""
    pooled = saved_spec(SavedActivation("pooler.output", s.hidden, "row"))
    return (
        saved_spec(SavedActivation("pooler.input", s.hidden))
        + linear_spec("pooler", s.hidden, s.hidden, bias=True, per="row", is_input_saved=True)
        + (pooled + dropout_spec(s, "dropout.head", s.hidden, per="row") if s.dropout else LayerSpec())
        + linear_spec("head", s.hidden, s.classes, bias=True, per="row")
        + saved_spec(
            SavedActivation("loss.probabilities", s.classes, "row", "wide"),
            SavedActivation("loss.targets", 1, "row", "int64"),
            SavedActivation("loss.weights", 1, "row", "wide"),
            SavedActivation("loss.total", 1, "step", "wide"),
        )
    )


# --- layers ----------------------------------------------------------------------------------------


def saved_spec(*saved: SavedActivation | SavedAttentionMatrix) -> LayerSpec:
    """Saved tensors without parameters or operations."""
    return LayerSpec(saved=saved)


def embedding_spec(name: str, entries: int, dim: int, *, per: CountedPer = "token") -> LayerSpec:
    """An embedding, which keeps its indices; a look-up has no FLOPs."""
    return _weight(name, (entries, dim)) + saved_spec(SavedActivation(f"{name}.input", 1, per, "int64"))


def linear_spec(
    name: str, inputs: int, outputs: int, *, bias: bool = False, per: CountedPer = "token", is_input_saved: bool = False
) -> LayerSpec:
    """A linear layer; `is_input_saved` says that another layer keeps its input already."""
    product = LayerSpec(operations=(MatmulSpec(f"{name}.weight", inputs, outputs, per),))
    saved = LayerSpec() if is_input_saved else saved_spec(SavedActivation(f"{name}.input", inputs, per))
    return _weight(name, (outputs, inputs), bias) + product + saved


def norm_spec(s: TransformerSettings, name: str, *, bias: bool = False, per: CountedPer = "token") -> LayerSpec:
    """A norm of the residual stream."""
    if s.norm == "rms":
        return rms_norm_spec(name, s.hidden, per=per)
    saved = (SavedActivation(f"{name}.input", s.hidden, per), SavedActivation(f"{name}.statistics", 2, per, "wide"))
    return _weight(name, (s.hidden,), bias) + saved_spec(*saved)


def rms_norm_spec(
    name: str, dim: int, *, saved_elements: int | None = None, groups: int = 1, per: CountedPer = "token"
) -> LayerSpec:
    """`groups` norms of `dim` elements each; `saved_elements` counts the tensor that they are a view of."""
    elements = groups * dim if saved_elements is None else saved_elements
    layer = _weight(name, (dim,)) + saved_spec(SavedActivation(f"{name}.statistics", groups, per, "wide"))
    return layer + (saved_spec(SavedActivation(f"{name}.input", elements, per)) if elements else LayerSpec())


def attention_spec(s: TransformerSettings, a: AttentionSpec, *saved: SavedActivation, bias: bool = False) -> LayerSpec:
    """Attention with its output projection. Fused attention keeps `saved` and a sum of exponentials per query.
    Dropout needs attention with explicit probabilities. It copies queries, keys and values, and keeps three matrices
    for each head: probabilities, mask, and masked probabilities. What is added to scores is then not kept."""
    name = a.name
    fused = LayerSpec((), (a,), (*saved, SavedActivation(f"{name}.sums", a.heads, a.queries, "wide")))
    explicit = (
        SavedActivation(f"{name}.queries", a.heads * a.key_dim, a.queries),
        SavedActivation(f"{name}.keys_values", a.heads * (a.key_dim + a.value_dim), a.keys),
        SavedAttentionMatrix(f"{name}.probabilities", 2 * a.heads, rows="all", queries=a.queries, keys=a.keys),
        SavedAttentionMatrix(f"{name}.mask", a.heads, rows="all", queries=a.queries, keys=a.keys, dtype="bool"),
    )
    output = linear_spec(f"{name}.output", a.heads * a.value_dim, s.hidden, bias=bias, per=a.queries)
    dropout = dropout_spec(s, f"dropout.{name}", s.hidden, per=a.queries)
    return (LayerSpec((), (a,), explicit) if s.dropout else fused) + output + dropout


def dropout_spec(s: TransformerSettings, name: str, elements: int, *, per: CountedPer = "token") -> LayerSpec:
    """The mask of a dropout."""
    return saved_spec(SavedActivation(f"{name}.mask", elements, per, "bool")) if s.dropout else LayerSpec()


def feed_forward_spec(
    s: TransformerSettings, *, bias: bool = False, per: CountedPer = "token", has_inner_dropout: bool = False
) -> LayerSpec:
    """A gated network keeps gate and up; `relu` without gate needs only its result, which `down` keeps."""
    inner = SavedActivation("ffn.inner", s.ffn_hidden * (2 if s.gated else 1), per)
    dropout = dropout_spec(s, "ffn.dropout", s.ffn_hidden, per=per) if has_inner_dropout else LayerSpec()
    is_result_enough = s.activation == "relu" and not s.gated and not dropout.saved
    return (
        linear_spec("ffn.up", s.hidden, inner.elements, bias=bias, per=per)
        + (LayerSpec() if is_result_enough else saved_spec(inner))
        + dropout
        + linear_spec("ffn.down", s.ffn_hidden, s.hidden, bias=bias, per=per)
        + dropout_spec(s, "dropout.ffn", s.hidden, per=per)
    )


def output_head_spec(s: TransformerSettings, *, tied: bool, bias: bool = False, per: CountedPer = "token") -> LayerSpec:
    """Output head fused with its loss, which keeps gradients but no logits (models/arch/loss.py)."""
    name = "embedding.weight" if tied else "head.weight"
    parameters = () if tied else (ParameterSpec(name, (s.vocab_size, s.hidden)),)
    saved = (
        SavedActivation("head.input.gradient", s.hidden, per),
        SavedActivation("head.weight.gradient", s.vocab_size * s.hidden, "step"),
    )
    layer = LayerSpec(parameters, (MatmulSpec(name, s.hidden, s.vocab_size, per),), saved)
    gradient = SavedActivation("head.bias.gradient", s.vocab_size, "step")
    return layer + LayerSpec((ParameterSpec("head.bias", (s.vocab_size,)),), (), (gradient,)) if bias else layer


def _weight(name: str, shape: tuple[int, ...], bias: bool = False) -> LayerSpec:
    weight, bias_vector = ParameterSpec(f"{name}.weight", shape), ParameterSpec(f"{name}.bias", shape[:1])
    return LayerSpec((weight, bias_vector) if bias else (weight,))
