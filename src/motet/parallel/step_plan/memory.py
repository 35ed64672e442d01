"""The memory of a rank that follows from its plan, without tensors.

It is the model state that a rank keeps, buffers included, and the peak of what comes and goes beyond that: gradients
before their reduction, and what stage 3 gathers, without activations. At stage 3 the peak is that of FSDP2 on CPU
ranks. FSDP2 prefetches one block in backward. In forward it frees the gathered buffer of a unit after the gather of the
next unit, and in backward the sent buffer of a unit at the next reduction.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from math import prod

from motet.core.dtypes import DTYPE_BYTES
from motet.parallel.data_parallel.buckets import Bucket
from motet.parallel.data_parallel.comm_units import CommUnit, SyncGroupPlan
from motet.parallel.data_parallel.communication.powersgd_matrices import Shape
from motet.parallel.data_parallel.zero import FSDPUnit, padded_shard_numel
from motet.parallel.step_plan.plan import StepPlan
from motet.precision.moment_formats import stored_bytes
from motet.precision.recipe import PrecisionRecipe
from motet.precision.state_bytes import parameter_state_bytes


@dataclass(frozen=True)
class ModelStateMemory:
    """Bytes that one rank keeps from step to step."""

    parameters: int  # In the compute dtype, with padding, and buffers; at stage 3 no masters that are cut into rows
    masters: int  # Zero where the parameters are their own masters
    gradients: int
    moments: int
    compression_errors: int = 0  # Error feedback, without PowerSGD's bases

    @property
    def total(self) -> int:
        return sum(getattr(self, each.name) for each in fields(self))


def model_state_memory(
    plan: StepPlan, recipe: PrecisionRecipe, *, moments_per_parameter: int, rank: int
) -> ModelStateMemory:
    """State of one rank."""
    units = [
        (unit, _unit_memory(unit, position, recipe, moments_per_parameter=moments_per_parameter))
        for group in plan.groups
        if (position := group.position(rank)) is not None
        for unit in group.units
    ]
    names = [field.name for field in fields(ModelStateMemory)]
    memory = ModelStateMemory(*(sum(getattr(each, name) for _, each in units) for name in names))
    in_units = sum(_numel(unit.contents.frozen) for unit, _ in units if isinstance(unit.contents, FSDPUnit))
    unsharded = _untrained_bytes(plan, recipe, rank) - DTYPE_BYTES[recipe.compute] * in_units
    return replace(memory, parameters=memory.parameters + unsharded)


def _untrained_bytes(plan: StepPlan, recipe: PrecisionRecipe, rank: int) -> int:
    """Frozen parameters, in the compute dtype, and buffers, as if nothing sharded them."""
    total = 0
    for tensor in (tensor for tensor in plan.inventory.tensors if tensor.kind != "trained"):
        spec, is_cast = plan.specs[tensor.name].get(rank), tensor.kind == "frozen" and "float" in tensor.dtype
        width = DTYPE_BYTES[recipe.compute] if is_cast else DTYPE_BYTES.get(tensor.dtype, 1)
        total += width * prod(spec.local_shape) if spec else 0
    return total


def _unit_memory(unit: CommUnit, rank: int, recipe: PrecisionRecipe, *, moments_per_parameter: int) -> ModelStateMemory:
    is_in_rows = isinstance(unit.contents, FSDPUnit)
    separate_masters = any(action.codec for action in unit.schedule if action.tensor == "parameters")
    each = parameter_state_bytes(
        recipe,
        moments_per_parameter,
        storage="rows" if is_in_rows else "buckets",
        separate_masters=separate_masters,
    )
    shard = unit.updated_shard(rank)
    updated = sum(
        stop - first
        for span in unit.spans
        for first, stop in [(0, span.length) if shard is None else span.shard_ranges[shard]]
    )
    sums = [action for action in unit.schedule if action.tensor == "gradients"]
    reduced_numel = [unit.reduction_spec(None if a.is_scatter else 0).numel for a in sums if a.keeps_error]
    errors = sum(reduced_numel) * max(DTYPE_BYTES[recipe.reduce], DTYPE_BYTES["float32"])
    if recipe.moments_are_masters_dtype:
        moments = int(updated * each.moments)
    else:
        parts = ((name, unit.shapes[name], stop - first) for name, first, stop in unit.member_ranges(shard))
        stored = (stored_bytes(recipe.moment_dtype(name, shape), shape, numel) for name, shape, numel in parts)
        moments = moments_per_parameter * sum(stored)
    if isinstance(unit.contents, FSDPUnit):
        rows, frozen = (padded_shard_numel(s, unit.shards) for s in (unit.contents.trainable, unit.contents.frozen))
        parameters = rows * each.parameters + frozen * DTYPE_BYTES[recipe.compute]
        return ModelStateMemory(parameters, rows * each.masters, rows * each.gradients, moments, errors)
    keeps_shard = any(action.moment == "microbatch" for action in unit.schedule)
    gradients = (updated if keeps_shard else unit.contents.length) * each.gradients
    return ModelStateMemory(unit.contents.length * each.parameters, updated * each.masters, gradients, moments, errors)


def peak_transient_bytes(
    plan: StepPlan, recipe: PrecisionRecipe, *, rank: int, saved_gradients: Collection[str] = ()
) -> int:
    """Peak bytes of one rank beyond its state, uncompressed, without buffers of algorithms; each block is called once.

    Autograd is assumed to hold one gradient at a time; it holds two where a bias's gradient follows the next matrix's.
    The gradients of `saved_gradients`, by name, are made in the forward, and counted among the saved activations.
    """
    groups = [group for group in plan.groups if group.position(rank) is not None]
    rows = [group for group in groups if group.group.unit_kind == "rows"]
    if rows:
        return max(_peak_of_units(group, plan.microbatches, recipe, saved=saved_gradients) for group in rows)
    peaks = (_peak_of_buckets(group.units, plan.microbatches, recipe, saved=saved_gradients) for group in groups)
    return max(peaks, default=0)


def _peak_of_buckets(
    units: Sequence[CommUnit], microbatches: int, recipe: PrecisionRecipe, *, saved: Collection[str]
) -> int:
    """One gradient of autograd; where each micro-batch is reduced also buckets: one is filled while another travels."""
    compute, reduce, master = (DTYPE_BYTES[dtype] for dtype in (recipe.compute, recipe.reduce, recipe.master))
    lengths = [unit.contents.length for unit in units if isinstance(unit.contents, Bucket)]
    shard_lengths = [max(stop - first for first, stop in unit.spans[0].shard_ranges) for unit in units]
    cast = master * max(shard_lengths) * (recipe.reduce != recipe.master)  # For the optimizer
    gradients = [compute * max((m.numel for m in unit.members if m.name not in saved), default=0) for unit in units]
    scatter = next((a for a in units[0].schedule if a.is_scatter and a.moment == "microbatch"), None)
    if scatter is None:
        return max(cast, *gradients)
    sizes = [reduce * length for length in lengths]
    arriving = [reduce * length if microbatches > 1 else 0 for length in shard_lengths]
    if not scatter.overlaps:
        filling = (sum(sizes[: i + 1]) + gradient for i, gradient in enumerate(gradients))
        return max(cast, *filling, *(sum(sizes[i:]) + sum(arriving[i : i + 2]) for i in range(len(sizes))))
    both = (sizes[i] + sizes[j] + arriving[i] + max(arriving[j], gradients[j]) for i, j in pairwise(range(len(sizes))))
    return max([cast, sizes[0] + max(gradients[0], arriving[0]), *both])


def _peak_of_units(group: SyncGroupPlan, microbatches: int, recipe: PrecisionRecipe, *, saved: Collection[str]) -> int:
    """Peak over the first, the middle and the last micro-batch.

    A step begins by freeing the gradients of the step before, so its first micro-batch reuses their memory. With
    replicas, sums over micro-batches wait for the last one in addition to the gradients that they contribute to.
    """
    last, has_replicas = microbatches - 1, any(a.over == "replicas" for unit in group.units for a in unit.schedule)
    row_shard = sum(unit.reduction_spec(0).numel for unit in group.units)
    total, waiting = DTYPE_BYTES[recipe.master] * row_shard, DTYPE_BYTES[recipe.reduce] * row_shard * has_replicas
    # (gradients kept, copies that wait for the all-reduce over the replicas, copies that each unit adds to those).
    cases = [(0, 0, int(has_replicas and last > 0))]
    cases += [(total, waiting, 0)] if last > 1 else []
    cases += [(total, waiting, -int(has_replicas))] if last else []
    reduces_once = any(a.is_scatter and a.moment == "last_microbatch" for unit in group.units for a in unit.schedule)
    if reduces_once and last:
        cases = [(0, 0, 0)]
    keeps_sums, saved_numel = reduces_once and last > 0, 0
    if not (keeps_sums and recipe.reduce == recipe.compute):
        saved_numel = sum(member.numel for member in group.units[-1].members if member.name in saved)
    live = (_live_bytes(group.units, recipe, case=case, keeps_sums=keeps_sums, saved=saved_numel) for case in cases)
    return max(map(max, live)) - total


def _live_bytes(
    units: Sequence[CommUnit], recipe: PrecisionRecipe, *, case: tuple[int, int, int], keeps_sums: bool, saved: int
) -> Iterator[int]:
    """The bytes in the moments of a micro-batch; where gradients are reduced once a step, the last one
    begins with unsharded sums. `saved` elements of the gradients of the root are counted elsewhere."""
    compute, reduce = DTYPE_BYTES[recipe.compute], DTYPE_BYTES[recipe.reduce]
    accumulated, waiting, growth = case
    kept = accumulated + waiting
    *blocks, root = [(unit, unit.contents) for unit in units if isinstance(unit.contents, FSDPUnit)]
    unsharded_sum, adds_each = reduce * keeps_sums, keeps_sums and reduce == compute  # Autograd adds to the sum
    kept += unsharded_sum * sum(_numel(shapes.trainable) for _, shapes in (*blocks, root))
    *block_sizes, gathered = (compute * unit.gathered_numel for unit in units)
    previous = gathered
    yield 2 * gathered + kept  # the gathered buffer, and the parameters copied out of it
    for (unit, _), size in zip(blocks, block_sizes, strict=True):
        yield gathered + previous + 2 * size + kept  # the buffer of the block before is freed after this gather
        gathered, previous = gathered + (0 if unit.reshards else size), size
    waiting_of_root = 0 if adds_each else compute * (_numel(root[1].used_after_blocks) - saved)
    gathered += waiting_of_root
    sent = prefetched = 0
    for index, (unit, shapes) in enumerate((*reversed(blocks), root)):
        size = compute * unit.gathered_numel
        if unit.reshards:
            yield gathered + sent + kept + (prefetched or size) + size
            gathered += size
            prefetched = block_sizes[-2 - index] if index + 1 < len(blocks) else 0
        gradients = compute * (_numel(shapes.trainable) - saved * (unit.kind == "root"))
        if adds_each:
            gradients = compute * max(map(prod, shapes.trainable), default=0)
        new_gradients = gradients if unit.kind == "block" else gradients - waiting_of_root
        yield gathered + prefetched + sent + kept + new_gradients
        gathered += new_gradients - size  # the unit is resharded before its gradients are sent
        shard = reduce * unit.reduction_spec(0).numel
        sent, last_gradient = unit.shards * shard, compute * _numel(shapes.trainable[-1:])
        yield gathered + prefetched + sent + kept - gradients * keeps_sums  # They have been added to the sums
        gathered -= gradients
        kept -= unsharded_sum * _numel(shapes.trainable)
        yield gathered + prefetched + sent + kept + (1 + max(growth, 0)) * shard + last_gradient
        master_shard = DTYPE_BYTES[recipe.master] * (shard // reduce)
        cast = master_shard * (recipe.reduce != recipe.master)
        yield gathered + prefetched + sent + kept + (1 + growth) * shard + cast + last_gradient
        kept += (0 if accumulated else master_shard) + growth * shard


def _numel(shapes: Iterable[Shape]) -> int:
    return sum(map(prod, shapes))
