"""The rows of stage 3 that lie in files: the bytes that a rank reads before it gathers, and its window on the host."""

from collections.abc import Sequence
from math import prod

from motet.core.units import DTYPE_BYTES
from motet.memory.tiers.file_layout import FileLayout
from motet.memory.tiers.window_layout import WindowLayout, WindowUnit, row_buffer_bytes
from motet.parallel.data_parallel.comm_units import CommUnit, SyncGroupPlan
from motet.parallel.data_parallel.zero import FSDPUnit, padded_shard_numel, shard_rows
from motet.parallel.step_plan.plan import StepPlan
from motet.precision.recipe import PrecisionRecipe


def frozen_files(plan: StepPlan, recipe: PrecisionRecipe, *, rank: int) -> tuple[FileLayout, ...]:
    """The files of frozen rows of a rank, which a step only reads."""
    layouts = (_frozen_layout(group, group.units, recipe, rank=rank) for group in _groups_with_rows(plan, rank))
    return tuple(layout for layout in layouts if layout.lengths)


def read_bytes(plan: StepPlan, group: SyncGroupPlan, unit: CommUnit, *, recipe: PrecisionRecipe, rank: int) -> int:
    """The bytes of files that a rank reads before it gathers a unit: its masters, which are the rows, and frozen rows;
    padding included."""
    position = group.position(rank)
    if plan.parameters != "disk" or position is None:
        return 0
    trained = FileLayout({"master": DTYPE_BYTES[recipe.master]}, tuple(unit.slice_lengths(position)))
    return trained.update_bytes + _frozen_layout(group, [unit], recipe, rank=rank).update_bytes


def window_bytes(plan: StepPlan, recipe: PrecisionRecipe, *, rank: int) -> int:
    """The memory of a host for the rows that a rank reads ahead."""
    windows = (_window(group, recipe, plan.window) for group in _groups_with_rows(plan, rank))
    return sum(window.memory_bytes(microbatches=plan.microbatches) for window in windows)


def _groups_with_rows(plan: StepPlan, rank: int) -> list[SyncGroupPlan]:
    """The sync groups of a rank whose rows lie in files."""
    groups = [group for group in plan.groups if group.group.unit_kind == "rows" and group.position(rank) is not None]
    return groups if plan.parameters == "disk" else []


def _window(group: SyncGroupPlan, recipe: PrecisionRecipe, ahead: int) -> WindowLayout:
    *blocks, root = group.units
    units = (WindowUnit(_buffer_bytes(unit, recipe), unit.reshards) for unit in (root, *blocks))
    return WindowLayout(tuple(units), ahead, turns=not group.group.in_pipeline)


def _buffer_bytes(unit: CommUnit, recipe: PrecisionRecipe) -> int:
    assert isinstance(unit.contents, FSDPUnit)
    parts = (unit.contents.trainable, recipe.master), (unit.contents.frozen, recipe.compute)
    sizes = ((padded_shard_numel([shape], unit.shards), dtype) for shapes, dtype in parts for shape in shapes)
    return sum(row_buffer_bytes(numel, DTYPE_BYTES[dtype]) for numel, dtype in sizes)


def _frozen_layout(
    group: SyncGroupPlan, units: Sequence[CommUnit], recipe: PrecisionRecipe, *, rank: int
) -> FileLayout:
    sharding, position = group.group.sharding, group.group.position_of_rank[rank]
    shapes = [shape for unit in units if isinstance(unit.contents, FSDPUnit) for shape in unit.contents.frozen]
    bounds = ((shape, shard_rows(shape[0], sharding.shards, sharding.shard_of_rank(position))) for shape in shapes)
    lengths = ((stop - first) * prod(shape[1:]) for shape, (first, stop) in bounds)
    return FileLayout({"frozen": DTYPE_BYTES[recipe.compute]}, tuple(lengths))
