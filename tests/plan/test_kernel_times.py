"""Times of attention by the kernels that a framework has, and by the sizes of heads."""

from dataclasses import replace

import pytest

from motet.models.settings import DecoderSettings
from motet.models.spec.block_costs import DecoderVariant, PublishedDecoderSettings
from motet.plan.frameworks import STACKS, SoftwareStack
from motet.plan.planned_cluster import load_planned_cluster
from motet.plan.planned_step import PlannedStep
from plan.sized_layouts import sized

MODEL = DecoderSettings(vocab_size=1024, context=2048, layers=2, hidden=2048, heads=16, ffn_hidden=2048, gated=False)


def seconds(stack: str, cluster: str = "a100", *, attention: str = "", sequence: int = 2048, **sizes: object) -> float:
    chosen = replace(STACKS[stack], attention=attention or STACKS[stack].attention)
    model = MODEL.model_copy(update={"context": sequence, **sizes})
    step = PlannedStep(model, sequence, 8, **sized(dp=8), stack=chosen)
    return load_planned_cluster(cluster, 8).step_times.predict(step).seconds


@pytest.mark.parametrize("cluster", ["a100", "h100"])
def test_newer_kernels_of_attention_gain_more_on_longer_sequences(cluster: str) -> None:
    gains = []
    for sequence in (1024, 8192, 65536):
        kinds = [seconds("llm-foundry", cluster, attention=f"flash-{year}", sequence=sequence) for year in (1, 2, 3)]
        assert kinds[0] > kinds[1] > kinds[2] or sequence == 1024
        gains.append(kinds[0] / kinds[1])
    assert gains[0] < gains[1] < gains[2] and gains[2] > 1.2


def test_kernels_of_2022_are_as_fast_for_narrow_heads() -> None:
    for kind, differs in (("flash-1", False), ("flash-2", True)):
        wide, narrow = (seconds("llm-foundry", attention=kind, sequence=32768, heads=heads) for heads in (16, 32))
        assert (narrow > 1.1 * wide) is differs, kind


def test_unfused_attention_of_heads_that_matrix_units_cannot_read_is_slow() -> None:
    """A row of 108 features of 2 bytes is no multiple of 16 bytes."""
    wide = {"sequence": 2048, "heads": 16}
    times = {head: seconds("megatron-deepspeed", head_dim=head, **wide) for head in (104, 108, 112)}
    assert times[108] > 1.3 * times[112] > times[104]
    fused = {head: seconds("torchtitan-compiled", head_dim=head, **wide) for head in (108, 112)}
    assert fused[108] < fused[112]


def test_sinks_are_not_for_the_newest_kernels_and_windows_leave_keys_out() -> None:
    def time(stack: SoftwareStack = STACKS["megatron"], **variant: object) -> float:
        window = variant.pop("window", None)
        settings = MODEL.model_dump() | {"context": 8192, "sliding_window": window}
        model = PublishedDecoderSettings(**settings, variant=DecoderVariant(**variant))
        step = PlannedStep(model, 8192, 8, **sized(dp=8), stack=stack)
        return load_planned_cluster("h100", 8).step_times.predict(step).seconds

    unfused = replace(STACKS["megatron"], attention="unfused")
    assert time(unfused) == pytest.approx(time(unfused, attention_sinks=True), rel=1e-4)
    plain, sinks = time(), time(attention_sinks=True)
    half, windows = time(attention_sinks=True, window=128, full_layers=(1,)), time(attention_sinks=True, window=128)
    assert plain < sinks and windows < half < sinks
    assert half - windows == pytest.approx(sinks - half, rel=0.05)
