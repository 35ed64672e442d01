"""Memory of planned steps: states by their definition, activations in flight, and what does not fit."""

import pytest

from motet.models.settings import DecoderSettings, MixtureOfExpertsSettings
from motet.plan.memory.step_memory import estimate_memory, fits
from motet.plan.planned_layout import PlannedLayout
from motet.plan.planned_step import PlannedStep
from motet.plan.software_stack import STACKS

MODEL = DecoderSettings(
    vocab_size=32000, context=1024, layers=8, hidden=1024, heads=16, kv_heads=8, ffn_hidden=4096, tied=False
)


def memory_of(stack: str = "motet", model: DecoderSettings = MODEL, **sizes: object):
    return estimate_memory(PlannedStep(model, 1024, 64, PlannedLayout(**sizes), stack=STACKS[stack]))


@pytest.mark.parametrize(("zero", "parts"), [(0, 18.0), (1, 6 + 12 / 8), (2, 2 + 16 / 8), (3, 16 / 8)])
def test_states_of_the_stages_of_zero(zero: int, parts: float) -> None:
    count = PlannedStep(MODEL, 1024, 64, PlannedLayout()).spec.parameter_count
    worst = memory_of(dp=8, zero=zero).worst
    assert worst.state == pytest.approx(parts * count)  # bf16 with AdamW: 2 + 4 + 4 + 8 bytes


def test_saved_activations_are_those_of_the_model() -> None:
    step = PlannedStep(MODEL, 1024, 64, PlannedLayout(dp=8, microbatches=4))
    assert memory_of(dp=8, microbatches=4).worst.bytes["saved activations"] == step.spec.saved_bytes(
        step.shape, "bfloat16"
    )
    full = memory_of(dp=8, microbatches=4, recompute="full").worst.bytes
    assert full["saved activations"] < 0.2 * step.spec.saved_bytes(step.shape, "bfloat16")


def test_a_pipeline_keeps_what_is_in_flight() -> None:
    ranks = memory_of(dp=1, pp=4, microbatches=16).ranks
    inner = [rank.bytes["saved activations"] for rank in ranks[:3]]
    assert inner[0] > inner[1] > inner[2]
    gpipe = memory_of(dp=1, pp=4, microbatches=16, schedule="gpipe").ranks[1].bytes["saved activations"]
    assert gpipe == pytest.approx(16 / 3 * inner[1])  # All micro-batches, not three


def test_tensor_parallelism_and_experts_divide() -> None:
    whole, split = memory_of(dp=2, tp=1).worst, memory_of(dp=1, tp=2, sp=True, microbatches=2).worst
    assert split.bytes["parameters"] == pytest.approx(whole.bytes["parameters"] / 2, rel=0.01)
    experts = MODEL.model_copy(update={"experts": MixtureOfExpertsSettings(count=8, per_token=2, hidden=2048)})
    all_here, spread = (memory_of(model=experts, dp=8, ep=ep).worst.bytes["parameters"] for ep in (1, 8))
    of_experts = 2.0 * 8 * 8 * 3 * 1024 * 2048  # bytes x layers x experts x matrices
    assert all_here - spread == pytest.approx(7 / 8 * of_experts)


def test_a_framework_with_logits_keeps_them() -> None:
    fused, kept = memory_of("motet", dp=8).worst.bytes, memory_of("megatron", dp=8).worst.bytes
    assert "logits" not in fused and kept["logits"] > 8 * 1024 * 32000 * 4


def test_what_does_not_fit_is_one_line() -> None:
    memory = memory_of(dp=8)
    assert fits(memory, 1e12) is None
    line = fits(memory, 1e9)
    assert line is not None and line.startswith("stage 0: activations ") and "GiB" in line and "\n" not in line
    assert memory.worst.allocated < memory.worst.reserved < memory.worst.outside


def test_the_states_of_all_stages_are_those_of_the_model() -> None:
    count = PlannedStep(MODEL, 1024, 64, PlannedLayout()).spec.parameter_count
    for chunks, schedule in ((1, "1f1b"), (2, "interleaved")):
        ranks = memory_of(dp=1, pp=4, chunks=chunks, schedule=schedule, microbatches=8).ranks
        assert sum(rank.bytes["parameters"] for rank in ranks) == 2 * count
        assert ranks[0].bytes["parameters"] > ranks[1].bytes["parameters"]  # The embedding
