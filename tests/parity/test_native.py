"""A layout in the precision of its job is as far from one device as other orders of the same additions."""

from collections.abc import Callable

import pytest

from motet.parity.compare import native_precision
from motet.parity.diagnose.native_differences import NativeDifference
from parity.faults import Patch
from parity.planted_copies import (
    a_bit_in_a_master,
    masters_in_bfloat16,
    masters_of_rounded_values,
    no_fault,
    sums_in_bfloat16,
)
from parity.planted_steps import UNEVEN
from parity.run_planted import native_comparison
from ranks import Ranks

Plant = Callable[[int], Patch]


def compared(
    ranks: Ranks, recipe: str, layout: str, plant: Plant = no_fault, *settings: str
) -> tuple[native_precision.DifferenceZScore | None, NativeDifference | None]:
    comparison = native_comparison(ranks, recipe, layout, plant, settings=("model.dropout=0.1", *settings))
    return comparison.worst, comparison.first()


QUICK = [("bf16", "dp=2 zero=2 microbatches=2")]
RECIPES = ["fp32", "bf16", *(f"fp32 precision.reduce_dtype={d}" for d in ("bfloat16", "float64"))]
CASES = [(recipe, layout) for layout in ("dp=3 zero=3", "dp=2 zero=2 microbatches=2") for recipe in RECIPES]


@pytest.mark.parametrize(
    ("recipe", "layout"), [case if case in QUICK else pytest.param(*case, marks=pytest.mark.proof) for case in CASES]
)
def test_rounding_is_as_likely_as_in_other_orders(ranks: Ranks, recipe: str, layout: str) -> None:
    recipe, *settings = recipe.split()
    worst, first = compared(ranks, recipe, layout, no_fault, *settings)
    assert first is None, (first, first and first.cause)
    assert worst.z < 8


@pytest.mark.proof
@pytest.mark.parametrize(
    "layout", ["dp=1 cp=2", "dp=1 cp=3 cp_kind=ring", "dp=1 tp=2", "dp=1 tp=4", "dp=1 tp=2 sp=true"]
)
def test_ranks_that_split_heads_or_rows_round_the_parts_of_gradients(ranks: Ranks, layout: str) -> None:
    worst, first = compared(ranks, "bf16", layout, no_fault, "model.tied=false")
    assert first is None, (first, first and first.cause)
    assert worst.z < 5


@pytest.mark.parametrize(
    ("recipe", "layout"),
    [
        pytest.param("fp32", "dp=2 zero=1 microbatches=2", marks=pytest.mark.proof),
        ("bf16", "dp=3 zero=0 microbatches=2"),
        pytest.param("bf16", "dp=2 zero=1 microbatches=2", marks=pytest.mark.proof),
        pytest.param("fp32", "dp=3 zero=0 microbatches=2", marks=pytest.mark.proof),
        pytest.param("fp32", "dp=2 cp=2 zero=1", marks=pytest.mark.proof),
    ],
)
def test_a_sum_that_is_kept_too_short_is_found(ranks: Ranks, recipe: str, layout: str) -> None:
    _, first = compared(ranks, recipe, layout, sums_in_bfloat16)
    assert first is not None and first.difference.key[0] == "gradient" and "rounded" in first.cause


@pytest.mark.parametrize(
    ("plant", "kind"), [(masters_in_bfloat16, "state"), (masters_of_rounded_values, "starting parameter")]
)
def test_masters_with_few_bits_are_found(ranks: Ranks, plant: Plant, kind: str) -> None:
    _, first = compared(ranks, "bf16", "dp=2 zero=1", plant)
    assert first is not None and first.difference.key[0] == kind and "bfloat16" in first.cause


@pytest.mark.proof
def test_promised_bits_are_held_to(ranks: Ranks) -> None:
    assert compared(ranks, "fp32", "dp=3 zero=1", no_fault, *UNEVEN)[1] is None
    assert compared(ranks, "fp32", "dp=3 zero=1", a_bit_in_a_master)[1] is None
    _, first = compared(ranks, "fp32", "dp=3 zero=1", a_bit_in_a_master, *UNEVEN)
    assert first is not None and first.difference.key[0] == "state"
    assert "its bits are not those of one device" in first.cause


@pytest.mark.proof
def test_in_float64_the_bits_alone_are_compared(ranks: Ranks) -> None:
    assert compared(ranks, "fp64", "dp=3 zero=1", no_fault, *UNEVEN) == (None, None)
    _, first = compared(ranks, "fp64", "dp=3 zero=1", a_bit_in_a_master, *UNEVEN)
    assert first is not None and "its bits are not those of one device" in first.cause
