"""Adapters and frozen parameters in planned steps: their state, their collectives, and the products of a backward."""

import json
from collections import Counter
from pathlib import Path

import pytest

from motet.cli.job_arguments import load_job_or_config
from motet.cli.plan.plan_report import planned_model
from motet.core.errors import InputError
from motet.models.hf.hf_config import settings_from_config
from motet.models.settings import AdapterSettings, DecoderSettings
from motet.models.spec.model_spec import ModelSpec, spec_from_settings
from motet.plan.frameworks import STACKS
from motet.plan.memory.step_memory import estimate_memory
from motet.plan.planned_cluster import load_planned_cluster
from motet.plan.planned_step import PlannedStep, count_parameters
from motet.plan.search.ranking import LayoutRanking
from motet.plan.time.step_time import StepTimes
from motet.train.forecast.planned_job import planned_step, step_of_run
from motet.train.job_step_plan import predicted_stages
from motet.train.memory_check.predicted_ranks import predict_step_memory
from plan.sized_layouts import sized, sized_layout

MODEL = DecoderSettings(
    vocab_size=32000, context=1024, layers=4, hidden=1024, heads=16, kv_heads=8, ffn_hidden=4096, tied=False
)
ADAPTED = MODEL.model_copy(update={"adapters": AdapterSettings(rank=16)})
HALF_FROZEN = MODEL.model_copy(update={"frozen": ("embedding.*", "blocks.[01].*")})
H100 = load_planned_cluster("h100", 8)


def step_of(model: DecoderSettings, **sizes: object) -> PlannedStep:
    return PlannedStep(model, 1024, 64, **sized(**sizes), stack=STACKS["motet"])


@pytest.mark.parametrize("layout", ["layout.zero=0", "layout.zero=2", "layout.zero=3", "layout.pp=2"])
@pytest.mark.parametrize("trained", ["model.adapters.rank=4", "model.frozen=['embedding*','blocks.0.*']", ""])
def test_state_is_that_of_a_run(layout: str, trained: str) -> None:
    words = ["precision.recipe=bf16", "layout.microbatches=2", layout, *filter(None, [trained])]
    job = load_job_or_config("tiny", words)
    resolved = job.layout_for(2)
    step = planned_step(job, resolved)
    stages = predicted_stages(job, resolved).stages
    planned = estimate_memory(step_of_run(job, step, resolved, stages=stages)).ranks
    known = [each.predicted for each in predict_step_memory(job, resolved)][:: 1 if stages else 2]
    for rank, timeline in zip(planned, known, strict=True):
        for category in ("parameters", "master parameters", "gradients", "moments"):
            assert rank.bytes.get(category, 0) == timeline.peak_of(category), category


class TimeOfBytes:
    """Collectives that take a time in proportion to their bytes."""

    def seconds(self, collective: str, size_bytes: float, *, ranks: int, ranks_per_host: int) -> float:
        return size_bytes * 1e-9


def communicated(step: PlannedStep) -> Counter[str]:
    """The seconds of gathers and reductions of parameters and gradients."""
    total = Counter[str]()
    for event in StepTimes(H100.step_times.rates, 8, TimeOfBytes()).events(step):
        total[event.kind] += event.stop_s - event.start_s
    return total


@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize("model", [ADAPTED, HALF_FROZEN], ids=["adapters", "half"])
def test_only_gradients_are_reduced_and_only_what_is_updated_is_gathered(model: DecoderSettings, zero: int) -> None:
    """Compared with a model that is trained as a whole; stage 3 gathers frozen parameters too."""
    everything, step = (step_of(each, dp=8, zero=zero) for each in (MODEL, model))
    counts = count_parameters((block, block.repeat) for block in step.spec.blocks)
    count, seconds, all_seconds = everything.spec.parameter_count, communicated(step), communicated(everything)
    assert counts.trained + counts.frozen_dense == step.spec.parameter_count
    assert seconds["reduce"] / all_seconds["reduce"] == pytest.approx(counts.trained / count)
    gathered = (counts.trained if zero < 3 else step.spec.parameter_count) / count
    assert seconds["gather"] == pytest.approx(gathered * all_seconds["gather"])


def test_frozen_blocks_have_no_backward_and_frozen_weights_no_gradient() -> None:
    last_frozen = MODEL.model_copy(update={"frozen": ("blocks.[23].*",)})
    models = MODEL, ADAPTED, HALF_FROZEN, last_frozen
    simulations = {each: H100.step_times.events(step_of(each)) for each in models}
    backward = {
        model: Counter({event.block: event.stop_s - event.start_s for event in events if event.kind == "backward"})
        for model, events in simulations.items()
    }
    assert set(backward[HALF_FROZEN]) == {"block 3", "first block 2", "head"}
    assert backward[HALF_FROZEN]["block 3"] == pytest.approx(backward[MODEL]["block 3"])
    assert backward[ADAPTED]["block 3"] < backward[MODEL]["block 3"]
    assert backward[last_frozen]["block 1"] == pytest.approx(backward[MODEL]["block 1"])
    assert backward[last_frozen]["frozen block 3"] < 0.8 * backward[MODEL]["block 3"]
    forward = {m: sum(e.stop_s - e.start_s for e in events if e.kind == "forward") for m, events in simulations.items()}
    assert forward[HALF_FROZEN] == pytest.approx(forward[MODEL]) and forward[ADAPTED] > forward[MODEL]
    flops = {model: step_of(model, dp=8).model_flops() for model in (MODEL, ADAPTED, HALF_FROZEN)}
    assert max(flops[ADAPTED], flops[HALF_FROZEN]) < 0.8 * flops[MODEL]


def test_less_state_lets_more_layouts_fit() -> None:
    """8 billion parameters: 16 bytes each do not fit a device, but 2 bytes of each frozen one do."""
    large = {"layers": 80, "hidden": 2560, "ffn_hidden": 10240}
    for adapters in (None, AdapterSettings(rank=16)):
        step = step_of(MODEL.model_copy(update={**large, "adapters": adapters}), dp=8, microbatches=8)
        ranking = LayoutRanking(step, H100)
        _, reason = ranking.predict(step)
        assert (reason is None) == (adapters is not None)
        assert ranking.least_state(step) == estimate_memory(step).worst.state


def test_a_config_does_not_name_the_layers_that_are_trained(tmp_path: Path) -> None:
    config = {"model_type": "llama", "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    job = load_job_or_config(f"hf:{tmp_path}", ["model.adapters.rank=4"])
    with pytest.raises(InputError, match=r"model\.adapters .* its config tells none; `motet show model JOB --trace`"):
        planned_step(job, sized_layout(dp=2), model=settings_from_config(config))
    traced = planned_model(job, None)
    assert isinstance(traced, ModelSpec)
    counts = count_parameters((block, block.repeat) for block in traced.blocks)
    # Queries, keys, values, output, gate, up, down of both layers, and the head
    assert counts.trained == 2 * (4 * 4 * 2 * 64 + 3 * 4 * (64 + 96)) + 4 * (64 + 128)
    assert counts.frozen_dense == spec_from_settings(settings_from_config(config)).parameter_count
