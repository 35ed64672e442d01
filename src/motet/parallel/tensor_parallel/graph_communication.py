"""Communication of activations inside of a compiled graph, as an operator of torch whose code the compiler calls."""

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


def numbered_group(group: RankGroup) -> tuple[int, RankGroup]:
    """The number of a group in compiled graphs, which holds as long as the returned group is alive."""
    number = _NUMBERS.get(group)
    if number is None or number not in _GROUPS:
        _NUMBERS[group] = number = next(_next_number)
        _GROUPS[number] = group
    return number, _GROUPS[number]


@torch.library.custom_op("motet::communicate", mutates_args=())
def _communicate(x: Tensor, *, operation: str, dim: int, group: int, is_recomputed: bool = False) -> Tensor:
    return OPERATIONS[cast(BoundaryOperation, operation)](x, dim % x.ndim, _GROUPS[group])


@_communicate.register_fake
def _(x: Tensor, *, operation: str, dim: int, group: int, is_recomputed: bool = False) -> Tensor:
    shape, ranks = [*x.shape], _GROUPS[group].world
    if operation in ("gather", "replicate"):
        shape[dim] *= ranks
    elif operation in ("scatter", "split"):
        shape[dim] //= ranks
    return x.new_empty(shape)


class _GraphBoundary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, call: tuple[str, str, int, int, bool]) -> Tensor:
        operation, ctx.conjugate, ctx.dim, ctx.group, is_recomputed = call
        if operation == "copy":
            return x.view_as(x)
        place = {"dim": ctx.dim, "group": ctx.group}
        return cast(Tensor, _communicate(x, operation=operation, **place, is_recomputed=is_recomputed))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        if ctx.conjugate == "copy":
            return gradients[0], None
        return cast(Tensor, _communicate(gradients[0], operation=ctx.conjugate, dim=ctx.dim, group=ctx.group)), None


def communicate_in_graph(
    x: Tensor, pair: tuple[BoundaryOperation, BoundaryOperation], *, dim: int, group: int, is_recomputed: bool
) -> Tensor:
    """Communicate an activation by the first operation of a pair, and its gradient by the second, the conjugate.
    With `is_recomputed` backward communicates the activation again, and the graph does not keep the result."""
    apply: Any = _GraphBoundary.apply
    return cast(Tensor, apply(x, (*pair, dim, group, is_recomputed)))
