"""Wrong splits of a model: the check of the plan refuses them, or the comparison with one device finds them."""

from dataclasses import replace
from typing import Any

import pytest

from motet.parallel.model_sharding import ActivationSplit, DimensionSplit, ModelSharding, ShardRule
from parity.split_module import SHARDING, SwappedColumns, a_copy_drifts, verified
from ranks import RankFailureError, Ranks

TP, HYBRID = (("tp", 2),), (("tp", 2), ("dp", 2))
MORE = (HYBRID, (*HYBRID, ("zero", 2), ("microbatches", 2)), (*HYBRID, ("zero", 3)))


def with_rule(name: str, rule: ShardRule) -> ModelSharding:
    return replace(SHARDING, rules={**SHARDING.rules, name: rule})


@pytest.mark.parametrize(
    "sizes",
    [
        TP,
        pytest.param((*HYBRID, ("zero", 3), ("microbatches", 2)), marks=pytest.mark.proof),
        *(pytest.param(sizes, marks=pytest.mark.proof) for sizes in MORE),
    ],
)
def test_a_right_split_is_not_called_wrong(ranks: Ranks, sizes: tuple[tuple[str, int], ...]) -> None:
    verdict = verified(ranks, SHARDING, *sizes)
    assert verdict.ok, verdict
    assert 0 < verdict.worst_relative < 1e-12 and not verdict.unplaced


@pytest.mark.parametrize(
    ("activations", "first"),
    [
        (SHARDING.activations, "activation blocks.0.up,"),
        pytest.param((), "activation blocks.0.down,", marks=pytest.mark.proof),
    ],
)
def test_spans_that_two_ranks_swap_are_found(ranks: Ranks, activations: Any, first: str) -> None:
    swapped = SwappedColumns(SHARDING.rules, SHARDING.boundary_comms, activations=activations)
    verdict = verified(ranks, swapped, *HYBRID)
    assert not verdict.ok and (verdict.first_difference or "").startswith(first), verdict
    assert verdict.rank is not None and "(tp " in str(verdict), verdict


def test_a_gradient_that_is_not_summed_is_refused_and_found(ranks: Ranks) -> None:
    alone = with_rule("head.weight", ShardRule(partial_over=("cp",)))
    with pytest.raises(RankFailureError, match=r"head.weight: gradients of ranks of dp are partial sums, and its rule"):
        verified(ranks, alone, *HYBRID)
    verdict = verified(ranks, alone, *HYBRID, is_proven=False)
    assert not verdict.ok and verdict.first_difference == "gradient head.weight, step 1", verdict
    assert "contribution of rank" in (verdict.cause or ""), verdict


def test_a_gradient_that_is_summed_over_copies_is_refused_and_found(ranks: Ranks) -> None:
    twice = with_rule("blocks.1.norm.weight", ShardRule(partial_over=("dp", "cp", "tp")))
    with pytest.raises(RankFailureError, match=r"blocks.1.norm.weight: gradients of ranks of tp are not partial sums"):
        verified(ranks, twice, *TP)
    verdict = verified(ranks, twice, *TP, is_proven=False)
    assert not verdict.ok and verdict.first_difference == "gradient blocks.1.norm.weight, step 1", verdict
    assert "it is 2 times what it should be" in (verdict.cause or ""), verdict


def test_a_split_of_what_is_whole_is_refused_and_found(ranks: Ranks) -> None:
    split = with_rule("embedding.weight", ShardRule((DimensionSplit(0, "tp"),)))
    with pytest.raises(RankFailureError, match=r"embedding.weight is split over ranks of tp, and no communication"):
        verified(ranks, split, *TP)
    verdict = verified(ranks, SHARDING, *TP, claimed=split)
    assert verdict.first_difference == "starting parameter embedding.weight, step 1" and verdict.rank == 0, verdict
    assert "has elements 0 to 2079 of shape [260, 8], where it should have elements 0 to 1039" in str(verdict.cause)


def test_a_block_that_a_stage_does_not_have_is_refused(ranks: Ranks) -> None:
    claims = replace(SHARDING, stages=(range(1), range(2)))
    with pytest.raises(RankFailureError, match=r"blocks.0.norm.weight: block 0 is in 2 stages, of ranks \[0, 1\]"):
        verified(ranks, claims, ("pp", 2))


def test_an_activation_that_does_not_lie_as_claimed_is_found(ranks: Ranks) -> None:
    lies = replace(
        SHARDING, activations=(*SHARDING.activations, ActivationSplit("blocks.1", "output", (DimensionSplit(1, "tp"),)))
    )
    verdict = verified(ranks, SHARDING, *TP, claimed=lies)
    assert verdict.first_difference == "activation blocks.1, step 1" and verdict.rank == 0, verdict
    assert "has shape [12, 8, 8] for 12 rows, where [12, 4, 8] follows" in (verdict.cause or ""), verdict


def test_a_copy_on_a_tensor_parallel_rank_is_named_by_its_coordinates(ranks: Ranks) -> None:
    verdict = verified(ranks, SHARDING, *HYBRID, plant=a_copy_drifts)
    assert verdict.rank == 3 and (verdict.first_difference or "").startswith("state master/"), verdict
    place = r"rank 3 (tp 1 of dp 1) hold copies that should be equal, but differ"
    assert place in (verdict.cause or "") and "on rank 3 (tp 1 of dp 1):" in str(verdict), verdict
