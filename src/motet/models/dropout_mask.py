"""Dropout masks as a function of a key for each row and of the index of an element in the row.

The hash of an element needs no other element, so a part of a row has the mask that it has in the whole row. It is
integer arithmetic modulo 2^32, which has the same bits on every device:

    x = index * 0x9E3779B1 + low half of the key
    x = (x ^ x >> 16) * 0x7FEB352D + high half of the key
    x = (x ^ x >> 15) * 0x846CA68B
    keep the element if x, as a signed number, is at least p * 2^32 - 2^31

These are the rounds of the hash lowbias32 without its last shift, which only low bits need. Where the index is 2^32 or
more, its high half makes another key.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from math import prod
from typing import Any, cast

import torch
from torch import Tensor

from motet.core.seeds import derive_seed
from motet.models.kernels.choice import chosen, in_triton

Spans = Sequence[Sequence[tuple[int, int]]]  # (first, stop) along each dimension, in local order

_INDEX_FACTOR, _HIGH_INDEX_FACTOR = 0x9E3779B1, 0x85EBCA6B
_ROUNDS = ((16, 0x7FEB352D), (15, 0x846CA68B - 2**32))  # (shift, factor as a signed number)
_CPU_CHUNK, _DEVICE_CHUNK = 2**16, 2**24  # Elements that are hashed together; those of a CPU's thread fit its cache


def draw_mask(
    keys: Sequence[int], shape: Sequence[int], p: float, *, spans: Spans | None = None, device: torch.device
) -> Tensor:
    """Whether each element is kept, [rows, *shape], for rows of this shape that have one 63-bit key each.

    With `spans`, it draws only a rank's part: along each dimension, the elements of these spans.
    """
    local_shape = tuple(shape) if spans is None else tuple(sum(stop - start for start, stop in s) for s in spans)
    keep = torch.empty((len(keys), prod(local_shape)), dtype=torch.bool, device=device)
    smallest_kept = round(p * 2**32) - 2**31
    if smallest_kept >= 2**31 or keep.numel() == 0:
        return keep.fill_(False).view(len(keys), *local_shape)
    uses_cache = device.type in ("cpu", "meta")
    columns = max(1, (_CPU_CHUNK * torch.get_num_threads() if uses_cache else _DEVICE_CHUNK) // len(keys))
    first, indices = _local_indices(shape, spans, count=keep.shape[1], device=device)
    for where, products, start in _chunks(first, indices, keep, columns=columns):
        keep[:, where] = _hashes(keys, products, start) >= smallest_kept
    return keep.view(len(keys), *local_shape)


def hash_indices(key: int, indices: Tensor) -> Tensor:
    """32 bits for each index, as int32, of which the upper ones are the more random."""
    products = _products(indices) + _products((indices >> 32) * _HIGH_INDEX_FACTOR)
    return _mix(products, torch.tensor(key % 2**32).to(torch.int32), torch.tensor(key >> 32).to(torch.int32))


def _hashes(keys: Sequence[int], products: Tensor, start: int) -> Tensor:
    """[rows, elements]; `products` are those of the first factor with the index, counted from `start`."""
    if start >> 32:
        keys = [derive_seed(key, start >> 32) for key in keys]
    halves = [[(key + start * _INDEX_FACTOR) % 2**32, key >> 32] for key in keys]
    low, high = torch.tensor(halves).to(torch.int32).to(products.device, non_blocking=True).T.unsqueeze(-1)
    return _mix(products, low, high)


def _mix(x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    for half, (shift, factor) in zip((low, high), _ROUNDS, strict=True):
        x = x + half
        x.bitwise_xor_((x >> shift).bitwise_and_(2 ** (32 - shift) - 1)).mul_(factor)  # without copies of the sign
    return x


def _local_indices(
    shape: Sequence[int], spans: Spans | None, *, count: int, device: torch.device
) -> tuple[int, Tensor | None]:
    """The index of the first local element; and those of all, unless they are consecutive in the row."""
    if spans is None:
        return 0, None
    first = last = 0
    for length, dim_spans in zip(shape, spans, strict=True):
        first, last = first * length + dim_spans[0][0], last * length + dim_spans[-1][1] - 1
    if last - first + 1 == count and all(len(dim_spans) == 1 for dim_spans in spans):
        return first, None
    indices = torch.zeros((), dtype=torch.int64, device=device)
    for length, dim_spans in zip(shape, spans, strict=True):
        along = torch.cat([torch.arange(start, stop, device=device) for start, stop in dim_spans])
        indices = indices.unsqueeze(-1) * length + along
    return 0, indices.flatten()


def _chunks(
    first: int, indices: Tensor | None, keep: Tensor, *, columns: int
) -> Iterator[tuple[slice | Tensor, Tensor, int]]:
    """Local elements whose indices have the same high half: where they are, products for `_hashes`, and its `start`."""
    count = keep.shape[1]
    if indices is None:
        products, stop = _products(torch.arange(min(columns, count), device=keep.device)), 0
        while (start := stop) < count:
            stop = min(start + columns, count, start + 2**32 - (first + start) % 2**32)
            yield slice(start, stop), products[: stop - start], first + start
        return
    highs = indices >> 32
    lowest, highest = int(highs.min()), int(highs.max())
    for high in range(lowest, highest + 1):
        all_here = torch.arange(count, device=keep.device) if lowest == highest else (highs == high).nonzero().flatten()
        for where in all_here.split(columns):
            yield where, _products(indices[where]), high << 32


def _products(indices: Tensor) -> Tensor:
    return (indices * _INDEX_FACTOR).to(torch.int32)  # the low half of 64 bits


class _WhereKept(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, keep: Tensor) -> Tensor:
        return x * keep

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:  # torch.func needs it
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return where_kept(grad, *ctx.saved_tensors), None


def where_kept(x: Tensor, keep: Tensor) -> Tensor:
    """x, or 0 where it is not kept. Backward keeps only the mask, one byte for each element."""
    return cast(Tensor, _WhereKept.apply(x, keep))  # type: ignore[no-untyped-call]  # untyped in torch


def apply_mask(x: Tensor, keys: Sequence[int], shape: Sequence[int], *, p: float, spans: Spans | None = None) -> Tensor:
    """x with the elements that `draw_mask` does not keep set to 0, and the others scaled by 1 / (1 - p)."""
    smallest_kept, is_in_triton = round(p * 2**32) - 2**31, chosen("dropout", x) == "triton"
    if not is_in_triton or not x.numel() or smallest_kept >= 2**31 or prod(shape) > 2**32:
        return scaled_where_kept(x, draw_mask(keys, shape, p, spans=spans, device=x.device).view(x.shape), p)
    make_indices = partial(_local_indices, shape, spans, count=x.numel() // len(keys), device=x.device)
    halves = torch.tensor([[key % 2**32, key >> 32] for key in keys]).to(torch.int32).to(x.device, non_blocking=True)
    mask = in_triton("triton_dropout", "CounterMask")(halves, make_indices, smallest_kept, 1 / (1 - p))
    return cast(Tensor, in_triton("triton_dropout", "drop_by_counter")(x, mask))


def scaled_where_kept(x: Tensor, keep: Tensor, p: float) -> Tensor:
    """x where it is kept, scaled by 1 / (1 - p)."""
    return where_kept(x, keep).mul_(0.0 if p >= 1 else 1 / (1 - p))
