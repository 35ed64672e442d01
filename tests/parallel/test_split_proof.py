"""Splits of modules that are found and proven, and what must stay whole."""

from collections import Counter

import pytest
import torch
from modules_to_split import FAMILIES, ROWS, ModuleAndForwards, huggingface_model, our_model

from motet.parallel.model_sharding import TENSOR_DIMENSION
from motet.parallel.tensor_parallel.split_proof import prove_splits
from motet.parallel.tensor_parallel.split_regions import ProvenSplits


def proven(model: ModuleAndForwards, degree: int, **options: object) -> ProvenSplits:
    module, forwards = model
    return prove_splits(module, forwards, degree, rows=ROWS, **options)  # type: ignore[arg-type]  # of any kind here


def row_layers(splits: ProvenSplits) -> list[str]:
    return sorted(row for region in splits.regions for row in region.rows)


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("name", ["gpt2-like", "bert-like", "t5-like"])
def test_all_layers_of_the_blocks_of_our_models_are_split(name: str, degree: int) -> None:
    module, forwards = our_model(name)
    splits = proven((module, forwards), degree)
    rows = [n for n, _ in module.named_modules() if n.endswith((".output", ".down"))]
    assert row_layers(splits) == sorted(rows)
    assert {part.device.type for part in module.parameters()} == {"meta"}  # As before
    for region in splits.regions:
        for row in region.rows:
            assert region.rules[f"{row}.weight"].splits[0].dim == 1


def test_attention_of_a_small_llama_is_split_by_heads() -> None:
    splits = proven(our_model("tiny"), 2)
    attention = next(region for region in splits.regions if region.module == "blocks.1.attention")
    assert attention.columns == (("blocks.1.attention.qkv",),)
    rule = attention.rules["blocks.1.attention.qkv.weight"]
    (split,) = rule.splits
    assert (split.dim, split.over, split.parts, split.unit) == (0, TENSOR_DIMENSION, (32, 16, 16), 8)
    assert TENSOR_DIMENSION not in rule.partial_over
    assert dict(Counter(attention.attributes)) == {
        ("blocks.1.attention", "heads", 2): 1,
        ("blocks.1.attention", "kv_heads", 1): 1,
    }


def test_norms_of_heads_are_whole_and_have_parts_of_the_gradient() -> None:
    splits = proven(our_model("tiny", query_key_norm=True), 2)
    rules = {name: rule for region in splits.regions for name, rule in region.rules.items()}
    for name in ("blocks.0.attention.query_norm.weight", "blocks.1.attention.key_norm.weight"):
        assert not rules[name].splits
        assert TENSOR_DIMENSION in rules[name].partial_over


def test_the_module_is_as_before() -> None:
    module, forwards = huggingface_model("gpt2")
    before = {name: (value, value.clone()) for name, value in module.state_dict(keep_vars=True).items()}
    attributes = {name: dict(vars(part)) for name, part in module.named_modules()}
    proven((module, forwards), 2)
    after = module.state_dict(keep_vars=True)
    assert all(after[name] is value and torch.equal(value, copy) for name, (value, copy) in before.items())
    for name, part in module.named_modules():
        assert {key: vars(part)[key] for key in attributes[name]} == attributes[name]
        assert not part._forward_hooks and not part._forward_pre_hooks
        assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("family", ["llama", "falcon"])
def test_a_family_of_transformers_is_split(family: str) -> None:
    splits = proven(huggingface_model(family), 2)
    assert len(row_layers(splits)) == 4


@pytest.mark.proof
@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_of_transformers_is_split(family: str, degree: int) -> None:
    splits = proven(huggingface_model(family), degree)
    whole_attention = {"olmo2", "bloom"} | ({"phi3", "falcon"} if degree == 4 else set())
    expected = {"t5": 10, "mixtral": 2}.get(family, 2 if family in whole_attention else 4)
    assert len(row_layers(splits)) == expected
