"""Attention of documents that follow one another, by the kernel of variable length that torch has on CUDA devices."""

from collections.abc import Callable
from functools import cache
from inspect import signature
from typing import Any, cast

import torch
from torch import Tensor

_MIN_CAPABILITY = 8  # Compute capability of NVIDIA GPUs from Ampere on


VariableLengthKernel = Callable[..., Tensor]  # With the arguments of `attend` below


def variable_length_kernel(x: Tensor) -> VariableLengthKernel | None:
    """The kernel for activations like x, or None. It is FlashAttention's: not where a job names another kernel."""
    if not x.is_cuda or x.dtype.itemsize != 2 or not torch.backends.cuda.flash_sdp_enabled():
        return None
    return torch_kernel() if torch.cuda.get_device_capability(x.device)[0] >= _MIN_CAPABILITY else None


@cache
def torch_kernel() -> VariableLengthKernel:
    """torch's kernel."""
    from torch.nn.attention.varlen import varlen_attn

    knows_groups = "enable_gqa" in signature(varlen_attn).parameters  # Not under torch 2.11

    def attend(
        q: Tensor, k: Tensor, v: Tensor, *, starts: Tensor, longest: int, scale: float, window: tuple[int, int]
    ) -> Tensor:
        """q [N, h, D], k and v [N, kv, D] -> [N, h, D]. starts [documents + 1] int32, the last one is N; a document has
        at most `longest` tokens, or none. A query sees `window` keys before and after its place; -1 is no limit."""
        options: dict[str, Any] = {"window_size": window}
        if knows_groups:
            options["enable_gqa"] = q.shape[1] != k.shape[1]
        else:
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        return cast(Tensor, varlen_attn(q, k, v, starts, starts, longest, longest, scale=scale, **options))

    return attend
