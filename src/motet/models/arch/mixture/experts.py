"""Experts as stacked weights: tokens in the order of their experts, and one grouped product for each layer.

An assignment is one of the K experts of a token. Assignments are sorted by expert, so that those of an expert are
neighbouring rows of each product. Sums over the K outputs of a token are in the order of its choice, on each layout.
Gradients exist for each expert, also without tokens: a rank that skipped one would make no gradient that others add.
"""

from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from motet.models.arch.layers import apply_activation, gated_activation
from motet.models.kept_results import keep_result
from motet.models.kernels.autograd_backward import single_backward
from motet.models.settings import DecoderSettings, MixtureOfExpertsSettings

_KERNEL_BYTES = 16  # Rows of each operand of the grouped kernel are multiples of it
_CACHE_BYTES = 2**20  # For each thread: a CPU gathers the outputs of as many tokens, and adds them while they are near


class Experts(nn.Module):
    """Feed-forward networks of which each token visits some.

    x [..., H], experts of each token [..., K], weights of their outputs [..., K] -> [..., H]. An index equal to the
    number of experts is a dropped assignment, whose weight is 0. It is computed as a row of zeros, so that no shape
    depends on values.
    """

    def __init__(self, s: DecoderSettings, experts: MixtureOfExpertsSettings) -> None:
        super().__init__()
        self.activation, self.has_limit = s.activation, experts.capacity is not None
        self.activate = gated_activation if s.gated else apply_activation
        self.up = nn.Parameter(torch.empty(experts.count, experts.hidden * (2 if s.gated else 1), s.hidden))
        self.down = nn.Parameter(torch.empty(experts.count, s.hidden, experts.hidden))

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        sorted_experts, order = chosen.flatten().sort(stable=True)
        stops = torch.searchsorted(sorted_experts, torch.arange(len(self.up), device=x.device), right=True)
        is_dropped = sorted_experts == len(self.up) if self.has_limit else None
        stops[-1] = len(order)  # The rows behind the last stop would have arbitrary values
        inputs = cast(Tensor, _ToExperts.apply(chosen.shape[-1], x.flatten(0, -2), order, is_dropped))  # type: ignore[no-untyped-call]  # untyped in torch
        inner = self.activate(grouped_product(inputs, self.up, stops), self.activation)
        outputs = grouped_product(inner, self.down, stops)
        total = cast(Tensor, _FromExperts.apply(outputs, weights.flatten(0, -2), order))  # type: ignore[no-untyped-call]  # untyped in torch
        return total.view_as(x)


def grouped_product(x: Tensor, weights: Tensor, stops: Tensor) -> Tensor:
    """x [N, in] in groups of rows that end at `stops` [E], weights [E, out, in] -> [N, out]: each group times its
    weight. The last stop is N."""
    return cast(Tensor, _GroupedProduct.apply(x, weights, stops))  # type: ignore[no-untyped-call]  # untyped in torch


class _GroupedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *stacked: Tensor) -> Tensor:
        weights, stops = stacked
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weights, stops)
        return keep_result(lambda: _multiply(x, weights.mT, stops))

    @staticmethod
    @single_backward
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weights, stops = ctx.saved_tensors
        grad_x = _multiply(grad, weights, stops) if ctx.needs_input_grad[0] else None
        return grad_x, _weight_gradient(grad, x, stops) if ctx.needs_input_grad[1] else None, None


def _multiply(x: Tensor, matrices: Tensor, stops: Tensor) -> Tensor:
    """x [N, in], matrices [E, in, out] -> [N, out]."""
    if _is_kernel_fit(x, matrices):
        return F.grouped_mm(x, matrices, offs=stops.to(torch.int32))
    result = x.new_empty(len(x), matrices.shape[-1])
    for rows, matrix in zip(_groups(stops, x), matrices, strict=False):
        torch.mm(x[rows], matrix, out=result[rows])
    return result


def _weight_gradient(grad: Tensor, x: Tensor, stops: Tensor) -> Tensor:
    """grad [N, out], x [N, in] -> [E, out, in]."""
    if _is_kernel_fit(x, grad):
        return F.grouped_mm(grad.mT, x, offs=stops.to(torch.int32))
    result = x.new_empty(len(stops), grad.shape[-1], x.shape[-1])
    for rows, out in zip(_groups(stops, x), result, strict=False):
        torch.mm(grad[rows].T, x[rows], out=out)
    return result


def _is_kernel_fit(x: Tensor, other: Tensor) -> bool:
    """Whether the grouped kernel takes both. On a CPU it is a loop as well (measured: equally fast), which the counters
    of products do not see. On CUDA it has not run yet."""
    widths = (tensor.shape[-1] * tensor.element_size() for tensor in (x, other))
    return x.is_cuda and x.dtype == torch.bfloat16 and not any(width % _KERNEL_BYTES for width in widths)


def _groups(stops: Tensor, x: Tensor) -> Iterator[slice]:
    """The rows of each expert. In a step of shapes, which has no values, all are those of the first expert: as many
    operations for any number of experts, with as many FLOPs."""
    numbers = [len(x)] if x.is_meta else stops.tolist()
    return (slice(start, stop) for start, stop in zip([0, *numbers], numbers, strict=False))


class _ToExperts(torch.autograd.Function):
    """x [N, H] -> [N K, H], the token of each assignment in the order of experts; zeros for dropped assignments."""

    @staticmethod
    def forward(ctx: Any, per_token: int, *tensors: Any) -> Tensor:
        x: Tensor = tensors[0]
        order, is_dropped = tensors[1:]
        ctx.save_for_backward(order)
        ctx.shape = len(x), per_token, x.shape[1]
        inputs = x.index_select(0, order // per_token)
        return inputs if is_dropped is None else inputs.masked_fill_(is_dropped.unsqueeze(-1), 0)

    @staticmethod
    @single_backward
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None, None]:
        (order,) = ctx.saved_tensors
        result = grad.new_empty(ctx.shape[0], ctx.shape[2])
        for out, places in _blocks_of_tokens(result, _inverse(order).view(ctx.shape[:2])):
            torch.sum(grad.index_select(0, places.flatten()).view(*places.shape, out.shape[1]), 1, out=out)
        return None, result, None, None


class _FromExperts(torch.autograd.Function):
    """outputs [N K, H] in the order of experts, weights [N, K] -> [N, H], the weighted sum of each token."""

    @staticmethod
    def forward(ctx: Any, outputs: Tensor, *assigned: Tensor) -> Tensor:
        weights, order = assigned
        ctx.save_for_backward(outputs, weights, order)
        result = outputs.new_empty(len(weights), outputs.shape[1])
        for out, places, factors in _blocks_of_tokens(result, _inverse(order).view(weights.shape), weights):
            by_token = outputs.index_select(0, places.flatten()).view(*places.shape, out.shape[1])
            torch.sum(by_token.mul_(factors.unsqueeze(-1)), 1, out=out)
        return result

    @staticmethod
    @single_backward
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        outputs, weights, order = ctx.saved_tensors
        by_assignment = grad.index_select(0, order // weights.shape[1])
        products = (by_assignment * outputs).sum(-1, dtype=weights.dtype)
        grad_weights = torch.empty_like(products).scatter_(0, order, products).view_as(weights)
        by_assignment.mul_(weights.flatten().index_select(0, order).unsqueeze(-1))
        return by_assignment, grad_weights, None


def _blocks_of_tokens(out: Tensor, places: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Blocks of rows of out [N, H], places [N, K] and other tensors of N rows, such that the rows of x at the places
    of a block fit a CPU's cache. On other devices, and in a step of shapes, one block has all rows."""
    tokens = max(len(out), 1)
    if out.device.type == "cpu":
        token_bytes = max(out.element_size() * out.shape[1] * places.shape[1], 1)
        tokens = max(_CACHE_BYTES * torch.get_num_threads() // token_bytes, 1)
    return zip(*(tensor.split(tokens) for tensor in (out, places, *others)), strict=True)


def _inverse(order: Tensor) -> Tensor:
    """The place of each assignment in the order of experts."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
