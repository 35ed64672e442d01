"""Values that a recorded forward consists of, at one size of the batch. They need no torch."""

from dataclasses import dataclass, field
from typing import NamedTuple

from motet.models.spec.layer_specs import BackwardKernel


class VisibleKeys(NamedTuple):
    """The keys that each query sees."""

    causal: bool
    window: int | None = None


@dataclass
class ProductRecord:
    """Products with one parameter."""

    name: str
    in_features: int
    out_features: int
    operator: int  # The number of operators before it
    count: int = 0  # Vectors that are multiplied


@dataclass
class AttentionRecord:
    """Attention of one module."""

    name: str
    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    lengths: tuple[int, int]  # Of queries and keys
    causal: bool
    window: int | None
    operator: int


@dataclass
class SavedRecord:
    """A storage that autograd keeps."""

    name: str
    elements: int
    dtype: str
    operator: int = 0  # That made it
    key: int = 0
    kernel: BackwardKernel = "other"


# A product of two activations: (its name, [batch, rows, depth, columns], visible keys of the first factor, operator)
UnweightedProduct = tuple[str, tuple[int, int, int, int], VisibleKeys | None, int]


@dataclass
class BlockRecord:
    """A block, or a stretch outside of blocks, which has no name."""

    name: str | None = None
    parameters: dict[str, tuple[int, ...]] = field(default_factory=dict)
    products: dict[tuple[str, int, int], ProductRecord] = field(default_factory=dict)
    attention: list[AttentionRecord] = field(default_factory=list)
    unweighted: list[UnweightedProduct] = field(default_factory=list)
    saved: list[SavedRecord] = field(default_factory=list)
    arguments: list[tuple[int, SavedRecord, bool]] = field(default_factory=list)  # (Storage, size, has a gradient)

    @property
    def is_empty(self) -> bool:
        return not (self.name or self.parameters or self.products or self.attention or self.unweighted or self.saved)
