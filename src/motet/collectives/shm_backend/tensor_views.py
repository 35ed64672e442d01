"""Tensors as flat chunks, and flat buffers in which a result is made for a tensor."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor

from motet.collectives.torch_private import has_dispatch_modes, without_dispatch
from motet.core.errors import InputError, check_input
from motet.core.units import dtype_name

Chunks = Sequence[Any]  # Flat tensors; None where a rank does not have a chunk
Factor = float | Tensor | None
_NOTHING = nullcontext()
CopyBack = Callable[[], object] | None  # Copies a result into the tensor of the caller, if that is not contiguous


def raw(tensor: Tensor) -> Tensor:
    """The values of a tensor without autograd: writing to them changes no version counter and needs no mode."""
    data = tensor.data
    if not data.is_inference():
        return data
    alias = torch.empty(0, dtype=data.dtype, device=data.device)
    return alias.set_(data.untyped_storage(), data.storage_offset(), data.shape, data.stride())


def without_modes() -> AbstractContextManager[object]:
    """Leave the caller's dispatch modes and inference mode, which do not concern the moving of bytes."""
    has_modes, is_inference = has_dispatch_modes(), torch.is_inference_mode_enabled()
    if not has_modes and not is_inference:
        return _NOTHING
    guards = ExitStack()
    if has_modes:
        guards.enter_context(without_dispatch())
    guards.enter_context(torch.inference_mode(False))
    return guards


def flatten(tensor: Tensor) -> Tensor:
    return raw(tensor).reshape(-1)


def output_buffer(tensor: Tensor) -> tuple[Tensor, CopyBack]:
    """Flat memory with the values of a tensor, in which to make a result for it."""
    tensor = raw(tensor)
    if tensor.is_contiguous():
        return tensor.view(-1), None
    buffer = tensor.reshape(-1)
    return buffer, lambda: tensor.copy_(buffer.view(tensor.shape))


def output_buffers(tensors: list[Tensor]) -> tuple[list[Tensor], CopyBack]:
    pairs = [output_buffer(tensor) for tensor in tensors]

    def copy_all_back() -> None:
        for _, copy_back in pairs:
            if copy_back is not None:
                copy_back()

    return [buffer for buffer, _ in pairs], copy_all_back


def split_equally(tensor: Tensor, numel: int, count: int) -> list[Tensor]:
    return list(tensor.split(numel)) if numel else [tensor] * count


def per_rank_chunks(
    buffers: Tensor | list[Tensor], like: Tensor, ranks: int, *, role: str, lengths: Sequence[int] | None = None
) -> tuple[list[Tensor], CopyBack]:
    """One flat chunk for each rank, like this tensor or of its length, of a long tensor or of a list of tensors."""
    if lengths is not None:
        return output_buffers(list(buffers))
    tensors, expected = ([buffers], 1) if isinstance(buffers, Tensor) else (buffers, ranks)
    numel = like.numel() * ranks // expected
    if len(tensors) != expected or any(x.numel() != numel or x.dtype != like.dtype for x in tensors):
        raise InputError(
            f"{role} of {', '.join(map(describe_tensor, tensors))}: each of the {ranks} ranks has "
            f"{describe_tensor(like)}, so give {ranks} such tensors, or one with as many elements"
        )
    if isinstance(buffers, Tensor):
        buffer, copy_back = output_buffer(buffers)
        return split_equally(buffer, like.numel(), ranks), copy_back
    return output_buffers(buffers)


def split_rows(tensor: Tensor, sizes: list[int], ranks: int, *, role: str) -> list[Tensor]:
    """The rows of a tensor for each rank, equally many if no sizes are given."""
    sizes = sizes or [tensor.shape[0] // ranks] * ranks
    problem = f"{role} split sizes {sizes}: give one for each of the {ranks} ranks, with the sum {tensor.shape[0]}"
    check_input(len(sizes) == ranks and sum(sizes) == tensor.shape[0], problem)
    return list(tensor.split(sizes))


def require_contiguous(tensor: Tensor) -> Tensor:
    if not tensor.is_contiguous():
        raise InputError(f"receiving into a tensor of strides {tensor.stride()}: give a contiguous one")
    return raw(tensor)


def describe_tensor(tensor: Tensor) -> str:
    return f"{dtype_name(tensor.dtype)} {list(tensor.shape)}"
