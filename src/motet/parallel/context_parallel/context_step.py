"""The part of each row that a rank computes, while the model runs on it: its attention and its dropout masks."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn

from motet.core.batch import Batch
from motet.models.attention_seams import AttentionSeams
from motet.models.layout_invariant_dropout import TokenPart, token_part
from motet.parallel.context_parallel.attention_exchange import ContextAttention, ContextGroup
from motet.parallel.data_parallel.communication.shard_replica_mesh import join_subgroup
from motet.parallel.layout import Layout
from motet.parallel.process.process_group import RankGroup


@dataclass(frozen=True)
class ContextRanks:
    """The ranks that share each row with this one."""

    layout: Layout
    group: RankGroup
    inner: RankGroup | None  # Neighbours among them that exchange by all-to-all inside of a ring
    seams: AttentionSeams  # Those of the module, whose attention they exchange

    def part_of(self, batch: Batch) -> Batch:
        """The part of a batch of whole rows that this rank computes."""
        return batch.at_places(self.layout.context.partition(batch.tokens.shape[1]).spans(self.group.rank))

    @contextmanager
    def attention_of(self, batch: Batch) -> Iterator[None]:
        """A context for the forward and the backward of a batch, in which attention exchanges keys and values if the
        batch is a part of each row. Recomputation has to run in this thread, where the context is known."""
        if batch.places is None:
            yield
            return
        assert batch.row_tokens is not None
        partition = self.layout.context.partition(batch.row_tokens)
        ranks = ContextGroup(partition, self.group.rank, self.group, self.layout.cp_kind, self.inner)
        documents = batch.row_documents if self.seams.separate_documents else None
        part = token_part.set(TokenPart(batch.row_tokens, partition.spans(self.group.rank)))
        try:
            with self.seams.exchanging(ContextAttention(ranks, documents)):
                yield
        finally:
            token_part.reset(part)


def join_context_ranks(layout: Layout, group: RankGroup, module: nn.Module) -> ContextRanks | None:
    """The ranks that share rows with this one; None if each row is computed by one rank. All ranks call this."""
    if layout.cp == 1:
        return None
    rank_groups = layout.dims.groups("cp")
    size = layout.cp_inner
    neighbours = tuple(ranks[first : first + size] for ranks in rank_groups for first in range(0, len(ranks), size))
    shared, inner = join_subgroup(group, rank_groups), join_subgroup(group, neighbours) if size > 1 else None
    assert shared is not None  # Each rank has an index in every dimension
    return ContextRanks(layout, shared, inner, AttentionSeams(module))
