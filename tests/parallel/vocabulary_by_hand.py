"""Models whose vocabulary is split by hand: each tensor is cut with arithmetic of its own."""

from typing import Any

import torch
from torch import Tensor, nn

from motet.collectives.execute.api import all_reduce
from motet.models.arch.loss import set_vocabulary_shard
from motet.parallel.process.process_group import RankGroup
from motet.parallel.shard_spec import ShardSpec
from motet.parallel.tensor_parallel.vocabulary.rank_vocabulary import RankVocabularyShard, shard_embedding


def cut(whole: Tensor, group: RankGroup) -> Tensor:
    """The rows of a rank, filled up with zeros."""
    width = -(-len(whole) // group.world)
    rows = whole[group.rank * width : (group.rank + 1) * width]
    return torch.cat([rows, whole.new_zeros(width - len(rows), *whole.shape[1:])])


def spec_of(shape: tuple[int, ...], group: RankGroup) -> ShardSpec:
    width = -(-shape[0] // group.world)
    first, stop = (min(rank * width, shape[0]) for rank in (group.rank, group.rank + 1))
    spans = ((first, stop),), *(((0, length),) for length in shape[1:])
    return ShardSpec(shape, spans, (width - (stop - first), *(0 for _ in shape[1:])))


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: RankGroup) -> Tensor:
        total = x.clone()
        all_reduce(total, group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def split_lookup(table: nn.Module, group: RankGroup, size: int) -> None:
    """Let a table that holds the rows of a rank give the sum of all ranks."""
    ((first, stop),) = spec_of((size,), group).spans[0]
    shard_embedding(table, range(first, stop))
    table.register_forward_hook(lambda module, args, output: _Sum.apply(output, group))


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: RankGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.clone()
        all_reduce(grad, ctx.group)
        return grad, None


def copy_input(head: nn.Module, group: RankGroup) -> None:
    head.register_forward_pre_hook(lambda module, args: (_Copy.apply(args[0], group), *args[1:]))


def split_vocabulary(module: nn.Module, group: RankGroup, size: int, *, has_head: bool = True) -> set[str]:
    """Cut every parameter of `size` rows, and return their names. A head is an nn.Linear, or a product elsewhere."""
    names = {name for name, p in module.named_parameters() if p.shape[0] == size}
    whole = dict(module.named_parameters(remove_duplicate=False))
    for name in names:
        whole[name].data = cut(whole[name].data, group)
    for inner in module.modules():
        if isinstance(inner, nn.Embedding) and inner.num_embeddings == size:
            split_lookup(inner, group, size)
        if isinstance(inner, nn.Linear) and inner.out_features == size:
            copy_input(inner, group)
    if has_head:
        set_vocabulary_shard(module, RankVocabularyShard.from_spec(spec_of((size,), group), 0, group=group))
    return names
