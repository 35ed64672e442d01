"""The sizes of the layers that our models are made of (models/layers.py), with what each keeps for backward.

Of two layers that keep the same tensor, one counts it: a linear layer its input, a norm its input, attention its
queries, keys and values, a feed-forward network what is inside. A tensor of which a part is kept is kept whole, so
queries, keys and values count as the one tensor that they are cut from. Masks of dropout are as layout-independent
dropout has them (models/randomness.py): in the dtype that is computed in.
"""

from motet.models.pieces import Attention, Matmul, Parameter, Part, Per, Saved, SavedPairs
from motet.models.settings import Architecture


def table(name: str, entries: int, dim: int, per: Per) -> Part:
    """An embedding. Looking up is no arithmetic; the numbers looked up are kept."""
    return Part((Parameter(f"{name}.weight", (entries, dim)),), saved=(Saved(f"{name}.input", 1, per, "int64"),))


def linear(name: str, inner: int, out: int, bias: bool, per: Per = "token", shared: bool = False) -> Part:
    """A linear layer; `shared`: its input is kept by another one already."""
    weight = Parameter(f"{name}.weight", (out, inner))
    parameters = (weight, Parameter(f"{name}.bias", (out,))) if bias else (weight,)
    saved = () if shared else (Saved(f"{name}.input", inner, per),)
    return Part(parameters, (Matmul(weight.name, inner, out, per),), saved)


def norm(s: Architecture, name: str, bias: bool, per: Per = "token") -> Part:
    """A norm of the residual stream."""
    if s.norm == "rms":
        return rms_norm(name, s.hidden, per=per)
    weight = Parameter(f"{name}.weight", (s.hidden,))
    parameters = (weight, Parameter(f"{name}.bias", (s.hidden,))) if bias else (weight,)
    return Part(parameters, saved=(Saved(f"{name}.input", s.hidden, per), Saved(f"{name}.statistics", 2, per, "wide")))


def rms_norm(name: str, dim: int, cut_from: int | None = None, groups: int = 1, per: Per = "token") -> Part:
    """`groups` norms of `dim` components each, cut from a tensor of `cut_from`, which is kept."""
    kept = Saved(f"{name}.input", groups * dim if cut_from is None else cut_from, per)
    statistics = Saved(f"{name}.statistics", groups, per, "wide")
    return Part((Parameter(f"{name}.weight", (dim,)),), saved=(kept, statistics) if kept.elements else (statistics,))


def attend(s: Architecture, attention: Attention, saved: tuple[Saved, ...]) -> Part:
    """Fused attention keeps what it reads, `saved`, and for each query the sum of its exponentials, but no scores.

    With dropout it is computed in the open: queries, keys and values are copied, and of all pairs there are the
    probabilities, the mask, and the probabilities that are left. What is added to scores is then not kept.
    """
    a, name = attention, attention.name
    if not s.dropout:
        return Part(operations=(a,), saved=(*saved, Saved(f"{name}.sums", a.heads, a.queries, "wide")))
    pairs = SavedPairs(f"{name}.probabilities", 3 * a.heads, rows="all", queries=a.queries, keys=a.keys)
    queries = Saved(f"{name}.queries", a.heads * a.key_dim, a.queries)
    keys_values = Saved(f"{name}.keys_values", a.heads * (a.key_dim + a.value_dim), a.keys)
    return Part(operations=(a,), saved=(queries, keys_values, pairs))


def added_to_scores(s: Architecture, bias: SavedPairs) -> Part:
    """Once for all layers that use it."""
    return Part(saved=() if s.dropout else (bias,))


def dropout(s: Architecture, name: str, elements: int, per: Per = "token") -> Part:
    return Part(saved=(Saved(f"{name}.mask", elements, per),)) if s.dropout else Part()


def feed_forward(s: Architecture, bias: bool, per: Per = "token", inner_dropout: bool = False) -> Part:
    """Gated ones keep gate and up only; of the others, `relu` needs nothing but its result, which `down` keeps."""
    inside = Saved("ffn.inside", s.ffn_hidden * (2 if s.gated else 1), per)
    dropped = inner_dropout and bool(s.dropout)
    by_result = s.activation == "relu" and not s.gated and not dropped
    return (
        linear("ffn.up", s.hidden, inside.elements, bias, per)
        + Part(saved=() if by_result else (inside,))
        + (dropout(s, "ffn.dropout", s.ffn_hidden, per) if dropped else Part())
        + linear("ffn.down", s.ffn_hidden, s.hidden, bias, per)
        + dropout(s, "dropout.ffn", s.hidden, per)
    )


def scores(s: Architecture, tied: bool, bias: bool = False, per: Per = "token") -> Part:
    """Scores of the whole vocabulary: with the loss one piece, which keeps gradients and no scores (models/loss.py)."""
    weight = Parameter("embedding.weight" if tied else "head.weight", (s.vocab_size, s.hidden))
    kept = [Saved("head.input.gradient", s.hidden, per), Saved("head.weight.gradient", weight.size, "step")]
    parameters: tuple[Parameter, ...] = () if tied else (weight,)
    if bias:
        parameters += (Parameter("head.bias", (s.vocab_size,)),)
        kept.append(Saved("head.bias.gradient", s.vocab_size, "step"))
    return Part(parameters, (Matmul(weight.name, s.hidden, s.vocab_size, per),), tuple(kept))
