"""The part of a tensor of one device that each rank should have: by the plan of the layout, and by rows."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from motet.parallel.shard_spec import ShardSpec
from motet.parity.compare.planned_records import PlannedRecords, format_elements, format_numbered
from motet.parity.record.activation_parts import cut_part, put_part, without_padding
from motet.parity.record.tensor_recorder import (
    ACTIVATION_KINDS,
    RankRecords,
    RecordedShard,
    RecordedTensor,
    TensorKey,
    count_significant_bits,
    sketch_shard,
)


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
    | unknown | what depends on the batch as a whole, or what one device does not show |
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
    """Pairs of what ranks have and should have; raise where these are no pairs."""
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
        return [_align_sum(reference, group, planned) for group in filter(None, by_group)]
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
    for of_rank in records:
        _check_shape(reference, of_rank, part.local_shape)
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


def _check_shape(reference: ReferenceTensor, of_rank: tuple[int, RecordedTensor], shape: tuple[int, ...]) -> None:
    rank, record = of_rank
    if record.value.shape != shape:
        rows = f" for {len(record.rows)} rows" if record.rows else ""
        shapes = f"has shape {list(record.value.shape)}{rows}, where {list(shape)} follows"
        raise TensorAlignmentError(rank, f"rank {rank} {shapes} from {list(reference.value.shape)} of one device")


def _align_rows(
    reference: ReferenceTensor,
    of_rank: tuple[int, RecordedTensor],
    placement: RowPlacement,
    *,
    planned: PlannedRecords | None,
) -> Iterator[AlignedTensorPair]:
    """The pair of one micro-batch; none if nothing is known about it."""
    rank, record = of_rank
    if (expected := _select_rows(reference, record.rows, placement)) is None:
        return
    if record.kind == "random mask" and record.part is not None:  # Some rows of it may belong to one of the batch
        if record.is_sketched:
            return
        if prod(record.part.shape) != expected.numel():
            draws = f"draws a part of {list(record.part.shape)} elements"
            raise TensorAlignmentError(rank, f"rank {rank} {draws}, where one device draws {list(expected.shape)}")
        expected = expected.reshape(record.part.shape)
    shape = tuple(expected.shape)
    if (part := planned.part_of_rows(record, rank, shape) if planned else ShardSpec.full(shape)) is None:
        return
    _check_shape(reference, of_rank, part.local_shape)
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
    by_rows: dict[tuple[int, ...], list[tuple[int, RecordedTensor]]] = {}
    for rank, record in records:
        by_rows.setdefault(record.rows, []).append((rank, record))
    for rows, of_ranks in by_rows.items():
        if (expected := _select_rows(reference, rows, placement)) is None:
            continue
        total = torch.zeros_like(expected)
        for rank, record in of_ranks:
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
