"""The choice of the experts of each token, and the weights of their outputs.

Logits, scores and weights are in float32 at least: in 16 bits, many scores of a token are equal, and which of them
counts as the highest would differ between layouts.
"""

from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from motet.models.arch.layers import accumulation_dtype
from motet.models.kernels.autograd_backward import single_backward
from motet.models.settings import MixtureOfExpertsSettings

_SMALLEST_SUM = 1e-20  # Sigmoid scores of a token may all be 0


class Router(nn.Module):
    """[R, T, H] -> logits [R, T, E], weights [R, T, K], chosen experts [R, T, K].

    With `has_correction` each expert has a correction of its score. It counts for the choice, not for the weights, and
    no gradient changes it.
    """

    load_buffers: ClassVar = ("correction",)

    def __init__(self, hidden: int, experts: MixtureOfExpertsSettings, *, has_correction: bool = False) -> None:
        super().__init__()
        self.experts = experts
        self.weight = nn.Parameter(torch.empty(experts.count, hidden))
        self.correction: Tensor | None
        self.register_buffer("correction", torch.zeros(experts.count, dtype=torch.float32) if has_correction else None)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        e = self.experts
        logits = cast(Tensor, _LogitsFunction.apply(x, self.weight))  # type: ignore[no-untyped-call]  # untyped in torch
        scores = logits.softmax(-1) if e.scores == "softmax" else logits.sigmoid()
        chosen = self.choose(scores)
        weights = scores.gather(-1, chosen)
        if e.normalize_weights:
            weights = weights / (weights.sum(-1, keepdim=True) + _SMALLEST_SUM)
        return logits, weights if e.weight_scale == 1 else weights * e.weight_scale, chosen

    @torch.no_grad()
    def choose(self, scores: Tensor) -> Tensor:
        """[..., E] -> [..., K], the experts with the highest scores, the highest first."""
        e = self.experts
        if self.correction is not None:
            scores = scores + self.correction
        if e.groups_per_token is not None and e.groups_per_token < e.groups:
            in_groups = scores.unflatten(-1, (e.groups, -1))
            best = in_groups.topk(2).values.sum(-1).topk(e.groups_per_token).indices
            is_left = torch.zeros_like(in_groups[..., 0], dtype=torch.bool).scatter(-1, best, True)
            scores = in_groups.masked_fill(~is_left.unsqueeze(-1), float("-inf")).flatten(-2)
        return scores.topk(e.per_token).indices


class _LogitsFunction(torch.autograd.Function):
    """x @ weight.T in float32 at least. Autograd would keep a copy of x in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        ctx.input_dtype, ctx.input_shape = x.dtype, x.shape
        dtype = accumulation_dtype(x)
        logits = x.flatten(0, -2).to(dtype) @ weight.to(dtype).T
        return logits.view(*x.shape[:-1], -1)

    @staticmethod
    @single_backward
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        rows, grad_x, grad_weight = grad.flatten(0, -2), None, None
        if ctx.needs_input_grad[0]:
            grad_x = (rows @ weight.to(grad.dtype)).to(ctx.input_dtype).view(ctx.input_shape)
        if ctx.needs_input_grad[1]:
            grad_weight = (rows.T @ x.flatten(0, -2).to(grad.dtype)).to(weight.dtype)
        return grad_x, grad_weight
