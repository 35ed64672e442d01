"""Communication of activations inside of a compiled graph, as an operator that the compiler calls and does not look into."""

from itertools import count
from typing import Any, cast
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor

from motet.parallel.model_sharding import BoundaryOperation
from motet.parallel.process.process_group import RankGroup
from motet.parallel.tensor_parallel.boundary_functions import OPERATIONS

# A graph names a group by its number, which is the same in each run of a job, so that compiled code is used again.
_GROUPS: WeakValueDictionary[int, RankGroup] = WeakValueDictionary()
_NUMBERS: WeakKeyDictionary[RankGroup, int] = WeakKeyDictionary()
_next_number = count()


def group_number(group: RankGroup) -> int:
    """The number of a group in compiled graphs."""
    if group not in _NUMBERS:
        _NUMBERS[group] = number = next(_next_number)
        _GROUPS[number] = group
    return _NUMBERS[group]


@torch.library.custom_op("motet::communicate", mutates_args=())
def _communicate(x: Tensor, operation: str, dim: int, group: int) -> Tensor:
    return OPERATIONS[cast(BoundaryOperation, operation)](x, dim % x.ndim, _GROUPS[group])


@_communicate.register_fake
def _(x: Tensor, operation: str, dim: int, group: int) -> Tensor:
    shape, ranks = [*x.shape], _GROUPS[group].world
    if operation in ("gather", "replicate"):
        shape[dim] *= ranks
    elif operation in ("scatter", "split"):
        shape[dim] //= ranks
    return x.new_empty(shape)


class _GraphBoundary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, operation: str, conjugate: str, dim: int, group: int) -> Tensor:
        ctx.conjugate, ctx.dim, ctx.group = conjugate, dim, group
        return x.view_as(x) if operation == "copy" else _communicate(x, operation, dim, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        if ctx.conjugate != "copy":
            gradient = _communicate(gradient, ctx.conjugate, ctx.dim, ctx.group)
        return gradient, None, None, None, None


def communicate_in_graph(
    x: Tensor, operation: BoundaryOperation, conjugate: BoundaryOperation, *, dim: int, group: int
) -> Tensor:
    """Communicate an activation, with the conjugate operation on its gradient."""
    apply: Any = _GraphBoundary.apply
    return cast(Tensor, apply(x, operation, conjugate, dim, group))
