"""AdamW in Triton: one pass over gradients, moments and masters, which also writes the parameters that compute."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_WIDTH = 1024  # Elements that a program updates; assumed


@triton.jit
def adamw_elements(
    gradient, master, mean, square, compute, numbers, step, size,
    casts: tl.constexpr, wide: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    # Numbers of the update are in float64: in float32, 1 - 0.999 would have three wrong digits.
    rate, decay = tl.load(numbers), tl.load(numbers + 1)
    beta1, beta2 = tl.load(numbers + 2), tl.load(numbers + 3)
    eps, scale = tl.load(numbers + 4).to(wide), tl.load(numbers + 5).to(wide)
    count = tl.load(step).to(tl.float64)
    step_size = (rate / (1.0 - tl.exp(count * tl.log(beta1)))).to(wide)
    root = tl.sqrt(1.0 - tl.exp(count * tl.log(beta2))).to(wide)
    at = tl.program_id(0).to(tl.int64) * width + tl.arange(0, width)
    inside = at < size
    g = tl.load(gradient + at, mask=inside, other=0.0).to(wide) * scale
    m = tl.load(mean + at, mask=inside, other=0.0) * beta1.to(wide) + g * (1.0 - beta1).to(wide)
    v = tl.load(square + at, mask=inside, other=0.0) * beta2.to(wide) + g * g * (1.0 - beta2).to(wide)
    p = tl.load(master + at, mask=inside, other=0.0) * (1.0 - rate * decay).to(wide)
    p -= step_size * m / (tl.sqrt(v) / root + eps)
    tl.store(mean + at, m, mask=inside)
    tl.store(square + at, v, mask=inside)
    tl.store(master + at, p, mask=inside)
    if casts:
        tl.store(compute + at, p.to(compute.dtype.element_ty), mask=inside)


def update_adamw(
    master: Tensor,
    gradient: Tensor,
    moments: tuple[Tensor, Tensor],
    *,
    numbers: Tensor,
    step: Tensor,
    compute: Tensor | None,
) -> None:
    """Update contiguous masters and moments of one dtype in place, and write the masters to `compute` in its dtype.
    numbers [6] float64: learning rate, weight decay, both betas, eps, and the factor of the gradient; `step` is the
    number of this update, from 1. Nothing waits for the device."""
    size = master.numel()
    if size:
        wide = tl.float64 if master.dtype == torch.float64 else tl.float32
        width = min(_WIDTH, triton.next_power_of_2(size))
        tensors = (gradient.contiguous(), master, *moments, master if compute is None else compute, numbers, step)
        options = {"casts": compute is not None, "wide": wide, "width": width}
        adamw_elements[(triton.cdiv(size, width),)](*tensors, size, **options)
