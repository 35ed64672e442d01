"""Splits of modules that are found and proven, and what must stay whole."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from modules_that_stay_whole import ADVERSARIES, DividesByHeads, GatedMlp, Residual, adversary
from modules_to_split import FAMILIES, ROWS, ModuleAndForwards, forwards_of, huggingface_model, our_model, tokens
from split_decoders import Recomputed, recomputed_sharding
from torch import nn

from motet.core.errors import InputError
from motet.models.adapters import add_adapters
from motet.models.arch.latent_attention import LatentAttention
from motet.models.hf.peft_weights import DrawnAdapters
from motet.models.settings import AdapterSettings
from motet.parallel.model_sharding import TENSOR_DIMENSION, ShardRule
from motet.parallel.proof import proof_values
from motet.parallel.tensor_parallel.split_proof import prove_splits
from motet.parallel.tensor_parallel.split_regions import ProvenSplits

LATENT = {
    "query_rank": 24, "key_value_rank": 16, "rotary_head_dim": 4, "plain_head_dim": 8, "value_head_dim": 6,
}  # fmt: skip


def proven(model: ModuleAndForwards, degree: int, **options: object) -> ProvenSplits:
    module, forwards = model
    return prove_splits(module, forwards, degree, rows=ROWS, **options)  # type: ignore[arg-type]  # of any kind here


def rules_of(splits: ProvenSplits) -> dict[str, ShardRule]:
    return {name: rule for region in splits.regions for name, rule in region.rules.items()}


def reasons_of(splits: ProvenSplits) -> dict[str, str]:
    return {region.module: region.reason for region in splits.whole_regions}


def spans_of(rule: ShardRule, length: int, degree: int) -> list[tuple[tuple[int, int], ...]]:
    """The spans of each rank."""
    (split,) = rule.splits
    return [split.local_spans(length, ranks=degree, index=rank)[0] for rank in range(degree)]


def row_layers(splits: ProvenSplits) -> list[str]:
    return sorted(row for region in splits.regions for row in region.rows)


@pytest.mark.parametrize(
    ("name", "degree"),
    [
        ("gpt2-like", 2),
        *(pytest.param(name, 4, marks=pytest.mark.proof) for name in ("gpt2-like", "bert-like", "t5-like")),
        *(pytest.param(name, 2, marks=pytest.mark.proof) for name in ("bert-like", "t5-like")),
    ],
)
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
    rules = rules_of(splits)
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


def test_key_heads_are_shared_by_ranks_and_the_shards_are_those_of_smaller_modules() -> None:
    module, forwards = huggingface_model("llama", attn_implementation="eager")
    splits = proven((module, forwards), 4)
    name = "model.layers.0.self_attn"
    rules = rules_of(splits)
    assert spans_of(rules[f"{name}.k_proj.weight"], 16, 4) == [((0, 8),), ((0, 8),), ((8, 16),), ((8, 16),)]
    assert TENSOR_DIMENSION in rules[f"{name}.v_proj.weight"].partial_over
    assert TENSOR_DIMENSION not in rules[f"{name}.q_proj.weight"].partial_over
    attention, shards = module.get_submodule(name), []
    for rank in range(4):
        small = huggingface_model("llama", num_attention_heads=1, num_key_value_heads=1, attn_implementation="eager")
        shards.append(small[0].get_submodule(name))
        for projection, dim in (("q_proj", 0), ("k_proj", 0), ("v_proj", 0), ("o_proj", 1)):
            weight = attention.get_parameter(f"{projection}.weight")
            ((span,), *_) = spans_of(rules[f"{name}.{projection}.weight"], weight.shape[dim], 4)[rank:]
            part = weight.narrow(dim, span[0], span[1] - span[0])
            shards[-1].get_submodule(projection).weight = nn.Parameter(part.detach())
    x, angles = torch.randn(2, 7, 32), torch.randn(1, 7, 8)
    rotations = angles.cos(), angles.sin()
    whole_output = attention(x, position_embeddings=rotations, attention_mask=None)[0]
    outputs = [shard(x, position_embeddings=rotations, attention_mask=None)[0] for shard in shards]
    torch.testing.assert_close(sum(outputs), whole_output)


def test_the_shards_of_an_uneven_feed_forward_network_by_hand() -> None:
    module, forwards = our_model("gpt2-like", ffn_hidden=50, dropout=0.0)
    rules = rules_of(proven((module, forwards), 3))
    assert spans_of(rules["blocks.0.ffn.up.weight"], 50, 3) == [((0, 17),), ((17, 34),), ((34, 50),)]
    assert spans_of(rules["blocks.0.ffn.down.weight"], 50, 3) == [((0, 17),), ((17, 34),), ((34, 50),)]
    assert rules["blocks.0.ffn.down.bias"].splits == ()
    module.to_empty(device="cpu")
    ffn, x = module.get_submodule("blocks.0.ffn"), torch.randn(3, 32)
    for parameter in ffn.parameters():
        nn.init.normal_(parameter, std=0.1)
    up, down = ffn.get_submodule("up"), ffn.get_submodule("down")
    total = down.bias + sum(
        F.gelu(x @ up.weight[start:stop].T + up.bias[start:stop], approximate="tanh") @ down.weight[:, start:stop].T
        for start, stop in ((0, 17), (17, 34), (34, 50))
    )
    torch.testing.assert_close(total, ffn(x))


def test_sizes_that_cannot_be_split_are_in_the_reason() -> None:
    splits = proven(our_model("tiny", ffn_hidden=50), 4)
    reasons = reasons_of(splits)
    assert not splits.regions
    assert reasons["blocks.0.attention"] == (
        "4 and 2 heads of 8 elements cannot be split over tp = 4; use a divisor of both"
    )
    assert reasons["blocks.1.ffn"].startswith("50 elements cannot be split over tp = 4")
    heads = reasons_of(proven(huggingface_model("llama"), 3))["model.layers.0.self_attn"]
    assert heads.startswith("4 heads of 8 elements cannot be split over tp = 3")


def test_three_ranks_split_six_heads() -> None:
    splits = proven(our_model("tiny", heads=6, kv_heads=3, hidden=48), 3)
    assert len(row_layers(splits)) == 4


@pytest.mark.parametrize("reentrant", [False, True])
def test_blocks_that_are_recomputed_in_backward_are_split(reentrant: bool) -> None:
    module = Recomputed(reentrant)
    model = module, forwards_of(lambda length: module(tokens(length)))
    dims = {
        name: [split.dim for split in rule.splits]
        for name, rule in rules_of(proven(model, 2, excluded=["table", "head"])).items()
    }
    expected = {name: [split.dim for split in rule.splits] for name, rule in recomputed_sharding().rules.items()}
    assert dims == {**expected, "blocks.0.down.bias": [], "blocks.1.down.bias": []}


def test_adapters_are_split_with_their_layers() -> None:
    module, forwards = our_model("gpt2-like")
    settings = AdapterSettings(targets=("*.up", "*.down"), rank=3)
    add_adapters(module, settings, DrawnAdapters(0))
    rules = rules_of(proven((module, forwards), 2))
    dims = {name: [split.dim for split in rule.splits] for name, rule in rules.items() if name.startswith("blocks.0")}
    assert (dims["blocks.0.ffn.up.adapter_a"], dims["blocks.0.ffn.up.adapter_b"]) == ([], [0])
    assert (dims["blocks.0.ffn.down.adapter_a"], dims["blocks.0.ffn.down.adapter_b"]) == ([1], [])
    for name in ("up.adapter_a", "down.adapter_b"):
        assert TENSOR_DIMENSION in rules[f"blocks.0.ffn.{name}"].partial_over


def test_a_large_model_needs_gradients_of_one_block_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = proven(our_model("tiny", query_key_norm=True), 2)
    monkeypatch.setattr(proof_values, "LARGE_MODEL", 0)
    assert proven(our_model("tiny", query_key_norm=True), 2) == expected


def test_a_layer_is_split_as_a_rule_says() -> None:
    splits = proven(our_model("gpt2-like"), 2, overrides={"*.ffn.up": "rows", "blocks.1.ffn.down": "rows"})
    regions = {region.module: region for region in splits.regions}
    assert regions["blocks.0.ffn.up"].columns == ()
    assert regions["blocks.0.ffn.up"].rows == ("blocks.0.ffn.up",)
    assert regions["blocks.0.ffn.up"].found_by == "a rule of the job"
    rules = rules_of(splits)
    assert spans_of(rules["blocks.0.ffn.up.weight"], 32, 2) == [((0, 16),), ((16, 32),)]
    assert rules["blocks.0.ffn.up.weight"].splits[0].dim == 1
    assert "blocks.1.ffn.down" in regions
    assert "blocks.0.ffn.down" in reasons_of(splits)
    splits = proven(our_model("gpt2-like"), 2, overrides={"*.ffn.*": "whole", "embedding": "whole"})
    assert reasons_of(splits)["blocks.0.ffn.up"] == "a rule of the job"
    assert {region.module for region in splits.regions} == {"blocks.0.attention", "blocks.1.attention"}


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"*.up": "columns"}, r"blocks\.0\.up cannot be split by columns: .* do not add up to its output"),
        ({"*.up": "columns", "*.down": "whole"}, "no later layer of its module can be split by rows with it"),
        ({"table": "rows"}, "table cannot be split by rows: its forward is not that of a linear layer"),
        ({"*.wp": "rows"}, r"'\*\.wp' matches no layer"),
    ],
)
def test_a_rule_that_cannot_be_proven_is_refused(rules: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        proven(adversary("softmax over the inner width"), 2, overrides=rules)


def test_a_rule_that_ranks_cannot_split_evenly_is_refused() -> None:
    with pytest.raises(InputError, match="3 ranks cannot read 16 input features evenly"):
        proven(adversary("softmax over the inner width"), 3, overrides={"*.up": "rows"})


@pytest.mark.parametrize("name", ["tiny", pytest.param("t5-like", marks=pytest.mark.proof)])
def test_what_a_plan_declares_is_found_without_it_too(name: str) -> None:
    declared, found = proven(our_model(name), 2), proven(our_model(name), 2, plan={})
    assert {region.found_by for region in declared.regions} == {"the model's plan"}
    assert {region.found_by for region in found.regions} == {"shapes"}
    assert [(r.columns, r.rows, r.attributes) for r in found.regions] == [
        (r.columns, r.rows, r.attributes) for r in declared.regions
    ]


@pytest.mark.proof
@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_of_transformers_is_split(family: str, degree: int) -> None:
    splits = proven(huggingface_model(family), degree)
    whole_attention = {"olmo2", "bloom"} | ({"phi3", "falcon"} if degree == 4 else set())
    expected = {"t5": 10, "mixtral": 2}.get(family, 2 if family in whole_attention else 4)
    assert len(row_layers(splits)) == expected


def test_a_number_of_heads_that_only_the_block_reads_is_left_alone() -> None:
    module = Residual(DividesByHeads())
    splits = proven((module, forwards_of(lambda length: module(tokens(length)))), 2)
    assert row_layers(splits) == ["blocks.0.attention.out"]
    assert splits.regions[0].attributes == ()


def test_ranks_share_a_gate_with_one_output_and_have_parts_of_its_gradient() -> None:
    module = Residual(GatedMlp())
    splits = proven((module, forwards_of(lambda length: module(tokens(length)))), 2)
    assert splits.regions[0].columns == (("blocks.0.up", "blocks.0.gate"),)
    rules = rules_of(splits)
    assert spans_of(rules["blocks.0.gate.weight"], 1, 2) == [((0, 1),), ((0, 1),)]
    assert TENSOR_DIMENSION in rules["blocks.0.gate.bias"].partial_over
    assert TENSOR_DIMENSION not in rules["blocks.0.up.weight"].partial_over


@pytest.mark.parametrize("is_copied", [True, False])
def test_heads_that_share_a_rotated_key_need_the_sum_of_its_gradients(
    monkeypatch: pytest.MonkeyPatch, is_copied: bool
) -> None:
    plan = LatentAttention.tensor_parallel_plan
    monkeypatch.setattr(LatentAttention, "tensor_parallel_plan", plan if is_copied else plan | {"shared_key": "whole"})
    module, forwards = our_model("tiny", kv_heads=4, latent_attention=LATENT)
    latent = module.blocks[0].attention.latent
    splits = proven((module, forwards), 2)
    regions = [region for region in splits.regions if region.module == "blocks.0.attention"]
    assert [region.columns for region in regions] == [
        (("blocks.0.attention.key_value_up",), ("blocks.0.attention.query_up",), ("blocks.0.attention.shared_key",))
    ] * is_copied
    assert module.blocks[0].attention.latent is latent  # Its frozen sizes were tried, too


@pytest.mark.parametrize("name", ADVERSARIES)
def test_what_no_split_computes_rightly_stays_whole(name: str) -> None:
    splits = proven(adversary(name), 2)
    assert not splits.regions
    assert ADVERSARIES[name][1] in " ".join(region.reason for region in splits.whole_regions)
