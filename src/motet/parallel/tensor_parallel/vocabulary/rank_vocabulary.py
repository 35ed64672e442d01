"""Embedding tables and logits whose vocabulary is split over ranks, at run time."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, cast

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
    def from_spec(spec: ShardSpec, dim: int, *, group: RankGroup) -> "RankVocabularyShard":
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


def shard_embedding(module: nn.Module, entries: range) -> Callable[[], None]:
    """Let a table that holds the rows of `entries` give zeros for other ids, by hooks; return their remover.

    Whatever the module multiplies vectors with, the sum of outputs over the ranks is the output of the whole table.
    """
    foreign: list[Tensor] = []  # The mask of foreign ids of the running call

    def shift_ids(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
        ids = args[0] if args else next(iter(kwargs.values()))
        is_foreign = (ids < entries.start) | (ids >= entries.stop)
        foreign[:] = [is_foreign]
        local = (ids - entries.start).masked_fill(is_foreign, 0)
        return ((local, *args[1:]), kwargs) if args else (args, {**kwargs, next(iter(kwargs)): local})

    def mask_vectors(_: nn.Module, args: object, output: Tensor) -> Tensor:
        return output.masked_fill(foreign.pop().unsqueeze(-1), 0)

    hooks = [module.register_forward_pre_hook(shift_ids, with_kwargs=True), module.register_forward_hook(mask_vectors)]
    table, padding_id = cast(Any, module), getattr(module, "padding_idx", None)
    if padding_id is not None:  # Its row gets no gradient
        table.padding_idx = padding_id - entries.start if padding_id in entries else None

    def unshard() -> None:
        for hook in hooks:
            hook.remove()
        if padding_id is not None:
            table.padding_idx = padding_id

    return unshard
