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

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, prod
from typing import NamedTuple

from motet.core.dtypes import DTYPE_BYTES
from motet.parallel.buckets import Bucket, cut_buckets, with_owners
from motet.parallel.communication import CommunicationSettings, Compression, compression, defers, joined
from motet.parallel.layout import Layout
from motet.parallel.matrices import Shape, Sum, sums_of_buckets, sums_of_rows
from motet.parallel.routes import Routes
from motet.parallel.sending import Sender
from motet.parallel.shares import told_by_rank, told_by_replica
from motet.precision.recipe import Recipe

MIB = 2**20


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
    late: tuple[Shape, ...] = ()
    """Of what is in no block, trainable parameters that are used after the blocks: their gradients come first."""

    def gathers(self, layout: Layout) -> tuple[int, int]:
        """(from all shards, from a second copy), in a step in which it is called once in each forward."""
        again = layout.microbatches if self.is_block and layout.regather else 0
        return layout.microbatches + (0 if layout.secondary else again), again if layout.secondary else 0


@dataclass(frozen=True)
class Portions:
    """What travels together."""

    buckets: tuple[Bucket, ...] = ()
    units: tuple[Unit, ...] = ()
    shapes: Mapping[str, Shape] = field(default_factory=dict)
    """Of what is in the buckets; only some codecs look at it."""


def cut_into_rows(shapes: Iterable[Shape], shards: int) -> int:
    """Elements of a shard, padded: as many rows of each as the first shard has."""
    return sum(ceil(shape[0] / shards) * prod(shape[1:]) for shape in shapes)


def part_of_rows(rows: int, shards: int, shard: int) -> tuple[int, int]:
    """(first, stop) of the rows that a shard really has of a parameter."""
    most = -(-rows // shards)
    first = most * shard
    return min(first, rows), min(first + most, rows)


def kept_rows(shapes: Iterable[Shape], shards: int, shard: int) -> int:
    """Elements that a shard really has."""
    parts = ((part_of_rows(shape[0], shards, shard), prod(shape[1:])) for shape in shapes)
    return sum((stop - first) * width for (first, stop), width in parts)


def has_rows(layout: Layout) -> bool:
    """Whether parameters are cut into rows, and not into shards of buckets."""
    return layout.zero == 3 and layout.shards > 1


def is_whole(shape: Shape, layout: Layout) -> bool:
    """Whether stage 3 leaves a parameter whole, in a bucket: it has no rows, no elements, or few."""
    return not shape or prod(shape) == 0 or prod(shape) < layout.whole_below


def buckets_of(
    sizes: Mapping[str, tuple[int, int]], layout: Layout, recipe: Recipe, settings: CommunicationSettings
) -> tuple[Bucket, ...]:
    """`sizes`: name -> (optimizer group, numel), in the order of use."""
    width, shards = DTYPE_BYTES[recipe.reduce], len(joined(settings, layout).shares[0])
    if layout.owners:
        buckets = cut_buckets(sizes, shards, int(layout.owners.mib * MIB / width))
        return with_owners(buckets, layout.owners.count)
    limits = (int(mib * MIB / width) for mib in (settings.bucket_mib, settings.first_bucket_mib))
    return cut_buckets(sizes, shards, *limits)


@dataclass(frozen=True)
class Traffic:
    """Bytes that one rank sends in one step. Agreements on a few numbers are not in it."""

    reduce_scatter: int
    all_reduce: int
    all_gather: int

    @property
    def total(self) -> int:
        return self.reduce_scatter + self.all_reduce + self.all_gather


class _Load(NamedTuple):
    """A bucket or a unit, as it travels in a step."""

    whole: Sum
    part: Sum
    codecs: Compression
    gathered: int
    """Elements, padding included."""
    gathers: int = 1
    near: int = 0
    """Gathers of a second copy."""


def traffic(portions: Portions, layout: Layout, recipe: Recipe, settings: CommunicationSettings, rank: int) -> Traffic:
    """Of a rank, with the algorithms and codecs that are named in the settings, in a step after the warm-up."""
    deferred = defers(settings, layout)
    shards = layout.dp if deferred else layout.shards
    sender = Sender(Routes(settings, layout), rank)
    times = layout.microbatches if PLACEMENTS[layout.zero].gradients else 1
    grad, compute = recipe.reduce, recipe.reduce if deferred else recipe.compute
    loads = list(_loads(portions, layout, compression(settings, layout), grad, (shards, rank % shards)))
    if layout.sequences:
        scattered, summed = _sums_by_tree(loads, layout, DTYPE_BYTES[grad], rank)
    else:
        scattered = times * sum(sender.scattered(load.whole, grad, load.codecs.shards) for load in loads)
        summed = sum(sender.summed(load.part, grad, load.codecs.replicas) for load in loads)
    return Traffic(
        reduce_scatter=scattered,
        all_reduce=summed,
        all_gather=sum(
            load.gathers * sender.gathered(load.gathered, compute, load.codecs.parameters)
            + load.near * sender.gathered_near(load.gathered, compute)
            for load in loads
        ),
    )


def _sums_by_tree(loads: Sequence[_Load], layout: Layout, width: int, rank: int) -> tuple[int, int]:
    """What tree_sums.py sends: its own sums to those that share a copy, and the copy's to the other replicas."""
    shards, replicas = layout.shards, layout.dp // layout.shards
    told = sum(map(len, told_by_rank(layout, rank)))
    of_replica = len(told_by_replica(layout, rank // shards))
    scattered = told * sum(load.whole.numel // shards * (shards - 1) for load in loads)
    summed = (of_replica + 1) * sum(ceil(load.part.numel / replicas) * (replicas - 1) for load in loads)
    return width * scattered, width * summed


def _loads(
    portions: Portions, layout: Layout, codecs: Compression, dtype: str, place: tuple[int, int]
) -> Iterator[_Load]:
    """`place`: (ranks that share a copy, the number of this one)."""
    shards, shard = place
    of_buckets = Compression() if layout.zero == 3 else codecs
    wholes = sums_of_buckets(portions.buckets, None, portions.shapes, dtype).each
    parts = sums_of_buckets(portions.buckets, shard, portions.shapes, dtype).each
    for whole, part in zip(wholes, parts, strict=True):
        yield _Load(whole, part, of_buckets, whole.numel)
    sums = (found.each for found in sums_of_rows([unit.trainable for unit in portions.units], shards, dtype))
    for unit, whole, part in zip(portions.units, *sums, strict=True):
        gathered = shards * cut_into_rows(unit.trainable + unit.frozen, shards)
        yield _Load(whole, part, codecs, gathered, *unit.gathers(layout))


@dataclass(frozen=True)
class Memory:
    """Bytes that one rank keeps from step to step."""

    parameters: int
    """What the model computes with, padding included; at stage 3 nothing beside the masters and what is frozen."""
    masters: int
    """What is updated, where that is not the parameters themselves."""
    gradients: int
    moments: int
    errors: int = 0
    """What compression has lost of gradients; PowerSGD's bases are not in it."""

    @property
    def total(self) -> int:
        return self.parameters + self.masters + self.gradients + self.moments + self.errors


def memory(
    portions: Portions,
    layout: Layout,
    recipe: Recipe,
    moments: int,
    rank: int,
    settings: CommunicationSettings | None = None,
) -> Memory:
    """Of a rank; `moments`: how many numbers the optimizer keeps for each parameter.

    Frozen parameters count at stage 3 only.
    """
    how = Compression() if settings is None else compression(settings, layout)
    kept, shards = PLACEMENTS[layout.zero], layout.shards
    whole = sum(bucket.length for bucket in portions.buckets)
    shard = whole // shards
    rows = sum(cut_into_rows(unit.trainable, shards) for unit in portions.units)
    fixed = sum(cut_into_rows(unit.frozen, shards) for unit in portions.units)
    own = sum(kept_rows(unit.trainable, shards, rank % shards) for unit in portions.units)
    master, compute = DTYPE_BYTES[recipe.master], DTYPE_BYTES[recipe.compute]
    is_exact = layout.zero == 3 or how.parameters is None
    apart = 0 if recipe.master == recipe.compute and is_exact else shard
    fed_back = rows if layout.zero == 3 else shard
    errors = (whole if how.feeds_back_shards else 0) + (fed_back if how.feeds_back_replicas else 0)
    return Memory(
        parameters=(whole + fixed) * compute,
        masters=(apart + rows) * master,
        gradients=(shard if kept.gradients or layout.sequences else whole) * DTYPE_BYTES[recipe.reduce] + rows * master,
        moments=moments * (shard + own) * DTYPE_BYTES[recipe.state],
        errors=errors * DTYPE_BYTES[recipe.reduce],
    )
