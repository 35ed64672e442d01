"""The one linear: how a rank computes its part of a linear layer, and communicates during the matmuls.

Layers whose columns are split read one tensor, which is communicated once. Their weight gradients are computed while
the gradient of this tensor is being reduced: the product of a layer leaves them to the function that communicates.

    forward    gather the input, or have it; then a product for each layer that reads it
    backward   for each layer the gradient of its input; start to reduce their sum; all weight gradients; wait

Where the cores that compute also move the data, nothing is started early: a rank communicates when it needs the result,
and autograd computes the products unless the input was gathered.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from motet.collectives.execute.api import all_gather, all_reduce, reduce_scatter
from motet.collectives.execute.work_queue import WorkHandle
from motet.models.kept_results import keep_result
from motet.models.kernels.autograd_backward import single_backward
from motet.parallel.data_parallel.flat_parameters import ParameterGradientSum
from motet.parallel.process.process_group import RankGroup
from motet.parallel.tensor_parallel.boundary_functions import join_parts, unflatten_parts
from motet.parallel.torch_private import accumulates_into_leaf, autocasts, has_gradient_hooks, is_transformed


@dataclass(frozen=True)
class LinearProducts:
    """The three products of a linear layer: the output, and from its gradient those of the input and of the weight."""

    is_transposed: bool = False  # The weight is [in, out], as in transformers' Conv1D

    def multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The output of the layer; autograd can differentiate it too."""
        return F.linear(x, weight.T if self.is_transposed else weight, bias)

    def input_gradient(self, gradient: Tensor, weight: Tensor) -> Tensor:
        return gradient @ (weight.T if self.is_transposed else weight)

    def weight_gradient(self, x: Tensor, gradient: Tensor, out: Tensor | None = None, *, adds: bool = False) -> Tensor:
        """The gradient of the weight; it is written to `out`, or added to it."""
        rows, columns = x.reshape(-1, x.shape[-1]), gradient.reshape(-1, gradient.shape[-1])
        left, right = (rows.T, columns) if self.is_transposed else (columns.T, rows)
        return torch.mm(left, right, out=out) if out is None or not adds else out.addmm_(left, right)


@dataclass(frozen=True)
class LinearSplit:
    """The split of a linear layer over the ranks of a group."""

    group: RankGroup
    products: LinearProducts
    pieces: int = 1  # Pieces of a communicated activation: each is in flight while the next or the last is multiplied
    dim: int | None = None  # Split rows: ranks get their parts of the output along it; None: all of the output
    reduces: bool = True  # Split rows: the output is summed here, and not after something was added to it


def gather(x: Tensor, group: RankGroup, dim: int | None) -> Tensor:
    """The tensor gathered along a dimension, or itself without one."""
    if dim is None:
        return x
    parts = x.new_empty(group.world, *x.shape)
    all_gather(parts, x.contiguous(), group)
    return join_parts(parts, dim)


# The next two classes are the place for kernels that communicate inside of a matmul, by CUDA's symmetric memory.


class PendingGather:
    """A gather along a dimension that was started in pieces."""

    def __init__(self, x: Tensor, group: RankGroup, dim: int, *, pieces: int = 1) -> None:
        self._dim = dim
        self._pieces: list[tuple[Tensor, Tensor, WorkHandle]] = []  # (gathered parts, sent piece, work)
        for part in _split_pieces(x, dim, pieces):
            sent, parts = part.contiguous(), x.new_empty(group.world, *part.shape)
            self._pieces.append((parts, sent, all_gather(parts, sent, group, async_op=True)))

    def apply(self, function: Callable[[Tensor], Tensor]) -> Tensor:
        """Apply a function of the last dimension to the gathered tensor: to each piece as it arrives."""
        results = []
        for parts, _, work in self._pieces:
            work.wait()
            results.append(function(parts))
        return join_parts(_join_pieces(results, self._dim + 1), self._dim)

    def wait(self) -> Tensor:
        return self.apply(lambda parts: parts)


def start_gather(x: Tensor, group: RankGroup, dim: int | None) -> Callable[[], Tensor]:
    """Start to gather along a dimension, if there is one."""
    return (lambda: x) if dim is None else PendingGather(x, group, dim).wait


class PendingReduction:
    """A started sum over the ranks that overwrites its input, or with `scatters` this rank's part of [ranks, ...]"""

    def __init__(self, x: Tensor, group: RankGroup, *, scatters: bool, async_op: bool = True) -> None:
        self._sent = self._result = x.contiguous()  # Lives until it was sent
        if scatters:
            self._result = torch.empty_like(self._sent[0])
            self._work = reduce_scatter(self._result.view(-1), self._sent.view(-1), group, async_op=async_op)
        else:
            self._work = all_reduce(self._result, group, async_op=async_op)

    def wait(self) -> Tensor:
        self._work.wait()
        return self._result


def start_reduction(x: Tensor, group: RankGroup, dim: int | None, *, async_op: bool) -> PendingReduction:
    """Start to sum over the ranks; with `dim`, each rank gets its part along it."""
    parts, scatters = (x, False) if dim is None else (unflatten_parts(x, dim, group), True)
    return PendingReduction(parts, group, scatters=scatters, async_op=async_op)


def _reduce_product(split: LinearSplit, x: Tensor, multiply: Callable[[Tensor], Tensor]) -> Tensor:
    """The sum over the ranks of a product: each piece is summed while the next one is multiplied."""
    if split.pieces == 1:
        return start_reduction(multiply(x), split.group, split.dim, async_op=False).wait()
    rows, dim = (x.flatten(0, -2), 0) if split.dim is None else (unflatten_parts(x, split.dim, split.group), split.dim)
    scatters = split.dim is not None
    pieces = _split_pieces(rows, dim + scatters, split.pieces)
    reductions = [PendingReduction(multiply(piece), split.group, scatters=scatters) for piece in pieces]
    total = _join_pieces([reduction.wait() for reduction in reductions], dim)
    return total if scatters else total.view(*x.shape[:-1], -1)


def _split_pieces(x: Tensor, dim: int, pieces: int) -> Sequence[Tensor]:
    return (x,) if pieces == 1 else x.tensor_split(min(pieces, x.shape[dim]) or 1, dim)


def _join_pieces(pieces: list[Tensor], dim: int) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


def _no_view(x: Tensor) -> Tensor:
    """The same memory as a tensor that is not a view: a model may change the output of a layer in place."""
    return x.new_empty(0).set_(x.untyped_storage(), x.storage_offset(), x.size(), x.stride()) if x._is_view() else x


def _apply(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    return function.apply(*arguments)


@dataclass
class SharedInput:
    """A tensor that layers with split columns read: communicated once, with the weight gradients left to it."""

    group: RankGroup
    dim: int | None  # It is gathered along this dimension; None: all ranks have it
    is_reduced: bool = False  # It needs a gradient
    pieces: int = 1
    overlaps: bool = True  # Backward communicates during its matmuls
    arriving: PendingGather | None = None  # The forward's gather, while only pieces of it were read
    readers: int = 0  # Layers that have yet to compute their weight gradients themselves
    _gathered_again: Tensor | None = None
    _gather_again: Callable[[], Tensor] | None = None
    # Products of a layer, index of its weight among the weights read, gradient of its output
    _left: list[tuple[LinearProducts, int, Tensor]] = field(default_factory=list)

    def read(self, x: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The tensor for the layers, and the weights as the layers must use them."""
        return cast(tuple[Tensor, ...], _apply(_ReadShared, self, x, *weights))

    def multiply(
        self, split: LinearSplit, x: Tensor, weight: Tensor, *, bias: Tensor | None, index: int | None, local: Tensor
    ) -> Tensor:
        """The local columns of the output of a layer. `x` was read from the detached `local` input, and so was a weight
        that has an `index`, whose gradient is left to the function that communicates."""
        return cast(Tensor, _apply(_ColumnParallelProduct, self, split.products, index, x, local, weight, bias))

    def gather_again(self, local: Tensor) -> Tensor:
        """The gathered input in backward, for one product after another."""
        gathered = gather(local, self.group, self.dim) if self._gathered_again is None else self._gathered_again
        self.readers -= 1
        self._gathered_again = gathered if self.readers > 0 else None
        return gathered

    def leave(self, products: LinearProducts, index: int, gradient: Tensor, *, local: Tensor) -> None:
        """Leave the gradient of a weight for later; a gathered input is gathered again from now on."""
        if self._gather_again is None:
            self._gather_again = start_gather(local, self.group, self.dim)
        self._left.append((products, index, gradient))

    def weight_gradients(self, count: int) -> list[Tensor | None]:
        """The gradients that were left."""
        gradients: list[Tensor | None] = [None] * count
        if self._gather_again is not None:
            x = self._gather_again()
            for products, index, gradient in self._left:
                grad_weight, before = products.weight_gradient(x, gradient), gradients[index]
                gradients[index] = grad_weight if before is None else before + grad_weight
        self._gather_again, self._left = None, []
        return gradients


class _ReadShared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shared: SharedInput, *tensors: Tensor) -> tuple[Tensor, ...]:
        (x, *weights), ctx.shared = tensors, shared
        shared.is_reduced = ctx.needs_input_grad[1]
        ctx.set_materialize_grads(False)
        if shared.dim is None:
            complete = x.view_as(x)
        elif shared.pieces == 1:
            complete = gather(x, shared.group, shared.dim)
        else:  # The first layer that reads it fills it
            shared.arriving = PendingGather(x, shared.group, shared.dim, pieces=shared.pieces)
            shape = [length * (shared.group.world if dim == shared.dim else 1) for dim, length in enumerate(x.shape)]
            complete = x.new_empty(shape)
        if not shared.is_reduced:
            ctx.mark_non_differentiable(complete)
        return complete, *(weight.view_as(weight) for weight in weights)

    @staticmethod
    @single_backward
    def backward(ctx: Any, gradient: Tensor | None, *no_gradients: None) -> tuple[Tensor | None, ...]:
        shared, reduction = ctx.shared, None
        if gradient is not None and shared.is_reduced:
            reduction = start_reduction(gradient, shared.group, shared.dim, async_op=shared.overlaps)
        weight_gradients = shared.weight_gradients(len(no_gradients))
        return None, None if reduction is None else reduction.wait(), *weight_gradients


class _ColumnParallelProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shared: SharedInput, products: LinearProducts, *arguments: Any) -> Tensor:
        ctx.shared, ctx.products = shared, products
        ctx.index, x, local, weight, bias = arguments
        is_trained = ctx.index is not None or ctx.needs_input_grad[5]
        ctx.save_for_backward(local if is_trained else None, weight)  # Not `x`, which backward gathers again
        shared.readers += ctx.index is None and ctx.needs_input_grad[5]
        if (arriving := shared.arriving) is not None:
            shared.arriving = None
            output = arriving.apply(lambda piece: products.multiply(piece, weight, bias))
            x.copy_(arriving.wait())
        else:
            output = products.multiply(x, weight, bias)
        return _no_view(output)

    @staticmethod
    @single_backward
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (local, weight), shared, products = ctx.saved_tensors, ctx.shared, ctx.products
        if ctx.index is not None:
            shared.leave(products, ctx.index, gradient, local=local)
        grad_x = products.input_gradient(gradient, weight) if shared.is_reduced else None
        grad_weight = None
        if ctx.index is None and ctx.needs_input_grad[5]:
            grad_weight = products.weight_gradient(shared.gather_again(local), gradient)
        grad_bias = gradient.flatten(0, -2).sum(0) if ctx.needs_input_grad[6] else None
        return None, None, None, grad_x, None, grad_weight, grad_bias


def row_product(split: LinearSplit, layer: Any, x: Tensor) -> Tensor:
    """The output of a layer whose rows are split, or this rank's summand of it. The first rank adds the bias, and every
    rank has its complete gradient."""
    return cast(Tensor, _apply(_RowParallelProduct, split, x, layer.weight, getattr(layer, "bias", None)))


class _RowParallelProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, split: LinearSplit, *tensors: Any) -> Tensor:
        (x, weight, bias), ctx.split = tensors, split
        ctx.save_for_backward(x if ctx.needs_input_grad[2] else None, weight)
        multiply = partial(split.products.multiply, weight=weight, bias=bias if split.group.rank == 0 else None)
        return keep_result(lambda: _no_view(_reduce_product(split, x, multiply) if split.reduces else multiply(x)))

    @staticmethod
    @single_backward
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), split, products = ctx.saved_tensors, ctx.split, ctx.split.products
        dim, grad_x, needs_grad_x = split.dim if split.reduces else None, None, ctx.needs_input_grad[1]
        if split.pieces == 1 or dim is None or not needs_grad_x:
            gradient = gather(gradient, split.group, dim)
            grad_x = products.input_gradient(gradient, weight) if needs_grad_x else None
        else:
            pending = PendingGather(gradient, split.group, dim, pieces=split.pieces)
            grad_x = pending.apply(partial(products.input_gradient, weight=weight))
            gradient = pending.wait()
        grad_weight = products.weight_gradient(x, gradient) if ctx.needs_input_grad[2] else None
        grad_bias = gradient.flatten(0, -2).sum(0) if ctx.needs_input_grad[3] else None
        return None, grad_x, grad_weight, grad_bias


class WeightGradientQueue:
    """Takes weight gradients of linear layers, and adds them to the sums of the gradients without a tensor for each:
    during backward, or at the W actions of a pipeline's schedule."""

    def __init__(self, products: LinearProducts, sums: Mapping[Tensor, ParameterGradientSum] | None = None) -> None:
        """`sums` are by weight; gradients of other weights are left to autograd."""
        self.products, self._sums = products, sums or {}
        self._deferred = dict[object, list[tuple[Tensor, Callable[..., Tensor]]]]()
        self._open: list[tuple[Tensor, Callable[..., Tensor]]] | None = None

    @contextmanager
    def deferring(self, key: object) -> Iterator[None]:
        """Inside, layers leave their weight gradients for `compute(key)`."""
        self._open = self._deferred.setdefault(key, [])
        try:
            yield
        finally:
            self._open = None

    def take(self, weight: Tensor, product: Callable[..., Tensor]) -> bool:
        """Add the product, which is the gradient of a weight, or leave it for later; False if autograd must have it."""
        total = self._sums.get(weight)
        if has_gradient_hooks(weight) or (self._open is None and total is None):
            return False
        if self._open is not None:
            self._open.append((weight, product))
        elif total is not None:
            total.add_product(product)
        return True

    @torch.no_grad()
    def compute(self, key: object) -> None:
        """Compute the gradients left under a key. The gradient of a weight is complete after the last use of it."""
        deferred = self._deferred.pop(key, [])
        uses, by_autograd = Counter(weight for weight, _ in deferred), dict[Tensor, Tensor]()
        while deferred:
            weight, product = deferred.pop(0)
            uses[weight] -= 1
            total = self._sums.get(weight)
            if total is not None:
                total.add_product(product)
                if not uses[weight]:
                    total.complete()
                continue
            gradient = product()
            by_autograd[weight] = by_autograd[weight].add_(gradient) if weight in by_autograd else gradient
            del product, gradient
            if not uses[weight]:
                torch.autograd.backward([weight], [by_autograd.pop(weight)])


def take_weight_gradients(module: nn.Module, queue: WeightGradientQueue) -> None:
    """Let the linear layers of a module leave their weight gradients to a queue."""
    for layer in module.modules():
        if type(layer).forward is nn.Linear.forward and "forward" not in vars(layer):
            layer.forward = _QueuedForward(queue, layer)


class _QueuedForward:
    """The forward of a linear layer that leaves its weight gradient to a queue."""

    def __init__(self, queue: WeightGradientQueue, layer: Any) -> None:
        self._queue, self._products, self._layer = queue, queue.products, layer

    def __call__(self, x: Tensor) -> Tensor:
        weight, bias = self._layer.weight, self._layer.bias
        if torch.compiler.is_compiling():  # A graph has the gradients of all its weights at its end
            return self._products.multiply(x, weight, bias)
        # A computed weight has a gradient only inside of a backward. Autocast computes in another dtype.
        if x.ndim < 2 or not weight.is_leaf or is_transformed() or autocasts(x):
            return self._products.multiply(x, weight, bias)
        return cast(Tensor, _apply(_QueuedProduct, self._queue, x, weight, bias))


class _QueuedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, queue: WeightGradientQueue, *tensors: Any) -> Tensor:
        x, weight, bias = tensors
        ctx.queue, ctx.leaf = queue, weight  # In recomputation, backward finds another tensor saved
        ctx.save_for_backward(x if ctx.needs_input_grad[2] else None, weight)
        return _no_view(queue.products.multiply(x, weight, bias))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), rows, products, grad_weight = ctx.saved_tensors, gradient.flatten(0, -2), ctx.queue.products, None
        if ctx.needs_input_grad[2]:
            product = partial(products.weight_gradient, x.flatten(0, -2), rows)
            is_sum = not torch.is_grad_enabled() and accumulates_into_leaf(ctx.next_functions[1][0])
            grad_weight = None if is_sum and ctx.queue.take(ctx.leaf, product) else product()
        grad_x = products.input_gradient(rows, weight) if ctx.needs_input_grad[1] else None
        grad_x = None if grad_x is None else grad_x.unflatten(0, gradient.shape[:-1])
        return None, grad_x, grad_weight, rows.sum(0) if ctx.needs_input_grad[3] else None
