"""The rows of an activation are found on one device alone, and a layout must have exactly the shape that follows."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from motet.parity.compare.align_with_reference import UNKNOWN_ROWS, RowPlacement
from motet.parity.compare.reference_runs import find_row_placements
from motet.parity.compare.tensor_differences import ReferenceStep, build_reference_tensors, compare_with_reference
from motet.parity.record.tensor_recorder import RecordedTensor, TensorKey, TensorRecorder

ROWS, KEY = 8, TensorKey("activation", "x")
VALUES = torch.randn(ROWS, 3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
TABLE = torch.randn(4, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Forward = Callable[[Tensor], Tensor]


def step(forward: Forward, *microbatches: range, result: Forward = torch.sum) -> list[RecordedTensor]:
    """The records of one device, or of one rank: an activation of each micro-batch, and a gradient of all."""
    recorder, results = TensorRecorder(), []
    for rows in microbatches:
        recorder.begin_microbatch(rows)
        recorder.add("activation", "x", forward(VALUES[rows.start : rows.stop]))
        results.append(result(forward(VALUES[rows.start : rows.stop])))
    recorder.add_shard("gradient", "w", torch.stack(results).sum(0).reshape(1))
    return recorder.records


def reference(forward: Forward, result: Forward = torch.sum) -> ReferenceStep:
    made = ReferenceStep(build_reference_tensors(step(forward, range(ROWS), result=result)), 1e-3)
    pairs = (range(first, first + 2) for first in range(0, ROWS, 2))
    made.row_placements.update(find_row_placements(made, step(forward, *pairs, result=result)))
    return made


def nothing(x: Tensor) -> Tensor:
    return torch.zeros(1, dtype=torch.float64)


CASES: dict[str, tuple[Forward, RowPlacement]] = {
    "rows first": (lambda x: x, RowPlacement("rows")),
    "rows second": (lambda x: x.transpose(0, 1), RowPlacement("rows", 1)),
    "tokens of a row are neighbours": (lambda x: x.flatten(0, 1), RowPlacement("rows")),
    "rows change first": (lambda x: x.transpose(0, 1).flatten(0, 1), RowPlacement("rows", 0, True)),
    "rows change first in the last dimension": (lambda x: x.permute(1, 2, 0).flatten(1), RowPlacement("rows", 1, True)),
    "a table": (lambda x: TABLE, RowPlacement("same")),
    "a sum over the rows": (lambda x: x.sum(0), RowPlacement("sum")),
    "a mean over the rows": (lambda x: x.mean(0), UNKNOWN_ROWS),
    "a number of rows that depends on the data": (lambda x: x[x[:, 0, 0] > 0], UNKNOWN_ROWS),
}


@pytest.mark.parametrize("name", CASES)
def test_one_device_shows_where_rows_are(name: str) -> None:
    forward, placement = CASES[name]
    made = reference(forward, result=nothing)
    assert made.row_placements == {KEY: placement}
    halves = [step(forward, range(4), result=nothing), step(forward, range(4, 8), result=nothing)]
    assert [each.key for each in compare_with_reference(made, halves) if not each.is_rounding] == []


def test_noise_does_not_place_rows() -> None:
    """Tokens in the order of their experts, which a tie in the first step reorders when one ulp changes. The noise of
    their gradients is small, and so are these."""
    large, gradient = torch.randn(ROWS, 100, dtype=torch.float64), TensorKey("activation gradient", "x")

    def sorted_step(*microbatches: range) -> list[RecordedTensor]:
        recorder = TensorRecorder()
        for rows in microbatches:
            x = VALUES[rows.start : rows.stop].flatten(0, 1)
            by_expert = x[x[:, 0].argsort()]
            recorder.begin_microbatch(rows)
            recorder.add("activation", "x", by_expert)
            recorder.add("activation gradient", "x", 1e-6 * by_expert)
            recorder.add("activation gradient", "y", large[rows.start : rows.stop])
        return recorder.records

    made = ReferenceStep(build_reference_tensors(sorted_step(range(ROWS))), 1e-3)
    made.noise.update({KEY: 0.14, gradient: 1e-6})
    placements = find_row_placements(made, sorted_step(*(range(first, first + 2) for first in range(0, ROWS, 2))))
    assert placements[KEY] == placements[gradient] == UNKNOWN_ROWS
    assert placements[TensorKey("activation gradient", "y")] == RowPlacement("rows")


def test_rows_that_depend_on_each_other() -> None:
    def centred(x: Tensor) -> Tensor:
        return x - x.mean(0)

    assert reference(centred, nothing).row_placements == {KEY: UNKNOWN_ROWS}, "nothing that follows changes"
    made = reference(centred, lambda x: x.square().sum())
    assert made.row_placements == {KEY: RowPlacement("rows", is_by_shape=True)}
    halves = [step(centred, range(4)), step(centred, range(4, 8))]
    assert not compare_with_reference(made, halves)[0].is_rounding


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (lambda x: x.transpose(0, 1).flatten(0, 1), ""),  # the right numbers, in the order of another placement
        (lambda x: x.flatten(0, 1)[:6], "rank 0 has shape [6, 5] for 4 rows, where [12, 5] follows from [24, 5]"),
        (lambda x: x, "rank 0 has shape [4, 3, 5] for 4 rows, where [12, 5] follows from [24, 5]"),
    ],
)
def test_no_other_placement_is_tried(wrong: Forward, reason: str) -> None:
    made = reference(lambda x: x.flatten(0, 1), nothing)
    halves = [step(wrong, range(4), result=nothing), step(wrong, range(4, 8), result=nothing)]
    found = compare_with_reference(made, halves)[0]
    assert not found.is_rounding and reason in found.reason, found
