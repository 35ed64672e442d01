"""The spec of a model against the module that is built from the same settings: names, shapes, FLOPs, saved tensors."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from spec_cases import CASES, SMALL, forward, kept_bytes
from torch.utils.flop_counter import FlopCounterMode

import motet
from motet.models.arch import attention_core, logit_slices
from motet.models.build import build_module
from motet.models.settings import DecoderSettings, EncoderDecoderSettings, EncoderSettings, TransformerSettings
from motet.models.spec.layer_specs import MicroBatchShape
from motet.models.spec.model_spec import spec_from_settings
from motet.train.job import builtin_jobs

counts, flags = st.integers(1, 3), st.booleans()


@pytest.fixture(autouse=True)
def _as_many_targets_as_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """The spec counts targets; the module fills their number up to a multiple."""
    monkeypatch.setattr(logit_slices, "TARGET_COUNT_MULTIPLE", 1)


@st.composite
def architectures(draw: st.DrawFn, kind: type[TransformerSettings], **more: Any) -> TransformerSettings:
    """Small settings of one kind, with dims that differ from each other."""
    kv_heads, shared, dim = draw(counts), draw(counts), 2 * draw(st.integers(1, 4))
    values: dict[str, Any] = {
        "vocab_size": draw(st.integers(2, 40)),
        "context": draw(st.integers(1, 20)),
        "layers": draw(counts),
        "heads": kv_heads * shared,
        "hidden": kv_heads * shared * dim,
        "head_dim": draw(st.sampled_from([None, 2, 6])),
        "ffn_hidden": draw(st.integers(1, 30)),
        "gated": draw(flags),
        "norm": draw(st.sampled_from(["rms", "layer"])),
        **{name: draw(strategy) for name, strategy in more.items()},
    }
    if kind is DecoderSettings:
        values["kv_heads"] = draw(st.sampled_from([None, kv_heads]))
    return kind.model_validate(values)


optional_flags = st.sampled_from([None, True, False])
positions = st.sampled_from(["rotary", "learned", "none"])
biases = {"qkv_bias": flags, "bias": flags, "ffn_bias": optional_flags, "norm_bias": optional_flags}
decoders = architectures(DecoderSettings, positions=positions, **biases, query_key_norm=flags, tied=flags)
heads = st.sampled_from(["masked", "classify"])
encoders = architectures(EncoderSettings, head=heads, classes=st.integers(2, 4), token_types=st.integers(0, 2))
relative = {"relative_buckets": st.integers(4, 9), "relative_distance": st.integers(16, 20)}
layers = st.sampled_from([None, 1, 4])
encoder_decoders = architectures(EncoderDecoderSettings, decoder_layers=layers, tied=flags, **relative)


def check_parameters(model: Any) -> None:
    with torch.device("meta"):
        module = build_module(model)
    shapes = sorted((name, tuple(p.shape)) for name, p in module.named_parameters())
    repetitions = [one for block in spec_from_settings(model).blocks for one in block.parameters_by_repetition()]
    assert sorted((p.name, p.shape) for parameters in repetitions for p in parameters) == shapes


@pytest.mark.parametrize("job", builtin_jobs())
def test_parameters_of_built_in_jobs_are_those_of_the_module(job: str) -> None:
    check_parameters(motet.load_job(job).model)


@settings(deadline=None)
@given(st.one_of(decoders, encoders, encoder_decoders))
def test_parameters_of_any_settings_are_those_of_the_module(model: TransformerSettings) -> None:
    check_parameters(model)


# --- FLOPs and saved tensors -------------------------------------------------------------------------


def unfused_bytes(model: EncoderDecoderSettings, shape: MicroBatchShape) -> int:
    """Bytes that torch's attention on a CPU keeps beyond the fused one if a bias is learned.
    Each block keeps the probabilities of all pairs instead of the sums; the bias, once per stack, is not kept."""
    total, rows = 0, shape.rows
    for layers, length in ((model.layers, shape.source_length), (model.decoder_layers or model.layers, shape.length)):
        bias = (rows if shape.packed else 1) * length**2
        total += (layers * (rows * length**2 - rows * length) - bias) * model.heads
    return total


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_saved_bytes_are_those_that_autograd_keeps(dtype: torch.dtype, packed: bool, dropout: float) -> None:
    shape, name = MicroBatchShape(3, 11, 9, packed), str(dtype).removeprefix("torch.")
    masked = MicroBatchShape(3, 11, 9, packed, targets=7)
    for kind, cases in CASES.items():
        for values in cases:
            model = kind.model_validate({**SMALL, **values, "dropout": dropout})
            counted = masked if isinstance(model, EncoderSettings) else shape
            is_learned = isinstance(model, EncoderDecoderSettings) and not dropout
            more = unfused_bytes(model, shape) * dtype.itemsize if is_learned else 0
            saved = spec_from_settings(model).saved_bytes(counted, name)
            assert saved + more == kept_bytes(model, counted, dtype), values


@pytest.mark.parametrize("value_dim", [3, 9])
def test_a_cpu_keeps_values_as_long_as_keys(value_dim: int) -> None:
    """Its fused kernel takes no others: it keeps padded keys or values, and its padded output."""
    latent = {"key_value_rank": 7, "rotary_head_dim": 2, "plain_head_dim": 5, "value_head_dim": value_dim}
    model, shape = DecoderSettings.model_validate({**SMALL, "latent_attention": latent}), MicroBatchShape(3, 11)
    size = max(value_dim, 7)
    # Queries and keys, values, and the output; of longer values the values are a view of what is kept anyway
    kept = 4 * size + value_dim if value_dim < 7 else 3 * size + (5 + value_dim)
    counted = 2 * 7 + (5 + value_dim) + value_dim
    padding = model.layers * shape.count("token") * model.heads * (kept - counted) * 4
    assert kept_bytes(model, shape, torch.float32) == padding + spec_from_settings(model).saved_bytes(shape, "float32")


def test_saved_bytes_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's attention and RMS norms: on a CPU layer norms also keep their weights in float32."""
    monkeypatch.setattr(attention_core, "is_amx_faster", lambda *_: False)
    for values in CASES[DecoderSettings]:
        decoder = DecoderSettings(**SMALL, **{**values, "norm": "rms"})
        predicted = spec_from_settings(decoder).saved_bytes(MicroBatchShape(3, 11), "bfloat16")
        assert predicted == kept_bytes(decoder, MicroBatchShape(3, 11), torch.bfloat16), values


@pytest.mark.parametrize("kind", CASES)
def test_training_flops_are_those_of_torchs_counter(kind: type[TransformerSettings]) -> None:
    """Dropout, since torch counts attention on a CPU only if its probabilities are explicit, and then all pairs."""
    shape = MicroBatchShape(3, 11, 9, targets=7 if kind is EncoderSettings else None)
    for values in CASES[kind]:
        model = kind.model_validate({**SMALL, **values, "dropout": 0.1})
        _, loss = forward(model, shape, torch.bfloat16)
        with FlopCounterMode(display=False) as counter:
            loss().backward()
        # The gradient of the masked head's bias is computed as a product as well.
        bias = 2 * 7 * 50 if kind is EncoderSettings and values.get("head") != "classify" else 0
        assert spec_from_settings(model).training_flops(shape, "full") == counter.get_total_flops() - bias, values
