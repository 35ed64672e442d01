"""What models are made of, as plain values: parameters, matrix products, attention, and what autograd saves.

Each piece says how it grows with the tokens; splits over ranks divide the dims that are named here. `Part`s are added
up into the blocks of a `ModelSpec` (models/spec/model_spec.py).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from math import prod
from typing import Literal

from motet.core.dtypes import DTYPE_BYTES

# What a piece is there for: each token, each token of an encoder-decoder's source, each token that is to be predicted,
# each row, each position (that all rows share, unless they hold several documents), or once.
CountedPer = Literal["token", "source", "target", "row", "position", "step"]

# How attention is counted. `causal`: only pairs of query and key that may see each other, as if half of a square were
# on either side of its diagonal. `full`: all pairs, as many published FLOP rates have it.
AttentionFlopsRule = Literal["causal", "full"]


@dataclass(frozen=True)
class MicroBatchShape:
    """A micro-batch: `rows` sequences of `length` tokens, and their sources in an encoder-decoder."""

    rows: int
    length: int
    source_length: int = 0
    packed: bool = False  # Rows hold several documents each, which do not see each other and count their positions anew
    targets: int | None = None  # How many masked tokens an encoder is to predict; all tokens when not given

    def length_of(self, per: CountedPer) -> int:
        return self.source_length if per == "source" else self.length

    def count(self, per: CountedPer) -> int:
        match per:
            case "token" | "source":
                return self.rows * self.length_of(per)
            case "target":
                return self.count("token") if self.targets is None else self.targets
            case "row":
                return self.rows
            case "position":
                return self.length * (self.rows if self.packed else 1)
            case "step":
                return 1


@dataclass(frozen=True)
class ParameterSpec:
    """A named tensor."""

    name: str
    shape: tuple[int, ...]
    # The part of it that one token goes through: less than all of it for experts.
    active_fraction: Fraction = Fraction(1)

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class MatmulSpec:
    """[n, inner] x [inner, out] by a parameter, where n counts what it is there for."""

    parameter: str
    in_features: int
    out_features: int
    per: CountedPer = "token"
    uses_per_token: int = 1  # How often each token goes through one of this kind: the experts that it is sent to

    def flops(self, shape: MicroBatchShape, attention: AttentionFlopsRule) -> int:
        """2 n inner out."""
        return 2 * shape.count(self.per) * self.uses_per_token * self.in_features * self.out_features


@dataclass(frozen=True)
class AttentionSpec:
    """Scores of every query with every key that it may see, and the weighted sum of values."""

    name: str
    heads: int
    key_dim: int
    value_dim: int
    causal: bool = False
    window: int | None = None  # A query sees so many keys at most, itself included
    queries: CountedPer = "token"
    keys: CountedPer = "token"

    def flops(self, shape: MicroBatchShape, attention: AttentionFlopsRule) -> int:
        """2 pairs heads (key_dim + value_dim)."""
        key_length = shape.length_of(self.keys)
        visible_keys = min(self.window or key_length, key_length)
        # Of `seen` keys, the first queries of a row see half on average: T w - w^2 / 2 pairs, T^2 / 2 without a window.
        twice_pairs = visible_keys * (2 * key_length - visible_keys) * shape.rows
        if not self.causal or attention == "full":
            twice_pairs = 2 * shape.count(self.queries) * key_length
        return twice_pairs * self.heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True)
class SavedActivation:
    """A tensor that autograd keeps from forward to backward."""

    name: str
    elements: int
    per: CountedPer = "token"
    dtype: str = "compute"  # `compute`, `wide` (float32, or float64 if that is computed in), or a fixed dtype

    def bytes(self, shape: MicroBatchShape, compute: str) -> int:
        return shape.count(self.per) * self.elements * _element_bytes(self.dtype, compute)


@dataclass(frozen=True)
class SavedAttentionMatrix:
    """Numbers for each pair of query and key: [rows or 1, heads, queries, keys]."""

    name: str
    heads: int = 1
    window: int | None = None
    # `usual`: where every query sees all keys, or all before it, which kernels know; `unusual`: anywhere else.
    when: Literal["always", "usual", "unusual"] = "always"
    # For each row, for each only if rows hold several documents, or for all rows together.
    rows: Literal["all", "packed", "one"] = "one"
    queries: CountedPer = "token"
    keys: CountedPer = "token"
    dtype: str = "compute"

    def bytes(self, shape: MicroBatchShape, compute: str) -> int:
        keys = shape.length_of(self.keys)
        needs_explicit_mask = shape.packed or keys > (self.window or keys)
        if self.when != "always" and needs_explicit_mask != (self.when == "unusual"):
            return 0
        rows = shape.rows if self.rows == "all" or (self.rows == "packed" and shape.packed) else 1
        return rows * self.heads * shape.length_of(self.queries) * keys * _element_bytes(self.dtype, compute)


def _element_bytes(dtype: str, compute: str) -> int:
    wide_dtype = "float64" if compute == "float64" else "float32"
    return DTYPE_BYTES[{"compute": compute, "wide": wide_dtype}.get(dtype, dtype)]


@dataclass(frozen=True)
class LayerSpec:
    """Some of a block: a layer with its parameters, work, and saved tensors."""

    parameters: tuple[ParameterSpec, ...] = ()
    operations: tuple[MatmulSpec | AttentionSpec, ...] = ()
    saved: tuple[SavedActivation | SavedAttentionMatrix, ...] = ()

    def __add__(self, other: "LayerSpec") -> "LayerSpec":
        return LayerSpec(
            self.parameters + other.parameters, self.operations + other.operations, self.saved + other.saved
        )


@dataclass(frozen=True)
class BlockSpec:
    """A run of equal parts of a model, e.g. its 32 transformer blocks."""

    name: str
    layer: LayerSpec
    prefix: str = ""  # What the names of its parameters begin with; `{i}` stands for the number of the repetition
    repeat: int = 1
    first_index: int = 0  # The number of the first repetition

    @property
    def parameter_count(self) -> int:
        """Of one repetition."""
        return sum(p.numel for p in self.layer.parameters)

    @property
    def active_parameter_count(self) -> int:
        """Of one repetition, counting only the experts that a token is sent to."""
        return int(sum(p.numel * p.active_fraction for p in self.layer.parameters))

    def named_parameters(self) -> Iterator[ParameterSpec]:
        """Of all repetitions, with their full names."""
        for i in range(self.first_index, self.first_index + self.repeat):
            for parameter in self.layer.parameters:
                yield replace(parameter, name=self.prefix.format(i=i) + parameter.name)

    def forward_flops(self, shape: MicroBatchShape, attention: AttentionFlopsRule = "causal") -> int:
        """Of one repetition."""
        return sum(operation.flops(shape, attention) for operation in self.layer.operations)

    def saved_bytes(self, shape: MicroBatchShape, dtype: str) -> int:
        """Of one repetition, computing in `dtype`."""
        return sum(saved.bytes(shape, dtype) for saved in self.layer.saved)
