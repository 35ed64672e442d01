"""The numerics of a run: the context of all that a process computes while it trains by a recipe.

Frozen parameters in the compute dtype of a recipe.

Matrix products of 16-bit tensors in float32: inputs and results are rounded to the format, sums are not.

This is what hardware with 16-bit matmuls does: products are exact in float32, and are added in it. A processor without
such hardware is often many times slower with 16-bit kernels than with float32 ones. The mode reaches linear layers,
batched products and attention, forward and backward, where autograd computes in the thread that entered the mode, as
it does on a processor.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from motet.core.errors import check_input
from motet.precision.attention_kernels import attention_problem, attention_remark, named_kernel
from motet.precision.float64_mode import use_float64
from motet.precision.recipe import PrecisionRecipe, PrecisionSettings
from motet.precision.torch_private import (
    ATTENTION,
    ATTENTION_BACKWARD,
    GROUPED_KERNEL,
    NormBase,
    TorchDispatchMode,
    tree_map,
)


def cast_frozen_parameters(module: nn.Module, recipe: PrecisionRecipe) -> None:
    """Cast frozen parameters and the running statistics of norms to the compute dtype.
    Other buffers keep their dtype, since a rotary table needs its bits."""
    compute = getattr(torch, recipe.compute)
    for name, norm in module.named_modules():
        if isinstance(norm, NormBase) and norm.running_mean is not None:
            check_input(
                compute.itemsize >= 4,
                f"{type(norm).__name__} {name!r} keeps running statistics, which need more than the "
                f"{recipe.compute} of the weights that it computes with; use precision fp32, or a norm without "
                "statistics",
            )
            for key in ("running_mean", "running_var"):
                norm.register_buffer(key, norm.get_buffer(key).to(compute))
    for parameter in module.parameters():
        if not parameter.requires_grad and parameter.is_floating_point():
            parameter.data = parameter.data.to(compute)


_aten = torch.ops.aten
_PRODUCTS: frozenset[Any] = frozenset(
    [
        _aten.mm.default,
        _aten.addmm.default,
        _aten.bmm.default,
        _aten.baddbmm.default,
        _aten.mv.default,
        _aten.addmv.default,
        _aten.dot.default,
        _aten.linear.default,
        _aten.matmul.default,
        GROUPED_KERNEL,
        ATTENTION,
        ATTENTION_BACKWARD,
    ]
)
# Kernels that write into a tensor -> the product whose rounded result is copied there.
_INTO_FIRST_ARGUMENT: dict[Any, Any] = {
    _aten.addmm_.default: _aten.addmm.default,
    _aten.baddbmm_.default: _aten.baddbmm.default,
}
_INTO_OUT: dict[Any, Any] = {
    _aten.mm.out: _aten.mm.default,
    _aten.bmm.out: _aten.bmm.default,
    _aten.addmm.out: _aten.addmm.default,
    _aten.baddbmm.out: _aten.baddbmm.default,
}
# The log of the sum of exponentials, which attention keeps for backward, is float32 in each dtype.
_FLOAT32_RESULTS = {ATTENTION: frozenset([1])}


class _Float32ProductsMode(TorchDispatchMode):
    """Widens tensors of `dtype` for products, and rounds the results to it."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not annotate it
        self._dtype = dtype

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, *call: Any, **named: Any) -> Any:
        """Call a kernel of torch; `call` is its positional arguments and those by name."""
        args, kwargs = call[0], dict(call[1] or {})
        if func in _PRODUCTS:
            return self._multiply(func, args, kwargs)
        if func in _INTO_FIRST_ARGUMENT and args[0].dtype == self._dtype:
            return args[0].copy_(self._multiply(_INTO_FIRST_ARGUMENT[func], args, kwargs))
        if func in _INTO_OUT and kwargs["out"].dtype == self._dtype:
            out = kwargs.pop("out")
            return out.copy_(self._multiply(_INTO_OUT[func], args, kwargs))
        return func(*args, **kwargs)

    def _multiply(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        has_format = False

        def widen(value: Any) -> Any:
            nonlocal has_format
            if not isinstance(value, Tensor) or value.dtype != self._dtype:
                return value
            has_format = True
            return value.to(torch.float32)

        widened, named = tree_map(widen, args), tree_map(widen, kwargs)
        result = func(*widened, **named)
        if not has_format:
            return result
        if isinstance(result, Tensor):
            return result.to(self._dtype)
        kept = _FLOAT32_RESULTS.get(func, frozenset())
        return tuple(
            value.to(self._dtype) if isinstance(value, Tensor) and index not in kept else value
            for index, value in enumerate(result)
        )


@contextmanager
def float32_products(dtype: torch.dtype) -> Iterator[None]:
    """Inside, tensors of `dtype` are multiplied in float32, and each result is rounded to `dtype` once."""
    with _Float32ProductsMode(dtype):
        yield


_TF32_CAPABILITY = 8  # Compute capability of NVIDIA GPUs from Ampere on


@contextmanager
def precision_numerics(settings: PrecisionSettings, device: torch.device) -> Iterator[None]:
    """Inside, everything on the device is computed in the precision of the recipe, and attention by its kernels."""
    with _products(settings, device), _attention_kernels(settings, device):
        yield


@contextmanager
def _attention_kernels(settings: PrecisionSettings, device: torch.device) -> Iterator[None]:
    """torch keeps the kernels for the process: they hold in backward and in what it recomputes, in its threads too."""
    problem = attention_problem(settings) if device.type == "cuda" else ""
    check_input(not problem, problem)
    name = named_kernel(settings, device.type)
    try:
        with sdpa_kernel(getattr(SDPBackend, name)) if name else nullcontext():
            yield
    except RuntimeError as error:
        check_input(
            name is None or "No available kernel" not in str(error),
            f"precision.attention = {settings.attention!r}: a call of attention in this model has a mask, dtype or "
            "heads that this kernel does not take; write precision.attention=auto",
        )
        raise


def _products(settings: PrecisionSettings, device: torch.device) -> AbstractContextManager[None]:
    if settings.recipe == "fp64":
        return use_float64()
    if settings.recipe == "tf32" and has_tf32(device):
        return _tf32_products()
    if settings.emulate:
        check_input(
            device.type == "cpu",
            f"precision.emulate = true with run.device = {device.type}, which multiplies "
            f"{settings.resolved.compute} itself; leave precision.emulate out, or set run.device=cpu",
        )
        return float32_products(getattr(torch, settings.resolved.compute))
    return nullcontext()


def has_tf32(device: torch.device) -> bool:
    """Whether the device has matmuls of TF32."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= _TF32_CAPABILITY


def numerics_remark(settings: PrecisionSettings, device: torch.device) -> str | None:
    """Sentences where a run computes in another way than the names of its recipe and its attention say."""
    remarks = (_recipe_remark(settings, device), attention_remark(settings, device.type))
    return "; ".join(filter(None, remarks)) or None


def _recipe_remark(settings: PrecisionSettings, device: torch.device) -> str | None:
    compute = settings.resolved.compute
    if settings.recipe == "tf32" and not has_tf32(device):
        missing = "its compute capability is below 8.0" if device.type == "cuda" else "only NVIDIA GPUs have TF32"
        return f"precision.recipe = 'tf32' computes in float32 on this device ({device.type}): {missing}"
    if settings.emulate:
        return f"precision.emulate = true multiplies in float32 and rounds each result to {compute}"
    return None


@contextmanager
def _tf32_products() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
