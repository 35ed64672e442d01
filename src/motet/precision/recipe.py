"""Recipes: the dtype of each kind of tensor, in one table that training and memory estimates read.

Moments of the optimizer are stored in a dtype, or as 8-bit codes in blocks of elements that share a scale.

The scale of the mean loss in float16, whose smallest number is 6e-8. Losses are sums over targets, so their backward
begins with the scale divided by the number of targets, as a power of two: neither rounds. Nothing here imports torch.

The bytes that training keeps for each parameter, by kind: they follow from the recipe and the optimizer.

The engine, the memory of a step plan and `motet show precision` read this one description.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from math import frexp, prod
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from motet.core.config_loading import FrozenSettings
from motet.core.errors import TrainingDivergedError
from motet.core.units import DTYPE_BYTES

MomentDtype = Literal["float32", "float64", "bfloat16", "8bit"]
AttentionKernelName = Literal["auto", "cudnn", "flash", "efficient", "plain"]
IN_BLOCKS = "8bit"
MAX_BLOCK_ELEMENTS, MIN_BLOCK_ELEMENTS = 256, 16
SCALE_BYTES = DTYPE_BYTES["float32"]


def block_elements(shape: Sequence[int]) -> int:
    """Elements of a parameter that share a scale, or 0 for a parameter whose moments are not stored in 8 bits.

    It is a power of two that divides the rows, so that shards of whole rows are shards of whole blocks. Vectors, and
    matrices with rows of another length, have no such blocks.
    """
    row = prod(shape[1:]) if len(shape) > 1 else 1
    block = min(row & -row, MAX_BLOCK_ELEMENTS)
    return block if block >= MIN_BLOCK_ELEMENTS else 0


def stored_bytes(dtype: str, shape: Sequence[int], numel: int) -> int:
    """Bytes of one moment of `numel` elements of a parameter, which begin with a block."""
    if dtype != IN_BLOCKS:
        return numel * DTYPE_BYTES[dtype]
    return numel + SCALE_BYTES * -(-numel // block_elements(shape))


def bytes_per_element(dtype: str) -> float:
    """Bytes of an element of a moment; in 8 bits that of a matrix whose rows are cut into the largest blocks."""
    if dtype == IN_BLOCKS:
        return stored_bytes(dtype, (1, MAX_BLOCK_ELEMENTS), MAX_BLOCK_ELEMENTS) / MAX_BLOCK_ELEMENTS
    return DTYPE_BYTES[dtype]


SMALLEST_SCALE, LARGEST_SCALE = 1, 2**24
MAX_OVERFLOWS_AT_SMALLEST = 10


def _check_power_of_two(scale: int) -> int:
    if scale & scale - 1:
        raise PydanticCustomError("power", "is not a power of two, by which nothing is rounded; give one, such as 1024")
    return scale


LossScale = Annotated[int, Field(ge=SMALLEST_SCALE, le=LARGEST_SCALE), AfterValidator(_check_power_of_two)]


@dataclass(frozen=True)
class LossScaler:
    """A scale, and the counts that decide when it changes; each step makes a new one."""

    scale: int
    growth_steps: int | None = 2000  # Steps without overflow after which the scale doubles; None: it is static
    good_steps: int = 0  # Steps in a row without overflow at this scale
    overflows_at_smallest: int = 0  # Overflows in a row at a scale that cannot be halved
    targets: int = 1  # Targets of the last step on all ranks, rounded up to a power of two

    @property
    def backward_scale(self) -> float:
        """The number that the backward of a sum of losses begins with."""
        return self.scale / self.targets

    def with_targets(self, count: float) -> "LossScaler":
        """The scaler of a step with `count` targets."""
        mantissa, exponent = frexp(count)
        return replace(self, targets=2 ** max(0, exponent - (mantissa == 0.5)))

    def after_step(self) -> "LossScaler":
        """The scaler after a step without overflow."""
        good_steps = self.good_steps + 1
        if self.growth_steps is None or good_steps < self.growth_steps:
            return replace(self, good_steps=good_steps, overflows_at_smallest=0)
        return replace(self, scale=min(self.scale * 2, LARGEST_SCALE), good_steps=0, overflows_at_smallest=0)

    def after_overflow(self) -> "LossScaler":
        """The scaler after a step whose gradients were not finite."""
        if self.growth_steps is None or self.scale <= SMALLEST_SCALE:
            return replace(self, good_steps=0, overflows_at_smallest=self.overflows_at_smallest + 1)
        return replace(self, scale=max(self.scale // 2, SMALLEST_SCALE), good_steps=0, overflows_at_smallest=0)

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
            "targets": self.targets,
        }

    def restored(self, state: dict[str, int]) -> "LossScaler":
        """The scaler that continues from a checkpoint; another static scale stays that of the job."""
        is_replaced = self.growth_steps is None and state["scale"] != self.scale
        return self if is_replaced else replace(self, **state)


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
        """The storage of a parameter's moments: the dtype of the masters where it cannot be cut into blocks."""
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

    other_names: ClassVar = {"recipe": "bf16 fp16 fp8 amp mixed_precision dtype torch_dtype param_dtype"}
    remedies: ClassVar = {
        "recipe=*fp8*": "motet does not train in 8 bits; use precision.recipe=bf16, and predict the saving of float8 "
        "with `motet plan JOB --matmul float8`",
        "recipe=bf*": "write precision.recipe=bf16",
        "recipe=*16*": "write precision.recipe=fp16",
        "recipe=*32*": "write precision.recipe=fp32",
    }
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
    """With fp16: the factor of the mean loss in backward; gradients are divided by it before they are clipped. A power
    of two is a static scale. `dynamic` halves the scale after a step with a gradient that is not finite, and doubles it
    after `loss_scale_growth_steps` steps without one."""

    loss_scale_initial: LossScale = 65536
    """The first dynamic scale."""

    loss_scale_growth_steps: Annotated[int, Field(ge=1)] = 2000
    """Steps in a row without overflow after which a dynamic scale doubles."""

    attention: AttentionKernelName = "auto"
    """The kernel of attention. `auto` leaves the choice to torch, for each call; a name takes that kernel alone. A CPU
    has `flash` and `plain`."""

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


# Flat buckets keep parameters in the compute dtype, with gradients in that of their sums. Rows of FSDP2 are masters
# with gradients of their dtype; parameters in the compute dtype exist while they are gathered.
StateStorage = Literal["buckets", "rows"]


@dataclass(frozen=True)
class ParameterStateBytes:
    """Bytes of one parameter from step to step, of the rank that holds each of them."""

    parameters: int
    gradients: int
    masters: int
    moments: float  # Includes the scales of blocks

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
        return ParameterStateBytes(master if separate_masters else 0, master, master, moments)
    return ParameterStateBytes(compute, reduce, master if separate_masters or keeps_masters(recipe) else 0, moments)
