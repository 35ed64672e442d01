"""Weighted sums of cross-entropies: of logits, or of a linear head fused with its loss.
The fused loss holds the logits of one block of rows and computes the gradients of the head's input and weight in the
forward pass. Softmax runs over chunks that stay in the cache and overwrites the logits with their errors. Softmax and
loss are in float32 at least."""

from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from motet.models.arch.activations import accumulation_dtype

# Measured on one thread of a CPU with 2 MiB of L2 cache per core, 2048 rows: chunks of 1-8 MiB of float32 are equal.
# The gradient of the weight is added once per block: at a vocabulary of 50257, blocks of 32 MiB take 1.6x as long as
# 200 MiB. Against logits, cross-entropy and their backward: 0.5x the time at 4096 in bfloat16, else 0.75-0.9x.
SOFTMAX_CHUNK_BYTES = {"cpu": 4 << 20}
DEFAULT_SOFTMAX_CHUNK_BYTES = 256 << 20
LOGITS_BLOCK_BYTES = 256 << 20


def cross_entropy(logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Sum of weights x cross-entropy. logits [N, V], targets [N], weights [N]."""
    logits = logits.to(accumulation_dtype(logits))
    return (F.cross_entropy(logits, targets, reduction="none") * weights.to(logits.dtype)).sum()


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, *, targets: Tensor, weights: Tensor
) -> Tensor:
    """`cross_entropy(hidden @ weight.T + bias, ...)`. hidden [N, H], weight [V, H], bias [V]."""
    return cast(Tensor, _FusedLinearCrossEntropy.apply(hidden, weight, bias, targets, weights))  # type: ignore[no-untyped-call]  # untyped in torch


class _FusedLinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, weights: Tensor
    ) -> Tensor:
        needs_grad = ctx.needs_input_grad[:3]
        loss_dtype = accumulation_dtype(hidden)
        total = torch.zeros((), dtype=loss_dtype, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if needs_grad[0] else None
        grad_weight = torch.zeros_like(weight, dtype=loss_dtype) if needs_grad[1] else None
        grad_bias = torch.zeros_like(bias, dtype=loss_dtype) if needs_grad[2] and bias is not None else None
        for block in _even_row_slices(hidden.shape[0], LOGITS_BLOCK_BYTES // (hidden.element_size() * weight.shape[0])):
            rows, scale = hidden[block], weights[block].to(loss_dtype).unsqueeze(1)
            logits = F.linear(rows, weight, bias)
            total += (_losses(logits, targets[block], any(needs_grad)) * scale).sum()
            errors, scale = logits, scale.to(rows.dtype)  # overwritten if there is a gradient
            if grad_hidden is not None:
                torch.mm(errors, weight, out=grad_hidden[block])
                grad_hidden[block].mul_(scale)
            if grad_weight is not None and grad_weight.dtype == rows.dtype:
                grad_weight.addmm_(errors.t(), rows * scale)
            elif grad_weight is not None:
                grad_weight.add_(errors.t() @ (rows * scale))
            if grad_bias is not None:
                grad_bias.add_((errors.t() @ scale).squeeze(1))
        ctx.save_for_backward(*(g if g is None else g.to(weight.dtype) for g in (grad_hidden, grad_weight, grad_bias)))
        return total

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor) -> tuple[Tensor | None, ...]:
        saved: tuple[Tensor | None, ...] = ctx.saved_tensors
        if grad_total != 1.0:  # `loss_sum.backward()` needs no scaling
            saved = tuple(None if g is None else g * grad_total.to(g.dtype) for g in saved)
        return (*saved, None, None)


def _losses(logits: Tensor, targets: Tensor, overwrite_with_errors: bool) -> Tensor:
    """[N, 1] from logits [N, V], which may be overwritten with their errors: probabilities minus targets."""
    loss_dtype = accumulation_dtype(logits)
    losses = []
    budget = SOFTMAX_CHUNK_BYTES.get(logits.device.type, DEFAULT_SOFTMAX_CHUNK_BYTES)
    for rows in _even_row_slices(logits.shape[0], budget // (loss_dtype.itemsize * logits.shape[1])):
        chunk, target = logits[rows], targets[rows].unsqueeze(1)
        probabilities = torch.softmax(chunk, dim=1, dtype=loss_dtype)
        # log-sum-exp through the largest logit, whose probability is at least 1/V: no second pass of exponentials.
        largest, argmax = chunk.max(dim=1, keepdim=True)
        logsumexp = largest.to(loss_dtype) - probabilities.gather(1, argmax).log()
        losses.append(logsumexp - chunk.gather(1, target).to(loss_dtype))
        if overwrite_with_errors:
            probabilities.scatter_add_(1, target, torch.full_like(losses[-1], -1.0))
            chunk.copy_(probabilities)
    return torch.cat(losses) if losses else logits.new_zeros(0, 1, dtype=loss_dtype)


def _even_row_slices(rows: int, max_rows: int) -> Iterator[slice]:
    count = max(1, -(-rows // max(8, max_rows)))
    size = -(-rows // count) if rows else 1
    return (slice(start, start + size) for start in range(0, rows, size))
