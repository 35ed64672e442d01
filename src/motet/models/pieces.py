"""What models are made of, as plain values: parameters, matrix products, attention, and what autograd saves.

Each piece says how it grows with the tokens; splits over ranks divide the dims that are named here. `Part`s are added
up into the blocks of a `ModelSpec` (models/spec.py).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from math import prod
from typing import Literal

from motet.core.dtypes import DTYPE_BYTES

Per = Literal["token", "source", "target", "row", "position", "step"]
"""What a piece is there for: each token, each token of an encoder-decoder's source, each token that is to be predicted,
each row, each position (that all rows share, unless they hold several documents), or once."""

AttentionCount = Literal["causal", "full"]
"""How attention is counted. `causal`: only pairs of query and key that may see each other, as if half of a square were
on either side of its diagonal. `full`: all pairs, as many published FLOP rates have it."""


@dataclass(frozen=True)
class Shape:
    """A micro-batch: `rows` sequences of `length` tokens, and their sources in an encoder-decoder."""

    rows: int
    length: int
    source_length: int = 0
    packed: bool = False
    """Rows hold several documents each, which do not see each other and count their positions anew."""
    targets: int | None = None
    """How many masked tokens an encoder is to predict; all tokens when not given."""

    def length_of(self, per: Per) -> int:
        return self.source_length if per == "source" else self.length

    def count(self, per: Per) -> int:
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
class Parameter:
    """A named tensor."""

    name: str
    shape: tuple[int, ...]
    used: Fraction = Fraction(1)
    """The part of it that one token goes through: less than all of it for experts."""

    @property
    def size(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class Matmul:
    """[n, inner] x [inner, out] by a parameter, where n counts what it is there for."""

    parameter: str
    inner: int
    out: int
    per: Per = "token"
    times: int = 1
    """How often each token goes through one of this kind: the experts that it is sent to."""

    def flops(self, shape: Shape, attention: AttentionCount) -> int:
        """2 n inner out."""
        return 2 * shape.count(self.per) * self.times * self.inner * self.out


@dataclass(frozen=True)
class Attention:
    """Scores of every query with every key that it may see, and the weighted sum of values."""

    name: str
    heads: int
    key_dim: int
    value_dim: int
    causal: bool = False
    window: int | None = None
    """A query sees so many keys at most, itself included."""
    queries: Per = "token"
    keys: Per = "token"

    def flops(self, shape: Shape, attention: AttentionCount) -> int:
        """2 pairs heads (key_dim + value_dim)."""
        key_length = shape.length_of(self.keys)
        seen = min(self.window or key_length, key_length)
        # Of `seen` keys, the first queries of a row see half on average: T w - w^2 / 2 pairs, T^2 / 2 without a window.
        doubled = seen * (2 * key_length - seen) * shape.rows
        if not self.causal or attention == "full":
            doubled = 2 * shape.count(self.queries) * key_length
        return doubled * self.heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True)
class Saved:
    """A tensor that autograd keeps from forward to backward."""

    name: str
    elements: int
    per: Per = "token"
    dtype: str = "compute"
    """`compute`, `wide` (float32, or float64 if that is computed in), or a fixed dtype."""

    def bytes(self, shape: Shape, compute: str) -> int:
        return shape.count(self.per) * self.elements * _element_bytes(self.dtype, compute)


@dataclass(frozen=True)
class SavedPairs:
    """Numbers for each pair of query and key: [rows or 1, heads, queries, keys]."""

    name: str
    heads: int = 1
    window: int | None = None
    when: Literal["always", "usual", "unusual"] = "always"
    """`usual`: where every query sees all keys, or all before it, which kernels know; `unusual`: anywhere else."""
    rows: Literal["all", "packed", "one"] = "one"
    """For each row, for each only if rows hold several documents, or for all rows together."""
    queries: Per = "token"
    keys: Per = "token"
    dtype: str = "compute"

    def bytes(self, shape: Shape, compute: str) -> int:
        keys = shape.length_of(self.keys)
        unusual = shape.packed or keys > (self.window or keys)
        if self.when != "always" and unusual != (self.when == "unusual"):
            return 0
        rows = shape.rows if self.rows == "all" or (self.rows == "packed" and shape.packed) else 1
        return rows * self.heads * shape.length_of(self.queries) * keys * _element_bytes(self.dtype, compute)


def _element_bytes(dtype: str, compute: str) -> int:
    wide = "float64" if compute == "float64" else "float32"
    return DTYPE_BYTES[{"compute": compute, "wide": wide}.get(dtype, dtype)]


@dataclass(frozen=True)
class Part:
    """Some of a block: a layer with its parameters, work, and saved tensors."""

    parameters: tuple[Parameter, ...] = ()
    operations: tuple[Matmul | Attention, ...] = ()
    saved: tuple[Saved | SavedPairs, ...] = ()

    def __add__(self, other: "Part") -> "Part":
        return Part(self.parameters + other.parameters, self.operations + other.operations, self.saved + other.saved)


@dataclass(frozen=True)
class Block:
    """A run of equal parts of a model, e.g. its 32 transformer blocks."""

    name: str
    part: Part
    prefix: str = ""
    """What the names of its parameters begin with; `{i}` stands for the number of the repetition."""
    repeat: int = 1
    first: int = 0
    """The number of the first repetition."""

    @property
    def parameter_count(self) -> int:
        """Of one repetition."""
        return sum(p.size for p in self.part.parameters)

    @property
    def active_parameter_count(self) -> int:
        """Of one repetition, counting only the experts that a token is sent to."""
        return int(sum(p.size * p.used for p in self.part.parameters))

    def named_parameters(self) -> Iterator[Parameter]:
        """Of all repetitions, with their full names."""
        for i in range(self.first, self.first + self.repeat):
            for parameter in self.part.parameters:
                yield replace(parameter, name=self.prefix.format(i=i) + parameter.name)

    def forward_flops(self, shape: Shape, attention: AttentionCount = "causal") -> int:
        """Of one repetition."""
        return sum(operation.flops(shape, attention) for operation in self.part.operations)

    def saved_bytes(self, shape: Shape, dtype: str) -> int:
        """Of one repetition, computing in `dtype`."""
        return sum(saved.bytes(shape, dtype) for saved in self.part.saved)
