"""The spec of one of several tensor-parallel ranks: published formulas, sums over ranks, sizes that do not divide."""

from dataclasses import replace
from typing import Any

import pytest

import motet
from motet.models.settings import DecoderSettings, EncoderDecoderSettings, EncoderSettings, TransformerSettings
from motet.models.spec.layer_specs import (
    AttentionSpec,
    BlockSpec,
    MatmulSpec,
    MicroBatchShape,
    SavedActivation,
)
from motet.models.spec.model_spec import ModelSpec, spec_from_settings
from motet.train.job import builtin_jobs

SMALL: dict[str, Any] = {"vocab_size": 48, "context": 32, "layers": 2, "hidden": 24, "heads": 4, "ffn_hidden": 40}
SHAPE = MicroBatchShape(3, 8, 12)
TEXTBOOK: dict[str, Any] = {
    "vocab_size": 512,
    "context": 2048,
    "layers": 1,
    "gated": False,
    "activation": "gelu",
    "norm": "layer",
    "positions": "learned",
    "bias": True,
    "dropout": 0.1,
}


def block_of(spec: ModelSpec, name: str = "block") -> BlockSpec:
    (block,) = (block for block in spec.blocks if block.name == name)
    return block


def bytes_by_name(block: BlockSpec, shape: MicroBatchShape, dtype: str = "bfloat16") -> dict[str, int]:
    return {tensor.name: tensor.bytes(shape, dtype) for tensor in block.layer.saved}


# --- the formulas of Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models" --------


@pytest.mark.parametrize(("heads", "hidden"), [(4, 64), (8, 64), (16, 1024), (96, 12288)])
@pytest.mark.parametrize(("length", "rows"), [(16, 1), (256, 4), (2048, 1)])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_textbook_block_keeps_the_bytes_of_the_published_formulas(
    heads: int, hidden: int, length: int, rows: int, ranks: int
) -> None:
    """sbh(10 + 24/t + 5as/(ht)), and sbh(34/t + 5as/(ht)) with sequence parallelism, in whole bytes.
    Beyond the formula a block keeps the mean and the deviation of each token in two norms, and one mask of later keys,
    which the paper leaves out."""
    spec = spec_from_settings(DecoderSettings(**TEXTBOOK, hidden=hidden, heads=heads, ffn_hidden=4 * hidden))
    s, b, h, a, t = length, rows, hidden, heads, ranks
    for sequence, stream in ((False, 10 * s * b * h), (True, 10 * s * b * h // t)):
        saved = bytes_by_name(block_of(spec.on_rank(t, sequence=sequence)), MicroBatchShape(rows, length))
        extras = {name: saved.pop(name) for name in [*saved] if "statistics" in name or "causal_mask" in name}
        assert sum(saved.values()) == stream + (24 * s * b * h + 5 * a * s * s * b) // t
        tokens = s * b // (t if sequence else 1)
        assert extras == {
            "attention_norm.statistics": 8 * tokens,
            "ffn_norm.statistics": 8 * tokens,
            "attention.causal_mask": s * s,
        }


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("sequence", [False, True])
def test_without_dropout_fused_attention_keeps_sums_instead_of_matrices(ranks: int, sequence: bool) -> None:
    """A block without dropout keeps no masks, and of the attention a sum of exponentials for each query and head."""
    sizes = TEXTBOOK | {"dropout": 0.0, "hidden": 64, "heads": 4, "ffn_hidden": 256}
    block = block_of(spec_from_settings(DecoderSettings(**sizes)).on_rank(ranks, sequence=sequence))
    saved = bytes_by_name(block, MicroBatchShape(2, 16))
    tokens, stream = 2 * 16, 2 * 16 // (ranks if sequence else 1)
    expected = stream * (2 * 64 * 4 + 2 * 8) + tokens * (2 * 64 * 12 + 4 * 4) // ranks
    assert sum(saved.values()) == expected


# --- one rank of several ------------------------------------------------------------------------------


def settings_of(kind: str, **values: Any) -> TransformerSettings:
    families: dict[str, type[TransformerSettings]] = {
        "decoder": DecoderSettings,
        "encoder": EncoderSettings,
        "encoder-decoder": EncoderDecoderSettings,
    }
    return families[kind].model_validate({**SMALL, **values})


@pytest.mark.parametrize("kind", ["decoder", "encoder", "encoder-decoder"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_what_is_split_divides_and_what_is_whole_stays(kind: str, dropout: float) -> None:
    spec = spec_from_settings(settings_of(kind, dropout=dropout))
    for block, on_rank, with_sequence in zip(
        spec.blocks, spec.on_rank(4).blocks, spec.on_rank(4, sequence=True).blocks, strict=True
    ):
        for whole, local in zip(block.layer.parameters, on_rank.layer.parameters, strict=True):
            assert whole.numel == local.numel * (1 if whole.split.split_by == "none" else 4), whole
        for tensor, local, split in zip(block.layer.saved, on_rank.layer.saved, with_sequence.layer.saved, strict=True):
            size, by = tensor.bytes(SHAPE, "float32"), tensor.split.split_by
            assert size == local.bytes(SHAPE, "float32") * (1 if by in ("none", "stream") else 4), tensor
            assert size == split.bytes(SHAPE, "float32") * (1 if by == "none" else 4), tensor
        for product, local in zip(block.layer.operations, on_rank.layer.operations, strict=True):
            is_split = isinstance(product, AttentionSpec) or product.split.split_by != "none"
            assert product.flops(SHAPE, "full") == local.flops(SHAPE, "full") * (4 if is_split else 1), product


@pytest.mark.parametrize("job", builtin_jobs())
def test_one_rank_is_the_whole_model(job: str) -> None:
    spec = spec_from_settings(motet.load_job(job).model)
    for sequence in (False, True):
        on_rank = spec.on_rank(1, sequence=sequence)
        assert on_rank.parameter_count == spec.parameter_count
        assert on_rank.training_flops(SHAPE) == spec.training_flops(SHAPE)
        assert on_rank.saved_bytes(SHAPE, "bfloat16") == spec.saved_bytes(SHAPE, "bfloat16")


@pytest.mark.parametrize("job", builtin_jobs())
def test_every_tensor_of_a_block_names_what_splits_it(job: str) -> None:
    """Only masks of the attention are whole in a block."""
    spec = spec_from_settings(motet.load_job(job).model)
    for block in spec.blocks:
        if block.prefix.count("{i}"):
            assert all(tensor.split.split_by != "none" for tensor in block.layer.saved if "_mask" not in tensor.name)
            assert all(o.split.split_by != "none" for o in block.layer.operations if isinstance(o, MatmulSpec))


# --- sizes that ranks do not divide -------------------------------------------------------------------


def test_fewer_heads_of_keys_than_ranks_are_shared() -> None:
    spec = spec_from_settings(settings_of("decoder", kv_heads=2))
    fused = block_of(spec.on_rank(4)).layer.parameters
    assert [p.shape for p in fused if p.name == "attention.qkv.weight"] == [((4 + 2 + 2) * 6, 24)]  # Whole
    block = block_of(replace(spec, has_fused_products=False).on_rank(4))
    shapes = {parameter.name: parameter.shape for parameter in block.layer.parameters}
    assert shapes["attention.qkv.weight"] == ((1 + 1 + 1) * 6, 24) and shapes["attention.output.weight"] == (24, 6)


def test_a_vocabulary_and_a_width_are_padded() -> None:
    spec = spec_from_settings(settings_of("decoder", vocab_size=50, ffn_hidden=41, gated=False)).on_rank(4)
    shapes = {parameter.name: parameter.shape for block in spec.blocks for parameter in block.layer.parameters}
    assert shapes["embedding.weight"] == (13, 24)
    assert shapes["ffn.up.weight"] == (11, 24) and shapes["ffn.down.weight"] == (24, 11)
    gradient = next(tensor for tensor in spec.blocks[-1].layer.saved if tensor.name == "head.weight.gradient")
    assert gradient.bytes(SHAPE, "float32") == 4 * 13 * 24


def test_heads_that_ranks_do_not_divide_stay_whole_on_the_whole_sequence() -> None:
    whole = spec_from_settings(settings_of("decoder"))
    on_rank = spec_from_settings(settings_of("decoder")).on_rank(3, sequence=True)
    shape = MicroBatchShape(2, 12)
    saved, kept = (bytes_by_name(block_of(spec), shape) for spec in (whole, on_rank))
    for name in ("attention.qkv.input", "attention.queries_keys", "attention.sums", "attention.output.input"):
        assert saved[name] == kept[name], name
    assert saved["ffn.up.input"] == 3 * kept["ffn.up.input"]
    before, after = (block_of(spec).layer.operations for spec in (whole, on_rank))
    assert [o.flops(shape, "full") for o in before[:3]] == [o.flops(shape, "full") for o in after[:3]]


def test_a_gated_width_that_ranks_do_not_divide_stays_whole_on_the_split_stream() -> None:
    settings = settings_of("decoder", ffn_hidden=41)
    shape = MicroBatchShape(2, 12)
    whole, on_rank = (block_of(spec_from_settings(settings).on_rank(n, sequence=True)) for n in (1, 4))
    saved, kept = bytes_by_name(whole, shape), bytes_by_name(on_rank, shape)
    for name in ("ffn.up.input", "ffn.inner", "ffn.down.input"):
        assert saved[name] == 4 * kept[name], name
    assert whole.layer.parameters[-1] == replace(on_rank.layer.parameters[-1], split=whole.layer.parameters[-1].split)
    assert SavedActivation("x", 3, sequence_ranks=4).bytes(MicroBatchShape(2, 9), "float32") == 2 * 3 * 3 * 4
