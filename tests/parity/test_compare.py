"""Distances between tensors with unusual numbers."""

import math

import pytest
import torch
from torch import Tensor

from motet.parity.compare.align_with_reference import RowPlacement
from motet.parity.compare.reference_runs import find_row_placements
from motet.parity.compare.tensor_differences import (
    ReferenceStep,
    build_reference_tensors,
    compare_with_reference,
    relative_distance,
)
from motet.parity.record.tensor_recorder import RecordedTensor, TensorKey, TensorKind, TensorRecorder

INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(
    ("value", "expected", "floor", "far"),
    [
        ([1.0, -INF], [1.0, -INF], 0.0, 0.0),
        ([2.0, -INF], [1.0, -INF], 0.0, 1.0),
        ([1.0, INF], [1.0, -INF], 0.0, INF),
        ([NAN, 1.0], [1.0, 1.0], 0.0, INF),
        ([2.0, -3e38], [1.0, -3e38], 0.0, 1.0),
        ([1.5, 0.0], [1.0, 0.0], 10.0, 0.05),
        ([1e-9, 0.0], [0.0, 0.0], 0.0, INF),
    ],
)
def test_how_far(value: list[float], expected: list[float], floor: float, far: float) -> None:
    assert relative_distance(*[torch.tensor(each, dtype=torch.float64) for each in (value, expected)], floor) == far


def seen(kind: TensorKind, tensors: dict[str, Tensor], rows: range) -> list[RecordedTensor]:
    """The records of some rows; rows are the first dimension."""
    recorder = TensorRecorder()
    recorder.begin_microbatch(rows)
    for name, tensor in tensors.items():
        recorder.add(kind, name, tensor[rows.start : rows.stop].double())
    return recorder.records


def records_of_two_ranks(wrong: int, **changed: Tensor) -> list[list[RecordedTensor]]:
    """Each rank has half of 8 rows; the rows of one rank are wrong."""
    halves = [range(4), range(4, 8)]
    return [seen("activation", {**TENSORS, **(changed if r == wrong else {})}, rows) for r, rows in enumerate(halves)]


TENSORS = {name: torch.randn(8, 5, generator=torch.Generator().manual_seed(n)) for n, name in enumerate("abcd")}
PLACEMENTS = {TensorKey("activation", name): RowPlacement("rows") for name in TENSORS}


def reference_of(records: list[RecordedTensor]) -> ReferenceStep:
    return ReferenceStep(build_reference_tensors(records), 1e-3, row_placements=PLACEMENTS)


REFERENCE = reference_of(seen("activation", TENSORS, range(8)))


@pytest.mark.parametrize("rank", [0, 1])
def test_what_is_not_a_number_is_found_on_every_rank(rank: int) -> None:
    spoilt = torch.where(torch.arange(8)[:, None] % 4 == 1, NAN, TENSORS["b"])
    found = [
        each for each in compare_with_reference(REFERENCE, records_of_two_ranks(rank, b=spoilt)) if not each.is_rounding
    ]
    assert [(each.key[1], each.rank, each.relative_error) for each in found] == [("b", rank, INF)]


def test_a_mask_is_no_measure_of_others() -> None:
    tensors = {"a": torch.full((8, 5), -1e9), **{name: TENSORS[name] for name in "bcd"}}
    reference = reference_of(seen("activation", tensors, range(8)))
    found = compare_with_reference(reference, [seen("activation", {**tensors, "c": 2 * TENSORS["c"]}, range(8))])
    assert [each.key[1] for each in found if not each.is_rounding] == ["c"]
    assert max(each.relative_error for each in found) == pytest.approx(1.0)


def test_moments_are_not_measured_by_masters() -> None:
    def state(second: float) -> list[RecordedTensor]:
        recorder = TensorRecorder()
        recorder.add_shard("state", "exp_avg_sq/w", torch.full((9,), second, dtype=torch.float64))
        recorder.add_shard("state", "master/w", torch.ones(9, dtype=torch.float64))
        return recorder.records

    found = compare_with_reference(ReferenceStep(build_reference_tensors(state(1e-14)), 1e-3), [state(2e-14)])
    assert [each.key[1] for each in found if not each.is_rounding] == ["exp_avg_sq/w"]


def test_a_module_that_is_called_for_each_row_varies() -> None:
    def called(rows: range) -> list[RecordedTensor]:
        recorder = TensorRecorder()
        recorder.begin_microbatch(rows)
        for row in rows:
            recorder.add("activation", "inner", TENSORS["a"][row].double())
        recorder.add("activation", "outer", TENSORS["a"][rows.start : rows.stop].double())
        return recorder.records

    reference = ReferenceStep(build_reference_tensors(called(range(8))), 1e-3)
    cut = [each for row in range(8) for each in called(range(row, row + 1))]
    reference.row_placements.update(find_row_placements(reference, cut))
    assert {key[1].split()[0] for key in reference.tensors if reference.is_without_rows(key)} == {"inner"}
    assert all(each.is_rounding for each in compare_with_reference(reference, [called(range(4)), called(range(4, 8))]))
