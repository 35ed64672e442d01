"""The scale of the loss in float16, whose smallest number is 6e-8: backward begins with the scale instead of 1.
A scale is a power of two, so that neither multiplying nor dividing by it rounds. Nothing here imports torch."""

from dataclasses import dataclass, replace
from typing import Annotated

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from motet.core.errors import TrainingDivergedError

SMALLEST_SCALE, LARGEST_SCALE = 1, 2**24
MAX_OVERFLOWS_AT_SMALLEST = 10


def _check_power_of_two(scale: int) -> int:
    if scale & scale - 1:
        raise PydanticCustomError("power", "must be a power of two, by which nothing is rounded")
    return scale


LossScale = Annotated[int, Field(ge=SMALLEST_SCALE, le=LARGEST_SCALE), AfterValidator(_check_power_of_two)]


@dataclass(frozen=True)
class LossScaler:
    """A scale, and what decides when it changes; each step makes a new one."""

    scale: int
    growth_steps: int | None = 2000  # Steps without overflow after which the scale doubles; None: it is static
    good_steps: int = 0  # Steps in a row without overflow at this scale
    overflows_at_smallest: int = 0  # In a row, at a scale that cannot be halved

    def after_step(self) -> "LossScaler":
        """The scaler after a step without overflow."""
        good_steps = self.good_steps + 1
        if self.growth_steps is None or good_steps < self.growth_steps:
            return replace(self, good_steps=good_steps, overflows_at_smallest=0)
        return LossScaler(min(self.scale * 2, LARGEST_SCALE), self.growth_steps)

    def after_overflow(self) -> "LossScaler":
        """The scaler after a step whose gradients were not finite."""
        if self.growth_steps is None or self.scale <= SMALLEST_SCALE:
            return replace(self, good_steps=0, overflows_at_smallest=self.overflows_at_smallest + 1)
        return LossScaler(max(self.scale // 2, SMALLEST_SCALE), self.growth_steps)

    def check_can_continue(self) -> None:
        """Raise the error that ends a run whose gradients overflow at a scale that does not get smaller."""
        count = self.overflows_at_smallest
        if count < MAX_OVERFLOWS_AT_SMALLEST:
            return
        if self.growth_steps is None:
            scale, remedy = f"the static precision.loss_scale = {self.scale}", "set precision.loss_scale=dynamic"
        else:
            scale, remedy = f"loss scale {self.scale}, the smallest", "use precision.recipe=bf16 or fp32"
        raise TrainingDivergedError(
            f"stopped: gradients are not finite for {count} steps in a row with {scale}; none of these steps updated "
            f"the model; {remedy}, or lower optimizer.learning_rate"
        )

    def state(self) -> dict[str, int]:
        """The numbers that a checkpoint keeps."""
        return {
            "scale": self.scale,
            "good_steps": self.good_steps,
            "overflows_at_smallest": self.overflows_at_smallest,
        }

    def restored(self, state: dict[str, int]) -> "LossScaler":
        """The scaler that continues from a checkpoint; another static scale stays that of the job."""
        is_replaced = self.growth_steps is None and state["scale"] != self.scale
        return self if is_replaced else replace(self, **state)
