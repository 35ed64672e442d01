"""How many bytes more than it keeps a rank needs at the worst moment of a step, activations apart.

These are gradients before they are summed, and what stage 3 gathers. At stage 3 the moments are those of FSDP2 on CPU
ranks: it gathers one block ahead in backward, holds what arrived of one unit until the next has arrived in forward, and
holds what it sent of one unit until it sends the next.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from math import prod

from motet.core.dtypes import DTYPE_BYTES
from motet.parallel.data_parallel.buckets import Bucket
from motet.parallel.data_parallel.communication.communication_settings import CommunicationSettings
from motet.parallel.data_parallel.communication.powersgd_matrices import Shape
from motet.parallel.data_parallel.zero import ZERO_STAGES, BucketsAndFSDPUnits, FSDPUnit, padded_shard_numel
from motet.parallel.layout import Layout
from motet.precision.recipe import PrecisionRecipe


def peak_transient_bytes(
    comm_units: BucketsAndFSDPUnits, layout: Layout, recipe: PrecisionRecipe, settings: CommunicationSettings
) -> int:
    """Beyond what `memory` says is kept. Uncompressed, each block called once, and without what algorithms need.

    Gradients are taken one after another; where autograd has that of a bias after the next matrix's, it is one more.
    """
    if comm_units.units:
        return _peak_of_units(comm_units.units, layout, recipe)
    return _peak_of_buckets(comm_units.buckets, layout, recipe, settings.overlap != "none")


def _peak_of_buckets(buckets: Sequence[Bucket], layout: Layout, recipe: PrecisionRecipe, overlaps: bool) -> int:
    """A gradient as autograd has it; at stage 2 also whole buckets, of which one is filled while another travels."""
    compute, reduce = DTYPE_BYTES[recipe.compute], DTYPE_BYTES[recipe.reduce]
    largest_gradients = [compute * max(member.numel for member in bucket.members) for bucket in buckets]
    if not ZERO_STAGES[layout.zero].gradients:
        return max(largest_gradients)
    bucket_bytes = [reduce * bucket.length for bucket in buckets]
    arriving = [size // layout.shards if layout.microbatches > 1 else 0 for size in bucket_bytes]
    if not overlaps:
        sending = (sum(bucket_bytes[i:]) + sum(arriving[i : i + 2]) for i in range(len(bucket_bytes)))
        return max(*(sum(bucket_bytes[: i + 1]) + size for i, size in enumerate(largest_gradients)), *sending)
    first_bucket_peak = bucket_bytes[0] + max(largest_gradients[0], arriving[0])
    return max(
        first_bucket_peak,
        *(
            bucket_bytes[i] + bucket_bytes[j] + arriving[i] + max(largest_gradients[j], arriving[j])
            for i, j in pairwise(range(len(buckets)))
        ),
    )


def _peak_of_units(units: Sequence[FSDPUnit], layout: Layout, recipe: PrecisionRecipe) -> int:
    """Gradients of the step before are freed when a step begins; those of its first micro-batch take their place.

    Where there are replicas, sums over micro-batches wait for the last one beside the gradients that they are part of.
    """
    last_microbatch = layout.microbatches - 1
    has_replicas = layout.dp > layout.shards
    gradient_shard_bytes = DTYPE_BYTES[recipe.master] * sum(
        padded_shard_numel(unit.trainable, layout.shards) for unit in units
    )
    cases = [
        (0, 0, 1 if has_replicas and last_microbatch else 0)
    ]  # what is summed, what waits, and whether that grows with each unit
    cases += [(gradient_shard_bytes, gradient_shard_bytes if has_replicas else 0, 0)] if last_microbatch > 1 else []
    cases += (
        [(gradient_shard_bytes, gradient_shard_bytes if has_replicas else 0, -1 if has_replicas else 0)]
        if last_microbatch
        else []
    )
    return max(max(_live_bytes(units, layout, recipe, *case)) for case in cases) - gradient_shard_bytes


def _live_bytes(
    units: Sequence[FSDPUnit], layout: Layout, recipe: PrecisionRecipe, summed: int, waiting: int, grows: int
) -> Iterator[int]:
    """What there is of a micro-batch besides masters and moments of the optimizer."""
    compute, reduce, shards = DTYPE_BYTES[recipe.compute], DTYPE_BYTES[recipe.reduce], layout.shards
    *blocks, root = units

    def unsharded_bytes(unit: FSDPUnit) -> int:
        return compute * shards * padded_shard_numel(unit.trainable + unit.frozen, shards)

    kept = summed + waiting
    yield 2 * unsharded_bytes(root) + kept  # as it arrives, and as it is used
    gathered_bytes, previous_bytes = unsharded_bytes(root), unsharded_bytes(root)
    for block in blocks:  # what arrived for the one before is freed after what arrives for this one
        yield gathered_bytes + previous_bytes + 2 * unsharded_bytes(block) + kept
        gathered_bytes, previous_bytes = (
            gathered_bytes + (0 if layout.reshard_after_forward else unsharded_bytes(block)),
            unsharded_bytes(block),
        )
    gathered_bytes += compute * _numel(root.used_after_blocks)
    sent_bytes, prefetched_bytes = 0, 0
    for index, unit in enumerate((*reversed(blocks), root)):
        if unit.is_block and layout.reshard_after_forward:
            yield (
                gathered_bytes + sent_bytes + kept + (prefetched_bytes or unsharded_bytes(unit)) + unsharded_bytes(unit)
            )
            gathered_bytes += unsharded_bytes(unit)
            prefetched_bytes = unsharded_bytes(blocks[-2 - index]) if index + 1 < len(blocks) else 0
        gradients = compute * _numel(unit.trainable)
        new_gradients = gradients if unit.is_block else gradients - compute * _numel(unit.used_after_blocks)
        yield gathered_bytes + prefetched_bytes + sent_bytes + kept + new_gradients
        gathered_bytes += new_gradients - unsharded_bytes(unit)  # it is freed before its gradients are sent
        sent_bytes = reduce * shards * padded_shard_numel(unit.trainable, shards)
        yield gathered_bytes + prefetched_bytes + sent_bytes + kept
        gathered_bytes -= gradients
        shard_bytes = sent_bytes // shards
        last_gradient = compute * _numel(unit.trainable[-1:])
        yield (
            gathered_bytes
            + prefetched_bytes
            + sent_bytes
            + kept
            + shard_bytes
            + max(grows, 0) * shard_bytes
            + last_gradient
        )
        kept += (0 if summed else shard_bytes) + grows * shard_bytes


def _numel(shapes: Iterable[Shape]) -> int:
    return sum(map(prod, shapes))
