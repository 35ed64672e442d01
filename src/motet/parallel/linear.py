"""The one linear: how a rank computes its part of a linear layer, and communicates during the matmuls.

Layers whose columns are split read one tensor, which is communicated once. Their weight gradients are computed while
the gradient of this tensor is being reduced: the product of a layer leaves them to the function that communicates.

    forward    gather the input, or have it; then a product for each layer that reads it
    backward   for each layer the gradient of its input; start to reduce their sum; all weight gradients; wait
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
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


class PendingGather:
    """A gather along a dimension that was started, or the tensor itself without one."""

    def __init__(self, x: Tensor, group: RankGroup, dim: int | None) -> None:
        self._dim, self._parts, self._work = dim, x, cast(WorkHandle | None, None)
        if dim is not None:
            self._parts = x.new_empty(group.world, *x.shape)
            self._work = all_gather(self._parts, x.contiguous(), group, async_op=True)

    def wait(self) -> Tensor:
        if self._work is None or self._dim is None:
            return self._parts
        self._work.wait()
        return join_parts(self._parts, self._dim)


class PendingReduction:
    """A sum over the ranks that was started; with a dimension, each rank gets its part. It may overwrite its input."""

    def __init__(self, x: Tensor, group: RankGroup, dim: int | None) -> None:
        self._result = self._parts = x.contiguous()
        if dim is None:
            self._work = all_reduce(self._result, group, async_op=True)
            return
        self._parts = unflatten_parts(x, dim, group).contiguous()  # It must live until it was sent
        self._result = torch.empty_like(self._parts[0])
        self._work = reduce_scatter(self._result.view(-1), self._parts.view(-1), group, async_op=True)

    def wait(self) -> Tensor:
        self._work.wait()
        return self._result


def _apply(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    return function.apply(*arguments)


@dataclass
class SharedInput:
    """A tensor that layers with split columns read: communicated once, with the weight gradients left to it."""

    group: RankGroup
    dim: int | None  # It is gathered along this dimension; None: all ranks have it
    is_reduced: bool = False  # It needs a gradient
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
                if product.index is not None:
                    gradients[product.index] = product.split.weight_gradient(x, gradient)
        self._gather, self._left = None, []
        return gradients


class _ReadShared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shared: SharedInput, *tensors: Tensor) -> tuple[Tensor, ...]:
        (x, *weights), ctx.shared = tensors, shared
        shared.is_reduced = ctx.needs_input_grad[1]
        ctx.set_materialize_grads(False)
        complete = x.view_as(x) if shared.dim is None else PendingGather(x, shared.group, shared.dim).wait()
        return complete, *(weight.view_as(weight) for weight in weights)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor | None, *of_weights: None) -> tuple[Tensor | None, ...]:
        shared, reduction = ctx.shared, None
        if gradient is not None and shared.is_reduced:
            reduction = PendingReduction(gradient, shared.group, shared.dim)
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
        summand = split.multiply(x, weight, bias if split.group.rank == 0 else None)
        return PendingReduction(summand, split.group, split.dim).wait() if split.reduces else summand

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), split = ctx.saved_tensors, ctx.split
        gradient = PendingGather(gradient, split.group, split.dim if split.reduces else None).wait()
        of_x = split.input_gradient(gradient, weight) if ctx.needs_input_grad[1] else None
        of_weight = split.weight_gradient(x, gradient) if ctx.needs_input_grad[2] else None
        of_bias = gradient.flatten(0, -2).sum(0) if ctx.needs_input_grad[3] else None
        return None, of_x, of_weight, of_bias
