"""The part of a tensor of one device that each rank should record, by the plan of its step and by rows."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from motet.collectives.cost.alpha_beta import RankGroups
from motet.parallel.data_parallel.zero import shard_rows
from motet.parallel.model_sharding import CONTEXT_DIMENSION, PIPELINE_DIMENSION, TensorInfo
from motet.parallel.shard_spec import ShardSpec
from motet.parallel.step_plan.plan import StepPlan, updated_ranges
from motet.parallel.sync_groups import DATA_DIMENSIONS, pipeline_groups, same_rows_groups
from motet.parity.record.activation_parts import (
    ActivationParts,
    cut_part,
    module_of,
    parts_of_activations,
    put_part,
    without_padding,
)
from motet.parity.record.tensor_recorder import (
    ACTIVATION_KINDS,
    MASTER_PREFIX,
    ROW_KINDS,
    RankRecords,
    RecordedShard,
    RecordedTensor,
    TensorKey,
    count_significant_bits,
    parameter_name,
    sketch_shard,
)

UPDATED_KINDS = ("gradient", "clipped gradient", "state")  # Kinds with the elements that a rank updates


@dataclass(frozen=True)
class PlannedRecords:
    """A plan, and the expected records of ranks that follow from it."""

    plan: StepPlan
    activation_order: Mapping[str, int] = field(default_factory=dict)  # The order on one device
    row_tokens: int = 1  # Tokens of each row, where ranks may split them

    @cached_property
    def _updated_ranges(self) -> list[dict[str, tuple[int, int]]]:
        return [updated_ranges(self.plan, rank) for rank in range(self.plan.dims.ranks)]

    @cached_property
    def _tensors(self) -> dict[str, TensorInfo]:
        return {name: tensor for tensor in self.plan.inventory.tensors for name in (tensor.name, *tensor.aliases)}

    @cached_property
    def row_groups(self) -> RankGroups:
        """Ranks that together compute each row once."""
        return self.plan.dims.groups(*DATA_DIMENSIONS[:1])  # The second dimension splits the positions of rows

    @cached_property
    def adding_groups(self) -> RankGroups:
        """Ranks that together compute each token once."""
        return self.plan.dims.groups(*DATA_DIMENSIONS)

    def own_name(self, name: str) -> str:
        """The name of a tensor that may have several, such as a tied weight."""
        return self._tensors[name].name if name in self._tensors else name

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
        """Groups of ranks with the stage that computes a tensor; each group has each row once."""
        if (stage := self.stage_of(key)) is None:
            has_stages = bool(self.plan.model_sharding.stages)
            return [group for group in self.row_groups if not has_stages or set(group).intersection(holders)]
        dims = self.plan.dims
        place = self.plan.model_sharding.rank_of_stage(stage, dims)
        return [group for group in self.row_groups if dims.coordinates(group[0])[PIPELINE_DIMENSION] == place]

    def shards(self, key: TensorKey, shape: tuple[int, ...]) -> dict[int, RecordedShard]:
        """The elements of a tensor that each rank has; ranks without any are left out."""
        tensor = self._tensors.get(parameter_name(key.name))
        if tensor is None:  # The count of steps, for example
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

    def split_table(self, module: str) -> dict[int, range] | None:
        """Rank -> entries of a table of vectors whose entries ranks split; None for other modules."""
        specs: Mapping[int, ShardSpec] = self.plan.specs.get(self.own_name(f"{module}.weight"), {})
        spans = {rank: spec.spans[0] for rank, spec in specs.items() if spec.spans}
        is_split = any(len(each) == 1 and each != ((0, specs[rank].shape[0]),) for rank, each in spans.items())
        tables = [split for comm in self.plan.model_sharding.boundary_comms for split in (comm.module, *comm.shared_by)]
        return {rank: range(*each[0]) for rank, each in spans.items()} if is_split and module in tables else None

    def is_sum_of_parts(self, name: str) -> bool:
        """Whether ranks that work on the same rows have parts of the gradient of a tensor."""
        return name in self._tensors and not self.has_complete_local_gradients(name)

    @cached_property
    def activations(self) -> ActivationParts:
        return parts_of_activations(self.plan, self.activation_order, row_tokens=self.row_tokens)

    def part_of_rows(self, record: RecordedTensor, rank: int, shape: tuple[int, ...]) -> ShardSpec | None:
        """The part of a tensor of rows that a rank should have; its shape on one device is given. None if not known."""
        if record.kind in ACTIVATION_KINDS:
            return self.activations.spec(record.name, rank, shape, rows=len(record.rows))
        if record.kind == "sample":
            return self.activations.token_spec(rank, shape, rows=len(record.rows))
        return record.part or ShardSpec.full(shape)

    def adds_up_parts(self, reference: RecordedTensor) -> bool:
        """Whether only the sum over ranks can be compared: each has a sketch of its part, or a part of a gradient."""
        splits = self.activations.splits(reference.name)
        if reference.kind not in ACTIVATION_KINDS or splits is None or not (splits or self.activations.tokens):
            return False
        return reference.is_sketched or self._is_partial(reference)

    def copy_of_part(self, name: str, rank: int) -> object:
        """Ranks of equal numbers have different parts of an output; others have copies."""
        if self.activations.splits(name):
            return None
        return next(ranks for ranks in self.adding_groups if rank in ranks)

    def _is_partial(self, record: RecordedTensor) -> bool:
        return record.kind == "activation gradient" and self.activations.is_shared(record.name)

    def differing_copies(self, records: RankRecords) -> list[list[int]]:
        """Groups of ranks with equal bits of a replicated part; of the first part that differs, the largest first."""
        copies: dict[object, dict[int, list[int]]] = {}
        for rank, record in self.combine_stages(records):
            if (place := self._place(record, rank)) is not None:
                copies.setdefault(place, {}).setdefault(record.digest, []).append(rank)
        differing = next((ranks for ranks in copies.values() if len(ranks) > 1), {})
        return sorted(differing.values(), key=len, reverse=True)

    def describe_copies(self, copies: Sequence[Sequence[int]]) -> str:
        ranks = " and ".join(format_numbered("rank", ranks) for ranks in copies)
        return f"{ranks} hold copies that should be equal, but differ"

    def _place(self, record: RecordedTensor, rank: int) -> object:
        """A key that is equal for ranks that should have the same values; None if nothing is known."""
        if record.shard is not None:
            return record.shard
        tokens = self.plan.dims.coordinates(rank)[CONTEXT_DIMENSION]
        if record.kind not in ROW_KINDS:
            return record.rows, record.kind == "loss" and tokens
        is_unknown = record.kind in ACTIVATION_KINDS and self.activations.splits(record.name) is None
        if is_unknown or self._is_partial(record):
            return None
        is_summand = record.kind == "activation gradient" and record.part is None
        return record.microbatch, record.rows, record.part and record.part.spans, is_summand and tokens


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


class AlignedTensorPair(NamedTuple):
    """A part of a tensor on a rank, and the same part of the reference."""

    rank: int | None  # None: the value is of all ranks together
    value: Tensor
    expected: Tensor
    record: RecordedTensor | None = None
    expected_bits: int = 0  # Significant bits of the expected numbers


class RowPlacement(NamedTuple):
    """The part of a tensor of the whole batch that a micro-batch has.

    | how | a micro-batch has |
    |---|---|
    | rows | its own rows: those of the batch are along one dimension |
    | same | the same tensor, such as a table |
    | sum | a summand of the tensor, such as the gradient of a table |
    | unknown | a part that depends on the whole batch, or that one device does not show |
    """

    how: Literal["rows", "same", "sum", "unknown"]
    dim: int = 0
    is_inner: bool = False  # Within the dimension, rows change first
    is_by_shape: bool = False  # The values depend on the other rows of the micro-batch

    def select(self, tensor: Tensor, rows: int, indices: Sequence[int]) -> Tensor:
        """Some of the rows of a tensor."""
        if self.how != "rows":
            return tensor
        sizes = (-1, rows) if self.is_inner else (rows, -1)
        unflattened = tensor.unflatten(self.dim, sizes)
        selected: Tensor = unflattened.index_select(self.dim + self.is_inner, torch.tensor(indices))
        return selected.flatten(self.dim, self.dim + 1)

    def by_row(self, tensor: Tensor, rows: int) -> Tensor:
        """The tensor as [rows, elements of each]."""
        if self.how != "rows":
            return tensor
        first = tensor.movedim(self.dim, 0)
        return (first.unflatten(0, (-1, rows)).transpose(0, 1) if self.is_inner else first).reshape(rows, -1)


UNKNOWN_ROWS = RowPlacement("unknown")


@dataclass(frozen=True)
class ReferenceTensor:
    """A tensor of one device, unsharded and of the whole batch."""

    key: TensorKey
    value: Tensor
    rows: tuple[int, ...]  # Rows of the batch
    record: RecordedTensor


class TensorAlignmentError(Exception):
    """The tensors of the ranks do not make up the tensor of the reference."""

    def __init__(self, rank: int | None, message: str) -> None:
        super().__init__(message)
        self.rank = rank


def align_tensor(
    reference: ReferenceTensor,
    records: RankRecords,
    *,
    placement: RowPlacement,
    planned: PlannedRecords | None = None,
) -> list[AlignedTensorPair]:
    """Pairs of the values that ranks have and should have; raise where they do not pair up."""
    if any(record.shard for _, record in records):
        return list(_align_shards(reference, records, planned))
    bits = reference.record.significant_bits
    if all(record.microbatch < 0 for _, record in records):
        for rank, record in records:
            _check_shape(reference, (rank, record), tuple(reference.value.shape))
        return [AlignedTensorPair(rank, record.value, reference.value, record, bits) for rank, record in records]
    records = planned.combine_stages(records) if planned else records
    holders = sorted({rank for rank, _ in records})
    groups = planned.row_groups_of(reference.key, holders) if planned else [holders]
    by_group = [[each for each in records if each[0] in ranks] for ranks in groups]
    if others := [rank for rank in holders if not any(rank in ranks for ranks in groups)]:
        stage, verb = planned.describe_stage(reference.key) if planned else "", "s" if len(others) == 1 else ""
        raise TensorAlignmentError(others[0], f"{format_numbered('rank', others)} compute{verb} it, but {stage}")
    for group in by_group:
        _check_each_row_once(reference, group)
    if reference.key.kind == "loss" or placement.how == "sum":
        adding = planned.adding_groups if planned else groups  # Each rank of these has a summand
        summands = ([each for each in records if each[0] in ranks] for ranks in adding)
        return [_align_sum(reference, group, planned) for group in filter(None, summands)]
    if planned and planned.adds_up_parts(reference.record):
        return list(_align_sums_of_parts(reference, records, placement, planned=planned))
    if reference.key.kind == "random mask":
        _check_each_element_drawn(records)
    return [pair for each in records for pair in _align_rows(reference, each, placement, planned=planned)]


def _align_sum(reference: ReferenceTensor, records: RankRecords, planned: PlannedRecords | None) -> AlignedTensorPair:
    """The sum over micro-batches and ranks that have the same part of a tensor."""
    shape, (rank, record) = tuple(reference.value.shape), records[0]
    part = planned.part_of_rows(record, rank, shape) if planned and record.kind in ACTIVATION_KINDS else None
    part = part or ShardSpec.full(shape)
    for rank_record in records:
        _check_shape(reference, rank_record, part.local_shape)
    total = torch.stack([record.value.double() for _, record in records]).sum(0)
    return AlignedTensorPair(None, without_padding(total, part), cut_part(reference.value, part))


def _check_each_row_once(reference: ReferenceTensor, records: RankRecords) -> None:
    ranks_of_row: dict[int, list[int]] = {row: [] for row in reference.rows}
    for rank, record in records:
        for row in record.rows:
            if row not in ranks_of_row:
                raise TensorAlignmentError(rank, f"rank {rank} computes row {row}, which the batch does not have")
            ranks_of_row[row].append(rank)
    missing = [row for row, ranks in ranks_of_row.items() if not ranks]
    repeated = [(row, ranks) for row, ranks in ranks_of_row.items() if len(ranks) > 1]
    verbs = {"activation gradient": "has a gradient of it for", "random mask": "draws it for"}
    verb = verbs.get(reference.key.kind, "computes")
    problems = [f"no rank {verb} {format_numbered('row', missing)} of the batch"] if missing else []
    for row, ranks in repeated[:1]:
        problems.append(f"row {row} is computed {len(ranks)} times, by {format_numbered('rank', sorted(set(ranks)))}")
    if problems:
        raise TensorAlignmentError(repeated[0][1][-1] if repeated else None, "; ".join(problems))


def _check_shape(reference: ReferenceTensor, rank_record: tuple[int, RecordedTensor], shape: tuple[int, ...]) -> None:
    rank, record = rank_record
    if record.value.shape != shape:
        rows = f" for {len(record.rows)} rows" if record.rows else ""
        shapes = f"has shape {list(record.value.shape)}{rows}, where {list(shape)} follows"
        raise TensorAlignmentError(rank, f"rank {rank} {shapes} from {list(reference.value.shape)} of one device")


def _align_rows(
    reference: ReferenceTensor,
    rank_record: tuple[int, RecordedTensor],
    placement: RowPlacement,
    *,
    planned: PlannedRecords | None,
) -> Iterator[AlignedTensorPair]:
    """The pair of one micro-batch; none if nothing is known about it."""
    rank, record = rank_record
    if (expected := _select_rows(reference, record.rows, placement)) is None:
        return
    if record.kind == "random mask" and record.part is not None:  # Several of its rows may belong to one of the batch
        if record.is_sketched:
            return
        if prod(record.part.shape) != expected.numel():
            draws = f"draws a part of {list(record.part.shape)} elements"
            raise TensorAlignmentError(rank, f"rank {rank} {draws}, where one device draws {list(expected.shape)}")
        expected = expected.reshape(record.part.shape)
    shape = tuple(expected.shape)
    if (part := planned.part_of_rows(record, rank, shape) if planned else ShardSpec.full(shape)) is None:
        return
    _check_shape(reference, rank_record, part.local_shape)
    expected, value = cut_part(expected, part), without_padding(record.value, part)
    is_part = expected.numel() < reference.value.numel() and not record.is_sketched
    bits = count_significant_bits(expected) if is_part else reference.record.significant_bits
    value, expected = (placement.by_row(tensor, len(record.rows)) for tensor in (value, expected))
    yield AlignedTensorPair(rank, value, expected, record, bits)


def _check_each_element_drawn(records: RankRecords) -> None:
    """The ranks that split rows of a random mask have all of it together."""
    by_rows: dict[object, dict[int, ShardSpec]] = {}
    for rank, record in records:
        if record.part is not None:
            by_rows.setdefault((record.rows, record.part.shape), {})[rank] = record.part
    for parts in by_rows.values():
        drawn = [put_part(torch.ones(part.local_shape), part) != 0 for part in parts.values()]
        if missing := int((~torch.stack(drawn).any(0)).sum()):
            ranks = format_numbered("rank", sorted(parts))
            message = f"{ranks} together leave out {missing} of its {drawn[0].numel()} elements"
            raise TensorAlignmentError(max(parts), message)


def _select_rows(reference: ReferenceTensor, rows: tuple[int, ...], placement: RowPlacement) -> Tensor | None:
    """The rows of a micro-batch; None if nothing is known about them."""
    if rows == reference.rows:
        return reference.value
    if placement.how == "unknown":
        return None
    return placement.select(reference.value, len(reference.rows), [reference.rows.index(row) for row in rows])


def _align_sums_of_parts(
    reference: ReferenceTensor, records: RankRecords, placement: RowPlacement, *, planned: PlannedRecords
) -> Iterator[AlignedTensorPair]:
    """The sums over ranks that compute parts of the same rows."""
    by_rows: dict[tuple[object, tuple[int, ...]], list[tuple[int, RecordedTensor]]] = {}
    for rank, record in records:
        by_rows.setdefault((planned.copy_of_part(reference.key.name, rank), record.rows), []).append((rank, record))
    for (_, rows), rank_records in by_rows.items():
        if (expected := _select_rows(reference, rows, placement)) is None:
            continue
        total = torch.zeros_like(expected)
        for rank, record in rank_records:
            part = ShardSpec.full(tuple(expected.shape))
            if not record.is_sketched:
                part = planned.part_of_rows(record, rank, part.shape) or part
            _check_shape(reference, (rank, record), part.local_shape)
            total += put_part(record.value, part)
        value, expected = (placement.by_row(tensor, len(rows)) for tensor in (total, expected))
        yield AlignedTensorPair(None, value, expected)


def _align_shards(
    reference: ReferenceTensor, records: RankRecords, planned: PlannedRecords | None
) -> Iterator[AlignedTensorPair]:
    shape = tuple(reference.value.shape)
    held = {rank: record.shard for rank, record in records if record.shard and record.shard.numel}
    unsharded = RecordedShard(ShardSpec.full(shape), 0, reference.value.numel())
    wanted = planned.shards(reference.key, shape) if planned else dict.fromkeys(held, unsharded)
    for rank in sorted(held if reference.key.kind == "used parameter" else {*held, *wanted}):
        if held.get(rank) != wanted.get(rank):
            has, should = (format_elements(shards.get(rank)) for shards in (held, wanted))
            raise TensorAlignmentError(rank, f"rank {rank} has {has}, where it should have {should}")
    for rank, record in records:
        if (shard := record.shard) is not None:
            expected = shard.cut(reference.value)
            bits = count_significant_bits(expected)
            yield AlignedTensorPair(rank, record.value, sketch_shard(expected, shard.start), record, bits)
