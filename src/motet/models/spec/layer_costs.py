"""The sizes of the layers that our models are made of (models/arch/layers.py), with what each keeps for backward.

Of two layers that keep the same tensor, one counts it: a linear layer its input, a norm its input, attention its
queries, keys and values, a feed-forward network what is inside. A tensor of which a part is kept is kept whole, so
queries, keys and values count as the one tensor that they are cut from. Masks of dropout are as layout-independent
dropout has them (models/layout_invariant_dropout.py): in the dtype that is computed in.
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


def embedding_spec(name: str, entries: int, dim: int, per: CountedPer) -> LayerSpec:
    """An embedding. Looking up is no arithmetic; the numbers looked up are kept."""
    return LayerSpec(
        (ParameterSpec(f"{name}.weight", (entries, dim)),), saved=(SavedActivation(f"{name}.input", 1, per, "int64"),)
    )


def linear_spec(
    name: str, in_features: int, out_features: int, bias: bool, per: CountedPer = "token", is_input_saved: bool = False
) -> LayerSpec:
    """A linear layer; `shared`: its input is kept by another one already."""
    weight = ParameterSpec(f"{name}.weight", (out_features, in_features))
    parameters = (weight, ParameterSpec(f"{name}.bias", (out_features,))) if bias else (weight,)
    saved = () if is_input_saved else (SavedActivation(f"{name}.input", in_features, per),)
    return LayerSpec(parameters, (MatmulSpec(weight.name, in_features, out_features, per),), saved)


def norm_spec(s: TransformerSettings, name: str, bias: bool, per: CountedPer = "token") -> LayerSpec:
    """A norm of the residual stream."""
    if s.norm == "rms":
        return rms_norm_spec(name, s.hidden, per=per)
    weight = ParameterSpec(f"{name}.weight", (s.hidden,))
    parameters = (weight, ParameterSpec(f"{name}.bias", (s.hidden,))) if bias else (weight,)
    return LayerSpec(
        parameters,
        saved=(SavedActivation(f"{name}.input", s.hidden, per), SavedActivation(f"{name}.statistics", 2, per, "wide")),
    )


def rms_norm_spec(
    name: str, dim: int, saved_elements: int | None = None, groups: int = 1, per: CountedPer = "token"
) -> LayerSpec:
    """`groups` norms of `dim` components each, cut from a tensor of `cut_from`, which is kept."""
    saved_input = SavedActivation(f"{name}.input", groups * dim if saved_elements is None else saved_elements, per)
    statistics = SavedActivation(f"{name}.statistics", groups, per, "wide")
    return LayerSpec(
        (ParameterSpec(f"{name}.weight", (dim,)),),
        saved=(saved_input, statistics) if saved_input.elements else (statistics,),
    )


def attention_spec(s: TransformerSettings, attention: AttentionSpec, saved: tuple[SavedActivation, ...]) -> LayerSpec:
    """Fused attention keeps what it reads, `saved`, and for each query the sum of its exponentials, but no scores.

    With dropout it is computed in the open: queries, keys and values are copied, and of all pairs there are the
    probabilities, the mask, and the probabilities that are left. What is added to scores is then not kept.
    """
    a, name = attention, attention.name
    if not s.dropout:
        return LayerSpec(operations=(a,), saved=(*saved, SavedActivation(f"{name}.sums", a.heads, a.queries, "wide")))
    pairs = SavedAttentionMatrix(f"{name}.probabilities", 3 * a.heads, rows="all", queries=a.queries, keys=a.keys)
    queries = SavedActivation(f"{name}.queries", a.heads * a.key_dim, a.queries)
    keys_values = SavedActivation(f"{name}.keys_values", a.heads * (a.key_dim + a.value_dim), a.keys)
    return LayerSpec(operations=(a,), saved=(queries, keys_values, pairs))


def score_bias_spec(s: TransformerSettings, bias: SavedAttentionMatrix) -> LayerSpec:
    """Once for all layers that use it."""
    return LayerSpec(saved=() if s.dropout else (bias,))


def dropout_spec(s: TransformerSettings, name: str, elements: int, per: CountedPer = "token") -> LayerSpec:
    return LayerSpec(saved=(SavedActivation(f"{name}.mask", elements, per),)) if s.dropout else LayerSpec()


def feed_forward_spec(
    s: TransformerSettings, bias: bool, per: CountedPer = "token", has_inner_dropout: bool = False
) -> LayerSpec:
    """Gated ones keep gate and up only; of the others, `relu` needs nothing but its result, which `down` keeps."""
    inner_activation = SavedActivation("ffn.inside", s.ffn_hidden * (2 if s.gated else 1), per)
    uses_inner_dropout = has_inner_dropout and bool(s.dropout)
    needs_only_result = s.activation == "relu" and not s.gated and not uses_inner_dropout
    return (
        linear_spec("ffn.up", s.hidden, inner_activation.elements, bias, per)
        + LayerSpec(saved=() if needs_only_result else (inner_activation,))
        + (dropout_spec(s, "ffn.dropout", s.ffn_hidden, per) if uses_inner_dropout else LayerSpec())
        + linear_spec("ffn.down", s.ffn_hidden, s.hidden, bias, per)
        + dropout_spec(s, "dropout.ffn", s.hidden, per)
    )


def output_head_spec(s: TransformerSettings, tied: bool, bias: bool = False, per: CountedPer = "token") -> LayerSpec:
    """Scores of the whole vocabulary: with the loss one piece, which keeps gradients and no scores (models/arch/loss.py)."""
    weight = ParameterSpec("embedding.weight" if tied else "head.weight", (s.vocab_size, s.hidden))
    saved = [
        SavedActivation("head.input.gradient", s.hidden, per),
        SavedActivation("head.weight.gradient", weight.numel, "step"),
    ]
    parameters: tuple[ParameterSpec, ...] = () if tied else (weight,)
    if bias:
        parameters += (ParameterSpec("head.bias", (s.vocab_size,)),)
        saved.append(SavedActivation("head.bias.gradient", s.vocab_size, "step"))
    return LayerSpec(parameters, (MatmulSpec(weight.name, s.hidden, s.vocab_size, per),), tuple(saved))
