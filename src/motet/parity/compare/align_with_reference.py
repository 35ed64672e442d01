"""Which part of a tensor of the reference each rank should have: by rows of the batch, or by places in the whole."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from motet.parity.record.random_sign_sketch import sketch_rows, sketch_shard
from motet.parity.record.tensor_recorder import RecordedTensor, TensorKind, count_significant_bits

TensorKey = tuple[TensorKind, str]
RankRecords = Sequence[tuple[int, RecordedTensor]]  # (rank, what it has)


class AlignedTensorPair(NamedTuple):
    """What a rank has of a tensor, and what the reference has there."""

    rank: int | None  # None: of all ranks together
    value: Tensor
    expected: Tensor
    record: RecordedTensor | None = None
    expected_bits: int = 0  # That the reference's numbers have there


@dataclass(frozen=True)
class ReferenceTensor:
    """A tensor of the reference."""

    key: TensorKey
    value: Tensor
    rows: tuple[int, ...]  # Of the batch
    record: RecordedTensor


class TensorAlignmentError(Exception):
    """What ranks have does not make the tensor of the reference."""

    def __init__(self, rank: int | None, message: str) -> None:
        super().__init__(message)
        self.rank = rank


def align_tensor(reference_tensor: ReferenceTensor, records: RankRecords) -> list[AlignedTensorPair]:
    """What is to be compared with what."""
    first_record = records[0][1]
    if first_record.unsharded_shape is not None:
        return list(_align_shards(reference_tensor, records))
    if first_record.microbatch < 0:
        for rank, record in records:
            if record.value.shape != reference_tensor.value.shape:
                shape, expected_shape = list(record.value.shape), list(reference_tensor.value.shape)
                raise TensorAlignmentError(
                    rank, f"rank {rank} has shape {shape}, where one device has {expected_shape}"
                )
        return [
            AlignedTensorPair(rank, each.value, reference_tensor.value, each, reference_tensor.record.significant_bits)
            for rank, each in records
        ]
    _check_each_row_once(reference_tensor, records)
    if reference_tensor.key[0] == "loss":
        total = torch.stack([each.value.double() for _, each in records]).sum()
        return [AlignedTensorPair(None, total, reference_tensor.value)]
    return list(_align_rows(reference_tensor, records))


def has_no_row_dimension(reference_tensor: ReferenceTensor, records: RankRecords) -> bool:
    """The same shape whatever the rows: a table, or a mean over them."""
    return reference_tensor.key[0] != "loss" and any(
        each.microbatch >= 0
        and each.value.shape == reference_tensor.value.shape
        and len(each.rows) != len(reference_tensor.rows)
        for _, each in records
    )


def _check_each_row_once(reference_tensor: ReferenceTensor, records: RankRecords) -> None:
    """Each row of the batch belongs to one micro-batch of one rank."""
    ranks_of_row: dict[int, list[int]] = {row: [] for row in reference_tensor.rows}
    for rank, record in records:
        for row in record.rows:
            if row not in ranks_of_row:
                raise TensorAlignmentError(rank, f"rank {rank} computes row {row}, which the batch has not")
            ranks_of_row[row].append(rank)
    kind = reference_tensor.key[0]
    missing_rows = [row for row, ranks in ranks_of_row.items() if not ranks]
    repeated_rows = {row: ranks for row, ranks in ranks_of_row.items() if len(ranks) > 1}
    verb = {"activation gradient": "has a gradient of it for", "random mask": "draws it for"}.get(kind, "computes")
    problems = (
        [f"no rank {verb} row{'s' * (len(missing_rows) > 1)} {join_numbers(missing_rows)} of the batch"]
        if missing_rows
        else []
    )
    for row, ranks in list(repeated_rows.items())[:1]:
        repeating_ranks = sorted(set(ranks))
        problems.append(
            f"row {row} is computed {len(ranks)} times, by rank{'s' * (len(repeating_ranks) > 1)} {join_numbers(repeating_ranks)}"
        )
    if problems:
        raise TensorAlignmentError(next((ranks[-1] for ranks in repeated_rows.values()), None), "; ".join(problems))


def join_numbers(numbers: Sequence[int]) -> str:
    return " and ".join(filter(None, [", ".join(map(str, numbers[:-1])), str(numbers[-1])]))


def _align_rows(reference_tensor: ReferenceTensor, records: RankRecords) -> Iterator[AlignedTensorPair]:
    row_count, expected = len(reference_tensor.rows), reference_tensor.value
    if not any(tensor.numel() for tensor in (expected, *(record.value for _, record in records))):
        return  # all are empty
    if has_no_row_dimension(reference_tensor, records):
        yield from (
            AlignedTensorPair(rank, each.value, expected, each, reference_tensor.record.significant_bits)
            for rank, each in records
        )
        return
    index_of_row = {row: place for place, row in enumerate(reference_tensor.rows)}
    for rank, each in records:
        if each.rows == reference_tensor.rows and each.value.shape == expected.shape:
            yield AlignedTensorPair(rank, each.value, expected, each, reference_tensor.record.significant_bits)
            continue
        row_indices = [index_of_row[row] for row in each.rows]
        if (
            expected.shape[:1] == (row_count,)
            and (shared_pair := _align_shared_by_rows(reference_tensor, each, expected[row_indices])) is not None
        ):
            yield AlignedTensorPair(rank, *shared_pair, each)
            continue
        row_layouts = [
            (reshape_to_rows(each.value, dim, inner, len(each.rows)), reshape_to_rows(expected, dim, inner, row_count))
            for dim, inner in _row_dims(expected, each, row_count)
        ]
        if not row_layouts:
            shapes = f"shape {list(each.value.shape)} for {len(each.rows)} rows"
            raise TensorAlignmentError(
                rank, f"rank {rank} has {shapes}, where one device has {list(expected.shape)} for {row_count}"
            )
        nearest = min(row_layouts, key=lambda pair: _error_norm(pair[0], pair[1][row_indices]))
        bits = (
            reference_tensor.record.significant_bits
            if each.is_sketched
            else count_significant_bits(nearest[1][row_indices])
        )
        yield AlignedTensorPair(rank, nearest[0], nearest[1][row_indices], each, bits)


def _align_shared_by_rows(
    reference_tensor: ReferenceTensor, record: RecordedTensor, expected: Tensor
) -> tuple[Tensor, Tensor] | None:
    """What a micro-batch has once for all of its rows, as positions are if each row is one document."""
    if record.is_sketched or not record.value.ndim:
        return None
    value = sketch_rows(record.value[None])
    is_sketched = value.shape[1:] != record.value.shape
    if value.shape[1:] != expected.shape[1:] or is_sketched != reference_tensor.record.is_sketched:
        return None
    if reference_tensor.key[0] == "activation gradient":
        return value, expected.sum(0, keepdim=True)
    return value.expand_as(expected), expected


def _row_dims(expected: Tensor, record: RecordedTensor, rows: int) -> Iterator[tuple[int, bool]]:
    """(dim that has the rows, whether they are its inner index there)."""
    shape, expected_shape = record.value.shape, expected.shape
    if len(shape) != len(expected_shape):
        return
    for dim in range(len(expected_shape)):
        others = [shape[i] == expected_shape[i] for i in range(len(expected_shape)) if i != dim]
        if (
            all(others)
            and expected_shape[dim] % rows == 0
            and shape[dim] * rows == expected_shape[dim] * len(record.rows)
        ):
            yield dim, False
            if expected_shape[dim] != rows:
                yield dim, True


def reshape_to_rows(tensor: Tensor, dim: int, is_inner: bool, rows: int) -> Tensor:
    """[rows, numbers of each]."""
    rows_first = tensor.movedim(dim, 0)
    if is_inner:
        return rows_first.reshape(-1, rows, *rows_first.shape[1:]).transpose(0, 1).reshape(rows, -1)
    return rows_first.reshape(rows, -1)


def _error_norm(value: Tensor, expected: Tensor) -> float:
    return float(torch.linalg.vector_norm(value.double() - expected.double()).nan_to_num(torch.inf))


def _align_shards(reference_tensor: ReferenceTensor, records: RankRecords) -> Iterator[AlignedTensorPair]:
    flat = reference_tensor.value.reshape(-1)
    missing = torch.ones(flat.numel(), dtype=torch.bool)
    for rank, record in records:
        if record.unsharded_shape != tuple(reference_tensor.value.shape):
            shape = list(record.unsharded_shape or ())
            raise TensorAlignmentError(
                rank, f"rank {rank} has one of shape {shape}, not {list(reference_tensor.value.shape)}"
            )
        stop = record.start + record.numel
        if stop > flat.numel():
            raise TensorAlignmentError(
                rank, f"rank {rank} has elements {record.start} to {stop - 1} of its {flat.numel()}"
            )
        missing[record.start : stop] = False
        expected_shard = flat[record.start : stop]
        yield AlignedTensorPair(
            rank,
            record.value,
            sketch_shard(expected_shard, record.start),
            record,
            count_significant_bits(expected_shard),
        )
    if missing.any():
        first = int(missing.nonzero()[0])
        raise TensorAlignmentError(
            None, f"no rank has {int(missing.sum())} of its {flat.numel()} elements, the first is {first}"
        )
