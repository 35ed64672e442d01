"""Embedding tables and logits whose vocabulary is split over ranks, at run time."""

from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from motet.collectives.execute.api import all_gather, all_reduce
from motet.parallel.process.process_group import RankGroup
from motet.parallel.shard_spec import ShardSpec


@dataclass(frozen=True)
class RankVocabularyShard:
    """The `VocabularyShard` of a rank of a group, whose ranks hold the entries in their order."""

    start: int
    stop: int
    size: int
    group: RankGroup

    @staticmethod
    def of_spec(spec: ShardSpec, group: RankGroup, dim: int = 0) -> "RankVocabularyShard":
        """The entries that a shard of the head's weight has along `dim`."""
        ((start, stop),) = spec.spans[dim]
        return RankVocabularyShard(start, stop, spec.shape[dim], group)

    def all_reduce(self, tensor: Tensor, op: Literal["sum", "max"]) -> Tensor:
        """Reduce in place over the ranks, without a gradient."""
        contiguous = tensor.contiguous()
        all_reduce(contiguous, self.group, op=op)
        return tensor if contiguous is tensor else tensor.copy_(contiguous)

    def gather_logits(self, local_logits: Tensor) -> Tensor:
        """[..., size] on every rank, from the local logits of all ranks, without a gradient or padding."""
        local = local_logits.detach().contiguous()
        gathered = local.new_empty(self.group.world, *local.shape)
        all_gather(gathered, local, self.group)
        return gathered.movedim(0, -2).flatten(-2)[..., : self.size]


def shard_embedding(module: nn.Module, spec: ShardSpec, group: RankGroup) -> None:
    """Let a table that holds the rows of `spec` give the vectors of all rows, by hooks on the module.

    Foreign ids read a row of this rank, and their vectors are set to zero. Whatever the module multiplies vectors with,
    the sum over the ranks is the vector that the whole table gives.
    """
    shard = RankVocabularyShard.of_spec(spec, group)
    foreign: list[Tensor] = []  # Of the call that is running

    def shift_ids(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
        ids = args[0] if args else next(iter(kwargs.values()))
        is_foreign = (ids < shard.start) | (ids >= shard.stop)
        foreign[:] = [is_foreign]
        local = (ids - shard.start).masked_fill(is_foreign, 0)
        return ((local, *args[1:]), kwargs) if args else (args, {**kwargs, next(iter(kwargs)): local})

    def add_vectors(_: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        return sum_over_ranks(output.masked_fill(foreign.pop().unsqueeze(-1), 0), group)

    module.register_forward_pre_hook(shift_ids, with_kwargs=True)
    module.register_forward_hook(add_vectors)
    padding_id = getattr(module, "padding_idx", None)
    if padding_id is not None:  # Its row gets no gradient
        is_here = shard.start <= padding_id < shard.stop
        cast(Any, module).padding_idx = padding_id - shard.start if is_here else None


def sum_over_ranks(tensor: Tensor, group: RankGroup) -> Tensor:
    """The sum over the ranks of a group, whose gradient is the same on all of them."""
    return cast(Tensor, _SumOverRanks.apply(tensor, group))  # type: ignore[no-untyped-call]  # untyped in torch


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: RankGroup) -> Tensor:
        total = tensor.detach().clone(memory_format=torch.contiguous_format)
        all_reduce(total, group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
