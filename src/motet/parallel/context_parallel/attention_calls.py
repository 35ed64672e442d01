"""The calls of attention in a forward of a model, whose keys ranks of context parallelism exchange."""

from dataclasses import dataclass


@dataclass(frozen=True)
class AttentionCall:
    """One call of attention in a forward of the whole model on one device."""

    module: str
    query_heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    causal: bool
    window: int | None = None  # Keys that a query sees, counted back from its own place
    block: int | None = None  # The transformer block; None outside of the blocks
