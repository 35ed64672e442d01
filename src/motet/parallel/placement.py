"""What each stage of data parallelism keeps where, and what that costs: bytes on the wire, and bytes in memory.

| stage | parameters | gradients | masters and moments |
|---|---|---|---|
| 0 | whole | whole | whole |
| 1 | whole | whole | shard |
| 2 | whole | shard | shard |
"""

from collections.abc import Sequence
from dataclasses import dataclass

from motet.collectives.library import program
from motet.collectives.lower import elements_sent
from motet.core.dtypes import DTYPE_BYTES
from motet.parallel.buckets import Bucket
from motet.parallel.communication import CommunicationSettings
from motet.parallel.layout import Layout
from motet.precision.recipe import Recipe


@dataclass(frozen=True)
class Placement:
    """Whether a rank keeps its shard alone; what is not sharded is whole."""

    gradients: bool
    states: bool


PLACEMENTS = {0: Placement(False, False), 1: Placement(False, True), 2: Placement(True, True)}


@dataclass(frozen=True)
class Traffic:
    """Bytes that one rank sends in one step. Agreements on a few numbers are not in it."""

    reduce_scatter: int
    all_reduce: int
    all_gather: int

    @property
    def total(self) -> int:
        return self.reduce_scatter + self.all_reduce + self.all_gather


def traffic(
    buckets: Sequence[Bucket], layout: Layout, recipe: Recipe, settings: CommunicationSettings, rank: int
) -> Traffic:
    """Of a rank, with the algorithms that are named in the settings."""
    shards, replicas = layout.shards, layout.dp // layout.shards
    times = layout.microbatches if PLACEMENTS[layout.zero].gradients else 1
    shard, replica = rank % shards, rank // shards

    def sent(collective: str, algorithm: str, ranks: int, me: int, counts: list[int]) -> int:
        if ranks == 1:
            return 0
        made = program(collective, algorithm, ranks)
        return sum(elements_sent(made, me, count) for count in counts)

    whole = [bucket.length for bucket in buckets]
    parts = [length // shards for length in whole]
    grad, compute = DTYPE_BYTES[recipe.reduce], DTYPE_BYTES[recipe.compute]
    return Traffic(
        reduce_scatter=times * grad * sent("reduce-scatter", settings.reduce_scatter, shards, shard, whole),
        all_reduce=grad * sent("all-reduce", settings.all_reduce, replicas, replica, parts),
        all_gather=compute * sent("all-gather", settings.all_gather, shards, shard, whole),
    )


@dataclass(frozen=True)
class Memory:
    """Bytes that one rank keeps from step to step."""

    parameters: int
    """What the model computes with, padding included."""
    masters: int
    """What is updated, where that is not the parameters themselves."""
    gradients: int
    moments: int

    @property
    def total(self) -> int:
        return self.parameters + self.masters + self.gradients + self.moments


def memory(buckets: Sequence[Bucket], layout: Layout, recipe: Recipe, moments: int) -> Memory:
    """`moments`: how many numbers the optimizer keeps for each parameter."""
    kept = PLACEMENTS[layout.zero]
    whole = sum(bucket.length for bucket in buckets)
    shard = whole // layout.shards
    return Memory(
        parameters=whole * DTYPE_BYTES[recipe.compute],
        masters=0 if recipe.master == recipe.compute else shard * DTYPE_BYTES[recipe.master],
        gradients=(shard if kept.gradients else whole) * DTYPE_BYTES[recipe.reduce],
        moments=moments * shard * DTYPE_BYTES[recipe.state],
    )
