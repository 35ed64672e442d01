"""Recipes: the dtype of each kind of tensor, in one table that training and memory estimates read."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Annotated, Literal

from pydantic import Field

from motet.core.base_settings import FrozenSettings
from motet.precision.loss_scaling import LossScale, LossScaler
from motet.precision.moment_formats import IN_BLOCKS, MAX_BLOCK_ELEMENTS, MomentDtype, block_elements


@dataclass(frozen=True)
class PrecisionRecipe:
    """The names of the dtypes (core.dtypes)."""

    compute: str  # Parameters and activations in forward and backward
    master: str  # Parameters that the optimizer updates; if `compute` differs, it is cast from them after each update
    reduce: str  # Sums of gradients over micro-batches and ranks; cast to `master` for the optimizer
    state: str  # Moments of the optimizer; "8bit" in blocks (precision.moment_formats)
    # (patterns of parameter names, dtype of their moments); the first that matches counts.
    moment_exceptions: tuple[tuple[tuple[str, ...], str], ...] = ()

    @property
    def moments_are_masters_dtype(self) -> bool:
        """Whether all moments have the dtype of the masters, which torch's fused optimizers need."""
        return {self.state, *(dtype for _, dtype in self.moment_exceptions)} == {self.master}

    @property
    def block_alignment(self) -> int:
        """A multiple of this many elements of a parameter never cuts a block of its moments."""
        return MAX_BLOCK_ELEMENTS if IN_BLOCKS in {self.state, *(d for _, d in self.moment_exceptions)} else 1

    def moment_dtype(self, name: str, shape: Sequence[int]) -> str:
        """How the moments of a parameter are stored: in the dtype of the masters where it cannot be cut into blocks."""
        exceptions = (d for patterns, d in self.moment_exceptions if any(fnmatchcase(name, p) for p in patterns))
        dtype = next(exceptions, self.state)
        return self.master if dtype == IN_BLOCKS and not block_elements(shape) else dtype


RECIPES: dict[str, PrecisionRecipe] = {
    "fp64": PrecisionRecipe(compute="float64", master="float64", reduce="float64", state="float64"),
    "fp32": PrecisionRecipe(compute="float32", master="float32", reduce="float32", state="float32"),
    "tf32": PrecisionRecipe(compute="float32", master="float32", reduce="float32", state="float32"),
    "bf16": PrecisionRecipe(compute="bfloat16", master="float32", reduce="float32", state="float32"),
    "fp16": PrecisionRecipe(compute="float16", master="float32", reduce="float32", state="float32"),
}


class PrecisionExceptionSettings(FrozenSettings):
    """Another dtype for parameters whose names match; the first exception that matches counts."""

    match: Annotated[tuple[str, ...], Field(min_length=1)]
    """Shell patterns of parameter names, e.g. `["*embed*", "head.*"]`."""
    moment_dtype: MomentDtype
    """The dtype of their moments."""


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

    moment_dtype: MomentDtype | None = None
    """The dtype of the moments of the optimizer, if it is another than that of the masters. bfloat16 is rounded
    stochastically; 8bit holds codes in blocks of up to 256 elements with a float32 scale each, for matrices."""

    exceptions: tuple[PrecisionExceptionSettings, ...] = ()
    """Parameters whose moments have another dtype."""

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
        state, reduce = self.moment_dtype or master, self.reduce_dtype or recipe.reduce
        exceptions = tuple((exception.match, exception.moment_dtype) for exception in self.exceptions)
        return replace(recipe, reduce=reduce, master=master, state=state, moment_exceptions=exceptions)

    def make_loss_scaler(self) -> LossScaler | None:
        """The scaler of a run before its first step; None if the recipe needs none."""
        if self.recipe != "fp16":
            return None
        if self.loss_scale == "dynamic":
            return LossScaler(self.loss_scale_initial, self.loss_scale_growth_steps)
        return LossScaler(self.loss_scale, growth_steps=None)
