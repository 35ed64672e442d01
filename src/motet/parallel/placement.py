"""What each stage of data parallelism keeps where, and what that costs: bytes on the wire, and bytes in memory.

| stage | parameters | gradients | masters and moments |
|---|---|---|---|
| 0 | whole | whole | whole |
| 1 | whole | whole | shard |
| 2 | whole | shard | shard |
| 3 | shard | shard | shard |

Stages 0 to 2 carry flat buckets. Stage 3 carries units, of which each parameter is cut into rows; what has no rows is
in buckets there too.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, prod

from motet.collectives.library import program
from motet.collectives.lower import elements_sent
from motet.core.dtypes import DTYPE_BYTES
from motet.parallel.buckets import Bucket
from motet.parallel.communication import CommunicationSettings
from motet.parallel.layout import Layout
from motet.precision.recipe import Recipe

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Placement:
    """Whether a rank keeps its shard alone; what is not sharded is whole."""

    parameters: bool
    gradients: bool
    states: bool


PLACEMENTS = {
    0: Placement(parameters=False, gradients=False, states=False),
    1: Placement(parameters=False, gradients=False, states=True),
    2: Placement(parameters=False, gradients=True, states=True),
    3: Placement(parameters=True, gradients=True, states=True),
}


@dataclass(frozen=True)
class Unit:
    """What stage 3 gathers as one: a block, or what is in none."""

    trainable: tuple[Shape, ...]
    frozen: tuple[Shape, ...] = ()
    is_block: bool = True
    """It is freed after its forward, where parameters are gathered again for backward."""

    def gathers(self, layout: Layout) -> int:
        """In a step in which it is called once in each forward."""
        return layout.microbatches * (2 if self.is_block and layout.regather else 1)


@dataclass(frozen=True)
class Portions:
    """What travels together."""

    buckets: tuple[Bucket, ...] = ()
    units: tuple[Unit, ...] = ()


def cut_into_rows(shapes: Iterable[Shape], shards: int) -> int:
    """Elements of a shard, padded: as many rows of each as the first shard has."""
    return sum(ceil(shape[0] / shards) * prod(shape[1:]) for shape in shapes)


def kept_rows(shapes: Iterable[Shape], shards: int, shard: int) -> int:
    """Elements that a shard really has."""
    each = ((shape[0], ceil(shape[0] / shards), prod(shape[1:])) for shape in shapes)
    return sum(max(0, min(rows - shard * most, most)) * width for rows, most, width in each)


@dataclass(frozen=True)
class Traffic:
    """Bytes that one rank sends in one step. Agreements on a few numbers are not in it."""

    reduce_scatter: int
    all_reduce: int
    all_gather: int

    @property
    def total(self) -> int:
        return self.reduce_scatter + self.all_reduce + self.all_gather


def traffic(portions: Portions, layout: Layout, recipe: Recipe, settings: CommunicationSettings, rank: int) -> Traffic:
    """Of a rank, with the algorithms that are named in the settings."""
    shards, replicas = layout.shards, layout.dp // layout.shards
    times = layout.microbatches if PLACEMENTS[layout.zero].gradients else 1

    def sent(collective: str, algorithm: str, ranks: int, me: int, count: int) -> int:
        return 0 if ranks == 1 else elements_sent(program(collective, algorithm, ranks), me, count)

    def scattered(whole: int) -> int:
        return sent("reduce-scatter", settings.reduce_scatter, shards, rank % shards, whole)

    def summed(part: int) -> int:
        return sent("all-reduce", settings.all_reduce, replicas, rank // shards, part)

    def gathered(whole: int) -> int:
        return sent("all-gather", settings.all_gather, shards, rank % shards, whole)

    reduced = [bucket.length for bucket in portions.buckets]
    reduced += [shards * cut_into_rows(unit.trainable, shards) for unit in portions.units]
    gathers = [(1, bucket.length) for bucket in portions.buckets]
    gathers += [(u.gathers(layout), shards * cut_into_rows(u.trainable + u.frozen, shards)) for u in portions.units]
    grad, compute = DTYPE_BYTES[recipe.reduce], DTYPE_BYTES[recipe.compute]
    return Traffic(
        reduce_scatter=times * grad * sum(map(scattered, reduced)),
        all_reduce=grad * sum(summed(whole // shards) for whole in reduced),
        all_gather=compute * sum(count * gathered(whole) for count, whole in gathers),
    )


@dataclass(frozen=True)
class Memory:
    """Bytes that one rank keeps from step to step."""

    parameters: int
    """What the model computes with, padding included; at stage 3 nothing beside the masters and what is frozen."""
    masters: int
    """What is updated, where that is not the parameters themselves."""
    gradients: int
    moments: int

    @property
    def total(self) -> int:
        return self.parameters + self.masters + self.gradients + self.moments


def memory(portions: Portions, layout: Layout, recipe: Recipe, moments: int, rank: int) -> Memory:
    """Of a rank; `moments`: how many numbers the optimizer keeps for each parameter.

    Frozen parameters count at stage 3 only.
    """
    kept, shards = PLACEMENTS[layout.zero], layout.shards
    whole = sum(bucket.length for bucket in portions.buckets)
    shard = whole // shards
    rows = sum(cut_into_rows(unit.trainable, shards) for unit in portions.units)
    fixed = sum(cut_into_rows(unit.frozen, shards) for unit in portions.units)
    own = sum(kept_rows(unit.trainable, shards, rank % shards) for unit in portions.units)
    master, compute = DTYPE_BYTES[recipe.master], DTYPE_BYTES[recipe.compute]
    apart = 0 if recipe.master == recipe.compute else shard
    return Memory(
        parameters=(whole + fixed) * compute,
        masters=(apart + rows) * master,
        gradients=(shard if kept.gradients else whole) * DTYPE_BYTES[recipe.reduce] + rows * master,
        moments=moments * (shard + own) * DTYPE_BYTES[recipe.state],
    )
