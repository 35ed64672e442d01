"""Which part of a reference tensor each rank should have: by rows of the batch, or by elements of the flat tensor."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from motet.parity.record.tensor_recorder import (
    RankRecords,
    RecordedTensor,
    TensorKey,
    count_significant_bits,
    sketch_rows,
    sketch_shard,
)


class AlignedTensorPair(NamedTuple):
    """A part of a tensor on a rank, and the same part of the reference."""

    rank: int | None  # None: the value is of all ranks together
    value: Tensor
    expected: Tensor
    record: RecordedTensor | None = None
    expected_bits: int = 0  # Significant bits of the expected numbers


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


def align_tensor(reference: ReferenceTensor, records: RankRecords) -> list[AlignedTensorPair]:
    """Pairs of what ranks have and should have; raise where these are no pairs."""
    if records[0][1].is_shard:
        return list(_align_shards(reference, records))
    value, is_split = reference.value, records[0][1].microbatch >= 0
    if is_split:
        _check_each_row_once(reference, records)
        if reference.key.kind == "loss":
            return [AlignedTensorPair(None, torch.stack([r.value.double() for _, r in records]).sum(), value)]
        if not value.numel() and not any(record.value.numel() for _, record in records):
            return []
        if not has_no_row_dimension(reference, records):
            return [_align_rows(reference, rank, record) for rank, record in records]
    for rank, record in records:
        if not is_split and record.value.shape != value.shape:
            shapes = f"shape {list(record.value.shape)}, where one device has {list(value.shape)}"
            raise TensorAlignmentError(rank, f"rank {rank} has {shapes}")
    return [AlignedTensorPair(rank, r.value, value, r, reference.record.significant_bits) for rank, r in records]


def has_no_row_dimension(reference: ReferenceTensor, records: RankRecords) -> bool:
    """Its shape does not depend on the rows: it is a table, or a mean over them."""
    if reference.key.kind == "loss":
        return False
    fewer_rows = [r for _, r in records if r.microbatch >= 0 and len(r.rows) != len(reference.rows)]
    return any(record.value.shape == reference.value.shape for record in fewer_rows)


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


def format_numbered(noun: str, numbers: Sequence[int]) -> str:
    """`rank 1`, or `ranks 0, 1 and 2`."""
    plural, text = "es" if noun.endswith("h") else "s", [", ".join(map(str, numbers[:-1])), str(numbers[-1])]
    return f"{noun}{plural * (len(numbers) > 1)} {' and '.join(filter(None, text))}"


def _align_rows(reference: ReferenceTensor, rank: int, record: RecordedTensor) -> AlignedTensorPair:
    expected, bits, row_count = reference.value, reference.record.significant_bits, len(reference.rows)
    if record.rows == reference.rows and record.value.shape == expected.shape:
        return AlignedTensorPair(rank, record.value, expected, record, bits)
    indices = [reference.rows.index(row) for row in record.rows]
    if (shared_pair := _align_shared(reference, record, indices)) is not None:
        return AlignedTensorPair(rank, *shared_pair, record)
    pairs = []
    for dim, inner in _row_dims(expected, record, row_count):
        expected_rows = _reshape_to_rows(expected, row_count, dim=dim, is_inner=inner)[indices]
        pairs.append((_reshape_to_rows(record.value, len(indices), dim=dim, is_inner=inner), expected_rows))
    if not pairs:
        shapes = f"shape {list(record.value.shape)} for {len(record.rows)} rows"
        message = f"rank {rank} has {shapes}, where one device has {list(expected.shape)} for {row_count}"
        raise TensorAlignmentError(rank, message)
    value, expected_rows = min(pairs, key=lambda pair: _error_norm(*pair))
    bits = bits if record.is_sketched else count_significant_bits(expected_rows)
    return AlignedTensorPair(rank, value, expected_rows, record, bits)


def _align_shared(reference: ReferenceTensor, record: RecordedTensor, rows: list[int]) -> tuple[Tensor, Tensor] | None:
    """A micro-batch may have a tensor once for all of its rows, as positions if each row is one document."""
    if record.is_sketched or not record.value.ndim or reference.value.shape[:1] != (len(reference.rows),):
        return None
    expected = reference.value[rows]
    value = sketch_rows(record.value[None])
    is_sketched = value.shape[1:] != record.value.shape
    if value.shape[1:] != expected.shape[1:] or is_sketched != reference.record.is_sketched:
        return None
    if reference.key.kind == "activation gradient":
        return value, expected.sum(0, keepdim=True)
    return value.expand_as(expected), expected


def _row_dims(expected: Tensor, record: RecordedTensor, rows: int) -> Iterator[tuple[int, bool]]:
    """Dimensions that may have the rows, and whether rows are the inner index of that dimension."""
    shape, expected_shape = record.value.shape, expected.shape
    if len(shape) != len(expected_shape):
        return
    for dim, size in enumerate(expected_shape):
        others_match = shape[:dim] + shape[dim + 1 :] == expected_shape[:dim] + expected_shape[dim + 1 :]
        if others_match and size % rows == 0 and shape[dim] * rows == size * len(record.rows):
            yield dim, False
            if size != rows:
                yield dim, True


def _reshape_to_rows(tensor: Tensor, rows: int, *, dim: int, is_inner: bool) -> Tensor:
    """The tensor as [rows, elements of each]."""
    first = tensor.movedim(dim, 0)
    return (first.reshape(-1, rows, *first.shape[1:]).transpose(0, 1) if is_inner else first).reshape(rows, -1)


def _error_norm(value: Tensor, expected: Tensor) -> float:
    return float(torch.linalg.vector_norm(value.double() - expected.double()).nan_to_num(torch.inf))


def _align_shards(reference: ReferenceTensor, records: RankRecords) -> Iterator[AlignedTensorPair]:
    flat, shape = reference.value.reshape(-1), tuple(reference.value.shape)
    numel, is_missing = flat.numel(), torch.ones(flat.numel(), dtype=torch.bool)
    for rank, record in records:
        stop, own_shape = record.start + record.numel, record.unsharded_shape
        if own_shape != shape:
            raise TensorAlignmentError(rank, f"rank {rank} has one of shape {list(own_shape or ())}, not {list(shape)}")
        if stop > numel:
            raise TensorAlignmentError(rank, f"rank {rank} has elements {record.start} to {stop - 1} of its {numel}")
        is_missing[record.start : stop] = False
        expected = flat[record.start : stop]
        bits = count_significant_bits(expected)
        yield AlignedTensorPair(rank, record.value, sketch_shard(expected, record.start), record, bits)
    if lost := is_missing.nonzero().flatten().tolist():
        raise TensorAlignmentError(None, f"no rank has {len(lost)} of its {numel} elements, the first is {lost[0]}")
