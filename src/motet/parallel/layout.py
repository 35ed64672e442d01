"""How a model is spread over ranks, as a value.

Axes and techniques add their fields together with the code that reads them.
"""

import tomllib
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from pydantic import Field

from motet.collectives.algorithms import find_algorithm
from motet.collectives.cost.alpha_beta import RankGroups
from motet.core.base_settings import FrozenSettings
from motet.core.config_loading import settings_from_dict
from motet.core.errors import InputError
from motet.parallel.parameter_server.server_settings import ParameterServerSettings


class LayoutSettings(FrozenSettings):
    """The `[layout]` section."""

    dp: Annotated[int, Field(ge=1)] | None = None
    """Replicas of the model; all ranks when not given."""
    zero: Annotated[int, Field(ge=0, le=3)] = 0
    """What ranks share instead of keeping all of it: 0 nothing, 1 masters and optimizer states, 2 gradients too,
    3 parameters too."""
    reshard_after_forward: bool = True
    """Stage 3: gather parameters again for backward, instead of keeping them after forward."""
    min_shard_numel: Annotated[int, Field(ge=0)] = 0
    """Stage 3: parameters of fewer numbers stay whole, and their gradients travel together."""
    shard_group: Annotated[int, Field(ge=1)] | None = None
    """Neighbouring ranks that share one copy of what is sharded; all of `dp` when not given."""
    secondary_group: Annotated[int, Field(ge=1)] | None = None
    """Stage 3: neighbouring ranks that keep, between forward and backward, a second copy of the parameters in shards
    among them, so that gathering for backward stays inside of a host."""
    microbatches: Annotated[int, Field(ge=1)] = 1
    """Parts that a rank cuts its share of the batch into, one forward and backward each."""
    data: Literal["all_reduce", "parameter_server"] = "all_reduce"
    """How gradients come together: ranks exchange them, or push them to servers that keep the parameters."""
    server: ParameterServerSettings = ParameterServerSettings()

    @property
    def uses_server_processes(self) -> bool:
        """Servers are processes beside the workers, with a desk."""
        return self.data == "parameter_server" and self.server.transport == "point-to-point"

    @property
    def uses_server_collectives(self) -> bool:
        """Some of the ranks are servers, too."""
        return self.data == "parameter_server" and self.server.transport == "collectives"


@dataclass(frozen=True)
class BucketOwners:
    """The first `count` ranks keep and update whole buckets of parameters of up to so many MiB."""

    count: int
    bucket_mib: float
    reduce_algorithm: str  # The algorithm by which the gradients of a bucket come to its owner
    broadcast_algorithm: str  # That by which what it has updated gets to all


@dataclass(frozen=True)
class Layout:
    """A layout that is known to fit `ranks`."""

    dp: int
    microbatches: int
    zero: int = 0
    shards: int = 1  # Ranks that share one copy of what is sharded
    reshard_after_forward: bool = True  # Stage 3: parameters are gathered again for backward
    # Stage 3: so many neighbours share a copy between forward and backward, where that is fewer than `shards`.
    secondary_shards: int | None = None
    min_shard_numel: int = 0  # Stage 3: parameters of fewer numbers stay whole
    bucket_owners: BucketOwners | None = None  # Buckets of parameters are kept by some of the ranks
    # Of a global batch, if gradients are summed by one tree over them: each is a micro-batch. Some rank has as many as
    # there are micro-batches, others may have one less.
    reproducible_batch_size: int | None = None

    @property
    def ranks(self) -> int:
        return self.dp

    @property
    def shard_groups(self) -> RankGroups:
        """The ranks that share a copy: neighbours."""
        return _consecutive_groups(range(self.dp), self.shards)

    @property
    def replica_groups(self) -> RankGroups:
        """The ranks that hold the same shard."""
        return tuple(tuple(range(first, self.dp, self.shards)) for first in range(self.shards))

    @property
    def secondary_shard_groups(self) -> RankGroups:
        """The ranks that share a second copy; none if there is none."""
        return _consecutive_groups(range(self.dp), self.secondary_shards) if self.secondary_shards else ()

    @property
    def secondary_replica_groups(self) -> RankGroups:
        """Of those that share a copy, the ranks that hold the same part of a second one."""
        return tuple(
            row[place :: self.secondary_shards]
            for row in self.shard_groups
            for place in range(self.secondary_shards or 0)
        )

    def rows_per_microbatch(self, batch_sequences: int) -> int:
        return 1 if self.reproducible_batch_size else batch_sequences // (self.dp * self.microbatches)


def _consecutive_groups(ranks: range, length: int) -> RankGroups:
    return tuple(tuple(ranks[first : first + length]) for first in range(0, len(ranks), length))


def resolve_layout(settings: LayoutSettings, ranks: int, batch_sequences: int, reproducible: bool = False) -> Layout:
    """The layout for so many ranks, or a sentence about why there is none. `by_tree`: see `Layout.sequences`."""
    dp = settings.dp if settings.dp is not None else ranks
    if dp != ranks:
        raise InputError(
            f"layout.dp = {dp} does not match {ranks} ranks; start {dp} ranks (--ranks {dp}) or leave layout.dp out"
        )
    if reproducible:
        return _reproducible_layout(settings, dp, batch_sequences)
    microbatch_count = dp * settings.microbatches
    if batch_sequences % microbatch_count:
        below, above = (
            batch_sequences // microbatch_count * microbatch_count,
            -(-batch_sequences // microbatch_count) * microbatch_count,
        )
        choices = f"{above}" if below == 0 else f"{below} or {above}"
        raise InputError(
            f"data.batch_sequences = {batch_sequences} cannot be cut evenly over {dp} ranks x {settings.microbatches} "
            f"micro-batches = {microbatch_count}; use data.batch_sequences = {choices}, or another number of ranks"
        )
    if settings.uses_server_collectives:
        bucket_owners = _bucket_owners(settings.server, dp)
        return Layout(dp, settings.microbatches, int(dp > 1), dp, bucket_owners=bucket_owners if dp > 1 else None)
    return _all_reduce_layout(settings, dp)


def _reproducible_layout(settings: LayoutSettings, dp: int, batch_sequences: int) -> Layout:
    if batch_sequences < dp:
        raise InputError(
            f"data.batch_sequences = {batch_sequences} leaves some of {dp} ranks without a sequence; use "
            f"data.batch_sequences = {dp} or more, or {batch_sequences} ranks at most"
        )
    layout = _all_reduce_layout(settings, dp)
    return replace(layout, microbatches=-(-batch_sequences // dp), reproducible_batch_size=batch_sequences)


def _all_reduce_layout(settings: LayoutSettings, dp: int) -> Layout:
    shards = _shard_count(settings, dp)
    secondary = _secondary_shard_count(settings, shards)
    reshard_after_forward = settings.reshard_after_forward
    if secondary == 1:  # whole parameters
        reshard_after_forward, secondary = False, None
    return Layout(
        dp, settings.microbatches, settings.zero, shards, reshard_after_forward, secondary, settings.min_shard_numel
    )


def _bucket_owners(server: ParameterServerSettings, dp: int) -> BucketOwners:
    if server.count > dp:
        raise InputError(
            f"layout.server.count = {server.count} servers among {dp} ranks; with layout.server.transport = 'collectives' "
            f"the servers are workers, too: set layout.server.count={dp} at most"
        )
    for collective, name in (("reduce", server.reduce_algorithm), ("broadcast", server.broadcast_algorithm)):
        try:
            find_algorithm(collective, name).check_ranks(dp)
        except InputError as error:
            raise InputError(f"layout.server.{collective} = {name!r}: {error}") from None
    return BucketOwners(server.count, server.slice_mib, server.reduce_algorithm, server.broadcast_algorithm)


def _shard_count(settings: LayoutSettings, dp: int) -> int:
    size = settings.shard_group
    if settings.zero == 0:
        return 1
    if size is None:
        return dp
    if dp % size:
        fitting = ", ".join(str(n) for n in range(1, dp + 1) if dp % n == 0)
        raise InputError(
            f"layout.shard_group = {size} does not divide {dp} ranks of data parallelism; use one of {fitting}"
        )
    return size


def _secondary_shard_count(settings: LayoutSettings, shards: int) -> int | None:
    size = settings.secondary_group
    if size is None or settings.zero < 3 or size == shards:
        return None
    if shards % size:
        fitting = ", ".join(str(n) for n in range(1, shards + 1) if shards % n == 0)
        raise InputError(
            f"layout.secondary_group = {size} does not divide the {shards} ranks that share a copy; "
            f"use one of {fitting}"
        )
    if not settings.reshard_after_forward:
        raise InputError(
            f"layout.secondary_group = {size} has no effect with layout.reshard_after_forward = false, which keeps whole parameters "
            "for backward; leave one of them out"
        )
    return size


def parse_layout(text: str) -> LayoutSettings:
    """Settings written in a row, as in "zero=2 shard_group=4"."""
    tree: dict[str, object] = {}
    for word in text.split():
        key, equals, value = word.partition("=")
        if not (key and equals and value):
            raise InputError(f"layout {text!r}: {word!r} is not of the form key=value, e.g. zero=2")
        try:
            tree[key] = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            tree[key] = value
    return settings_from_dict(LayoutSettings, tree, f"layout {text!r}")
