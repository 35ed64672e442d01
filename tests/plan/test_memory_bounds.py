"""Short cuts of the planner's memory: a bound below it, the fullest ranks alone, and a few rounds of a schedule."""

import random
from dataclasses import replace

import pytest

from motet.models.settings import DecoderSettings
from motet.parallel.pipeline.schedules import order_of_computations
from motet.plan.frameworks import STACKS
from motet.plan.memory.step_memory import busy_moments_of_ranks, estimate_memory, least_memory
from motet.plan.planned_step import PlannedStep, spec_of
from motet.plan.search.layout_space import SearchSpace
from plan.sized_layouts import sized

MODEL = DecoderSettings(
    vocab_size=32000, context=4096, layers=16, hidden=4096, heads=32, kv_heads=8, ffn_hidden=14336, tied=False
)


@pytest.mark.parametrize("stack", ["motet", "megatron", "torchtitan-compiled", "deepspeed", "llm-foundry"])
def test_short_cuts_change_no_decision(stack: str) -> None:
    base = PlannedStep(MODEL, 4096, 64, **sized(), stack=STACKS[stack])
    layouts = [*SearchSpace(spec_of(MODEL), 4096, 64, 64, 8).layouts()]
    for layout in random.Random(3).sample(layouts, 25):
        for recompute in ("none", "selective", "full"):
            step = replace(base, layout=layout, recompute=recompute)
            worst = estimate_memory(step).worst
            assert least_memory(step) <= worst.outside, step.layout
            assert estimate_memory(step, only_fullest=True).worst.outside == worst.outside, step.layout


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zb-v", 2)])
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 7), (3, 16), (4, 23), (4, 24), (5, 5), (4, 3)])
def test_a_few_rounds_have_as_much_in_flight_as_all(schedule: str, chunks: int, ranks: int, microbatches: int) -> None:
    order = order_of_computations(schedule, ranks, chunks=chunks, microbatches=microbatches)
    for rank, actions in enumerate(order.actions):
        kept = most = 0
        for action in actions:
            kept += {"F": 1, "B": -1, "W": -1}.get(action.kind, 0)
            most = max(most, kept)
        moments = busy_moments_of_ranks((schedule, ranks, chunks, microbatches))[rank]
        assert max(sum(moment.in_flight.values()) for moment in moments) == most


def test_of_ranks_with_like_stages_the_fullest_is_kept() -> None:
    step = PlannedStep(MODEL, 4096, 64, **sized(pp=4, microbatches=8), stack=STACKS["megatron"])
    chosen = estimate_memory(step, only_fullest=True).ranks
    assert [rank.pipeline_rank for rank in chosen] == [0, 1, 3]  # The second and third have like stages
