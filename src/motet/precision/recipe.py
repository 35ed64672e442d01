"""Recipes: the dtype of each kind of tensor, in one table that training and memory estimates read."""

from dataclasses import dataclass, replace
from typing import Literal

from motet.core.base_settings import FrozenSettings


@dataclass(frozen=True)
class PrecisionRecipe:
    """The names of the dtypes (core.dtypes)."""

    compute: str  # Parameters and activations in forward and backward
    master: str  # Parameters that the optimizer updates; if `compute` differs, it is cast from them after each update
    reduce: str  # Sums of gradients over micro-batches and ranks; cast to `master` for the optimizer
    state: str  # Moments of the optimizer


RECIPES: dict[str, PrecisionRecipe] = {
    "fp64": PrecisionRecipe(compute="float64", master="float64", reduce="float64", state="float64"),
    "fp32": PrecisionRecipe(compute="float32", master="float32", reduce="float32", state="float32"),
    "tf32": PrecisionRecipe(compute="float32", master="float32", reduce="float32", state="float32"),
    "bf16": PrecisionRecipe(compute="bfloat16", master="float32", reduce="float32", state="float32"),
}


class PrecisionSettings(FrozenSettings):
    """The `[precision]` section."""

    recipe: Literal["fp64", "fp32", "tf32", "bf16"] = "fp32"
    """fp64 (for proofs) turns every request for float32 into float64; bf16 keeps float32 masters; tf32 is fp32 with
    matmuls of NVIDIA's tensor cores on inputs of 19 bits."""

    reduce_dtype: Literal["float32", "bfloat16", "float64"] | None = None
    """The dtype in which gradients are summed over micro-batches and ranks. When not given, that of the recipe."""

    master_dtype: Literal["float32", "float64"] | None = None
    """The dtype of the parameters that the optimizer updates, and of its moments. When not given, those of the recipe.
    """

    emulate: bool = False
    """On a processor, multiply matrices of 16-bit recipes in float32, and round each result to the 16-bit format."""

    @property
    def resolved(self) -> PrecisionRecipe:
        """The dtypes that training uses. In fp64 all of them are float64 whatever is set."""
        recipe = RECIPES[self.recipe]
        if self.recipe == "fp64":
            return recipe
        master = self.master_dtype or recipe.master
        state = self.master_dtype or recipe.state  # torch's fused optimizers need the dtype of the masters
        return replace(recipe, reduce=self.reduce_dtype or recipe.reduce, master=master, state=state)
