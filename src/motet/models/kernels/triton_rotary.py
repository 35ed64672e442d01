"""The rotation of pairs by position in Triton: any number of heads, any strides, components that pass through."""

from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from motet.models.kernels.autograd_backward import single_backward

_TILE = 4096  # Elements of the heads that a program rotates; assumed


@triton.jit
def rotate_pairs(
    heads, rotations, out, token_stride, head_stride, stride, positions, count, size, pairs,
    sign: tl.constexpr, height: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1).to(tl.int64) * height + tl.arange(0, height))[:, None, None]
    component = (2 * tl.arange(0, width)[None, :, None] + tl.arange(0, 2)[None, None, :]).to(tl.int64)
    inside = (head < count) & (component < size)
    value = tl.load(heads + token * token_stride + head * head_stride + component * stride, mask=inside, other=0.0)
    first, second = tl.split(value.to(rotations.dtype.element_ty))
    pair = tl.arange(0, width)[None, :]
    turn = rotations + (token % positions) * 2 * pairs + 2 * pair
    cos = tl.load(turn, mask=pair < pairs, other=0.0)
    sin = tl.load(turn + 1, mask=pair < pairs, other=0.0) * sign
    turns = tl.broadcast_to(pair < pairs, (height, width))
    rotated = tl.join(
        tl.where(turns, first * cos - second * sin, first), tl.where(turns, first * sin + second * cos, second)
    )
    tl.store(out + (token * count + head) * size + component, rotated.to(out.dtype.element_ty), mask=inside)


def _rotate(heads: Tensor, rotations: Tensor, *, sign: int) -> Tensor:
    """[tokens, heads, head_dim] -> the same shape, contiguous; `rotations` [positions, pairs, 2] repeat."""
    tokens, count, size = heads.shape
    out = torch.empty(heads.shape, dtype=heads.dtype, device=heads.device)
    if not out.numel():
        return out
    width = triton.next_power_of_2(triton.cdiv(size, 2))
    height = max(1, min(_TILE // (2 * width), triton.next_power_of_2(count)))
    sizes = *heads.stride(), rotations.shape[0], count, size, rotations.shape[1]
    constants = {"sign": sign, "height": height, "width": width}
    rotate_pairs[tokens, triton.cdiv(count, height)](heads, rotations, out, *sizes, **constants)
    return out


class _TritonRotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, heads: Tensor, rotations: Tensor) -> Tensor:
        ctx.save_for_backward(rotations)
        return _rotate(heads, rotations, sign=1)

    @staticmethod
    @single_backward
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _rotate(grad, *ctx.saved_tensors, sign=-1), None


def rotary(heads: Tensor, rotations: Tensor) -> Tensor:
    """[..., T, heads, head_dim], rotated by the rotations [..., T, 1, pairs, 2] of their positions."""
    leading = heads.shape[:-2]
    turns = rotations.squeeze(-3)
    dims = turns.shape[:-2]
    while dims[:1] == (1,) and len(dims) > 1:
        dims = dims[1:]
    if dims != leading[len(leading) - len(dims) :]:
        turns = turns.expand(*leading, -1, -1)
    turns = turns.reshape(-1, *turns.shape[-2:]).contiguous()
    flat = heads.reshape(-1, *heads.shape[-2:])
    rotated = _TritonRotary.apply(flat, turns)  # type: ignore[no-untyped-call]  # untyped in torch
    return cast(Tensor, rotated.view(heads.shape))
