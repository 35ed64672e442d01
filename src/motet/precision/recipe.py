"""A recipe says which dtype each kind of tensor has: one table, read by training and by every count of bytes."""

from dataclasses import dataclass
from typing import Literal

from motet.core.base_settings import FrozenSettings


class PrecisionSettings(FrozenSettings):
    """The `[precision]` section."""

    recipe: Literal["fp64", "fp32", "bf16"] = "fp32"
    """fp64 (for proofs) turns every request for float32 into float64; bf16 keeps float32 masters."""


@dataclass(frozen=True)
class PrecisionRecipe:
    """Names of dtypes (core.dtypes)."""

    compute: str  # What the model's parameters and activations are while it runs
    # What the optimizer updates. When it differs from `compute`, parameters are cast from it after each update.
    master: str
    reduce: str  # What gradients are summed in, over micro-batches and over ranks
    state: str  # What the optimizer's moments are kept in


RECIPES: dict[str, PrecisionRecipe] = {
    "fp64": PrecisionRecipe(compute="float64", master="float64", reduce="float64", state="float64"),
    "fp32": PrecisionRecipe(compute="float32", master="float32", reduce="float32", state="float32"),
    "bf16": PrecisionRecipe(compute="bfloat16", master="float32", reduce="float32", state="float32"),
}
