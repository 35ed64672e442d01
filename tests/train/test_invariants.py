"""The judgement on reports of ranks, without ranks."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.train.replica_check import invariants
from motet.train.replica_check.invariants import ExpectedInvariants, find_violations, float_to_bits, format_ranks

RANKS = 4
HYBRID = ((0, 2), (1, 3))
EXPECTED = ExpectedInvariants(HYBRID, HYBRID, range(8), 40.0)


def report(rank: int, **changes: int) -> invariants.RankDigestReport:
    """A report without faults of one of four ranks; two ranks form a shard group."""
    before = (rank - 1) % RANKS
    norms = {"norm": 5.0 / 40, "squared_norm": (9.0, 16.0)[rank % 2]}
    sums = {"targets": 10.0, "neighbour_targets": 10.0, "loss": 3.5 + rank, "neighbour_loss": 3.5 + before}
    right = {name: float_to_bits(value) for name, value in (norms | sums).items()}
    right |= {"machine_digest": 1, "parameters": 2, "states": rank % 2, "gradients": rank % 2, "row_count": 2}
    right |= {"rows": invariants.rows_digest(range(2 * rank, 2 * rank + 2))}
    right |= {"batches": 100 + rank, "neighbour_batches": 100 + before}
    return invariants.RankDigestReport(**(right | changes))


Told = list[tuple[str, tuple[int, ...]]]


def found(changed: int | None = None, expected: ExpectedInvariants = EXPECTED, **changes: int) -> Told:
    """The reported (invariant, ranks) when one rank, or every rank, reports another value."""
    reports = [report(rank, **(changes if changed in (rank, None) else {})) for rank in range(RANKS)]
    return [(one.invariant, one.ranks) for one in find_violations(reports, expected)]


def test_what_is_right_is_not_told() -> None:
    assert found() == []


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"parameters": 7}, [("parameters", (2,))]),
        ({"states": 7}, [("states", (0, 2))]),  # of two nobody knows which
        ({"rows": 7}, [("rows", (0, 1, 2, 3))]),
        ({"row_count": 3}, [("rows", (0, 1, 2, 3))]),
        ({"batches": 7}, [("batches", (2, 3))]),
        ({"neighbour_batches": 7}, [("batches", (1, 2))]),
        ({"neighbour_targets": float_to_bits(9.0)}, [("targets", (1, 2))]),
        ({"targets": float_to_bits(9.0)}, [("targets", (2, 3)), ("targets", (0, 1, 2, 3))]),
        ({"norm": float_to_bits(5.0 / 40 * (1 + 2**-52))}, [("norm", (2,))]),
        ({"gradients": 7}, [("gradients", (0, 2))]),
        ({"squared_norm": float_to_bits(9.0 + 2**-40)}, [("norm", (2, 3))]),
        ({"loss": float_to_bits(5.5 + 2**-50)}, [("loss", (2, 3))]),
        ({"neighbour_loss": float_to_bits(math.inf)}, [("loss", (1, 2))]),
    ],
)
def test_what_is_broken_on_a_rank_is_told(changes: dict[str, int], told: Told) -> None:
    assert found(2, **changes) == told


def test_the_step_may_have_counted_wrongly() -> None:
    assert ("targets", (0, 1, 2, 3)) in found(expected=replace(EXPECTED, targets=41.0))


def test_rows_that_others_have_read_are_not_made_up_for_by_their_number() -> None:
    reports = [report(rank) for rank in range(RANKS)]
    reports[1] = reports[1]._replace(rows=reports[0].rows)
    assert [one.invariant for one in find_violations(reports, EXPECTED)] == ["rows"]


def test_other_machines_may_have_other_last_bits() -> None:
    assert found(2, machine_digest=5, loss=float_to_bits(5.25)) == []
    assert found(2, machine_digest=5, gradients=7) == [("gradients", (0, 2))]
    assert found(2, machine_digest=5, parameters=7) == [("parameters", (2,))]


def test_what_is_not_finite_is_the_same_everywhere() -> None:
    assert float_to_bits(math.nan) == float_to_bits(-math.nan)
    assert found(norm=float_to_bits(math.nan), squared_norm=float_to_bits(math.nan)) == []


def test_ranks_are_named_as_long_as_they_are_few() -> None:
    assert (format_ranks([3]), format_ranks([0, 1, 2])) == ("rank 3", "ranks 0, 1 and 2")
    assert format_ranks(range(20)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more"


@given(st.lists(st.integers(0, 2), min_size=1, max_size=9))
def test_those_that_are_unlike_most_are_named(values: list[int]) -> None:
    odd = invariants.outliers(dict(enumerate(values)))
    rest = {value for rank, value in enumerate(values) if rank not in odd}
    assert len(rest) <= 1 and (len(set(values)) > 1) == bool(odd)
    assert len(rest) == 0 or all(values.count(next(iter(rest))) > values.count(values[rank]) for rank in odd)


@given(st.floats(allow_nan=False))
def test_bits_are_of_one_float(value: float) -> None:
    assert invariants.bits_to_float(float_to_bits(value)) == value
