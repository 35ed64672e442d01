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
from motet.parallel.server.settings import ServerSettings


class LayoutSettings(FrozenSettings):
    """The `[layout]` section."""

    dp: Annotated[int, Field(ge=1)] | None = None
    """Replicas of the model; all ranks when not given."""
    zero: Annotated[int, Field(ge=0, le=3)] = 0
    """What ranks share instead of keeping all of it: 0 nothing, 1 masters and optimizer states, 2 gradients too,
    3 parameters too."""
    regather: bool = True
    """Stage 3: gather parameters again for backward, instead of keeping them after forward."""
    whole_below: Annotated[int, Field(ge=0)] = 0
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
    server: ServerSettings = ServerSettings()

    @property
    def has_desk(self) -> bool:
        """Servers are processes beside the workers, with a desk."""
        return self.data == "parameter_server" and self.server.transport == "messages"

    @property
    def has_owners(self) -> bool:
        """Some of the ranks are servers, too."""
        return self.data == "parameter_server" and self.server.transport == "programs"


@dataclass(frozen=True)
class Owners:
    """The first `count` ranks keep and update whole buckets of parameters of up to so many MiB."""

    count: int
    mib: float
    reduce: str
    """The algorithm by which the gradients of a bucket come to its owner."""
    broadcast: str
    """That by which what it has updated gets to all."""


@dataclass(frozen=True)
class Layout:
    """A layout that is known to fit `ranks`."""

    dp: int
    microbatches: int
    zero: int = 0
    shards: int = 1
    """Ranks that share one copy of what is sharded."""
    regather: bool = True
    """Stage 3: parameters are gathered again for backward."""
    secondary: int | None = None
    """Stage 3: so many neighbours share a copy between forward and backward, where that is fewer than `shards`."""
    whole_below: int = 0
    """Stage 3: parameters of fewer numbers stay whole."""
    owners: Owners | None = None
    """Buckets of parameters are kept by some of the ranks."""
    sequences: int | None = None
    """Of a global batch, if gradients are summed by one tree over them: each is a micro-batch. Some rank has as many as
    there are micro-batches, others may have one less."""

    @property
    def ranks(self) -> int:
        return self.dp

    @property
    def rows(self) -> RankGroups:
        """The ranks that share a copy: neighbours."""
        return _runs(range(self.dp), self.shards)

    @property
    def columns(self) -> RankGroups:
        """The ranks that hold the same shard."""
        return tuple(tuple(range(first, self.dp, self.shards)) for first in range(self.shards))

    @property
    def near(self) -> RankGroups:
        """The ranks that share a second copy; none if there is none."""
        return _runs(range(self.dp), self.secondary) if self.secondary else ()

    @property
    def far(self) -> RankGroups:
        """Of those that share a copy, the ranks that hold the same part of a second one."""
        return tuple(row[place :: self.secondary] for row in self.rows for place in range(self.secondary or 0))

    def rows_per_microbatch(self, batch_sequences: int) -> int:
        return 1 if self.sequences else batch_sequences // (self.dp * self.microbatches)


def _runs(ranks: range, length: int) -> RankGroups:
    return tuple(tuple(ranks[first : first + length]) for first in range(0, len(ranks), length))


def resolve_layout(settings: LayoutSettings, ranks: int, batch_sequences: int, by_tree: bool = False) -> Layout:
    """The layout for so many ranks, or a sentence about why there is none. `by_tree`: see `Layout.sequences`."""
    dp = settings.dp if settings.dp is not None else ranks
    if dp != ranks:
        raise InputError(
            f"layout.dp = {dp} does not match {ranks} ranks; start {dp} ranks (--ranks {dp}) or leave layout.dp out"
        )
    if by_tree:
        return _by_tree(settings, dp, batch_sequences)
    parts = dp * settings.microbatches
    if batch_sequences % parts:
        below, above = batch_sequences // parts * parts, -(-batch_sequences // parts) * parts
        choices = f"{above}" if below == 0 else f"{below} or {above}"
        raise InputError(
            f"data.batch_sequences = {batch_sequences} cannot be cut evenly over {dp} ranks x {settings.microbatches} "
            f"micro-batches = {parts}; use data.batch_sequences = {choices}, or another number of ranks"
        )
    if settings.has_owners:
        owners = _owners(settings.server, dp)
        return Layout(dp, settings.microbatches, int(dp > 1), dp, owners=owners if dp > 1 else None)
    return _all_reduced(settings, dp)


def _by_tree(settings: LayoutSettings, dp: int, batch_sequences: int) -> Layout:
    if batch_sequences < dp:
        raise InputError(
            f"data.batch_sequences = {batch_sequences} leaves some of {dp} ranks without a sequence; use "
            f"data.batch_sequences = {dp} or more, or {batch_sequences} ranks at most"
        )
    layout = _all_reduced(settings, dp)
    return replace(layout, microbatches=-(-batch_sequences // dp), sequences=batch_sequences)


def _all_reduced(settings: LayoutSettings, dp: int) -> Layout:
    shards = _shards(settings, dp)
    secondary = _secondary(settings, shards)
    regather = settings.regather
    if secondary == 1:  # whole parameters
        regather, secondary = False, None
    return Layout(dp, settings.microbatches, settings.zero, shards, regather, secondary, settings.whole_below)


def _owners(server: ServerSettings, dp: int) -> Owners:
    if server.count > dp:
        raise InputError(
            f"layout.server.count = {server.count} servers among {dp} ranks; with layout.server.transport = 'programs' "
            f"the servers are workers, too: set layout.server.count={dp} at most"
        )
    for collective, name in (("reduce", server.reduce), ("broadcast", server.broadcast)):
        try:
            find_algorithm(collective, name).check_ranks(dp)
        except InputError as error:
            raise InputError(f"layout.server.{collective} = {name!r}: {error}") from None
    return Owners(server.count, server.piece_mib, server.reduce, server.broadcast)


def _shards(settings: LayoutSettings, dp: int) -> int:
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


def _secondary(settings: LayoutSettings, shards: int) -> int | None:
    size = settings.secondary_group
    if size is None or settings.zero < 3 or size == shards:
        return None
    if shards % size:
        fitting = ", ".join(str(n) for n in range(1, shards + 1) if shards % n == 0)
        raise InputError(
            f"layout.secondary_group = {size} does not divide the {shards} ranks that share a copy; "
            f"use one of {fitting}"
        )
    if not settings.regather:
        raise InputError(
            f"layout.secondary_group = {size} has no effect with layout.regather = false, which keeps whole parameters "
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
