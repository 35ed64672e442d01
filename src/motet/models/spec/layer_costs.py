"""Costs of the layers in models/arch/attention_and_feed_forward.py.
A tensor that two layers keep is counted once: by a linear layer or norm its input, by attention its queries, keys and
values, by a feed-forward network its inner activations. A view keeps its whole storage, so queries, keys and values
count as one tensor. Ranks split queries, keys and values by heads, a feed-forward network by its inner width, embedding
and output head by the vocabulary."""

from dataclasses import replace

from motet.models.settings import TransformerSettings
from motet.models.spec.layer_specs import (
    WHOLE,
    AttentionSpec,
    BackwardKernel,
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
    for each head: probabilities, mask, and masked probabilities. What is added to scores is then not kept."""
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
