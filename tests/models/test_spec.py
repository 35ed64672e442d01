"""Sizes of the built-in jobs against published totals, and FLOPs against formulas written another way."""

from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

import motet
from motet.core.errors import InputError
from motet.models.settings import DecoderSettings, EncoderDecoderSettings, EncoderSettings, UserModuleSettings
from motet.models.spec.layer_specs import (
    AttentionFlopsRule,
    AttentionSpec,
    CountedPer,
    MatmulSpec,
    MicroBatchShape,
    ParameterSpec,
    SavedActivation,
)
from motet.models.spec.model_spec import ModelSpec, spec_from_settings
from motet.train.job import builtin_jobs

# Of the published checkpoints, exact; those of GPT-3 and Nemotron-4 follow from published sizes, and DeepSeek-V3 is
# published as 671 B with 37 B active (tests/models/test_config.py compares with transformers).
PARAMETERS = {"gpt2-124m": 124_439_808, "llama3-8b": 8_030_261_248, "llama3-70b": 70_553_706_496}
PARAMETERS |= {"llama3-405b": 405_853_388_800, "mixtral-8x7b": 46_702_792_704, "gpt3-175b": 174_604_259_328}
PARAMETERS |= {"nemotron-340b": 341_029_195_776, "deepseek-v3": 671_026_404_352}
ACTIVE = {"mixtral-8x7b": 12_879_925_248, "deepseek-v3": 37_552_282_624}
SMALL = {"vocab_size": 50, "context": 32, "layers": 2, "hidden": 12, "heads": 4, "ffn_hidden": 20}


def spec_of(job: str) -> ModelSpec:
    return spec_from_settings(motet.load_job(job).model)


def parameters_of(spec: ModelSpec) -> list[ParameterSpec]:
    return [p for block in spec.blocks for repetition in block.parameters_by_repetition() for p in repetition]


@pytest.mark.parametrize("job", PARAMETERS)
def test_published_totals(job: str) -> None:
    spec = spec_of(job)
    assert spec.parameter_count == PARAMETERS[job] and spec.active_parameter_count == ACTIVE.get(job, PARAMETERS[job])


@pytest.mark.parametrize("job", builtin_jobs())
def test_totals_are_the_sums_of_named_parameters(job: str) -> None:
    spec = spec_of(job)
    named = parameters_of(spec)
    assert len({p.name for p in named}) == len(named) and sum(p.numel for p in named) == spec.parameter_count
    assert sum(p.numel * p.active_fraction for p in named) == spec.active_parameter_count


@pytest.mark.parametrize("job", ["tiny", "gpt2-124m", "llama3-8b", "llama3-405b", "gpt3-175b", "nemotron-340b"])
def test_training_flops_are_six_per_weight_and_token_and_twelve_per_pair(job: str) -> None:
    model = motet.load_job(job).model
    assert isinstance(model, DecoderSettings)
    spec = spec_from_settings(model)
    weights = sum(p.numel for p in parameters_of(spec) if len(p.shape) == 2 and p.name != "positions.weight")
    if not model.tied:  # looking a token up costs nothing; the head does
        weights -= model.vocab_size * model.hidden
    rows, length = 3, 128
    pairs = model.layers * model.heads * model.dim_per_head * rows * length**2
    products = 6 * weights * rows * length
    assert spec.training_flops(MicroBatchShape(rows, length), "full") == products + 12 * pairs
    assert spec.training_flops(MicroBatchShape(rows, length), "causal") == products + 6 * pairs


def test_a_token_pays_for_the_experts_that_it_visits() -> None:
    spec, shape, looked_up = spec_of("mixtral-8x7b"), MicroBatchShape(1, 64), 32000 * 4096
    weights = spec.active_parameter_count - looked_up - 4096 * 65  # 65 norms
    attention = sum(
        operation.flops(shape, "full") * block.repeat
        for block in spec.blocks
        for operation in block.layer.operations
        if isinstance(operation, AttentionSpec)
    )
    assert spec.forward_flops(shape, "full") - attention == 2 * weights * 64


def test_latent_attention_counts_keys_and_values_by_their_own_dims() -> None:
    block = spec_of("deepseek-v3").blocks[1]
    (attention,) = [o for o in block.layer.operations if isinstance(o, AttentionSpec)]
    assert (attention.heads, attention.key_dim, attention.value_dim) == (128, 192, 128)
    assert attention.flops(MicroBatchShape(2, 8), "full") == 2 * (2 * 8 * 8) * 128 * (192 + 128)


@given(st.integers(1, 40), st.integers(1, 60), st.integers(1, 3))
def test_a_window_is_counted_as_the_pairs_in_it(length: int, window: int, rows: int) -> None:
    """Half of the diagonal counts: one by one there is half a pair more for each of the `seen` keys."""
    attention = AttentionSpec("attention", heads=3, key_dim=5, value_dim=7, causal=True, window=window)
    doubled = 2 * sum(min(query + 1, window) for query in range(length)) - min(window, length)
    assert attention.flops(MicroBatchShape(rows, length), "causal") == rows * doubled * 3 * 12
    assert attention.flops(MicroBatchShape(rows, length), "full") == rows * 2 * length**2 * 3 * 12


def test_cross_attention_pairs_tokens_with_the_source() -> None:
    attention = AttentionSpec("cross", heads=2, key_dim=3, value_dim=3, keys="source")
    for count in get_args(AttentionFlopsRule):
        assert attention.flops(MicroBatchShape(2, 5, 7), count) == 2 * (2 * 5 * 7) * 2 * 6


@given(st.integers(1, 5), st.integers(1, 9))
def test_work_grows_with_rows(rows: int, length: int) -> None:
    encoders = EncoderSettings(**SMALL), EncoderSettings(**SMALL, head="classify")
    for settings in (DecoderSettings(**SMALL), *encoders, EncoderDecoderSettings(**SMALL)):
        spec = spec_from_settings(settings)
        one, many = MicroBatchShape(1, length, length + 2), MicroBatchShape(rows, length, length + 2)
        assert spec.forward_flops(many) == rows * spec.forward_flops(one)
        assert 0 < spec.saved_bytes(one, "bfloat16") < spec.saved_bytes(one, "float32")


def test_the_class_of_a_row_is_paid_per_row() -> None:
    head = spec_from_settings(EncoderSettings(**SMALL, head="classify", classes=3)).blocks[-1]
    assert head.forward_flops(MicroBatchShape(4, 9)) == 2 * 4 * (12 * 12 + 12 * 3)


def test_wide_tensors_follow_float64_and_fixed_ones_follow_nothing() -> None:
    shape = MicroBatchShape(2, 3, 5)
    dtypes = ("bfloat16", "float32", "float64")
    assert [SavedActivation("s", 7, dtype="wide").bytes(shape, d) for d in dtypes] == [168, 168, 336]
    assert [SavedActivation("s", 7).bytes(shape, d) for d in dtypes] == [84, 168, 336]
    assert SavedActivation("s", 7, dtype="bool", per="source").bytes(shape, "float64") == 70
    per_kind = {per: SavedActivation("s", 1, per, "bool").bytes(shape, "float32") for per in get_args(CountedPer)}
    assert per_kind == {"token": 6, "source": 10, "target": 6, "row": 2, "position": 3, "step": 1}


def test_matmul_counts_two_per_multiplication() -> None:
    assert MatmulSpec("w", 3, 5, uses_per_token=2).flops(MicroBatchShape(2, 7), "causal") == 2 * 14 * 3 * 5 * 2


def test_experts_may_leave_no_dense_layer_or_only_dense_ones() -> None:
    experts = {"count": 4, "per_token": 1, "hidden": 5}
    alone = spec_from_settings(DecoderSettings(**SMALL, experts=experts))
    assert [(b.name, b.repeat, b.first_index) for b in alone.blocks[1:-1]] == [("expert block", 2, 0)]
    dense = spec_from_settings(DecoderSettings(**SMALL, experts={**experts, "first_dense_layers": 9}))
    assert [(b.name, b.repeat, b.first_index) for b in dense.blocks[1:-1]] == [("block", 2, 0)]
    assert dense.parameter_count == spec_from_settings(DecoderSettings(**SMALL)).parameter_count


def test_a_hugging_face_factory_has_the_sizes_of_its_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "n_layer": 3}')
    spec = spec_from_settings(UserModuleSettings(factory=f"hf:{tmp_path}", arguments={"n_layer": 12}))
    assert spec.parameter_count == PARAMETERS["gpt2-124m"]


def test_a_function_has_no_known_sizes() -> None:
    with pytest.raises(InputError, match=r"package\.module:function"):
        spec_from_settings(UserModuleSettings(factory="package.module:function"))
