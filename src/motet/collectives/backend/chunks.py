"""Tensors as flat chunks: what a caller gives, and flat memory in which a result is made for it."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from motet.core.errors import InputError

Chunks = Sequence[Tensor | None]
"""Flat tensors; None where a rank has nothing to do with a chunk."""
Factor = float | Tensor | None
Finish = Callable[[], None] | None
"""Brings a result into the caller's tensor when that does not lie in one piece."""


def flat(tensor: Tensor) -> Tensor:
    if tensor.requires_grad:
        tensor = tensor.detach()
    return tensor.reshape(-1)


def landing(tensor: Tensor) -> tuple[Tensor, Finish]:
    """Flat memory with the values of a tensor, in which to make a result for it."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.is_contiguous():
        return tensor.view(-1), None
    made = tensor.reshape(-1)

    def finish() -> None:
        tensor.copy_(made.view(tensor.shape))

    return made, finish


def landings(tensors: list[Tensor]) -> tuple[list[Tensor], Finish]:
    pairs = [landing(tensor) for tensor in tensors]
    finishes = [finish for _, finish in pairs if finish is not None]

    def finish_all() -> None:
        for finish in finishes:
            finish()

    return [made for made, _ in pairs], finish_all if finishes else None


def scaled(chunks: Chunks, factor: float | Tensor) -> Chunks:
    return [None if chunk is None else (chunk * factor).to(chunk.dtype) for chunk in chunks]


def equal(whole: Tensor, each: int, count: int) -> list[Tensor]:
    return list(whole.split(each)) if each else [whole] * count


def pieces(whole: Tensor | list[Tensor], like: Tensor, ranks: int, what: str) -> tuple[list[Tensor], Finish]:
    """One flat chunk like this tensor for each rank, of a long tensor or of a list of tensors."""
    given = [whole] if isinstance(whole, Tensor) else whole
    tensors = 1 if isinstance(whole, Tensor) else ranks
    numel = like.numel() * ranks // tensors
    if len(given) != tensors or any(x.numel() != numel or x.dtype != like.dtype for x in given):
        raise InputError(
            f"{what} of {', '.join(map(shown, given))}: each of the {ranks} ranks has {shown(like)}, so it must be "
            f"{ranks} such tensors, or one with as many numbers"
        )
    if isinstance(whole, Tensor):
        made, finish = landing(whole)
        return equal(made, like.numel(), ranks), finish
    return landings(whole)


def rows(tensor: Tensor, sizes: list[int], ranks: int, what: str) -> list[Tensor]:
    """The parts of a tensor for each rank, with so many rows each, or equally many."""
    if not sizes:
        sizes = [tensor.shape[0] // ranks] * ranks
    if len(sizes) != ranks or sum(sizes) != tensor.shape[0]:
        raise InputError(
            f"{what} split sizes {sizes}: give one for each of the {ranks} ranks, with the sum {tensor.shape[0]}"
        )
    return list(tensor.split(sizes))


def contiguous(tensor: Tensor) -> Tensor:
    if not tensor.is_contiguous():
        raise InputError(f"receiving into a tensor of strides {tensor.stride()}: it must be contiguous")
    return tensor.detach()


def shown(tensor: Tensor) -> str:
    return f"{dtype_name(tensor.dtype)} {list(tensor.shape)}"


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
