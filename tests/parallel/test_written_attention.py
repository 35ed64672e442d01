"""Attention layers as people write them by hand: ranks split them, or the line that prevents it is named."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from motet import parallelize
from motet.core.errors import InputError
from motet.parallel.model_sharding import ModelSharding
from motet.parallel.parallel_dims import ParallelDims
from motet.parallel.process.process_group import RankGroup
from motet.parallel.tensor_parallel.sharding_proposal import (
    ProofForwards,
    check_split_share,
    propose_sharding,
    split_share,
)
from motet.precision.float64_mode import use_float64
from parallel.attention_styles import GPT, GPTConfig
from ranks import Ranks

DIMS, STEPS = ParallelDims((("tp", 2),)), 3


def gpt(style: str) -> GPT:
    torch.manual_seed(1)
    return GPT(GPTConfig(block_size=12, vocab_size=64), style)


def batch_of(step: int, length: int = 12) -> dict[str, Tensor]:
    tokens = torch.randint(64, (2, length + 1), generator=torch.Generator().manual_seed(step))
    return {"idx": tokens[:, :-1], "targets": tokens[:, 1:].contiguous()}


def proven(module: nn.Module, dims: ParallelDims = DIMS) -> ModelSharding:
    forwards = [partial(lambda batch: module(**batch)[1], batch_of(0, length)) for length in (6, 12)]
    return propose_sharding(module, ProofForwards(forwards, 2), dims)


def splits_attention(sharding: ModelSharding) -> bool:
    names = [name for name, rule in sharding.rules.items() if rule.splits]
    return any(".attn." in name for name in names)


@pytest.mark.parametrize("style", ["nanoGPT", "minGPT", "GPT-NeoX", "ViT", "grouped"])
def test_it_is_split_with_all_layers_but_positions(style: str) -> None:
    module = gpt(style)
    share = split_share(module, proven(module))
    assert [name for name, _, _ in share.unsplit] == ["transformer.wpe.weight"] and share.value > 0.95


def test_four_ranks_have_a_head_each() -> None:
    sharding = proven(gpt("nanoGPT"), ParallelDims((("tp", 4),)))
    assert ("transformer.h.1.attn", "n_head", 1) in sharding.attributes and splits_attention(sharding)
    assert {(each.module, each.ranks, each.readers) for each in sharding.input_widths} == {
        (f"transformer.h.{i}.attn", 4, (f"transformer.h.{i}.attn.c_attn",)) for i in range(2)
    }


def test_heads_that_ranks_do_not_divide_stay_whole() -> None:
    assert not splits_attention(proven(gpt("nanoGPT"), ParallelDims((("tp", 3),))))


@pytest.mark.parametrize("style", ["reads its input", "reads one column", "gates with one column"])
def test_values_of_an_input_are_not_those_of_a_view_of_it(style: str) -> None:
    sharding = proven(gpt(style))
    if style == "reads one column":  # All ranks have this column, and multiply what they have summed
        assert splits_attention(sharding)
        return
    assert not splits_attention(sharding)


def test_a_line_with_a_global_number_is_named_with_the_change_that_lets_ranks_split_it() -> None:
    module = gpt("global")
    sharding = proven(module)
    reason = sharding.rule("transformer.h.1.attn.c_attn.weight").reason
    assert "at attention_styles.py:" in reason and "in `each.view(B, T, HEADS, C // HEADS)`" in reason
    assert "set `self.heads` to HEADS in __init__, write `self.heads`" in reason
    assert splits_attention(proven(gpt("changed global")))
    with pytest.raises(InputError, match=r"layout.require_split = 0.9: layout.tp = 2 splits 68.2% .*=0.68 .*whole"):
        check_split_share(module, sharding, DIMS, required=0.9)
    check_split_share(module, sharding, DIMS, required=0.68)


def test_what_is_frozen_or_kept_whole_by_a_rule_does_not_count() -> None:
    module = gpt("global")
    attention = [name for name, _ in module.named_parameters() if ".attn." in name]
    with_rules = proven_with_rules(module)
    assert [name for name, _, _ in split_share(module, with_rules).unsplit] == ["transformer.wpe.weight"]
    for name in attention:
        module.get_parameter(name).requires_grad_(False)
    assert [name for name, _, _ in split_share(module, proven(module)).unsplit] == ["transformer.wpe.weight"]


def proven_with_rules(module: nn.Module) -> ModelSharding:
    forwards = [partial(lambda batch: module(**batch)[1], batch_of(0, length)) for length in (6, 12)]
    return propose_sharding(module, ProofForwards(forwards, 2), DIMS, rules={"*.attn.*": "whole"})


def loss(module: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return module(**batch)[1] * batch["targets"].numel(), batch["targets"].numel()


def train(group: RankGroup, style: str, layout: str) -> list[tuple[float, float]]:
    with use_float64():
        module, optimizer = gpt(style).double(), {"learning_rate": 0.01}
        engine = parallelize(module, layout, loss=loss, example=batch_of(0), precision="fp64", optimizer=optimizer)
        assert group.world == 1 or splits_attention(engine.plan.model_sharding)
        steps = [engine.step(batch_of(step)) for step in range(STEPS)]
    return [(step.loss, step.grad_norm) for step in steps]


@pytest.mark.parametrize(
    ("style", "layout"),
    [
        ("nanoGPT", "tp=2"),
        ("nanoGPT", "tp=2 sp=true"),
        pytest.param("minGPT", "tp=2 sp=true", marks=pytest.mark.proof),
        pytest.param("GPT-NeoX", "tp=2", marks=pytest.mark.proof),
        pytest.param("ViT", "tp=2", marks=pytest.mark.proof),
        pytest.param("grouped", "tp=2 sp=true", marks=pytest.mark.proof),
        pytest.param("nanoGPT", "tp=4", marks=pytest.mark.proof),
    ],
)
def test_ranks_train_it_as_one_device(ranks: Ranks, style: str, layout: str) -> None:
    (alone,) = ranks.run(1, train, style, "")
    for steps in ranks.run(4 if "4" in layout else 2, train, style, layout):
        assert steps == [pytest.approx(expected, rel=1e-12) for expected in alone]


def warned(group: RankGroup) -> None:
    context = pytest.warns(UserWarning, match="leaves 31.8% of the parameters that it is meant to split whole")
    with use_float64(), context if group.rank == 0 else pytest.MonkeyPatch.context():
        parallelize(gpt("global").double(), "tp=2", loss=loss, example=batch_of(0), precision="fp64")


def test_the_first_rank_warns_of_what_stays_whole(ranks: Ranks) -> None:
    ranks.run(2, warned)
