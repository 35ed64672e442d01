"""The stages of ZeRO as a table, and how each stage cuts parameters.

Stages 0 to 2 communicate flat buckets. Stage 3 communicates units, whose parameters are cut into rows; a parameter
without rows is in a bucket there too.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import ceil, prod

from motet.core.dtypes import DTYPE_BYTES
from motet.parallel.data_parallel.buckets import Bucket, assign_owners, build_buckets
from motet.parallel.data_parallel.communication.communication_settings import (
    CommunicationSettings,
    resolve_communication_groups,
)
from motet.parallel.data_parallel.communication.powersgd_matrices import Shape
from motet.parallel.data_parallel.data_sharding import DataParallelSharding
from motet.precision.recipe import PrecisionRecipe

MIB = 2**20


@dataclass(frozen=True)
class ZeroStageSharding:
    """Whether a rank keeps only its shard of each; what is not sharded is replicated."""

    parameters: bool
    gradients: bool
    optimizer_states: bool  # Master parameters and moments


ZERO_STAGES = {n: ZeroStageSharding(parameters=n >= 3, gradients=n >= 2, optimizer_states=n >= 1) for n in range(4)}


@dataclass(frozen=True)
class FSDPUnit:
    """Shapes of the parameters that stage 3 gathers together: a block, or all parameters outside of blocks."""

    trainable: tuple[Shape, ...]
    frozen: tuple[Shape, ...] = ()
    is_block: bool = True  # Resharded after its forward if the layout says so
    used_after_blocks: tuple[Shape, ...] = ()  # Trainable, outside of blocks; their gradients come first

    def gather_counts(self, sharding: DataParallelSharding) -> tuple[int, int]:
        """(gathers from the primary shards, from the secondary ones) in a step with one call in each forward."""
        backward = sharding.microbatches if self.is_block and sharding.reshard_after_forward else 0
        return (sharding.microbatches, backward) if sharding.secondary_shards else (sharding.microbatches + backward, 0)

    def gathered_numel(self, shards: int) -> int:
        """Elements of the unit when it is gathered, with padding."""
        return shards * padded_shard_numel(self.trainable + self.frozen, shards)


@dataclass(frozen=True)
class BucketsAndFSDPUnits:
    """Everything that a step communicates."""

    buckets: tuple[Bucket, ...] = ()
    units: tuple[FSDPUnit, ...] = ()
    shapes: Mapping[str, Shape] = field(default_factory=dict)  # Parameters in buckets; only PowerSGD needs them


def padded_shard_numel(shapes: Iterable[Shape], shards: int) -> int:
    """Elements of a shard with padding: of each parameter as many rows as the first shard has."""
    return sum(ceil(shape[0] / shards) * prod(shape[1:]) for shape in shapes)


def shard_rows(rows: int, shards: int, shard: int) -> tuple[int, int]:
    """(first, stop) of the rows of a parameter that a shard holds, without padding."""
    rows_per_shard = -(-rows // shards)
    return min(rows_per_shard * shard, rows), min(rows_per_shard * (shard + 1), rows)


def shard_numel(shapes: Iterable[Shape], shards: int, shard: int) -> int:
    """Elements of a shard without padding."""
    return sum(len(range(*shard_rows(shape[0], shards, shard))) * prod(shape[1:]) for shape in shapes)


def uses_row_shards(sharding: DataParallelSharding) -> bool:
    """Whether parameters are cut into rows, and not into shards of buckets."""
    return sharding.zero == 3 and sharding.shards > 1


def is_replicated(shape: Shape, sharding: DataParallelSharding) -> bool:
    """Whether stage 3 keeps a parameter unsharded, in a bucket: it has no rows, no elements, or few."""
    return not shape or prod(shape) == 0 or prod(shape) < sharding.min_shard_numel


def make_buckets(
    sizes: Mapping[str, tuple[int, int]],
    sharding: DataParallelSharding,
    recipe: PrecisionRecipe,
    *,
    settings: CommunicationSettings,
) -> tuple[Bucket, ...]:
    """Buckets of the parameters `sizes`, name -> (optimizer group, elements), in the order of use."""
    width, shards = DTYPE_BYTES[recipe.reduce], len(resolve_communication_groups(settings, sharding).shard_groups[0])
    if sharding.bucket_owners:
        buckets = build_buckets(sizes, shards, int(sharding.bucket_owners.bucket_mib * MIB / width))
        return assign_owners(buckets, sharding.bucket_owners.count)
    max_numel, first_max_numel = (int(mib * MIB / width) for mib in (settings.bucket_mib, settings.first_bucket_mib))
    return build_buckets(sizes, shards, max_numel, first_max_numel=first_max_numel)
