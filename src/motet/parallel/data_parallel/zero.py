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
from motet.parallel.data_parallel.buckets import Bucket, assign_owners, build_buckets
from motet.parallel.data_parallel.communication.algorithm_choice import CollectiveAlgorithmSelector
from motet.parallel.data_parallel.communication.communication_settings import (
    CommunicationCodecs,
    CommunicationSettings,
    resolve_codecs,
    resolve_communication_groups,
    uses_gradient_gather,
)
from motet.parallel.data_parallel.communication.powersgd_matrices import (
    ReductionBufferSpec,
    Shape,
    bucket_reduction_specs,
    row_shard_reduction_specs,
)
from motet.parallel.layout import Layout
from motet.parallel.row_assignment import partial_sums_sent_by_rank, partial_sums_sent_by_replica
from motet.parallel.step_plan.traffic import CollectiveTrafficModel
from motet.precision.recipe import PrecisionRecipe

MIB = 2**20


@dataclass(frozen=True)
class ZeroStageSharding:
    """Whether a rank keeps its shard alone; what is not sharded is whole."""

    parameters: bool
    gradients: bool
    optimizer_states: bool


ZERO_STAGES = {
    0: ZeroStageSharding(parameters=False, gradients=False, optimizer_states=False),
    1: ZeroStageSharding(parameters=False, gradients=False, optimizer_states=True),
    2: ZeroStageSharding(parameters=False, gradients=True, optimizer_states=True),
    3: ZeroStageSharding(parameters=True, gradients=True, optimizer_states=True),
}


@dataclass(frozen=True)
class FSDPUnit:
    """What stage 3 gathers as one: a block, or what is in none."""

    trainable: tuple[Shape, ...]
    frozen: tuple[Shape, ...] = ()
    is_block: bool = True  # It is freed after its forward, where parameters are gathered again for backward
    # Of what is in no block, trainable parameters that are used after the blocks: their gradients come first.
    used_after_blocks: tuple[Shape, ...] = ()

    def gather_counts(self, layout: Layout) -> tuple[int, int]:
        """(from all shards, from a second copy), in a step in which it is called once in each forward."""
        backward_gathers = layout.microbatches if self.is_block and layout.reshard_after_forward else 0
        return layout.microbatches + (
            0 if layout.secondary_shards else backward_gathers
        ), backward_gathers if layout.secondary_shards else 0


@dataclass(frozen=True)
class BucketsAndFSDPUnits:
    """What travels together."""

    buckets: tuple[Bucket, ...] = ()
    units: tuple[FSDPUnit, ...] = ()
    shapes: Mapping[str, Shape] = field(default_factory=dict)  # Of what is in the buckets; only some codecs look at it


def padded_shard_numel(shapes: Iterable[Shape], shards: int) -> int:
    """Elements of a shard, padded: as many rows of each as the first shard has."""
    return sum(ceil(shape[0] / shards) * prod(shape[1:]) for shape in shapes)


def shard_rows(rows: int, shards: int, shard: int) -> tuple[int, int]:
    """(first, stop) of the rows that a shard really has of a parameter."""
    rows_per_shard = -(-rows // shards)
    first = rows_per_shard * shard
    return min(first, rows), min(first + rows_per_shard, rows)


def shard_numel(shapes: Iterable[Shape], shards: int, shard: int) -> int:
    """Elements that a shard really has."""
    row_ranges = ((shard_rows(shape[0], shards, shard), prod(shape[1:])) for shape in shapes)
    return sum((stop - first) * width for (first, stop), width in row_ranges)


def uses_row_shards(layout: Layout) -> bool:
    """Whether parameters are cut into rows, and not into shards of buckets."""
    return layout.zero == 3 and layout.shards > 1


def is_replicated(shape: Shape, layout: Layout) -> bool:
    """Whether stage 3 leaves a parameter whole, in a bucket: it has no rows, no elements, or few."""
    return not shape or prod(shape) == 0 or prod(shape) < layout.min_shard_numel


def make_buckets(
    sizes: Mapping[str, tuple[int, int]], layout: Layout, recipe: PrecisionRecipe, settings: CommunicationSettings
) -> tuple[Bucket, ...]:
    """`sizes`: name -> (optimizer group, numel), in the order of use."""
    width, shards = DTYPE_BYTES[recipe.reduce], len(resolve_communication_groups(settings, layout).shard_groups[0])
    if layout.bucket_owners:
        buckets = build_buckets(sizes, shards, int(layout.bucket_owners.bucket_mib * MIB / width))
        return assign_owners(buckets, layout.bucket_owners.count)
    limits = (int(mib * MIB / width) for mib in (settings.bucket_mib, settings.first_bucket_mib))
    return build_buckets(sizes, shards, *limits)


@dataclass(frozen=True)
class StepTrafficBytes:
    """Bytes that one rank sends in one step. Agreements on a few numbers are not in it."""

    reduce_scatter: int
    all_reduce: int
    all_gather: int

    @property
    def total(self) -> int:
        return self.reduce_scatter + self.all_reduce + self.all_gather


class _CommUnitTraffic(NamedTuple):
    """A bucket or a unit, as it travels in a step."""

    unsharded_gradients: ReductionBufferSpec
    sharded_gradients: ReductionBufferSpec
    codecs: CommunicationCodecs
    gathered_numel: int  # Elements, padding included
    gather_count: int = 1
    secondary_gather_count: int = 0  # Gathers of a second copy


def sent_bytes_per_step(
    comm_units: BucketsAndFSDPUnits, layout: Layout, recipe: PrecisionRecipe, settings: CommunicationSettings, rank: int
) -> StepTrafficBytes:
    """Of a rank, with the algorithms and codecs that are named in the settings, in a step after the warm-up."""
    gathers_gradients = uses_gradient_gather(settings, layout)
    shards = layout.dp if gathers_gradients else layout.shards
    traffic_model = CollectiveTrafficModel(CollectiveAlgorithmSelector(settings, layout), rank)
    reductions = layout.microbatches if ZERO_STAGES[layout.zero].gradients else 1
    grad, compute = recipe.reduce, recipe.reduce if gathers_gradients else recipe.compute
    unit_traffic = list(
        _iter_unit_traffic(comm_units, layout, resolve_codecs(settings, layout), grad, (shards, rank % shards))
    )
    if layout.reproducible_batch_size:
        reduce_scatter_bytes, all_reduce_bytes = _tree_reduction_bytes(unit_traffic, layout, DTYPE_BYTES[grad], rank)
    else:
        reduce_scatter_bytes = reductions * sum(
            traffic_model.reduce_scatter_bytes(load.unsharded_gradients, grad, load.codecs.shard_gradients)
            for load in unit_traffic
        )
        all_reduce_bytes = sum(
            traffic_model.all_reduce_bytes(load.sharded_gradients, grad, load.codecs.replica_gradients)
            for load in unit_traffic
        )
    return StepTrafficBytes(
        reduce_scatter=reduce_scatter_bytes,
        all_reduce=all_reduce_bytes,
        all_gather=sum(
            load.gather_count * traffic_model.all_gather_bytes(load.gathered_numel, compute, load.codecs.parameters)
            + load.secondary_gather_count * traffic_model.secondary_all_gather_bytes(load.gathered_numel, compute)
            for load in unit_traffic
        ),
    )


def _tree_reduction_bytes(
    unit_traffic: Sequence[_CommUnitTraffic], layout: Layout, width: int, rank: int
) -> tuple[int, int]:
    """What tree_sums.py sends: its own sums to those that share a copy, and the copy's to the other replicas."""
    shards, replicas = layout.shards, layout.dp // layout.shards
    rank_sums = sum(map(len, partial_sums_sent_by_rank(layout, rank)))
    replica_sums = len(partial_sums_sent_by_replica(layout, rank // shards))
    reduce_scatter_numel = rank_sums * sum(
        load.unsharded_gradients.numel // shards * (shards - 1) for load in unit_traffic
    )
    all_reduce_numel = (replica_sums + 1) * sum(
        ceil(load.sharded_gradients.numel / replicas) * (replicas - 1) for load in unit_traffic
    )
    return width * reduce_scatter_numel, width * all_reduce_numel


def _iter_unit_traffic(
    comm_units: BucketsAndFSDPUnits,
    layout: Layout,
    codecs: CommunicationCodecs,
    dtype: str,
    shard_position: tuple[int, int],
) -> Iterator[_CommUnitTraffic]:
    """`place`: (ranks that share a copy, the number of this one)."""
    shards, shard = shard_position
    bucket_codecs = CommunicationCodecs() if layout.zero == 3 else codecs
    unsharded = bucket_reduction_specs(comm_units.buckets, None, comm_units.shapes, dtype).buffers
    sharded = bucket_reduction_specs(comm_units.buckets, shard, comm_units.shapes, dtype).buffers
    for unsharded_gradients, sharded_gradients in zip(unsharded, sharded, strict=True):
        yield _CommUnitTraffic(unsharded_gradients, sharded_gradients, bucket_codecs, unsharded_gradients.numel)
    sums = (
        found.buffers
        for found in row_shard_reduction_specs([unit.trainable for unit in comm_units.units], shards, dtype)
    )
    for unit, unsharded_gradients, sharded_gradients in zip(comm_units.units, *sums, strict=True):
        gathered_numel = shards * padded_shard_numel(unit.trainable + unit.frozen, shards)
        yield _CommUnitTraffic(
            unsharded_gradients, sharded_gradients, codecs, gathered_numel, *unit.gather_counts(layout)
        )


@dataclass(frozen=True)
class ModelStateMemory:
    """Bytes that one rank keeps from step to step."""

    # What the model computes with, padding included; at stage 3 nothing beside the masters and what is frozen.
    parameters: int
    masters: int  # What is updated, where that is not the parameters themselves
    gradients: int
    moments: int
    compression_errors: int = 0  # What compression has lost of gradients; PowerSGD's bases are not in it

    @property
    def total(self) -> int:
        return self.parameters + self.masters + self.gradients + self.moments + self.compression_errors


def model_state_memory(
    comm_units: BucketsAndFSDPUnits,
    layout: Layout,
    recipe: PrecisionRecipe,
    moments_per_parameter: int,
    rank: int,
    settings: CommunicationSettings | None = None,
) -> ModelStateMemory:
    """Of a rank; `moments`: how many numbers the optimizer keeps for each parameter.

    Frozen parameters count at stage 3 only.
    """
    codecs = CommunicationCodecs() if settings is None else resolve_codecs(settings, layout)
    stage, shards = ZERO_STAGES[layout.zero], layout.shards
    bucket_numel = sum(bucket.length for bucket in comm_units.buckets)
    bucket_shard_numel = bucket_numel // shards
    row_shard_numel = sum(padded_shard_numel(unit.trainable, shards) for unit in comm_units.units)
    frozen_numel = sum(padded_shard_numel(unit.frozen, shards) for unit in comm_units.units)
    updated_row_numel = sum(shard_numel(unit.trainable, shards, rank % shards) for unit in comm_units.units)
    master, compute = DTYPE_BYTES[recipe.master], DTYPE_BYTES[recipe.compute]
    is_exact = layout.zero == 3 or codecs.parameters is None
    separate_master_numel = 0 if recipe.master == recipe.compute and is_exact else bucket_shard_numel
    replica_error_numel = row_shard_numel if layout.zero == 3 else bucket_shard_numel
    error_numel = (bucket_numel if codecs.has_shard_error_feedback else 0) + (
        replica_error_numel if codecs.has_replica_error_feedback else 0
    )
    return ModelStateMemory(
        parameters=(bucket_numel + frozen_numel) * compute,
        masters=(separate_master_numel + row_shard_numel) * master,
        gradients=(bucket_shard_numel if stage.gradients or layout.reproducible_batch_size else bucket_numel)
        * DTYPE_BYTES[recipe.reduce]
        + row_shard_numel * master,
        moments=moments_per_parameter * (bucket_shard_numel + updated_row_numel) * DTYPE_BYTES[recipe.state],
        compression_errors=error_numel * DTYPE_BYTES[recipe.reduce],
    )
