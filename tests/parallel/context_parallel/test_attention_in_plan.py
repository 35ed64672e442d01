"""A step plan of context parallelism: its communication inside of attention, and the rules that check it."""

from dataclasses import replace

import pytest

from motet.models.spec.model_spec import spec_from_settings
from motet.parallel.context_parallel.attention_tiles import PlaceVisibility
from motet.parallel.context_parallel.context_bytes import fullest_share
from motet.parallel.context_parallel.context_partition import ContextPartition, Spans
from motet.parallel.context_parallel.head_split import HeadSplit
from motet.parallel.context_parallel.ring_schedule import RingSchedule
from motet.parallel.model_sharding import DimensionSplit, ShardRule
from motet.parallel.step_plan.attention_traffic import (
    attention_comms,
    attention_of_spec,
    attention_on_ranks,
    sent_attention_bytes,
)
from motet.parallel.step_plan.check import InvalidStepPlanError, prove_step_plan
from motet.parallel.step_plan.plan import StepPlan
from motet.train.job import batch_shape, load_job
from motet.train.job_step_plan import predicted_stages, step_plan_of_job
from motet.train.launch.preflight import check_job
from motet.train.proof.proposed_sharding import sharding_of_job

# 8 query heads, 4 key heads of 32 features, 4 blocks, 16 rows of 256 tokens
SIZES = {
    "layout.cp=2": (8 * 128 * 4 * 64 * 4, 2 * 8 * 128 * 4 * 64 * 4),
    "layout.cp=4 layout.cp_kind=all-to-all": (16 * 64 * 3 * (2 * 32 + 64 + 2 * 32) * 4,) * 2,
}


def planned(words: str, ranks: int = 4) -> StepPlan:
    job = load_job("tiny", words.split())
    layout = check_job(job, ranks)
    return step_plan_of_job(job, layout, model_sharding=predicted_stages(job, layout))


@pytest.mark.parametrize("words", SIZES)
def test_each_call_of_attention_says_what_a_rank_sends(words: str) -> None:
    plan, job = planned(words), load_job("tiny", words.split())
    shape, recipe = batch_shape(job, len(plan.rows_by_rank[0][0])), job.precision.resolved
    comms = attention_comms(plan, shape, recipe, rank=1)
    assert [each.module for each in comms] == [f"blocks.{block}.attention" for block in range(4)]
    assert {(each.forward_bytes, each.backward_bytes) for each in comms} == {SIZES[words]}
    forward, backward = SIZES[words]
    total = 4 * (forward + backward)
    assert sent_attention_bytes(plan, shape, recipe, rank=1) == total
    assert sent_attention_bytes(plan, shape, recipe, rank=1, recomputed=(0, 2)) == total + 2 * forward
    assert attention_comms(planned("layout.zero=1"), shape, recipe, rank=1) == ()


def test_a_rank_has_the_calls_of_its_stages_and_its_heads() -> None:
    plan = planned("layout.cp=2 layout.pp=2 layout.stages=0-1,2-3")
    assert [call.block for call in attention_on_ranks(plan, 3)] == [2, 3]
    split = ShardRule((DimensionSplit(0, "tp"),))
    rules = {name: split for name in plan.specs if "blocks.1.attention.qkv" in name}
    dims = replace(plan.dims, sizes=(("dp", 1), ("cp", 2), ("tp", 8)))
    plan = replace(plan, dims=dims, model_sharding=replace(plan.model_sharding, stages=(), rules=rules))
    heads = [(call.query_heads, call.key_heads) for call in attention_on_ranks(plan)]
    assert heads == [(8, 4), (1, 1), (8, 4), (8, 4)]  # Two neighbours share a key head


def test_calls_follow_from_the_sizes_of_a_model() -> None:
    spec = spec_from_settings(load_job("llama3-405b").model)
    calls = attention_of_spec(spec)
    assert len(calls) == 126 and (calls[-1].module, calls[-1].block) == ("blocks.125.attention", 125)
    assert (calls[0].query_heads, calls[0].key_heads, calls[0].key_dim) == (128, 8, 128)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_the_share_of_the_fullest_rank(ranks: int) -> None:
    causal, tokens = PlaceVisibility(causal=True), 2 * ranks * 1000
    assert fullest_share(ContextPartition(tokens, ranks, "head-tail"), causal, 1) == 1
    share = fullest_share(ContextPartition(tokens, ranks, "contiguous"), causal, 1)
    assert share == pytest.approx((2 * ranks - 1) / ranks, rel=1e-3)
    assert fullest_share(ContextPartition(tokens, ranks, "contiguous"), causal, ranks) == 1


def no_keys(schedule: RingSchedule, owner: int, hop: int) -> Spans:
    return tuple((first, first) for first, _ in schedule.spans_by_rank[owner])


FAULTS = {
    "a token of nobody": (
        *("layout.cp=2", ContextPartition, "spans_by_rank", property(lambda self: (((0, 1),), ((2, self.tokens),)))),
        "token 1 of a row of 4 is computed 0 times",
    ),
    "a token of two ranks": (
        *("layout.cp=2", ContextPartition, "spans_by_rank", property(lambda self: (((0, 2),), ((1, self.tokens),)))),
        r"token 1 of a row of 4 is computed 2 times, by ranks \[0, 1\]",
    ),
    "keys that a later rank needs stay": (
        *("layout.cp=4 layout.cp_kind=ring", RingSchedule, "keys_in_hop", no_keys),
        "blocks.0.attention: 2 keys reach the query of token 7 of 8 on rank 0 of 4, which sees 8",
    ),
    "the key head of another group": (
        *("layout.cp=4 layout.cp_kind=all-to-all", HeadSplit, "keys", lambda self, rank: (0, 1)),
        "blocks.0.attention: rank 1 computes query head 2 without its key head 1",
    ),
    "a query head of nobody": (
        *("layout.cp=4 layout.cp_kind=all-to-all", HeadSplit, "queries", lambda self, rank: (rank, rank + 1)),
        "blocks.0.attention: 4 ranks compute its query heads as",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_plan_in_which_attention_would_be_wrong_is_refused(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words, owner, name, wrong, sentence = FAULTS[fault]
    plan = planned(words)
    assert prove_step_plan(plan).rows == 16
    monkeypatch.setattr(owner, name, wrong)
    with pytest.raises(InvalidStepPlanError, match=sentence):
        prove_step_plan(plan)


@pytest.mark.parametrize("inner", [1, 2])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("order", ["head-tail", "contiguous"])
def test_rings_pass_the_check(inner: int, window: int | None, order: str) -> None:
    plan = planned(f"layout.cp=4 layout.cp_kind=ring layout.cp_inner={inner} layout.cp_order={order}")
    calls = tuple(replace(call, window=window) for call in plan.model_sharding.attention)
    prove_step_plan(replace(plan, model_sharding=replace(plan.model_sharding, attention=calls)))


def test_the_calls_of_the_sizes_are_those_of_the_proof() -> None:
    job = load_job("tiny", ["layout.cp=2", "model.layers=2", "data.sequence_length=32"])
    _, proven = sharding_of_job(job, check_job(job, 2))
    assert proven.attention == attention_of_spec(spec_from_settings(job.model))
