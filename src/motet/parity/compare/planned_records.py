"""The part of each tensor that every rank of a layout should record, by the plan of its step."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

import torch

from motet.collectives.cost.alpha_beta import RankGroups
from motet.parallel.data_parallel.zero import shard_rows
from motet.parallel.model_inventory import TensorInfo
from motet.parallel.model_sharding import PIPELINE_DIMENSION
from motet.parallel.shard_spec import ShardSpec
from motet.parallel.step_plan.plan import StepPlan, updated_ranges
from motet.parallel.sync_groups import DATA_DIMENSIONS, pipeline_groups, same_rows_groups
from motet.parity.record.activation_parts import ActivationParts, module_of
from motet.parity.record.tensor_recorder import (
    ACTIVATION_KINDS,
    MASTER_PREFIX,
    ROW_KINDS,
    RankRecords,
    RecordedShard,
    RecordedTensor,
    TensorKey,
    parameter_name,
)

UPDATED_KINDS = ("gradient", "clipped gradient", "state")  # Of the elements that a rank updates


@dataclass(frozen=True)
class PlannedRecords:
    """A plan, and what follows from it for the records of ranks."""

    plan: StepPlan
    activation_order: Mapping[str, int] = field(default_factory=dict)  # On one device

    @cached_property
    def _updated_ranges(self) -> list[dict[str, tuple[int, int]]]:
        return [updated_ranges(self.plan, rank) for rank in range(self.plan.dims.ranks)]

    @cached_property
    def _tensors(self) -> dict[str, TensorInfo]:
        return {name: tensor for tensor in self.plan.inventory.tensors for name in (tensor.name, *tensor.aliases)}

    @cached_property
    def row_groups(self) -> RankGroups:
        """Ranks that together compute each row once."""
        return self.plan.dims.groups(*DATA_DIMENSIONS[:1])  # Ranks of the second one have other positions of the rows

    def stage_of(self, key: TensorKey) -> int | None:
        """The stage that computes the loss or an output of a block; several may compute other outputs: None."""
        sharding, module = self.plan.model_sharding, module_of(key.name)
        if not sharding.stages or key.kind not in ("loss", *ACTIVATION_KINDS):
            return None
        inside = (i for i, name in enumerate(sharding.block_names) if f"{module}.".startswith(f"{name}."))
        block = sharding.stages[-1].start if key.kind == "loss" else next(inside, None)
        return next((stage for stage, blocks in enumerate(sharding.stages) if block in blocks), None)

    def describe_stage(self, key: TensorKey) -> str:
        """Words for the ranks that compute a tensor; empty if nothing is known."""
        if (stage := self.stage_of(key)) is None:
            return ""
        ranks = sorted(rank for group in self.row_groups_of(key, ()) for rank in group)
        return f"it belongs to stage {stage} of {format_numbered('rank', ranks)}"

    def holder(self, name: str, rank: int) -> int:
        """The rank that holds a parameter, among the ranks that work on the same rows as this one."""
        holders = self.plan.specs[self._tensors[name].name]
        same_rows = next(ranks for ranks in same_rows_groups(self.plan.dims) if rank in ranks)
        return rank if rank in holders else next(each for each in same_rows if each in holders)

    def combine_stages(self, records: RankRecords) -> RankRecords:
        """One record for each micro-batch of an output that several stages compute, perhaps without using it.

        The first stage that has it counts, and each stage has a summand of its gradient.
        """
        record = records[0][1]
        is_shared = self.plan.model_sharding.stages and record.kind in ACTIVATION_KINDS
        if not is_shared or self.stage_of(record.key) is not None:
            return records
        if record.kind == "activation":
            first_stage = min(each.stage for _, each in records)
            return [(rank, each) for rank, each in records if each.stage == first_stage]
        groups, sums = pipeline_groups(self.plan.dims), dict[tuple[int, int], tuple[int, RecordedTensor]]()
        for rank, each in records:
            key = next(i for i, group in enumerate(groups) if rank in group), each.microbatch
            first, total = sums.get(key, (rank, each._replace(value=torch.zeros_like(each.value))))
            sums[key] = first, total._replace(value=total.value + each.value)
        return list(sums.values())

    def row_groups_of(self, key: TensorKey, holders: Collection[int]) -> list[tuple[int, ...]]:
        """Ranks that together have each row of a tensor once, of those with the stage that computes it."""
        if (stage := self.stage_of(key)) is None:
            has_stages = bool(self.plan.model_sharding.stages)
            return [group for group in self.row_groups if not has_stages or set(group).intersection(holders)]
        dims = self.plan.dims
        place = self.plan.model_sharding.rank_of_stage(stage, dims)
        return [group for group in self.row_groups if dims.coordinates(group[0])[PIPELINE_DIMENSION] == place]

    def shards(self, key: TensorKey, shape: tuple[int, ...]) -> dict[int, RecordedShard]:
        """The elements of a tensor that each rank has; ranks without any are left out."""
        tensor = self._tensors.get(parameter_name(key.name))
        if tensor is None:  # Such as the count of steps
            return {rank: RecordedShard(ShardSpec.full(shape), 0, prod(shape)) for rank in range(self.plan.dims.ranks)}
        specs = self.plan.specs[tensor.name].items()
        shards = {rank: RecordedShard(spec, *self._elements(key, tensor, rank=rank, spec=spec)) for rank, spec in specs}
        return {rank: shard for rank, shard in shards.items() if shard.numel}

    def _elements(self, key: TensorKey, tensor: TensorInfo, *, rank: int, spec: ShardSpec) -> tuple[int, int]:
        if key.kind in UPDATED_KINDS or key.name.startswith(MASTER_PREFIX):
            return self._updated_ranges[rank].get(tensor.name, (0, 0))
        shape = spec.local_shape
        may_be_sharded = tensor.kind in ("trained", "frozen") and key.kind != "used parameter"
        for group in self.plan.groups if may_be_sharded else ():
            sharding, position = group.group.sharding, group.position(rank)
            is_cut = tensor.name in group.shapes or tensor.name in group.group.frozen
            if is_cut and group.group.unit_kind == "rows" and position is not None:
                first, stop = shard_rows(shape[0], sharding.shards, position % sharding.shards)
                return first * prod(shape[1:]), stop * prod(shape[1:])
        return 0, prod(shape)

    def reductions(self, name: str, rank: int) -> list[tuple[int, ...]]:
        """The ranks of each reduction of a gradient that a rank takes part in, in order."""
        for group in self.plan.groups:
            position, units = group.position(rank), (u for u in group.units if any(m.name == name for m in u.members))
            unit = next(units, None)
            if position is not None and unit is not None:
                ranks = next(ranks for ranks in group.group.sum_groups if rank in ranks)
                actions = (a for a in unit.schedule if a.tensor == "gradients" and a.over and not a.is_gather)
                groups = (positions for action in actions for positions in action.rank_groups if position in positions)
                return [tuple(ranks[index] for index in positions) for positions in groups]
        return []

    def has_complete_local_gradients(self, name: str) -> bool:
        """Whether a rank has the complete gradient of its rows before it is added to those of other ranks."""
        partial_over = self.plan.model_sharding.partial_over(self._tensors[name])
        return not any(self.plan.dims.size(over) > 1 for over in set(partial_over) - set(DATA_DIMENSIONS[:1]))

    @cached_property
    def activations(self) -> ActivationParts:
        return ActivationParts(self.plan.model_sharding, self.plan.dims, self.activation_order)

    def part_of_rows(self, record: RecordedTensor, rank: int, shape: tuple[int, ...]) -> ShardSpec | None:
        """The part of a tensor of rows that a rank should have; its shape on one device is given. None if not known."""
        if record.kind in ACTIVATION_KINDS:
            return self.activations.spec(record.name, rank, shape)
        return record.part or ShardSpec.full(shape)

    def adds_up_parts(self, reference: RecordedTensor) -> bool:
        """Whether only the sum over ranks can be compared: each has a sketch of its part, or a part of a gradient."""
        if reference.kind not in ACTIVATION_KINDS or not self.activations.splits(reference.name):
            return False
        return reference.is_sketched or self._is_partial(reference)

    def _is_partial(self, record: RecordedTensor) -> bool:
        return record.kind == "activation gradient" and self.activations.is_shared(record.name)

    def differing_copies(self, records: RankRecords) -> list[list[int]]:
        """Ranks with equal bits of what should be one copy, for the first copy whose ranks differ; the most first."""
        copies: dict[object, dict[int, list[int]]] = {}
        for rank, record in self.combine_stages(records):
            if (place := self._place(record)) is not None:
                copies.setdefault(place, {}).setdefault(record.digest, []).append(rank)
        differing = next((ranks for ranks in copies.values() if len(ranks) > 1), {})
        return sorted(differing.values(), key=len, reverse=True)

    def _place(self, record: RecordedTensor) -> object:
        """The same for ranks that should have the same values; None if nothing is known."""
        if record.shard is not None or record.kind not in ROW_KINDS:
            return record.shard or record.rows
        is_unknown = record.kind in ACTIVATION_KINDS and self.activations.splits(record.name) is None
        if is_unknown or self._is_partial(record):
            return None
        return record.microbatch, record.rows, record.part and record.part.spans


def format_numbered(noun: str, numbers: Sequence[int]) -> str:
    """`rank 1`, or `ranks 0, 1 and 2`."""
    plural, text = "es" if noun.endswith("h") else "s", [", ".join(map(str, numbers[:-1])), str(numbers[-1])]
    return f"{noun}{plural * (len(numbers) > 1)} {' and '.join(filter(None, text))}"


def format_elements(shard: RecordedShard | None) -> str:
    """Words for the elements of a rank."""
    if shard is None:
        return "nothing of it"
    spans = (
        "" if shard.spec == ShardSpec.full(shard.spec.shape) else f", which is {list(shard.spec.spans)} of the whole"
    )
    return f"elements {shard.start} to {shard.stop - 1} of shape {list(shard.spec.local_shape)}{spans}"
