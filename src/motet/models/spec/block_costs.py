"""Costs of the blocks of the three architectures, in the order of a forward.
All that blocks keep for each token, and that no region of heads or inner width splits, is part of the stream, which
sequence parallelism splits.

Costs of the layers in models/arch/attention_and_feed_forward.py, latent_attention.py and mixture/.
A tensor that two layers keep is counted once: a linear layer or norm counts its input, attention its queries, keys and
values, a feed-forward network its inner activations. A view keeps its whole storage, so queries, keys and values
count as one tensor. Ranks split queries, keys and values by heads, a feed-forward network by its inner width, embedding
and output head by the vocabulary.

Parts of published decoders that motet's own decoder does not have. They are known for planning alone.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import groupby
from typing import Literal

from motet.models.settings import (
    DecoderSettings,
    EncoderDecoderSettings,
    EncoderSettings,
    LatentAttentionSettings,
    MixtureOfExpertsSettings,
    TransformerSettings,
)
from motet.models.spec.layer_specs import (
    STREAM,
    WHOLE,
    AttentionSpec,
    BackwardKernel,
    BlockSpec,
    CountedPer,
    DimensionUnits,
    LayerSpec,
    MatmulSpec,
    ParameterSpec,
    SavedActivation,
    SavedAttentionMatrix,
)


def saved_spec(*saved: SavedActivation | SavedAttentionMatrix) -> LayerSpec:
    """Saved tensors without parameters or operations."""
    return LayerSpec(saved=saved)


def embedding_spec(
    name: str, entries: int, dim: int, *, per: CountedPer = "token", split: DimensionUnits = WHOLE
) -> LayerSpec:
    """An embedding, which keeps its indices; a look-up has no FLOPs."""
    indices = saved_spec(SavedActivation(f"{name}.input", 1, per, "int64"))
    return LayerSpec((ParameterSpec(f"{name}.weight", (entries, dim), split=split),)) + indices


def linear_spec(
    name: str,
    inputs: int,
    outputs: int,
    *,
    bias: bool = False,
    per: CountedPer = "token",
    is_input_saved: bool = False,
    columns: DimensionUnits = WHOLE,
    rows: DimensionUnits = WHOLE,
) -> LayerSpec:
    """A linear layer; `is_input_saved` says that another layer keeps its input already. Ranks split its outputs as
    `columns`, or its inputs as `rows`."""
    split, is_row = (columns, False) if rows == WHOLE else (rows, True)
    weight = ParameterSpec(f"{name}.weight", (outputs, inputs), split=split, split_dim=int(is_row))
    bias_vector = ParameterSpec(f"{name}.bias", (outputs,), split=columns)
    product = MatmulSpec(weight.name, inputs, outputs, per, split=split, sums_outputs=is_row)
    input_split = rows if columns == WHOLE else replace(WHOLE, region=columns.split_by)
    saved_input = SavedActivation(f"{name}.input", inputs, per, split=input_split, kernel="product")
    kept = () if is_input_saved else (saved_input,)
    return LayerSpec((weight, bias_vector) if bias else (weight,), (product,), kept)


def norm_spec(s: TransformerSettings, name: str, *, bias: bool = False, per: CountedPer = "token") -> LayerSpec:
    """A norm of the residual stream."""
    if s.norm == "rms":
        return rms_norm_spec(name, s.hidden, per=per)
    norm_input = SavedActivation(f"{name}.input", s.hidden, per, kernel="norm")
    return _weight(name, (s.hidden,), bias) + saved_spec(
        norm_input, SavedActivation(f"{name}.statistics", 2, per, "wide")
    )


def rms_norm_spec(
    name: str, dim: int, *, saved_elements: int | None = None, heads: int | None = None, per: CountedPer = "token"
) -> LayerSpec:
    """A norm, or one of each head; `saved_elements` counts the tensor that its input is a view of."""
    split = WHOLE if heads is None else split_by_heads(heads)
    layer = _weight(name, (dim,)) + saved_spec(SavedActivation(f"{name}.statistics", heads or 1, per, "wide", split))
    elements = dim if saved_elements is None else saved_elements
    norm_input = SavedActivation(f"{name}.input", elements, per, kernel="norm")
    return layer + (saved_spec(norm_input) if elements else LayerSpec())


def attention_spec(s: TransformerSettings, a: AttentionSpec, *saved: SavedActivation, bias: bool = False) -> LayerSpec:
    """Attention with its output projection. Fused attention keeps `saved` and a sum of exponentials per query.
    Dropout needs attention with explicit probabilities. It copies queries, keys and values, and keeps three matrices
    for each head: probabilities, mask, and masked probabilities. The bias of the scores is then not kept."""
    name, heads = a.name, split_by_heads(a.heads)
    sums = SavedActivation(f"{name}.sums", a.heads, a.queries, "wide", heads, kernel="attention")
    reads = replace(a, reads=(*(each.name for each in saved), f"{name}.output.input"))
    fused = LayerSpec((), (reads,), (*saved, sums))
    matrix = SavedAttentionMatrix("", a.heads, rows="all", queries=a.queries, keys=a.keys, split=heads)
    explicit = (
        SavedActivation(f"{name}.queries", a.heads * a.key_dim, a.queries, split=heads),
        SavedActivation(f"{name}.keys_values", a.heads * (a.key_dim + a.value_dim), a.keys, split=heads),
        replace(matrix, name=f"{name}.probabilities", heads=2 * a.heads, kernel="attention"),
        replace(matrix, name=f"{name}.mask", dtype="bool"),
    )
    output = linear_spec(f"{name}.output", a.heads * a.value_dim, s.hidden, bias=bias, per=a.queries, rows=heads)
    dropout = dropout_spec(s, f"dropout.{name}", s.hidden, per=a.queries)
    return (LayerSpec((), (a,), explicit) if s.dropout else fused) + output + dropout


def dropout_spec(
    s: TransformerSettings, name: str, elements: int, *, per: CountedPer = "token", split: DimensionUnits = WHOLE
) -> LayerSpec:
    """The mask of a dropout."""
    return saved_spec(SavedActivation(f"{name}.mask", elements, per, "bool", split)) if s.dropout else LayerSpec()


def feed_forward_spec(
    s: TransformerSettings, *, bias: bool = False, per: CountedPer = "token", has_inner_dropout: bool = False
) -> LayerSpec:
    """A gated network keeps gate and up; `relu` without gate needs only its result, which `down` keeps."""
    rows, columns = (DimensionUnits("inner", (s.ffn_hidden,) * parts) for parts in (1, 2 if s.gated else 1))
    kernel: BackwardKernel = "gated activation" if s.gated else "activation"
    inner = SavedActivation("ffn.inner", sum(columns.units), per, split=columns, kernel=kernel, is_product=True)
    dropout = dropout_spec(s, "ffn.dropout", s.ffn_hidden, per=per, split=rows) if has_inner_dropout else LayerSpec()
    is_result_enough = s.activation == "relu" and not s.gated and not dropout.saved
    return (
        linear_spec("ffn.up", s.hidden, inner.elements, bias=bias, per=per, columns=columns)
        + (LayerSpec() if is_result_enough else saved_spec(inner))
        + dropout
        + linear_spec("ffn.down", s.ffn_hidden, s.hidden, bias=bias, per=per, rows=rows)
        + dropout_spec(s, "dropout.ffn", s.hidden, per=per)
    )


def output_head_spec(s: TransformerSettings, *, tied: bool, bias: bool = False, per: CountedPer = "token") -> LayerSpec:
    """Output head fused with its loss, which keeps gradients but no logits (models/arch/loss.py)."""
    name, entries = "embedding.weight" if tied else "head.weight", _vocabulary(s)
    parameters = () if tied else (ParameterSpec(name, (s.vocab_size, s.hidden), split=entries),)
    saved = (
        SavedActivation("head.input.gradient", s.hidden, per),
        SavedActivation("head.weight.gradient", s.vocab_size * s.hidden, "step", split=entries, kernel="fused head"),
    )
    layer = LayerSpec(parameters, (MatmulSpec(name, s.hidden, s.vocab_size, per, split=entries),), saved)
    bias_vector = ParameterSpec("head.bias", (s.vocab_size,), split=entries)
    gradient = SavedActivation("head.bias.gradient", s.vocab_size, "step", split=entries)
    return layer + LayerSpec((bias_vector,), (), (gradient,)) if bias else layer


def token_embedding_spec(s: TransformerSettings) -> LayerSpec:
    """The table of tokens."""
    embedding = embedding_spec("embedding", s.vocab_size, s.hidden, split=_vocabulary(s))
    table = replace(embedding.parameters[0], is_tied=getattr(s, "tied", True))  # Encoders have no other head
    return replace(embedding, parameters=(table,))


def _vocabulary(s: TransformerSettings) -> DimensionUnits:
    return DimensionUnits("vocabulary", (s.vocab_size,))


def split_by_heads(*counts: int) -> DimensionUnits:
    """Heads of queries, or of fused queries, keys and values."""
    return DimensionUnits("heads", counts)


def _weight(name: str, shape: tuple[int, ...], bias: bool = False) -> LayerSpec:
    weight, bias_vector = ParameterSpec(f"{name}.weight", shape), ParameterSpec(f"{name}.bias", shape[:1])
    return LayerSpec((weight, bias_vector) if bias else (weight,))


@dataclass(frozen=True)
class DecoderVariant:
    """The differences of a published decoder from motet's."""

    # Norms before attention and feed-forward network, after them, both, or one that both of them read
    norms: Literal["before", "after", "both", "shared"] = "before"
    embedding_norm: bool = False
    final_norm: bool = True
    more_positions: int = 0  # Rows of the table of positions beyond the context
    query_key_norm_of_all_heads: bool = False
    attention_sinks: bool = False  # A learned score for each head that takes part in the softmax
    expert_biases: bool = False
    full_layers: tuple[int, ...] = ()  # Layers without the window that the others have


class PublishedDecoderSettings(DecoderSettings):
    """A decoder as its publisher configures it. It is trained as a module of transformers."""

    variant: DecoderVariant = DecoderVariant()


def variant_of(settings: DecoderSettings) -> DecoderVariant:
    """The variant of a decoder."""
    return settings.variant if isinstance(settings, PublishedDecoderSettings) else DecoderVariant()


def decoder_block_specs(s: DecoderSettings) -> tuple[BlockSpec, ...]:
    """Embedding, runs of equal blocks (plain ones first where later ones have experts), and head."""
    blocks, first = [BlockSpec("embedding", _decoder_embedding(s), arguments=_mask_arguments(s, s.sliding_window))], 0
    layers = dict[tuple[bool, bool], LayerSpec]()
    full_layers = frozenset(variant_of(s).full_layers)
    for kind, run in groupby(range(s.layers), lambda i: (s.experts_of(i) is not None, i in full_layers)):
        if kind not in layers:
            layers[kind] = _decoder_layer(s.model_copy(update={"sliding_window": None}) if kind[1] else s, kind[0])
        count, name = len(list(run)), "full " * kind[1] + "expert " * kind[0] + "block"
        blocks.append(BlockSpec(name, layers[kind], "blocks.{i}.", count, first, input=_block_input(s)))
        first += count
    head = norm_spec(s, "norm", bias=s.has_norm_bias) if variant_of(s).final_norm else LayerSpec()
    head += output_head_spec(s, tied=s.tied)
    return (*blocks, BlockSpec("head", head))


def encoder_block_specs(s: EncoderSettings) -> tuple[BlockSpec, ...]:
    """Embedding, blocks that end in a norm, and the head for masked tokens or for a class."""
    embedding = token_embedding_spec(s)
    embedding += embedding_spec("positions", s.context, s.hidden, per="position")
    if s.token_types:  # every token is of the first type, so no index is kept
        embedding += LayerSpec((ParameterSpec("token_types.weight", (s.token_types, s.hidden)),))
    embedding += norm_spec(s, "embedding_norm", bias=True) + dropout_spec(s, "dropout", s.hidden)
    attention = _self_attention(s, bias=True) + norm_spec(s, "attention_norm", bias=True)
    ffn = feed_forward_spec(s, bias=True) + norm_spec(s, "ffn_norm", bias=True)
    return (
        BlockSpec("embedding", embedding + _document_mask(s), arguments=_mask_arguments(s)),
        BlockSpec("block", _stream(attention + ffn), "blocks.{i}.", s.layers, input=_block_input(s)),
        BlockSpec("head", _masked_head(s) if s.head == "masked" else _classification_head(s)),
    )


def encoder_decoder_block_specs(s: EncoderDecoderSettings) -> tuple[BlockSpec, ...]:
    """Encoder blocks over the source and decoder blocks over the tokens; both read one embedding table."""
    embedding = token_embedding_spec(s)
    embedding += saved_spec(SavedActivation("embedding.sources", 1, "source", "int64"))
    embedding += _document_mask(s, "source")
    embedding += dropout_spec(s, "dropout", s.hidden) + dropout_spec(s, "dropout.source", s.hidden, per="source")
    # Every block of the decoder reads the encoder's output; it is kept once.
    encoded = saved_spec(SavedActivation("output", s.hidden, "source"))
    encoder_block = BlockSpec("encoder block", _stream(_t5_layer(s, "source")), "encoder.blocks.{i}.")
    decoder_block = BlockSpec("decoder block", _stream(_t5_layer(s, "token")), "decoder.blocks.{i}.")
    return (
        BlockSpec("embedding", embedding, arguments=_relative_arguments(s)),
        replace(encoder_block, repeat=s.layers, input=_block_input(s, "source")),
        BlockSpec("encoder end", _stack_end(s, "source") + encoded, "encoder."),
        replace(decoder_block, repeat=s.decoder_layers or s.layers, input=_block_input(s)),
        BlockSpec("decoder end", _stack_end(s, "token"), "decoder."),
        BlockSpec("head", output_head_spec(s, tied=s.tied)),
    )


def _block_input(s: TransformerSettings, per: CountedPer = "token") -> SavedActivation:
    return SavedActivation("input", s.hidden, per, split=STREAM)


def _stream(block: LayerSpec) -> LayerSpec:
    """A block in which all that no region splits belongs to the stream."""
    operations = tuple(
        replace(operation, split=STREAM)
        if isinstance(operation, MatmulSpec) and operation.split == WHOLE
        else operation
        for operation in block.operations
    )
    saved = tuple(
        replace(tensor, split=replace(tensor.split, split_by="stream"))
        if isinstance(tensor, SavedActivation) and tensor.split.split_by == "none"
        else tensor
        for tensor in block.saved
    )
    return LayerSpec(block.parameters, operations, saved)


def _document_mask(s: TransformerSettings, keys: CountedPer = "token", window: int | None = None) -> LayerSpec:
    if s.dropout:  # Only fused attention keeps it
        return LayerSpec()
    return saved_spec(replace(_explicit_mask(keys, window), has_starts=keys == "token"))


def _explicit_mask(keys: CountedPer = "token", window: int | None = None) -> SavedAttentionMatrix:
    return SavedAttentionMatrix("document_mask", window=window, saved_with="explicit mask", rows="packed", keys=keys)


def _mask_arguments(s: TransformerSettings, window: int | None = None) -> tuple[SavedAttentionMatrix, ...]:
    return (_explicit_mask(window=window),) if s.dropout else ()  # Fused attention keeps it anyway


# --- the decoder -----------------------------------------------------------------------------------


def _decoder_layer(s: DecoderSettings, has_experts: bool) -> LayerSpec:
    bias, norms = s.has_norm_bias, variant_of(s).norms
    attention = _decoder_attention(s) if s.latent_attention is None else _latent_attention(s, s.latent_attention)
    ffn = _experts(s, s.experts) if has_experts and s.experts else feed_forward_spec(s, bias=s.has_ffn_bias)

    def norm(name: str, *places: str) -> LayerSpec:
        return norm_spec(s, name, bias=bias) if norms in places else LayerSpec()

    layer = (
        norm("attention_norm", "before", "both", "shared") + attention + norm("attention_norm_after", "after", "both")
    )
    return _stream(layer + norm("ffn_norm", "before", "both") + ffn + norm("ffn_norm_after", "after", "both"))


def _decoder_embedding(s: DecoderSettings) -> LayerSpec:
    layer = token_embedding_spec(s)
    if s.positions == "learned":
        entries = s.context + variant_of(s).more_positions
        layer += embedding_spec("positions", entries, s.hidden, per="position")
    if variant_of(s).embedding_norm:
        layer += norm_spec(s, "embedding_norm", bias=s.has_norm_bias)
    if s.positions == "rotary":
        latent = s.latent_attention
        dims = int(s.dim_per_head * s.rotary_fraction) if latent is None else latent.rotary_head_dim
        layer += saved_spec(SavedActivation("rotations", dims, "position", "wide"))
    return layer + dropout_spec(s, "dropout", s.hidden) + _document_mask(s, window=s.sliding_window)


def _decoder_attention(s: DecoderSettings) -> LayerSpec:
    heads, kv_heads, dim = s.heads, s.kv_heads or s.heads, s.dim_per_head
    width, all_heads = (heads + 2 * kv_heads) * dim, split_by_heads(heads, kv_heads, kv_heads)
    layer = linear_spec("attention.qkv", s.hidden, width, bias=s.qkv_bias or s.bias, columns=all_heads)
    qkv = SavedActivation("attention.qkv", width, split=all_heads, kernel="queries and keys", is_product=True)
    saved = [qkv]
    if variant_of(s).attention_sinks:
        layer += LayerSpec((ParameterSpec("attention.sinks", (heads,), split=split_by_heads(heads)),))
    if variant_of(s).query_key_norm_of_all_heads:
        layer += rms_norm_spec("attention.query_norm", heads * dim) + rms_norm_spec(
            "attention.key_norm", kv_heads * dim
        )
    if s.query_key_norm:  # the first norm keeps the tensor of queries, keys and values
        layer += rms_norm_spec("attention.query_norm", dim, saved_elements=0, heads=heads)
        layer += rms_norm_spec("attention.key_norm", dim, saved_elements=0, heads=kv_heads)
        layer += saved_spec(replace(qkv, name="attention.query_norm.input", kernel="norm"))
        saved.clear()
    if s.query_key_norm or s.positions == "rotary":  # queries and keys are new tensors; the values stay views
        elements, split = (heads + kv_heads) * dim, split_by_heads(heads, kv_heads)
        saved.append(SavedActivation("attention.queries_keys", elements, split=split, kernel="queries and keys"))
    return layer + _causal_attention(s, dim, dim, *saved)


def _latent_attention(s: DecoderSettings, latent: LatentAttentionSettings) -> LayerSpec:
    """Queries, and keys with values, each from a short vector per token; all heads share one rotated key."""
    key_dim, value_dim = latent.plain_head_dim + latent.rotary_head_dim, latent.value_head_dim
    bias, rank, query_rank = s.qkv_bias or s.bias, latent.key_value_rank, latent.query_rank
    down, up = rank + latent.rotary_head_dim, s.heads * (latent.plain_head_dim + value_dim)
    heads = split_by_heads(s.heads)
    queries = (
        linear_spec("attention.query", s.hidden, s.heads * key_dim, columns=heads)
        if query_rank is None
        else linear_spec("attention.query_down", s.hidden, query_rank, bias=bias)
        + rms_norm_spec("attention.query_norm", query_rank)
        + linear_spec("attention.query_up", query_rank, s.heads * key_dim, columns=heads)
    )
    elements = 2 * s.heads * key_dim
    queries_keys = SavedActivation("attention.queries_keys", elements, split=heads, kernel="queries and keys")
    keys_values = SavedActivation("attention.key_value_up", up, split=heads, is_product=True)
    return (
        queries
        + linear_spec("attention.key_value_down", s.hidden, down, bias=bias, is_input_saved=True)
        + rms_norm_spec("attention.key_value_norm", rank, saved_elements=down)
        + linear_spec("attention.key_value_up", rank, up, columns=heads)
        + _causal_attention(s, key_dim, value_dim, queries_keys, keys_values)
    )


def _causal_attention(s: DecoderSettings, key_dim: int, value_dim: int, *saved: SavedActivation) -> LayerSpec:
    window, kv_heads = s.sliding_window, s.heads if s.latent_attention else s.kv_heads
    attention = AttentionSpec("attention", s.heads, key_dim, value_dim, causal=True, window=window, kv_heads=kv_heads)
    layer = attention_spec(s, attention, *saved, bias=s.bias)
    # Attention with explicit probabilities also keeps the mask of later keys.
    mask = SavedAttentionMatrix("attention.causal_mask", window=window, saved_with="implicit mask", dtype="bool")
    return layer + saved_spec(mask) if s.dropout else layer


def _experts(s: DecoderSettings, experts: MixtureOfExpertsSettings) -> LayerSpec:
    """A router, and experts of which each token visits a few; shared experts are one wider network for all tokens.
    Tensors of experts are in the order of experts. Their results are kept, because they are weighted."""
    count, per_token, inner, gates = experts.count, experts.per_token, experts.hidden, 2 if s.gated else 1
    fraction, up, down = Fraction(per_token, count), "ffn.experts.up", "ffn.experts.down"
    has_biases = variant_of(s).expert_biases
    biases = (
        ParameterSpec(f"{up}.bias", (count, gates * inner), fraction),
        ParameterSpec(f"{down}.bias", (count, s.hidden), fraction),
    )
    kernel: BackwardKernel = "gated activation" if s.gated else "activation"
    result = SavedActivation("ffn.experts.result", per_token * s.hidden, kernel="weighted sum", is_product=True)
    inner_of_experts = SavedActivation("ffn.experts.inner", per_token * gates * inner, kernel=kernel, is_product=True)
    is_result_enough = s.activation == "relu" and not s.gated
    layer = LayerSpec(biases if has_biases else ()) + _router(s, experts, bias=has_biases)
    layer += LayerSpec(
        (
            ParameterSpec(up, (count, gates * inner, s.hidden), fraction),
            ParameterSpec(down, (count, s.hidden, inner), fraction),
        ),
        (
            MatmulSpec(up, s.hidden, gates * inner, uses_per_token=per_token),
            MatmulSpec(down, inner, s.hidden, uses_per_token=per_token),
        ),
        (
            SavedActivation(f"{up}.input", per_token * s.hidden, kernel="product"),
            SavedActivation("ffn.experts.stops", count, "step", "int64"),
            *(() if is_result_enough else (inner_of_experts,)),
            SavedActivation(f"{down}.input", per_token * inner, kernel="product"),
            result,
            SavedActivation("ffn.order", per_token, dtype="int64"),
            SavedActivation("ffn.weights", per_token, dtype="wide"),
        ),
    )
    if experts.shared:
        layer += _shared_experts(s, experts.shared * inner)
    return layer + dropout_spec(s, "dropout.ffn", s.hidden)


def _router(s: DecoderSettings, experts: MixtureOfExpertsSettings, *, bias: bool) -> LayerSpec:
    """Scores of all experts and weights of the chosen ones, in float32 at least."""
    count, per_token = experts.count, experts.per_token
    router = linear_spec("ffn.router", s.hidden, count, bias=bias)
    product = MatmulSpec("ffn.router.weight", s.hidden, count, result_dtype="wide", takes_adapter=False)
    saved = [
        SavedActivation("ffn.router.scores", count, dtype="wide"),
        SavedActivation("ffn.router.chosen", per_token, dtype="int64"),
    ]
    if experts.normalize_weights:  # The scores of the chosen experts, and their sum
        saved.append(SavedActivation("ffn.router.chosen_scores", per_token + 1, dtype="wide"))
    if experts.capacity is not None:
        saved.append(SavedActivation("ffn.router.dropped", per_token, dtype="bool"))
    return replace(router, operations=(product,)) + saved_spec(*saved, *_balance_terms(s, experts))


def _balance_terms(s: DecoderSettings, experts: MixtureOfExpertsSettings) -> Iterator[SavedActivation]:
    """The tensors that the terms of rows keep, in float32 at least."""
    count = experts.count
    if s.balance.row_weight:  # Scores that add up to 1; sigmoids, their sum, and the sum that is not too small
        sums = 2 if experts.scores == "sigmoid" else 0
        yield SavedActivation("ffn.balance.scores", count + sums, dtype="wide")
        yield SavedActivation("ffn.balance.fractions", count, "row", dtype="wide")
    if s.balance.z_weight:  # Logits, and their log-sum-exp
        yield SavedActivation("ffn.balance.logits", count + 1, dtype="wide")
    if s.balance.row_weight or s.balance.z_weight:
        yield SavedActivation("ffn.balance.targets", 1, "row", dtype="wide")


def _shared_experts(s: DecoderSettings, width: int) -> LayerSpec:
    """A feed-forward network for all tokens, which reads the input of the router."""
    gates = 2 if s.gated else 1
    columns, rows = DimensionUnits("inner", (width,) * gates), DimensionUnits("inner", (width,))
    kernel: BackwardKernel = "gated activation" if s.gated else "activation"
    inner = SavedActivation("ffn.shared.inner", gates * width, split=columns, kernel=kernel, is_product=True)
    same_input = SavedActivation("ffn.shared.up.input", 0, kernel="product")  # Where backward computes its product
    return (
        linear_spec("ffn.shared.up", s.hidden, gates * width, is_input_saved=True, columns=columns)
        + saved_spec(same_input)
        + (LayerSpec() if s.activation == "relu" and not s.gated else saved_spec(inner))
        + linear_spec("ffn.shared.down", width, s.hidden, rows=rows)
    )


# --- the encoder, and both stacks of the encoder-decoder -------------------------------------------


def _self_attention(
    s: TransformerSettings, *, bias: bool = False, per: CountedPer = "token", causal: bool = False
) -> LayerSpec:
    dim, width = s.dim_per_head, 3 * s.heads * s.dim_per_head
    attention = AttentionSpec("attention", s.heads, dim, dim, causal, queries=per, keys=per)
    heads = split_by_heads(s.heads, s.heads, s.heads)
    qkv = linear_spec("attention.qkv", s.hidden, width, bias=bias, per=per, columns=heads)
    saved = SavedActivation("attention.qkv", width, per, split=heads, kernel="queries and keys", is_product=True)
    return qkv + attention_spec(s, attention, saved, bias=bias)


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
    width, heads, both = s.heads * s.dim_per_head, split_by_heads(s.heads), split_by_heads(s.heads, s.heads)
    attention = AttentionSpec("cross", s.heads, s.dim_per_head, s.dim_per_head, keys="source")
    query = SavedActivation("cross.query", width, split=heads, is_product=True)
    key_value = SavedActivation("cross.key_value", 2 * width, "source", split=both, is_product=True)
    return (
        linear_spec("cross.query", s.hidden, width, columns=heads)
        + linear_spec("cross.key_value", s.hidden, 2 * width, per="source", is_input_saved=True, columns=both)
        + attention_spec(s, attention, query, key_value)
    )


def _stack_end(s: EncoderDecoderSettings, per: CountedPer) -> LayerSpec:
    """A norm, and the relative positions that all blocks of the stack share: a bucket for each pair of positions.
    A learned bias is counted as fused attention keeps it. On a CPU torch's fused attention cannot learn one, and each
    block keeps the probabilities of all pairs instead of sums."""
    heads = split_by_heads(s.heads)
    bias = SavedAttentionMatrix("relative.bias", s.heads, rows="packed", queries=per, keys=per, split=heads)
    buckets = SavedAttentionMatrix("relative.buckets", queries=per, keys=per, dtype="int64")
    table = ParameterSpec("relative.weight", (s.relative_buckets, s.heads), split=heads, split_dim=1)
    relative = LayerSpec((table,), saved=(buckets,))
    norm = norm_spec(s, "norm", per=per) + dropout_spec(s, "dropout", s.hidden, per=per)
    return relative + norm if s.dropout else relative + saved_spec(bias) + norm


def _relative_arguments(s: EncoderDecoderSettings) -> tuple[SavedAttentionMatrix, ...]:
    """Scores of relative positions, which all blocks of a stack add, without a mask and with one. Without dropout
    `relative.bias` above counts one of the two."""
    plain = SavedAttentionMatrix("relative.plain", s.heads, split=split_by_heads(s.heads))
    source_scores, masked = replace(plain, queries="source", keys="source"), replace(plain, name="relative.masked")
    if not s.dropout:
        packed = replace(plain, saved_with="explicit mask"), replace(source_scores, saved_with="explicit mask")
        return (replace(masked, saved_with="implicit mask"), *packed)
    source_masked = replace(source_scores, name="relative.masked", rows="packed", saved_with="explicit mask")
    return (plain, source_scores, replace(masked, rows="packed"), source_masked, _explicit_mask("source"))


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
