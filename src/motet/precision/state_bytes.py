"""The bytes that training keeps for each parameter, by what they hold: they follow from the recipe and the optimizer.

The engine, the memory of a step plan and `motet show precision` read this one description.
"""

from dataclasses import dataclass
from typing import Literal

from motet.core.dtypes import DTYPE_BYTES
from motet.precision.moment_formats import bytes_per_element
from motet.precision.recipe import PrecisionRecipe

# Flat buckets keep parameters in the compute dtype, with gradients in that of their sums. Rows of FSDP2 are masters
# with gradients of their dtype; parameters in the compute dtype exist while they are gathered.
StateStorage = Literal["buckets", "rows"]


@dataclass(frozen=True)
class ParameterStateBytes:
    """Bytes of one parameter from step to step, of the rank that holds each of them."""

    parameters: int
    gradients: int
    masters: int
    moments: float  # With the scales of blocks

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.masters + self.moments


def keeps_masters(recipe: PrecisionRecipe) -> bool:
    """Whether masters are kept in addition to parameters, which are else their own masters."""
    return recipe.master != recipe.compute


def parameter_state_bytes(
    recipe: PrecisionRecipe,
    moments_per_parameter: int,
    *,
    storage: StateStorage = "buckets",
    separate_masters: bool = False,
) -> ParameterStateBytes:
    """The bytes of one parameter without exceptions; masters may be separate whatever their dtype."""
    compute, master, reduce = (DTYPE_BYTES[dtype] for dtype in (recipe.compute, recipe.master, recipe.reduce))
    moments = moments_per_parameter * bytes_per_element(recipe.state)
    if storage == "rows":
        return ParameterStateBytes(0, master, master, moments)
    return ParameterStateBytes(compute, reduce, master if separate_masters or keeps_masters(recipe) else 0, moments)
