"""The one linear: how a rank computes its part of a linear layer, and communicates during the matmuls.

Layers whose columns are split read one tensor, which is communicated once. Their weight gradients are computed while
the gradient of this tensor is being reduced: the product of a layer leaves them to the function that communicates.

    forward    gather the input, or have it; then a product for each layer that reads it
    backward   for each layer the gradient of its input; start to reduce their sum; all weight gradients; wait
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from motet.collectives.execute.api import all_gather, all_reduce, reduce_scatter
from motet.collectives.execute.work_queue import WorkHandle
from motet.parallel.process.process_group import RankGroup
from motet.parallel.tensor_parallel.boundary_functions import join_parts, unflatten_parts


@dataclass(frozen=True)
class LinearSplit:
    """How the ranks of a group split a linear layer."""

    group: RankGroup
    is_transposed: bool  # The weight is [in, out], as in transformers' Conv1D
    pieces: int = 1  # Of an activation that is communicated: each while the next ones, or the last, are multiplied
    dim: int | None = None  # Split rows: ranks get their parts of the output along it; None: all of the output
    reduces: bool = True  # Split rows: the output is summed here, and not after something was added to it

    def multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The output of the layer."""
        return F.linear(x, weight.T if self.is_transposed else weight, bias)

    def input_gradient(self, gradient: Tensor, weight: Tensor) -> Tensor:
        return gradient @ (weight.T if self.is_transposed else weight)

    def weight_gradient(self, x: Tensor, gradient: Tensor) -> Tensor:
        rows, columns = x.reshape(-1, x.shape[-1]), gradient.reshape(-1, gradient.shape[-1])
        return rows.T @ columns if self.is_transposed else columns.T @ rows


# The next two classes are the place for kernels that communicate inside of a matmul, by CUDA's symmetric memory.


class PendingGather:
    """A gather along a dimension that was started, or the tensor itself without one."""

    def __init__(self, x: Tensor, group: RankGroup, dim: int | None, *, pieces: int = 1) -> None:
        self._dim, self._x = dim, x
        self._pieces: list[tuple[Tensor, Tensor, WorkHandle]] = []  # With what is sent, which must live so long
        for part in () if dim is None else _split_pieces(x, dim, pieces):
            sent, parts = part.contiguous(), x.new_empty(group.world, *part.shape)
            self._pieces.append((parts, sent, all_gather(parts, sent, group, async_op=True)))

    def apply(self, function: Callable[[Tensor], Tensor]) -> Tensor:
        """The function of the gathered tensor, which maps its last dimension; of each piece when it is here."""
        if self._dim is None:
            return function(self._x)
        results = []
        for parts, _, work in self._pieces:
            work.wait()
            results.append(function(parts))
        return join_parts(_join_pieces(results, self._dim + 1), self._dim)

    def wait(self) -> Tensor:
        return self.apply(lambda parts: parts)


class PendingReduction:
    """A sum over the ranks that was started and overwrites its input, or with `scatters` this rank's of [ranks, ...]"""

    def __init__(self, x: Tensor, group: RankGroup, *, scatters: bool) -> None:
        self._sent = self._result = x.contiguous()  # Lives until it was sent
        if scatters:
            self._result = torch.empty_like(self._sent[0])
            self._work = reduce_scatter(self._result.view(-1), self._sent.view(-1), group, async_op=True)
        else:
            self._work = all_reduce(self._result, group, async_op=True)

    def wait(self) -> Tensor:
        self._work.wait()
        return self._result


def start_reduction(x: Tensor, group: RankGroup, dim: int | None) -> PendingReduction:
    """Start to sum over the ranks; with `dim`, each rank gets its part along it."""
    return PendingReduction(x if dim is None else unflatten_parts(x, dim, group), group, scatters=dim is not None)


def _reduce_product(split: LinearSplit, x: Tensor, multiply: Callable[[Tensor], Tensor]) -> Tensor:
    """The sum over the ranks of a product: each piece is summed while the next one is multiplied."""
    if split.pieces == 1:
        return start_reduction(multiply(x), split.group, split.dim).wait()
    rows, dim = (x.flatten(0, -2), 0) if split.dim is None else (unflatten_parts(x, split.dim, split.group), split.dim)
    scatters = split.dim is not None
    pieces = _split_pieces(rows, dim + scatters, split.pieces)
    reductions = [PendingReduction(multiply(piece), split.group, scatters=scatters) for piece in pieces]
    total = _join_pieces([reduction.wait() for reduction in reductions], dim)
    return total if scatters else total.view(*x.shape[:-1], -1)


def _split_pieces(x: Tensor, dim: int, pieces: int) -> Sequence[Tensor]:
    return x.tensor_split(min(pieces, x.shape[dim]) or 1, dim)


def _join_pieces(pieces: list[Tensor], dim: int) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


def _apply(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    return function.apply(*arguments)


@dataclass
class SharedInput:
    """A tensor that layers with split columns read: communicated once, with the weight gradients left to it."""

    group: RankGroup
    dim: int | None  # It is gathered along this dimension; None: all ranks have it
    is_reduced: bool = False  # It needs a gradient
    pieces: int = 1
    arriving: PendingGather | None = None  # Of the forward, as long as only pieces of it were read
    _gather: PendingGather | None = None
    _left: list[tuple["ColumnProduct", Tensor]] = field(default_factory=list)  # With gradients of outputs

    def read(self, x: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The tensor for the layers, and the weights as the layers must use them."""
        return cast(tuple[Tensor, ...], _apply(_ReadShared, self, x, *weights))

    def leave(self, product: "ColumnProduct", gradient: Tensor, local_input: Tensor) -> None:
        """Leave the gradient of a weight for later; a gathered input is gathered again from now on."""
        self._gather = self._gather or PendingGather(local_input, self.group, self.dim)
        self._left.append((product, gradient))

    def weight_gradients(self, count: int) -> list[Tensor | None]:
        """The gradients that were left."""
        gradients: list[Tensor | None] = [None] * count
        if self._gather is not None:
            x = self._gather.wait()
            for product, gradient in self._left:
                if (index := product.index) is not None:
                    of_weight, before = product.split.weight_gradient(x, gradient), gradients[index]
                    gradients[index] = of_weight if before is None else before + of_weight
        self._gather, self._left = None, []
        return gradients


class _ReadShared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shared: SharedInput, *tensors: Tensor) -> tuple[Tensor, ...]:
        (x, *weights), ctx.shared = tensors, shared
        shared.is_reduced = ctx.needs_input_grad[1]
        ctx.set_materialize_grads(False)
        gather = PendingGather(x, shared.group, shared.dim, pieces=shared.pieces)
        if shared.dim is None:
            complete = x.view_as(x)
        elif shared.pieces == 1:
            complete = gather.wait()
        else:  # The first layer that reads it fills it
            shape = [length * (shared.group.world if dim == shared.dim else 1) for dim, length in enumerate(x.shape)]
            complete, shared.arriving = x.new_empty(shape), gather
        if not shared.is_reduced:
            ctx.mark_non_differentiable(complete)
        return complete, *(weight.view_as(weight) for weight in weights)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor | None, *of_weights: None) -> tuple[Tensor | None, ...]:
        shared, reduction = ctx.shared, None
        if gradient is not None and shared.is_reduced:
            reduction = start_reduction(gradient, shared.group, shared.dim)
        weight_gradients = shared.weight_gradients(len(of_weights))
        return None, None if reduction is None else reduction.wait(), *weight_gradients


@dataclass(frozen=True)
class ColumnProduct:
    """One use of a layer whose columns are split."""

    split: LinearSplit
    shared: SharedInput
    index: int | None  # Of the weight in what was read; None if it is frozen

    def multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None, *, local_input: Tensor) -> Tensor:
        """The local columns of the output. `x` and a trained weight are what `shared` read from the local input."""
        return cast(Tensor, _apply(_MultiplyColumns, self, x, local_input.detach(), weight, bias))


class _MultiplyColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, product: ColumnProduct, *tensors: Any) -> Tensor:
        (x, local_input, weight, bias), ctx.product = tensors, product
        ctx.save_for_backward(local_input, weight)  # Not `x`, which backward gathers again
        if (arriving := product.shared.arriving) is not None:
            product.shared.arriving = None
            output = arriving.apply(lambda piece: product.split.multiply(piece, weight, bias))
            x.copy_(arriving.wait())
            return output
        return product.split.multiply(x, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (local_input, weight), product = ctx.saved_tensors, ctx.product
        if ctx.needs_input_grad[3]:
            product.shared.leave(product, gradient, local_input)
        of_x = product.split.input_gradient(gradient, weight) if product.shared.is_reduced else None
        of_bias = gradient.flatten(0, -2).sum(0) if ctx.needs_input_grad[4] else None
        return None, of_x, None, None, of_bias


def row_product(split: LinearSplit, layer: Any, x: Tensor) -> Tensor:
    """The output of a layer whose rows are split, or this rank's summand of it. The first rank adds the bias, and every
    rank has the complete gradient of it."""
    return cast(Tensor, _apply(_MultiplyRows, split, x, layer.weight, getattr(layer, "bias", None)))


class _MultiplyRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, split: LinearSplit, *tensors: Any) -> Tensor:
        (x, weight, bias), ctx.split = tensors, split
        ctx.save_for_backward(x, weight)
        added = bias if split.group.rank == 0 else None
        multiply = partial(split.multiply, weight=weight, bias=added)
        return _reduce_product(split, x, multiply) if split.reduces else multiply(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), split = ctx.saved_tensors, ctx.split
        gather = PendingGather(gradient, split.group, split.dim if split.reduces else None, pieces=split.pieces)
        of_x = gather.apply(partial(split.input_gradient, weight=weight)) if ctx.needs_input_grad[1] else None
        gradient = gather.wait()
        of_weight = split.weight_gradient(x, gradient) if ctx.needs_input_grad[2] else None
        of_bias = gradient.flatten(0, -2).sum(0) if ctx.needs_input_grad[3] else None
        return None, of_x, of_weight, of_bias
