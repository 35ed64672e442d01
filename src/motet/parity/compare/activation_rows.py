"""The dimension of each activation that has the rows: found on one device, which divides the batch in two ways."""

from collections.abc import Iterator, Sequence

from motet.parity.compare.align_with_reference import (
    UNKNOWN_ROWS,
    ReferenceTensor,
    RowPlacement,
    TensorAlignmentError,
    align_tensor,
)
from motet.parity.compare.tensor_differences import ReferenceStep, compare_with_reference, error_bound
from motet.parity.record.tensor_recorder import ROW_KINDS, RankRecords, RecordedTensor, TensorKey, group_by_key

RESULT_KINDS = ("gradient", "sum", "norm")


def find_row_placements(
    reference: ReferenceStep, microbatches: Sequence[RecordedTensor]
) -> dict[TensorKey, RowPlacement]:
    """The placement of the rows in each tensor of a step, by the same step of one device with several micro-batches.

    If what follows from activations changes, too, rows depend on each other, and no layout computes what one device
    does. Then a shape alone says where rows are, so that the first activation that differs is found.
    """
    records_by_key, differences = group_by_key([microbatches]), compare_with_reference(reference, [microbatches])
    changes_results = any(d.key.kind in RESULT_KINDS and not d.is_rounding for d in differences)
    placements = {}
    for key, tensor in reference.tensors.items():
        if key.kind in ROW_KINDS:
            records = records_by_key.get(key, [])
            possible = list(_possible_placements(tensor, records))
            fitting = (placement for placement in possible if _fits(reference, tensor, records, placement=placement))
            has_one_form = changes_results and [each.how for each in possible] == ["rows"]
            by_shape = possible[0]._replace(is_by_shape=True) if has_one_form else UNKNOWN_ROWS
            placements[key] = next(fitting, by_shape)
    return placements


def _possible_placements(tensor: ReferenceTensor, records: RankRecords) -> Iterator[RowPlacement]:
    """All placements that agree with the shapes."""
    forms = {(tuple(record.value.shape), len(record.rows), record.is_sketched) for _, record in records}
    if len(forms) != 1:
        return
    ((shape, microbatch_rows, is_sketched),) = forms
    unsplit, rows = tuple(tensor.value.shape), len(tensor.rows)
    if shape == unsplit:
        yield from (RowPlacement("same"), RowPlacement("sum"))
    for dim, size in enumerate(unsplit[: 1 if is_sketched else len(shape)]):
        others_match = shape[:dim] + shape[dim + 1 :] == unsplit[:dim] + unsplit[dim + 1 :]
        if size and others_match and size % rows == 0 and shape[dim] * rows == size * microbatch_rows:
            yield from (
                RowPlacement("rows", dim, is_inner) for is_inner in ((False,) if size == rows else (False, True))
            )


def _fits(reference: ReferenceStep, tensor: ReferenceTensor, records: RankRecords, *, placement: RowPlacement) -> bool:
    try:
        pairs = align_tensor(tensor, records, placement=placement)
    except TensorAlignmentError:
        return False
    bound = error_bound(reference, tensor)
    return all(reference.distance_of(tensor.key, pair) <= bound for pair in pairs)
