"""Memory of one rank in a step: the model state that it keeps, and the peak of what comes and goes beyond that.

Activations are not included. The transient part is gradients before their reduction, and what stage 3 gathers. At stage
3 the peak is that of FSDP2 on CPU ranks. FSDP2 prefetches one block in backward. In forward it frees the gathered
buffer of a unit after the gather of the next unit, and in backward the sent buffer of a unit at the next reduction.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import NamedTuple

from motet.core.dtypes import DTYPE_BYTES
from motet.parallel.data_parallel.buckets import Bucket
from motet.parallel.data_parallel.communication.communication_settings import (
    CommunicationCodecs,
    CommunicationSettings,
    resolve_codecs,
)
from motet.parallel.data_parallel.communication.powersgd_matrices import Shape
from motet.parallel.data_parallel.zero import (
    ZERO_STAGES,
    BucketsAndFSDPUnits,
    FSDPUnit,
    padded_shard_numel,
    shard_numel,
)
from motet.parallel.layout import Layout
from motet.precision.recipe import PrecisionRecipe


@dataclass(frozen=True)
class ModelStateMemory:
    """Bytes that one rank keeps from step to step."""

    parameters: int  # In the compute dtype, with padding; at stage 3 only buckets and frozen parameters
    masters: int  # Zero where the parameters are their own masters
    gradients: int
    moments: int
    compression_errors: int = 0  # Error feedback, without PowerSGD's bases

    @property
    def total(self) -> int:
        return self.parameters + self.masters + self.gradients + self.moments + self.compression_errors


def model_state_memory(
    comm_units: BucketsAndFSDPUnits,
    layout: Layout,
    recipe: PrecisionRecipe,
    *,
    moments_per_parameter: int,
    rank: int,
    settings: CommunicationSettings | None = None,
) -> ModelStateMemory:
    """State of one rank. Frozen parameters count at stage 3 only."""
    codecs = CommunicationCodecs() if settings is None else resolve_codecs(settings, layout)
    shards_gradients, shards = ZERO_STAGES[layout.zero].gradients, layout.shards
    master, compute, reduce = (DTYPE_BYTES[dtype] for dtype in (recipe.master, recipe.compute, recipe.reduce))
    bucket_numel = sum(bucket.length for bucket in comm_units.buckets)
    bucket_shard = bucket_numel // shards
    row_shard = sum(padded_shard_numel(unit.trainable, shards) for unit in comm_units.units)
    frozen_shard = sum(padded_shard_numel(unit.frozen, shards) for unit in comm_units.units)
    updated_rows = sum(shard_numel(unit.trainable, shards, rank % shards) for unit in comm_units.units)
    is_exact = layout.zero == 3 or codecs.parameters is None
    separate_masters = 0 if recipe.master == recipe.compute and is_exact else bucket_shard
    gradients = bucket_shard if shards_gradients or layout.reproducible_batch_size else bucket_numel
    errors = bucket_numel * codecs.has_shard_error_feedback
    errors += (row_shard if layout.zero == 3 else bucket_shard) * codecs.has_replica_error_feedback
    return ModelStateMemory(
        parameters=(bucket_numel + frozen_shard) * compute,
        masters=(separate_masters + row_shard) * master,
        gradients=gradients * reduce + row_shard * master,
        moments=moments_per_parameter * (bucket_shard + updated_rows) * DTYPE_BYTES[recipe.state],
        compression_errors=errors * reduce,
    )


def peak_transient_bytes(
    comm_units: BucketsAndFSDPUnits, layout: Layout, recipe: PrecisionRecipe, *, settings: CommunicationSettings
) -> int:
    """Peak bytes beyond the model state, uncompressed, without buffers of algorithms; each block is called once.

    Autograd is assumed to hold one gradient at a time; it holds two where a bias's gradient follows the next matrix's.
    """
    if comm_units.units:
        return _peak_of_units(comm_units.units, layout, recipe)
    return _peak_of_buckets(comm_units.buckets, layout, recipe, overlaps=settings.overlap != "none")


def _peak_of_buckets(buckets: Sequence[Bucket], layout: Layout, recipe: PrecisionRecipe, *, overlaps: bool) -> int:
    """One gradient of autograd; at stage 2 also unsharded buckets: one is filled while another travels."""
    compute, reduce = DTYPE_BYTES[recipe.compute], DTYPE_BYTES[recipe.reduce]
    gradients = [compute * max(member.numel for member in bucket.members) for bucket in buckets]
    if not ZERO_STAGES[layout.zero].gradients:
        return max(gradients)
    sizes = [reduce * bucket.length for bucket in buckets]
    arriving = [size // layout.shards if layout.microbatches > 1 else 0 for size in sizes]
    if not overlaps:
        filling = (sum(sizes[: i + 1]) + gradient for i, gradient in enumerate(gradients))
        sending = (sum(sizes[i:]) + sum(arriving[i : i + 2]) for i in range(len(sizes)))
        return max(*filling, *sending)
    both = (sizes[i] + sizes[j] + arriving[i] + max(arriving[j], gradients[j]) for i, j in pairwise(range(len(sizes))))
    return max([sizes[0] + max(gradients[0], arriving[0]), *both])


class _AccumulationCase(NamedTuple):
    """Gradient shards, in bytes, during one micro-batch."""

    accumulated: int  # Kept from earlier micro-batches
    waiting: int  # Copies that wait for the all-reduce over the replicas
    growth: int  # Copies that each unit adds to those (1) or removes from them (-1)


def _peak_of_units(units: Sequence[FSDPUnit], layout: Layout, recipe: PrecisionRecipe) -> int:
    """Peak over the first, the middle and the last micro-batch.

    A step begins by freeing the gradients of the step before, so its first micro-batch reuses their memory. With
    replicas, sums over micro-batches wait for the last one in addition to the gradients that they contribute to.
    """
    last, has_replicas = layout.microbatches - 1, layout.dp > layout.shards
    total = DTYPE_BYTES[recipe.master] * sum(padded_shard_numel(unit.trainable, layout.shards) for unit in units)
    waiting = total * has_replicas
    cases = [_AccumulationCase(0, 0, int(has_replicas and last > 0))]
    cases += [_AccumulationCase(total, waiting, 0)] if last > 1 else []
    cases += [_AccumulationCase(total, waiting, -int(has_replicas))] if last else []
    return max(max(_live_bytes(units, layout, recipe, case=case)) for case in cases) - total


def _live_bytes(
    units: Sequence[FSDPUnit], layout: Layout, recipe: PrecisionRecipe, *, case: _AccumulationCase
) -> Iterator[int]:
    """Bytes that are live during a micro-batch, without masters and moments."""
    compute, reduce, shards = DTYPE_BYTES[recipe.compute], DTYPE_BYTES[recipe.reduce], layout.shards
    reshards = layout.reshard_after_forward
    *blocks, root = units

    def unsharded_bytes(unit: FSDPUnit) -> int:
        return compute * shards * padded_shard_numel(unit.trainable + unit.frozen, shards)

    kept = case.accumulated + case.waiting
    gathered = previous = unsharded_bytes(root)
    yield 2 * gathered + kept  # the gathered buffer, and the parameters copied out of it
    for block in blocks:  # the gathered buffer of the block before is freed after this gather
        size = unsharded_bytes(block)
        yield gathered + previous + 2 * size + kept
        gathered, previous = gathered + (0 if reshards else size), size
    gathered += compute * _numel(root.used_after_blocks)
    sent = prefetched = 0
    for index, unit in enumerate((*reversed(blocks), root)):
        size = unsharded_bytes(unit)
        if unit.is_block and reshards:
            yield gathered + sent + kept + (prefetched or size) + size
            gathered += size
            prefetched = unsharded_bytes(blocks[-2 - index]) if index + 1 < len(blocks) else 0
        gradients = compute * _numel(unit.trainable)
        new_gradients = gradients if unit.is_block else gradients - compute * _numel(unit.used_after_blocks)
        yield gathered + prefetched + sent + kept + new_gradients
        gathered += new_gradients - size  # the unit is resharded before its gradients are sent
        sent = reduce * shards * padded_shard_numel(unit.trainable, shards)
        yield gathered + prefetched + sent + kept
        gathered -= gradients
        shard, last_gradient = sent // shards, compute * _numel(unit.trainable[-1:])
        yield gathered + prefetched + sent + kept + (1 + max(case.growth, 0)) * shard + last_gradient
        kept += (0 if case.accumulated else shard) + case.growth * shard


def _numel(shapes: Iterable[Shape]) -> int:
    return sum(map(prod, shapes))
