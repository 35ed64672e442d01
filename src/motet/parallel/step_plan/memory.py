"""The memory of a rank that follows from its plan, without tensors.

It is the model state that a rank keeps, buffers included, and the peak of temporary tensors beyond that: gradients
before their reduction, and parameters that stage 3 gathers, without activations.
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from math import prod

from motet.core.units import DTYPE_BYTES
from motet.memory.policy_choice import Place
from motet.models.spec.layer_specs import (
    BlockPolicy,
    BlockSpec,
    LayerSpec,
    MicroBatchShape,
    ParameterSpec,
    SavedActivation,
)
from motet.models.spec.model_spec import ModelSpec
from motet.parallel.data_parallel.buckets import Bucket
from motet.parallel.data_parallel.comm_units import CommUnit, SyncGroupPlan
from motet.parallel.data_parallel.communication.powersgd_matrices import Shape
from motet.parallel.data_parallel.zero import FSDPUnit, ShardedStates, padded_shard_numel
from motet.parallel.step_plan.gradient_sums import GradientStorage
from motet.parallel.step_plan.plan import StepPlan
from motet.parallel.step_plan.stage_memory import StageBlocks
from motet.precision.recipe import ParameterStateBytes, PrecisionRecipe, parameter_state_bytes, stored_bytes


@dataclass(frozen=True)
class ModelStateMemory:
    """Bytes that one rank keeps from step to step."""

    parameters: int  # In the compute dtype, with padding, and buffers; at stage 3 no masters that are cut into rows
    masters: int  # Zero where the parameters are their own masters
    gradients: int
    moments: int
    compression_errors: int = 0  # Error feedback, without PowerSGD's bases
    rows_on_host: int = 0  # Rows of stage 3, with padding, in the memory of the host, if they are not masters

    @property
    def total(self) -> int:
        return sum(getattr(self, each.name) for each in fields(self))

    def in_place(self, place: Place, states: Place) -> "ModelStateMemory":
        """The part that lies in a place, where masters and moments lie in `states`."""
        if place == "device":
            return self if states == place else replace(self, masters=0, moments=0, rows_on_host=0)
        kept = (self.masters, self.moments) if place == states else (0, 0)
        rows = self.rows_on_host if place == "host" else 0
        return ModelStateMemory(0, kept[0], 0, kept[1], rows_on_host=rows)


def state_of_shards(
    each: ParameterStateBytes, unsharded: float, shard: float, *, sharded: ShardedStates
) -> ModelStateMemory:
    """State of parameters of which a rank has `unsharded` elements, or `shard` of a state that is sharded."""
    updated, gradients = (
        shard if is_sharded else unsharded for is_sharded in (sharded.optimizer_states, sharded.gradients)
    )
    sizes = each.parameters * unsharded, each.masters * updated, each.gradients * gradients, each.moments * updated
    return ModelStateMemory(*map(round, sizes))


def model_state_memory(
    plan: StepPlan, recipe: PrecisionRecipe, *, moments_per_parameter: int, rank: int
) -> ModelStateMemory:
    """State of one rank."""
    units = [
        (unit, _unit_memory(unit, position, recipe, moments_per_parameter=moments_per_parameter, plan=plan))
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


def _unit_memory(
    unit: CommUnit, rank: int, recipe: PrecisionRecipe, *, moments_per_parameter: int, plan: StepPlan
) -> ModelStateMemory:
    is_in_rows = isinstance(unit.contents, FSDPUnit)
    is_on_host = any(action.kind == "to_host" for action in unit.schedule)
    is_compressed = any(action.codec for action in unit.schedule if action.tensor == "parameters")
    each = parameter_state_bytes(
        recipe,
        moments_per_parameter,
        storage="rows" if is_in_rows else "buckets",
        separate_masters=is_on_host or (is_compressed and not is_in_rows),
    )
    shard, updated = unit.updated_shard(rank), unit.updated_numel(rank)
    sums = [action for action in unit.schedule if action.tensor == "gradients"]
    reduced_numel = [unit.reduction_spec(None if a.is_scatter else 0).numel for a in sums if a.keeps_error]
    errors = sum(reduced_numel) * max(DTYPE_BYTES[recipe.reduce], DTYPE_BYTES["float32"])
    if isinstance(unit.contents, FSDPUnit):
        rows, frozen = (padded_shard_numel(s, unit.shards) for s in (unit.contents.trainable, unit.contents.frozen))
        state = state_of_shards(each, rows, rows, sharded=ShardedStates(True, True, True))
        state = replace(state, parameters=state.parameters + frozen * DTYPE_BYTES[recipe.compute])
        if is_on_host:  # Without the padding that FSDP2 adds to the rows of the device
            state = replace(state, masters=updated * DTYPE_BYTES[recipe.master])
        if plan.parameters == "disk":
            state = replace(state, parameters=0, gradients=0)
        elif plan.parameters == "host":
            rows = state.parameters - state.masters * (plan.states == "host")  # Which have their masters in them
            state = replace(state, parameters=0, gradients=0, rows_on_host=rows)
    else:
        keeps_shard = any(action.moment == "microbatch" for action in unit.schedule)
        sharded = ShardedStates(False, keeps_shard, optimizer_states=True)
        state = state_of_shards(each, unit.contents.length, updated, sharded=sharded)
    if recipe.moments_are_masters_dtype:
        moments = int(updated * each.moments)
    else:
        parts = ((name, unit.shapes[name], stop - first) for name, first, stop in unit.member_ranges(shard))
        stored = (stored_bytes(recipe.moment_dtype(name, shape), shape, numel) for name, shape, numel in parts)
        moments = moments_per_parameter * sum(stored)
    return replace(state, moments=moments, compression_errors=errors)


def peak_transient_bytes(
    plan: StepPlan, recipe: PrecisionRecipe, *, rank: int, saved_gradients: Collection[str] = ()
) -> int:
    """Peak bytes of one rank beyond its state and activations, uncompressed, without buffers of algorithms.

    Autograd is assumed to hold one gradient at a time; it holds two where a bias's gradient follows the next matrix's.
    The gradients of `saved_gradients`, by name, are made in the forward, and counted among the saved activations.
    """
    groups = [group for group in plan.groups if group.position(rank) is not None]
    rows = [group for group in groups if group.group.unit_kind == "rows"]
    peaks = (_peak_of_group(plan, group, recipe, saved=saved_gradients) for group in rows or groups)
    return max(peaks, default=0)


def _peak_of_group(plan: StepPlan, group: SyncGroupPlan, recipe: PrecisionRecipe, *, saved: Collection[str]) -> int:
    """The peak of blocks that save nothing, with the units of a plan."""
    if not group.units:
        return 0
    storage = _storage_of_group(plan, group, recipe)
    spec = ModelSpec(tuple(_blocks_of_units(plan, group, () if storage.adds_to_sums else saved)))
    policies: list[BlockPolicy] = ["none"] * spec.policy_count
    peaks = StageBlocks(spec, MicroBatchShape(1, 1), policies, storage).peaks()
    kept = DTYPE_BYTES[recipe.master] * sum(unit.reduction_spec(0).numel for unit in group.units)
    return max(peaks.forward.total, peaks.backward.total) - (
        kept if storage.kind == "rows" and storage.rows == "device" else 0
    )


def _storage_of_group(plan: StepPlan, group: SyncGroupPlan, recipe: PrecisionRecipe) -> GradientStorage:
    """The sums of gradients, by the actions on the units."""
    microbatches = plan.microbatches
    units, actions = group.units, [action for unit in group.units for action in unit.schedule]
    scatters = [action for action in actions if action.is_scatter]
    if group.group.unit_kind == "rows":
        return GradientStorage(
            "rows",
            recipe,
            units[0].shards,
            any(unit.reshards for unit in units),
            microbatches,
            reduces_once=any(a.moment == "last_microbatch" for a in actions if a.is_scatter or a.kind == "to_host"),
            has_replicas=any(action.over == "replicas" for action in actions),
            rows=plan.parameters,
        )
    each = [action for action in scatters if action.moment == "microbatch"]
    overlaps = all(action.overlaps for action in each)
    buckets = tuple(unit.contents for unit in units if isinstance(unit.contents, Bucket))
    return GradientStorage(
        "buckets" if each else "flat", recipe, microbatches=microbatches, overlaps=overlaps, plan_buckets=buckets
    )


def _blocks_of_units(plan: StepPlan, group: SyncGroupPlan, saved: Collection[str]) -> Iterator[BlockSpec]:
    """A block for each unit, in the order of a forward; parameters used after the blocks are a block of their unit."""
    late = {
        tensor.name for tensor in plan.inventory.tensors if tensor.block is None and -1 in tensor.needed_with_blocks
    }
    nothing = SavedActivation("input", 0)
    if group.group.unit_kind != "rows":
        yield from (BlockSpec(unit.name, LayerSpec(_parameters(unit, saved))) for unit in reversed(group.units))
        return
    *blocks, root = group.units
    outside = _parameters(root, saved)
    yield BlockSpec("start", LayerSpec(tuple(each for each in outside if each.name not in late)))
    yield from (BlockSpec(unit.name, LayerSpec(_parameters(unit, saved)), input=nothing) for unit in blocks)
    yield BlockSpec("end", LayerSpec(tuple(each for each in outside if each.name in late)))


def _parameters(unit: CommUnit, saved: Collection[str]) -> tuple[ParameterSpec, ...]:
    frozen = unit.contents.frozen if isinstance(unit.contents, FSDPUnit) else ()
    names = [member.name for member in unit.members]
    trained = (ParameterSpec(n, unit.shapes[n], gradient="forward" if n in saved else "backward") for n in names)
    return (*(ParameterSpec("frozen", shape, gradient="none") for shape in frozen), *trained)


def _numel(shapes: Iterable[Shape]) -> int:
    return sum(map(prod, shapes))
