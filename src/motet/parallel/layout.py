"""How a model is distributed over ranks: the `[layout]` section, the value that it resolves to, and rows of ranks.

Where gradients are summed by a tree over rows (`Layout.reproducible_batch_size`), a rank computes rows one by one. At
stages 0 and 1 its rows are neighbours: it adds what it can locally, and exchanges the rest once a step. At stages 2 and
3 partial sums are exchanged after each backward, so that no rank keeps an unsharded gradient. There the ranks of a
shard group take rows in turn, so that rows computed at the same time are close in the tree.
"""

from dataclasses import dataclass, replace
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from motet.collectives.algorithms import find_algorithm
from motet.collectives.cost.alpha_beta import RankGroups
from motet.core.base_settings import FrozenSettings
from motet.core.config_loading import parse_value, settings_from_dict
from motet.core.errors import InputError, check_input
from motet.core.renamed_settings import check_no_renamed_settings
from motet.parallel.parameter_server.server_settings import ParameterServerSettings
from motet.parallel.reproducible.summation_tree import SummationTreeNode, maximal_subtrees


class LayoutSettings(FrozenSettings):
    """The `[layout]` section."""

    dp: Annotated[int, Field(ge=1)] | None = None
    """Data-parallel ranks; all ranks when not given."""
    zero: Annotated[int, Field(ge=0, le=3)] = 0
    """What ranks shard instead of replicating: 0 nothing, 1 master parameters and optimizer states, 2 gradients too,
    3 parameters too."""
    reshard_after_forward: bool = True
    """Stage 3: gather parameters again for backward, instead of keeping them after forward."""
    min_shard_numel: Annotated[int, Field(ge=0)] = 0
    """Stage 3: parameters with fewer elements are replicated, and their gradients travel in buckets."""
    shard_group: Annotated[int, Field(ge=1)] | None = None
    """Neighbouring ranks that hold one copy of what is sharded; all of `dp` when not given."""
    secondary_group: Annotated[int, Field(ge=1)] | None = None
    """Stage 3: neighbouring ranks that hold a secondary copy of the parameters between forward and backward, so that
    gathering for backward stays inside of a host."""
    microbatches: Annotated[int, Field(ge=1)] = 1
    """Micro-batches of a rank in a step, one forward and backward each."""
    data: Literal["all_reduce", "parameter_server"] = "all_reduce"
    """How gradients are summed: ranks exchange them, or push them to servers that keep the parameters."""
    server: ParameterServerSettings = ParameterServerSettings()

    @property
    def uses_server_processes(self) -> bool:
        """Whether servers and a coordinator are processes in addition to the workers."""
        return self.data == "parameter_server" and self.server.transport == "point-to-point"

    @property
    def uses_server_collectives(self) -> bool:
        """Whether some of the ranks are servers too."""
        return self.data == "parameter_server" and self.server.transport == "collectives"


@dataclass(frozen=True)
class BucketOwners:
    """The first `count` ranks hold and update complete buckets of parameters."""

    count: int
    bucket_mib: float
    reduce_algorithm: str  # Reduces the gradients of a bucket to its owner
    broadcast_algorithm: str  # Broadcasts the updated parameters from the owner


@dataclass(frozen=True)
class Layout:
    """A layout that fits `ranks`."""

    dp: int
    microbatches: int
    zero: int = 0
    shards: int = 1  # Ranks of a shard group
    reshard_after_forward: bool = True
    secondary_shards: int | None = None  # Ranks of a secondary shard group, where these are fewer than `shards`
    min_shard_numel: int = 0
    bucket_owners: BucketOwners | None = None
    # Rows of the global batch, if gradients are summed by one tree over them. Each row is a micro-batch; a rank may
    # have one row fewer than there are micro-batches.
    reproducible_batch_size: int | None = None

    @property
    def ranks(self) -> int:
        return self.dp

    @property
    def shard_groups(self) -> RankGroups:
        """Neighbouring ranks that hold one copy of what is sharded."""
        return _consecutive_groups(self.dp, self.shards)

    @property
    def replica_groups(self) -> RankGroups:
        """Ranks that hold the same shard."""
        return tuple(tuple(range(first, self.dp, self.shards)) for first in range(self.shards))

    @property
    def secondary_shard_groups(self) -> RankGroups:
        """Neighbouring ranks that hold one secondary copy; none if there is no such copy."""
        return _consecutive_groups(self.dp, self.secondary_shards) if self.secondary_shards else ()

    @property
    def secondary_replica_groups(self) -> RankGroups:
        """Ranks of a shard group that hold the same secondary shard."""
        size = self.secondary_shards or 0
        return tuple(ranks[position::size] for ranks in self.shard_groups for position in range(size))

    def rows_per_microbatch(self, batch_sequences: int) -> int:
        return 1 if self.reproducible_batch_size else batch_sequences // (self.dp * self.microbatches)


def _consecutive_groups(ranks: int, length: int) -> RankGroups:
    return tuple(tuple(range(first, min(first + length, ranks))) for first in range(0, ranks, length))


def resolve_layout(settings: LayoutSettings, ranks: int, batch_sequences: int, *, reproducible: bool = False) -> Layout:
    """The layout for a number of ranks; with `reproducible`, gradients are summed by one tree over the batch."""
    check_input(
        settings.dp in (None, ranks),
        f"layout.dp = {settings.dp} does not match {ranks} ranks; start {settings.dp} ranks "
        f"(--ranks {settings.dp}) or leave layout.dp out",
    )
    check_input(
        not reproducible or batch_sequences >= ranks,
        f"data.batch_sequences = {batch_sequences} leaves some of {ranks} ranks without a sequence; use "
        f"data.batch_sequences = {ranks} or more, or {batch_sequences} ranks at most",
    )
    if reproducible:
        layout, microbatches = _all_reduce_layout(settings, ranks), -(-batch_sequences // ranks)
        return replace(layout, microbatches=microbatches, reproducible_batch_size=batch_sequences)
    count = ranks * settings.microbatches
    below = batch_sequences // count * count
    choices = f"{below} or {below + count}" if below else f"{count}"
    check_input(
        below == batch_sequences,
        f"data.batch_sequences = {batch_sequences} cannot be cut evenly over {ranks} ranks x {settings.microbatches} "
        f"micro-batches = {count}; use data.batch_sequences = {choices}, or another number of ranks",
    )
    if settings.uses_server_collectives:
        owners = _bucket_owners(settings.server, ranks)
        return Layout(ranks, settings.microbatches, int(ranks > 1), ranks, bucket_owners=owners if ranks > 1 else None)
    return _all_reduce_layout(settings, ranks)


def _all_reduce_layout(settings: LayoutSettings, dp: int) -> Layout:
    shards = settings.shard_group or dp if settings.zero else 1
    reshards, secondary = settings.reshard_after_forward, settings.secondary_group
    _check_divides("shard_group", shards, dp, ranks_text=f"{dp} ranks of data parallelism")
    if settings.zero < 3 or secondary == shards:
        secondary = None
    if secondary is not None:
        _check_divides("secondary_group", secondary, shards, ranks_text=f"the {shards} ranks of a shard group")
        check_input(
            reshards,
            f"layout.secondary_group = {secondary} has no effect with layout.reshard_after_forward = false, which "
            "keeps gathered parameters for backward; leave one of them out",
        )
    if secondary == 1:  # each rank keeps the gathered parameters
        reshards, secondary = False, None
    return Layout(dp, settings.microbatches, settings.zero, shards, reshards, secondary, settings.min_shard_numel)


def _check_divides(field: str, size: int, ranks: int, *, ranks_text: str) -> None:
    divisors = ", ".join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)
    check_input(ranks % size == 0, f"layout.{field} = {size} does not divide {ranks_text}; use one of {divisors}")


def _bucket_owners(server: ParameterServerSettings, dp: int) -> BucketOwners:
    check_input(
        server.count <= dp,
        f"layout.server.count = {server.count} servers among {dp} ranks; with layout.server.transport = "
        f"'collectives' the servers are workers, too: set layout.server.count={dp} at most",
    )
    for collective, name in (("reduce", server.reduce_algorithm), ("broadcast", server.broadcast_algorithm)):
        try:
            find_algorithm(collective, name).check_ranks(dp)
        except InputError as error:
            raise InputError(f"layout.server.{collective}_algorithm = {name!r}: {error}") from None
    return BucketOwners(server.count, server.slice_mib, server.reduce_algorithm, server.broadcast_algorithm)


def parse_layout(text: str) -> LayoutSettings:
    """Parse settings such as "zero=2 shard_group=4"."""
    tree: dict[str, object] = {}
    for word in text.split():
        key, equals, value = word.partition("=")
        check_input(key and equals and value, f"layout {text!r}: {word!r} is not of the form key=value, e.g. zero=2")
        tree[key] = parse_value(value)
    check_no_renamed_settings({"layout": tree}, f"layout {text!r}")
    return settings_from_dict(LayoutSettings, tree, f"layout {text!r}")


class MicroBatchRows(NamedTuple):
    """The rows of one micro-batch."""

    rows: range
    contributes_gradients: bool = True  # False: recomputed and discarded, while other ranks have another row


def microbatches_of_rank(layout: Layout, rank: int, batch_sequences: int) -> list[MicroBatchRows]:
    """The rows of a rank, by micro-batch."""
    if layout.reproducible_batch_size is None:
        size = layout.rows_per_microbatch(batch_sequences)
        first = rank * layout.microbatches * size
        return [MicroBatchRows(range(first + i * size, first + (i + 1) * size)) for i in range(layout.microbatches)]
    rows = _reproducible_rows_of_rank(layout, rank, batch_sequences)
    filled = [*rows, *[rows[-1]] * (layout.microbatches - len(rows))]
    return [MicroBatchRows(range(row, row + 1), i < len(rows)) for i, row in enumerate(filled)]


def contributing_rows_of_rank(layout: Layout, rank: int, batch_sequences: int) -> list[range]:
    """The rows of a rank whose gradients count, by micro-batch."""
    return [rows for rows, contributes in microbatches_of_rank(layout, rank, batch_sequences) if contributes]


def partial_sums_sent_by_rank(layout: Layout, rank: int) -> list[list[SummationTreeNode]]:
    """The partial sums that a rank sends to its shard group, by micro-batch."""
    count = layout.reproducible_batch_size
    assert count is not None
    if layout.zero >= 2:
        microbatches = microbatches_of_rank(layout, rank, count)
        return [[SummationTreeNode(rows.start, rows.stop)] * contributes for rows, contributes in microbatches]
    final_sums = maximal_subtrees(_reproducible_rows_of_rank(layout, rank, count), count)
    return [[] for _ in range(layout.microbatches - 1)] + [final_sums]


def partial_sums_sent_by_replica(layout: Layout, replica: int) -> list[SummationTreeNode]:
    """The partial sums that a replica sends to the others."""
    count = layout.reproducible_batch_size
    assert count is not None
    return maximal_subtrees(_even_range(count, layout.dp // layout.shards, replica), count)


def _reproducible_rows_of_rank(layout: Layout, rank: int, count: int) -> range:
    if layout.zero < 2:
        return _even_range(count, layout.dp, rank)
    replica, shard = divmod(rank, layout.shards)
    return _even_range(count, layout.dp // layout.shards, replica)[shard :: layout.shards]


def _even_range(count: int, parts: int, index: int) -> range:
    return range(index * count // parts, (index + 1) * count // parts)
