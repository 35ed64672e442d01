"""The kernels of attention that a job may name, and where each of them exists. Nothing here imports torch."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from motet.core.units import DTYPE_BYTES
from motet.precision.recipe import RECIPES, PrecisionSettings


@dataclass(frozen=True)
class AttentionKernel:
    """A kernel of `torch.nn.functional.scaled_dot_product_attention`; the limits are those on a CUDA device."""

    torch_name: str  # The member of `torch.nn.attention.SDPBackend`
    dtypes: tuple[str, ...]
    max_head_dim: int | None = None
    wider_heads: tuple[tuple[int, int], ...] = ()  # Sizes of keys and values, on Hopper and Blackwell
    has_equal_dims: bool = False  # Keys and values of a head have the same size
    head_bytes: int = 16  # The bytes of a head are a multiple
    takes_bias: bool = True  # Scores that the model learns
    is_deterministic: bool = True
    is_on_cpu: bool = False


_NARROW, _WIDE = ("bfloat16", "float16"), ("float32",)

ATTENTION_KERNELS: dict[str, AttentionKernel] = {
    "cudnn": AttentionKernel(
        "CUDNN_ATTENTION", _NARROW, 128, wider_heads=((192, 128),), takes_bias=False, is_deterministic=False
    ),
    "flash": AttentionKernel("FLASH_ATTENTION", _NARROW, 256, has_equal_dims=True, takes_bias=False, is_on_cpu=True),
    "efficient": AttentionKernel("EFFICIENT_ATTENTION", (*_NARROW, *_WIDE)),
    "plain": AttentionKernel("MATH", (*_NARROW, *_WIDE, "float64"), head_bytes=1, is_on_cpu=True),
}


class HeadSizes(Protocol):
    """The sizes of the heads of an attention layer."""

    @property
    def key_dim(self) -> int: ...

    @property
    def value_dim(self) -> int: ...


def named_kernel(settings: PrecisionSettings, device_type: str) -> str | None:
    """torch's name of the only kernel that attention may use on a device; None where torch decides."""
    if settings.attention == "auto" or not (device_type == "cuda" or _kernel(settings).is_on_cpu):
        return None
    return _kernel(settings).torch_name


def attention_remark(settings: PrecisionSettings, device_type: str) -> str | None:
    """A sentence where the kernel that a job names is not used on this device."""
    if settings.attention == "auto" or device_type == "cuda" or _kernel(settings).is_on_cpu:
        return None
    return (
        f"precision.attention = {settings.attention!r} has no effect on this device ({device_type}): only NVIDIA GPUs "
        "have this kernel"
    )


def attention_problem(
    settings: PrecisionSettings,
    heads: Iterable[HeadSizes] = (),
    *,
    on_gpu: bool = True,
    adds_bias: bool = False,
    is_deterministic: bool = False,
) -> str:
    """Why a device cannot compute attention with the kernel that a job names; empty if it can as far as known."""
    if settings.attention == "auto" or not (on_gpu or _kernel(settings).is_on_cpu):
        return ""
    kernel, compute = _kernel(settings), settings.resolved.compute
    name, remedy = f"precision.attention = {settings.attention!r}", "write precision.attention=auto"
    if on_gpu and compute not in kernel.dtypes:
        recipes = " or ".join(key for key, recipe in RECIPES.items() if recipe.compute in kernel.dtypes)
        return f"{name} has no kernel for {compute} on a GPU; {remedy}, or set precision.recipe={recipes}"
    if is_deterministic and not kernel.is_deterministic:
        return f"{name} adds in an order that changes, and run.reproducible allows no such kernel; {remedy}"
    step = max(1, kernel.head_bytes // DTYPE_BYTES[compute])
    for head in heads:
        limit, dims = kernel.max_head_dim, (head.key_dim, head.value_dim)
        other = [size for size in dims if (limit is not None and size > limit) or size % step]
        if other and dims not in kernel.wider_heads:
            sizes = f"{step}, {2 * step}, ... {'' if limit is None else f'{limit} '}components"
            return f"{name} takes heads of {sizes}, and the model has {other[0]}; {remedy}"
        if kernel.has_equal_dims and head.key_dim != head.value_dim:
            sizes = f"{head.key_dim} components and values of {head.value_dim}"
            return f"{name} takes keys and values of one size, and the model has keys of {sizes}; {remedy}"
    if adds_bias and not kernel.takes_bias:
        return f"{name} cannot add the scores of relative positions, which the model learns; {remedy}"
    return ""


def _kernel(settings: PrecisionSettings) -> AttentionKernel:
    return ATTENTION_KERNELS[settings.attention]
