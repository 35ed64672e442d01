"""Smaller sizes keep what ranks divide, the ratios of heads, and one layer of each kind."""

import math
from typing import Any

import pytest

from motet.models.spec.shrink import SmallSizes, shrink_heads
from motet.train.job import load_job

_KINDS = ["sliding_attention"] * 5 + ["full_attention"] + ["sliding_attention"] * 6


@pytest.mark.parametrize(
    ("heads", "shared", "fewer"),
    [
        (64, 8, (8, 4)),
        (32, 32, (4, 4)),
        (6, 2, (6, 2)),
        (3, 1, (3, 1)),
        (25, 25, (5, 5)),
        (6, 6, (6, 6)),
        (9, 3, (9, 3)),
    ],
)
def test_four_ranks_divide_heads_as_before(heads: int, shared: int, fewer: tuple[int, int]) -> None:
    assert shrink_heads(heads, shared, SmallSizes()) == fewer


@pytest.mark.parametrize("degree", [1, 2, 3, 4, 5, 6, 8, 12, 16, 64])
@pytest.mark.parametrize(("heads", "kv_heads"), [(128, 8), (96, 96), (12, 12), (71, 1), (40, 8), (25, 5), (64, 4)])
def test_any_number_of_ranks_divides_heads_as_before(heads: int, kv_heads: int, degree: int) -> None:
    few, few_keys = shrink_heads(heads, kv_heads, SmallSizes(degree=degree, units_per_rank=2))
    for small, large in ((few, heads), (few_keys, kv_heads)):
        assert small <= large and (small < degree) == (large < degree)
        assert (degree % small == 0) == (degree % large == 0) or large >= degree
        assert math.gcd(small, degree) == math.gcd(large, degree) or large < degree
    assert few % few_keys == 0 and (few == few_keys) == (heads == kv_heads) and (few_keys == 1) == (kv_heads == 1)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "alike"),
    [
        (128, 8, (16, 2)),  # 8 ranks share a key head, and have 2 query heads each
        (64, 64, (8, 8)),  # A rank has one
        (32, 8, (4, 2)),  # Too few query heads
        (40, 8, None),  # 64 is no multiple of 40, and 8 none of fewer, unless these are a multiple of 3
    ],
)
def test_eight_ranks_divide_or_share_heads_as_64_do(heads: int, kv_heads: int, alike: tuple[int, int] | None) -> None:
    sizes = SmallSizes(degree=8, large_degree=64, units_per_rank=2)
    assert shrink_heads(heads, kv_heads, sizes) == (alike or (6, 2))


@pytest.mark.parametrize("degree", [3, 5, 6, 7, 12])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(32, 8, 128), (96, 8, 192), (24, 24, 40), (12, 12, 64)])
def test_ranks_divide_fused_products_as_before(heads: int, kv_heads: int, head_dim: int, degree: int) -> None:
    hidden = heads * head_dim
    config = {"hidden_size": hidden, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    small = SmallSizes(degree=degree, head_dim=8).shrink_config(config)
    few, few_keys = small["num_attention_heads"], small["num_key_value_heads"]
    few_elements = small["hidden_size"] // few
    assert small["hidden_size"] < hidden
    one_key = [(heads + 2, few + 2)] * (heads == kv_heads)
    for units, few_units in ((heads + 2 * kv_heads, few + 2 * few_keys), (kv_heads, few_keys), *one_key):
        assert math.gcd(units * head_dim, degree) == math.gcd(few_units * few_elements, degree)


def test_numbers_of_heads_that_differ_stay_different() -> None:
    config: dict[str, Any] = {"hidden_size": 192, "num_attention_heads": 8, "num_key_value_heads": 4, "num_kv_heads": 2}
    small = SmallSizes(degree=4).shrink_config(config)
    assert (small["num_key_value_heads"], small["num_kv_heads"]) == (4, 2) and small["num_attention_heads"] == 8
    parts = {"d_model": 1024, "encoder_attention_heads": 32, "decoder_attention_heads": 16}
    small = SmallSizes(degree=2).shrink_config(parts)
    assert small["encoder_attention_heads"] != small["decoder_attention_heads"]
    assert (
        small["d_model"] % small["encoder_attention_heads"] == small["d_model"] % small["decoder_attention_heads"] == 0
    )


def test_layers_in_kinds_that_repeat_are_fewer() -> None:
    config: dict[str, Any] = {
        "hidden_size": 768, "num_heads": 12, "num_layers": 12, "attention_types": [[["global", "local"], 6]],
        "attention_layers": ["global", "local"] * 6,
    }  # fmt: skip
    small = SmallSizes(blocks=4).shrink_config(config)
    assert small["num_layers"] == 4 and small["attention_types"] == [[["global", "local"], 2]]
    assert small["attention_layers"] == ["global", "local"] * 2


def test_sizes_that_differ_stay_different() -> None:
    model = load_job("llama3-405b").model
    small = SmallSizes(blocks=3, degree=8, units_per_rank=2, head_dim=8, entries=67, avoided={13, 39}).shrink_settings(
        model
    )
    head_dim = small["hidden"] // small["heads"]
    sizes = [small["hidden"], small["ffn_hidden"], small["heads"], small["kv_heads"], small["vocab_size"], head_dim]
    assert len({*sizes, small["kv_heads"] * head_dim, 2 * small["ffn_hidden"]}) == len(sizes) + 2
    assert small["vocab_size"] % 8 == 128256 % 8 and not {13, 39}.intersection(sizes)


def test_a_config_keeps_one_layer_of_each_kind() -> None:
    config: dict[str, Any] = {
        "hidden_size": 2304, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
        "intermediate_size": 9216, "num_hidden_layers": 12, "layer_types": _KINDS, "sliding_window": 4096,
    }  # fmt: skip
    small = SmallSizes(window=16).shrink_config(config)
    assert small["layer_types"] == _KINDS[:6] and small["num_hidden_layers"] == 6
    assert small["num_attention_heads"] / small["num_key_value_heads"] == 2 and small["sliding_window"] == 16
    assert small["hidden_size"] != small["num_attention_heads"] * small["head_dim"]


def test_special_tokens_are_in_a_smaller_vocabulary() -> None:
    config = {"vocab_size": 150_000, "hidden_size": 512, "num_attention_heads": 8, "eos_token_id": 149_999}
    small = SmallSizes(entries=67).shrink_config(config)
    assert small["vocab_size"] < 200 and small["eos_token_id"] < small["vocab_size"]


def test_what_is_small_already_stays() -> None:
    config = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 24}
    small = SmallSizes().shrink_config(config)
    assert small == config


def test_a_mixture_has_fewer_and_narrow_experts_and_groups_of_them_stay() -> None:
    config: dict[str, Any] = {
        "num_hidden_layers": 36, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
        "hidden_size": 2880, "intermediate_size": 2880, "num_local_experts": 128, "num_experts_per_tok": 4,
    }  # fmt: skip
    small = SmallSizes(degree=8, units_per_rank=2, head_dim=8).shrink_config(config)
    assert 8 <= small["num_local_experts"] < 128 and small["num_local_experts"] % 8 == 0
    assert small["intermediate_size"] < small["hidden_size"] and small["intermediate_size"] % 8 == 0
    grouped = SmallSizes(degree=8).shrink_config({**config, "n_group": 8})
    assert "num_local_experts" not in grouped
