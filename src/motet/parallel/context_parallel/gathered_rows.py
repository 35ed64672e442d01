"""Complete rows of the choices of experts, for a limit of the load of an expert in a row."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from motet.core.batch import Batch
from motet.models.arch.mixture.row_tokens import row_exchange
from motet.parallel.context_parallel.context_partition import ContextOrder, ContextPartition
from motet.parallel.context_parallel.key_exchange import gather_tokens
from motet.parallel.data_parallel.communication.shard_replica_mesh import join_subgroup
from motet.parallel.layout import Layout
from motet.parallel.model_sharding import CONTEXT_DIMENSION, TENSOR_DIMENSION
from motet.parallel.process.process_group import RankGroup


@dataclass(frozen=True)
class CompleteRows:
    """The ranks that share each row, from which its tokens are gathered."""

    row_tokens: int
    context: RankGroup | None  # Ranks with different parts of each row
    order: ContextOrder
    tensor: RankGroup | None  # Ranks that split the tokens of such a part where activations are split

    def on_whole_rows(self, compute: Callable[..., Tensor], *parts: Tensor) -> Tensor:
        """The part of this rank of the result of `compute`, from the tensors of complete rows. All ranks call it."""
        cuts = self._cuts(parts[0].shape[1])
        for partition, group in reversed(cuts):
            parts = tuple(
                gather_tokens(part.transpose(0, 1).contiguous(), partition, group).transpose(0, 1).contiguous()
                for part in parts
            )
        result = compute(*parts)
        for partition, group in cuts:
            spans = partition.spans(group.rank)
            result = torch.cat([result[:, first:stop] for first, stop in spans], dim=1)
        return result

    def _cuts(self, tokens: int) -> list[tuple[ContextPartition, RankGroup]]:
        """The cuts, one inside of the other, by which this rank has this many tokens of each row."""
        cuts, here = list[tuple[ContextPartition, RankGroup]](), self.row_tokens
        if self.context is not None:
            partition = ContextPartition(here, self.context.world, self.order)
            cuts.append((partition, self.context))
            here = partition.length(self.context.rank)
        if self.tensor is not None and tokens < here:
            cuts.append((ContextPartition(here, self.tensor.world, "contiguous"), self.tensor))
        return cuts


@dataclass(frozen=True)
class RowRanks:
    """The ranks from which limits of rows gather tokens; None along a dimension that splits no tokens."""

    context: RankGroup | None
    order: ContextOrder
    tensor: RankGroup | None

    @contextmanager
    def rows_of(self, batch: Batch) -> Iterator[None]:
        """A context for the forward and the backward of a batch, which may be a part of each row."""
        context = None if batch.places is None else self.context
        rows = CompleteRows(batch.row_tokens or batch.tokens.shape[1], context, self.order, self.tensor)
        token = row_exchange.set(rows)
        try:
            yield
        finally:
            row_exchange.reset(token)


def join_row_ranks(layout: Layout, group: RankGroup, module: nn.Module) -> RowRanks | None:
    """The ranks that share rows with this one, if code of the module needs complete rows. All ranks call this."""
    if not any(getattr(inner, "needs_whole_rows", False) for inner in module.modules()):
        return None
    shared = {
        name: join_subgroup(group, layout.dims.groups(name)) if is_split and layout.dims.size(name) > 1 else None
        for name, is_split in ((CONTEXT_DIMENSION, True), (TENSOR_DIMENSION, layout.sp))
    }
    context, tensor = shared.values()
    return RowRanks(context, layout.context.order, tensor) if context or tensor else None
