"""Communication of activations between ranks, each operation with its conjugate in backward.

A group of one rank neither communicates nor copies.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from motet.collectives.execute.api import all_gather, all_reduce, reduce_scatter
from motet.core.errors import InputError
from motet.parallel.model_sharding import BoundaryOperation
from motet.parallel.process.process_group import RankGroup


@dataclass(frozen=True)
class Communication:
    """An operation of BOUNDARY_OPERATIONS on an activation, and its conjugate on the gradient."""

    operation: BoundaryOperation
    conjugate: BoundaryOperation
    dim: int
    group: RankGroup

    def apply(self, x: Tensor) -> Tensor:
        """Communicate an activation; a group of one rank has it already."""
        communicate: Any = _BoundaryFunction.apply
        return x if self.group.world == 1 else cast(Tensor, communicate(x, self))


class _BoundaryFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, communication: Communication) -> Tensor:
        ctx.communication = communication
        return OPERATIONS[communication.operation](x, communication.dim % x.ndim, communication.group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        c: Communication = ctx.communication
        return replace(c, operation=c.conjugate, conjugate=c.operation).apply(gradients[0]), None


def unflatten_parts(x: Tensor, dim: int, group: RankGroup) -> Tensor:
    """[ranks, ...] with the part of each rank; sizes are checked here, since Gloo aborts a process on a mismatch."""
    length, ranks = x.shape[dim], group.world
    if length % ranks:
        raise InputError(
            f"{ranks} ranks cannot split dimension {dim} of an activation of shape {list(x.shape)} evenly; make its "
            f"{length} elements (tokens of a sequence, say) a multiple of {ranks}, or leave layout.sp out"
        )
    return torch.unflatten(x, dim, (ranks, length // ranks)).movedim(dim, 0)


def join_parts(parts: Tensor, dim: int) -> Tensor:
    """The tensor whose parts along `dim` are [ranks, ...]."""
    return parts.movedim(0, dim).flatten(dim, dim + 1)


def _copy(x: Tensor, dim: int, group: RankGroup) -> Tensor:
    return x.view_as(x)


def _sum(x: Tensor, dim: int, group: RankGroup) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    all_reduce(total, group)
    return total


def _gather(x: Tensor, dim: int, group: RankGroup) -> Tensor:
    parts = x.new_empty(group.world, *x.shape)
    all_gather(parts, x.contiguous(), group)
    return torch.cat(parts.unbind(), dim)  # Not a view of the parts: FSDP2 warns of a block that returns one


def _scatter(x: Tensor, dim: int, group: RankGroup) -> Tensor:
    parts = unflatten_parts(x, dim, group).contiguous()
    part = torch.empty_like(parts[0])
    reduce_scatter(part.view(-1), parts.view(-1), group)
    return part


def _split(x: Tensor, dim: int, group: RankGroup) -> Tensor:
    return unflatten_parts(x, dim, group)[group.rank].clone(memory_format=torch.contiguous_format)


OPERATIONS: Mapping[BoundaryOperation, Callable[[Tensor, int, RankGroup], Tensor]] = {
    "copy": _copy,
    "sum": _sum,
    "gather": _gather,
    "replicate": _gather,
    "scatter": _scatter,
    "split": _split,
}
