"""The judgement on reports of ranks, without ranks."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.parallel.step_plan.plan import IdenticalCopies
from motet.train.replica_check import invariants
from motet.train.replica_check.invariants import ExpectedInvariants, find_violations, float_to_bits, format_ranks

RANKS = 4
EACH = tuple((rank,) for rank in range(RANKS))
HYBRID = ((0, 2), (1, 3))
COPIES = (
    IdenticalCopies("parameters", ("w",), (tuple(range(RANKS)),)),
    IdenticalCopies("states", ("w",), HYBRID),
    IdenticalCopies("gradients", ("w",), HYBRID),
)
EVERY = {"rows": range(RANKS), "targets": range(RANKS)}
EXPECTED = ExpectedInvariants(COPIES, EACH, EACH, EVERY, [1, 2, 3, 0], range(8), 40.0)
# Ranks 0 and 1, and 2 and 3, split one model: they read the same rows and compute the same loss.
SPLIT = replace(
    EXPECTED,
    same_rows=((0, 1), (2, 3)),
    same_loss=((0, 1), (2, 3)),
    reporters={"rows": [0, 2], "targets": [0, 2]},
    next_ranks=[2, 3, 0, 1],
    rows=range(4),
    targets=20.0,
)


def report(rank: int, expected: ExpectedInvariants, **changes: int) -> invariants.RankDigestReport:
    """A report without faults of one of four ranks; two ranks form a shard group."""
    work, before = rank, expected.next_ranks.index(rank)
    if expected is SPLIT:
        work, before = rank // 2, before // 2
    norms = {"norm": 5.0 / expected.targets, "squared_norm": (9.0, 16.0)[rank % 2]}
    sums = {"targets": 10.0, "repeated_targets": 10.0, "loss": 3.5 + work, "repeated_loss": 3.5 + before}
    right = {name: float_to_bits(value) for name, value in (norms | sums).items()}
    right |= {"machine_digest": 1, "parameters": 2, "states": rank % 2, "gradients": rank % 2, "row_count": 2}
    right |= {"rows": invariants.rows_digest(range(2 * work, 2 * work + 2))}
    right |= {"batches": 100 + work, "repeated_batches": 100 + before}
    right |= changes
    copies, squared_norm = tuple(right.pop(copies.kind) for copies in COPIES), right.pop("squared_norm")
    return invariants.RankDigestReport(**right, copies=copies, squared_norms=(squared_norm,))


Told = list[tuple[str, tuple[int, ...]]]


def found(changed: int | None = None, expected: ExpectedInvariants = EXPECTED, **changes: int) -> Told:
    """The reported (invariant, ranks) when one rank, or every rank, reports another value."""
    reports = [report(rank, expected, **(changes if changed in (rank, None) else {})) for rank in range(RANKS)]
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
        ({"repeated_batches": 7}, [("batches", (1, 2))]),
        ({"repeated_targets": float_to_bits(9.0)}, [("targets", (1, 2))]),
        ({"targets": float_to_bits(9.0)}, [("targets", (2, 3)), ("targets", (0, 1, 2, 3))]),
        ({"norm": float_to_bits(5.0 / 40 * (1 + 2**-52))}, [("norm", (2,))]),
        ({"gradients": 7}, [("gradients", (0, 2))]),
        ({"squared_norm": float_to_bits(9.0 + 2**-40)}, [("norm", (2, 3))]),
        ({"loss": float_to_bits(5.5 + 2**-50)}, [("loss", (2, 3))]),
        ({"repeated_loss": float_to_bits(math.inf)}, [("loss", (1, 2))]),
    ],
)
def test_what_is_broken_on_a_rank_is_told(changes: dict[str, int], told: Told) -> None:
    assert found(2, **changes) == told


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, []),
        ({"parameters": 7}, [("parameters", (2,))]),
        ({"rows": 7}, [("rows", (0, 1, 2, 3)), ("rows", (2, 3))]),
        ({"batches": 7}, [("batches", (2, 3)), ("batches", (2, 0))]),
        ({"targets": float_to_bits(9.0)}, [("targets", (2, 0)), ("targets", (0, 1, 2, 3))]),
        ({"loss": float_to_bits(5.0)}, [("loss", (2, 0)), ("loss", (2, 3))]),
    ],
)
def test_ranks_that_split_one_model_do_the_same_work(changes: dict[str, int], told: Told) -> None:
    assert found(2, SPLIT, **changes) == told
    silent = {"rows": [("rows", (2, 3))], "targets": [("targets", (3, 1))]}  # Rank 3 reports neither
    for name in changes.keys() & silent.keys():
        assert found(3, SPLIT, **changes) == silent[name]


def test_a_rank_that_computes_no_loss_is_not_compared() -> None:
    """Ranks 0 and 1 are a stage of a pipeline that has no loss."""
    stages = replace(
        EXPECTED, same_loss=EACH[2:], next_ranks=[1, 0, 3, 2], reporters={"rows": [0, 1], "targets": [2, 3]}
    )
    stages = replace(stages, same_rows=((0, 2), (1, 3)), rows=range(4), targets=20.0)
    reports = [report(rank, stages) for rank in range(RANKS)]
    norm = float_to_bits(5.0 / 20)
    rows, batches = [each.rows for each in reports[:2]] * 2, [each.batches for each in reports[:2]] * 2
    repeated = [batches[other] for other in stages.next_ranks]
    changed = [
        r._replace(rows=rows[i], batches=batches[i], repeated_batches=repeated[i], norm=norm)
        for i, r in enumerate(reports)
    ]
    assert find_violations(changed, stages) == []
    changed[0] = changed[0]._replace(loss=7, targets=7, repeated_loss=8, repeated_targets=8)
    assert find_violations(changed, stages) == []


def test_the_step_may_have_counted_wrongly() -> None:
    assert ("targets", (0, 1, 2, 3)) in found(expected=replace(EXPECTED, targets=41.0))


def test_rows_that_others_have_read_are_not_made_up_for_by_their_number() -> None:
    reports = [report(rank, EXPECTED) for rank in range(RANKS)]
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
