"""How far tensors are from each other, where their numbers are not usual."""

import math

import pytest
import torch
from torch import Tensor

from motet.verify.compare import Reference, compare, distance, reference_of, varying
from motet.verify.record import Kind, Recorder, Seen

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
    wide = [torch.tensor(each, dtype=torch.float64) for each in (value, expected)]
    assert distance(*wide, floor) == far


def seen(kind: Kind, tensors: dict[str, Tensor], rows: range) -> list[Seen]:
    """Of some rows; rows are the first dimension."""
    recorder = Recorder()
    recorder.begin_part(rows)
    for name, tensor in tensors.items():
        recorder.add(kind, name, tensor[rows.start : rows.stop].double())
    return recorder.seen


def of_two_ranks(wrong: int, **changed: Tensor) -> list[list[Seen]]:
    """Each has half of 8 rows; one of them has others."""
    halves = [range(4), range(4, 8)]
    return [seen("activation", {**TENSORS, **(changed if r == wrong else {})}, rows) for r, rows in enumerate(halves)]


TENSORS = {name: torch.randn(8, 5, generator=torch.Generator().manual_seed(n)) for n, name in enumerate("abcd")}
REFERENCE = Reference(reference_of(seen("activation", TENSORS, range(8))), 1e-3)


@pytest.mark.parametrize("rank", [0, 1])
def test_what_is_not_a_number_is_found_on_every_rank(rank: int) -> None:
    spoilt = torch.where(torch.arange(8)[:, None] % 4 == 1, NAN, TENSORS["b"])
    found = [each for each in compare(REFERENCE, of_two_ranks(rank, b=spoilt)) if not each.is_rounding]
    assert [(each.site[1], each.rank, each.relative) for each in found] == [("b", rank, INF)]


def test_a_mask_is_no_measure_of_others() -> None:
    tensors = {"a": torch.full((8, 5), -1e9), **{name: TENSORS[name] for name in "bcd"}}
    reference = Reference(reference_of(seen("activation", tensors, range(8))), 1e-3)
    found = compare(reference, [seen("activation", {**tensors, "c": 2 * TENSORS["c"]}, range(8))])
    assert [each.site[1] for each in found if not each.is_rounding] == ["c"]
    assert max(each.relative for each in found) == pytest.approx(1.0)


def test_moments_are_not_measured_by_masters() -> None:
    def state(second: float) -> list[Seen]:
        recorder = Recorder()
        recorder.add_piece("state", "exp_avg_sq/w", torch.full((9,), second, dtype=torch.float64))
        recorder.add_piece("state", "master/w", torch.ones(9, dtype=torch.float64))
        return recorder.seen

    found = compare(Reference(reference_of(state(1e-14)), 1e-3), [state(2e-14)])
    assert [each.site[1] for each in found if not each.is_rounding] == ["exp_avg_sq/w"]


def test_a_module_that_is_called_for_each_row_varies() -> None:
    def called(rows: range) -> list[Seen]:
        recorder = Recorder()
        recorder.begin_part(rows)
        for row in rows:
            recorder.add("activation", "inner", TENSORS["a"][row].double())
        recorder.add("activation", "outer", TENSORS["a"][rows.start : rows.stop].double())
        return recorder.seen

    reference = Reference(reference_of(called(range(8))), 1e-3)
    cut = [each for row in range(8) for each in called(range(row, row + 1))]
    reference.varying.update(varying(reference, [cut]))
    assert {site[1].split()[0] for site in reference.varying} == {"inner"}
    assert all(each.is_rounding for each in compare(reference, [called(range(4)), called(range(4, 8))]))
