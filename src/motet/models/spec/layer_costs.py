"""Costs of the layers in models/arch/layers.py, with the tensors that each keeps for backward.

A tensor that two layers keep is counted once: by a linear layer or norm its input, by attention its queries, keys and
values, by a feed-forward network its inner activations. A view keeps its whole storage, so queries, keys and values
count as one tensor. Dropout masks have the compute dtype (models/layout_invariant_dropout.py).
"""

from motet.models.settings import TransformerSettings
from motet.models.spec.flops_and_memory import (
    AttentionSpec,
    CountedPer,
    LayerSpec,
    MatmulSpec,
    ParameterSpec,
    SavedActivation,
    SavedAttentionMatrix,
)


def saved_spec(*saved: SavedActivation | SavedAttentionMatrix) -> LayerSpec:
    """Saved tensors without parameters or operations."""
    return LayerSpec(saved=saved)


def embedding_spec(name: str, entries: int, dim: int, *, per: CountedPer) -> LayerSpec:
    """An embedding, which keeps its indices; a look-up has no FLOPs."""
    return _weight(name, (entries, dim)) + saved_spec(SavedActivation(f"{name}.input", 1, per, "int64"))


def linear_spec(
    name: str,
    in_features: int,
    out_features: int,
    *,
    bias: bool,
    per: CountedPer = "token",
    is_input_saved: bool = False,
) -> LayerSpec:
    """A linear layer; `is_input_saved` says that another layer keeps its input already."""
    product = LayerSpec(operations=(MatmulSpec(f"{name}.weight", in_features, out_features, per),))
    saved = LayerSpec() if is_input_saved else saved_spec(SavedActivation(f"{name}.input", in_features, per))
    return _weight(name, (out_features, in_features), bias) + product + saved


def norm_spec(s: TransformerSettings, name: str, *, bias: bool, per: CountedPer = "token") -> LayerSpec:
    """A norm of the residual stream."""
    if s.norm == "rms":
        return rms_norm_spec(name, s.hidden, per=per)
    return _weight(name, (s.hidden,), bias) + saved_spec(
        SavedActivation(f"{name}.input", s.hidden, per), SavedActivation(f"{name}.statistics", 2, per, "wide")
    )


def rms_norm_spec(
    name: str, dim: int, *, saved_elements: int | None = None, groups: int = 1, per: CountedPer = "token"
) -> LayerSpec:
    """`groups` norms of `dim` elements each; `saved_elements` counts the tensor that they are a view of."""
    elements = groups * dim if saved_elements is None else saved_elements
    layer = _weight(name, (dim,)) + saved_spec(SavedActivation(f"{name}.statistics", groups, per, "wide"))
    return layer + (saved_spec(SavedActivation(f"{name}.input", elements, per)) if elements else LayerSpec())


def attention_spec(s: TransformerSettings, attention: AttentionSpec, *saved: SavedActivation, bias: bool) -> LayerSpec:
    """Attention with its output projection. Fused attention keeps `saved` and a sum of exponentials per query.

    Dropout needs attention with explicit probabilities. It copies queries, keys and values, and keeps three matrices
    for each head: probabilities, mask, and masked probabilities. What is added to scores is then not kept.
    """
    a, name = attention, attention.name
    if s.dropout:
        saved_tensors = saved_spec(
            SavedActivation(f"{name}.queries", a.heads * a.key_dim, a.queries),
            SavedActivation(f"{name}.keys_values", a.heads * (a.key_dim + a.value_dim), a.keys),
            SavedAttentionMatrix(f"{name}.probabilities", 3 * a.heads, rows="all", queries=a.queries, keys=a.keys),
        )
    else:
        saved_tensors = saved_spec(*saved, SavedActivation(f"{name}.sums", a.heads, a.queries, "wide"))
    output = linear_spec(f"{name}.output", a.heads * a.value_dim, s.hidden, bias=bias, per=a.queries)
    dropout = dropout_spec(s, f"dropout.{name}", s.hidden, per=a.queries)
    return LayerSpec(operations=(a,)) + saved_tensors + output + dropout


def score_bias_spec(s: TransformerSettings, bias: SavedAttentionMatrix) -> LayerSpec:
    """A bias of the scores that all layers share; only fused attention keeps it."""
    return LayerSpec() if s.dropout else saved_spec(bias)


def dropout_spec(s: TransformerSettings, name: str, elements: int, *, per: CountedPer = "token") -> LayerSpec:
    """The mask of a dropout."""
    return saved_spec(SavedActivation(f"{name}.mask", elements, per)) if s.dropout else LayerSpec()


def feed_forward_spec(
    s: TransformerSettings, *, bias: bool, per: CountedPer = "token", has_inner_dropout: bool = False
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
    shape = (s.vocab_size, s.hidden)
    parameters = () if tied else (ParameterSpec(name, shape),)
    layer = LayerSpec(parameters, (MatmulSpec(name, s.hidden, s.vocab_size, per),)) + saved_spec(
        SavedActivation("head.input.gradient", s.hidden, per),
        SavedActivation("head.weight.gradient", s.vocab_size * s.hidden, "step"),
    )
    if bias:
        gradient = SavedActivation("head.bias.gradient", s.vocab_size, "step")
        layer += LayerSpec((ParameterSpec("head.bias", (s.vocab_size,)),), saved=(gradient,))
    return layer


def _weight(name: str, shape: tuple[int, ...], bias: bool = False) -> LayerSpec:
    weight, bias_vector = ParameterSpec(f"{name}.weight", shape), ParameterSpec(f"{name}.bias", shape[:1])
    return LayerSpec((weight, bias_vector) if bias else (weight,))
