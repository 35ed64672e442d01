"""Recipes: the dtype of each kind of tensor, in one table that training and memory estimates read."""

from dataclasses import dataclass, replace
from typing import Annotated, Literal

from pydantic import Field

from motet.core.base_settings import FrozenSettings
from motet.precision.loss_scaling import LossScale, LossScaler


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
    "fp16": PrecisionRecipe(compute="float16", master="float32", reduce="float32", state="float32"),
}


class PrecisionSettings(FrozenSettings):
    """The `[precision]` section."""

    recipe: Literal["fp64", "fp32", "tf32", "bf16", "fp16"] = "fp32"
    """fp64 (for proofs) turns every request for float32 into float64; bf16 and fp16 keep float32 masters; tf32 is fp32
    with matmuls of NVIDIA's tensor cores on inputs of 19 bits."""

    reduce_dtype: Literal["float32", "bfloat16", "float64"] | None = None
    """The dtype in which gradients are summed over micro-batches and ranks. When not given, that of the recipe."""

    master_dtype: Literal["float32", "float64"] | None = None
    """The dtype of the parameters that the optimizer updates, and of its moments. When not given, those of the recipe.
    """

    emulate: bool = False
    """On a processor, multiply matrices of 16-bit recipes in float32, and round each result to the 16-bit format."""

    loss_scale: Literal["dynamic"] | LossScale = "dynamic"
    """With fp16: what backward begins with instead of 1; gradients are divided by it before they are clipped. A power
    of two is a static scale. `dynamic` halves the scale after a step with a gradient that is not finite, and doubles it
    after `loss_scale_growth_steps` steps without one."""

    loss_scale_initial: LossScale = 65536
    """The first dynamic scale."""

    loss_scale_growth_steps: Annotated[int, Field(ge=1)] = 2000
    """Steps in a row without overflow after which a dynamic scale doubles."""

    @property
    def resolved(self) -> PrecisionRecipe:
        """The dtypes that training uses. In fp64 all of them are float64 whatever is set."""
        recipe = RECIPES[self.recipe]
        if self.recipe == "fp64":
            return recipe
        master = self.master_dtype or recipe.master
        state = self.master_dtype or recipe.state  # torch's fused optimizers need the dtype of the masters
        return replace(recipe, reduce=self.reduce_dtype or recipe.reduce, master=master, state=state)

    def make_loss_scaler(self) -> LossScaler | None:
        """The scaler of a run before its first step; None if the recipe needs none."""
        if self.recipe != "fp16":
            return None
        if self.loss_scale == "dynamic":
            return LossScaler(self.loss_scale_initial, self.loss_scale_growth_steps)
        return LossScaler(self.loss_scale, growth_steps=None)
