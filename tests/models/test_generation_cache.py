"""Generation with cached keys and values: the logits of a forward of all tokens, and the sampler by its definition."""

from itertools import product
from typing import Any

import pytest
import torch
from small_models import SIZES, built

from motet.models.arch.key_value_cache import KeyValueCache
from motet.models.build import TrainableModel
from motet.models.generation import GeneratedText, TokenSampler, continue_text, generate_tokens
from motet.models.settings import AdapterSettings, DecoderSettings, RopeScalingSettings
from refusals import refused

SETTINGS: dict[str, dict[str, Any]] = {
    "llama": {"kv_heads": 2, "tied": False},
    "llama 3.1": {"rope_scaling": RopeScalingSettings(original_context=4)},
    "gpt2": {"positions": "learned", "norm": "layer", "bias": True, "gated": False, "activation": "gelu_tanh"},
    "qwen 3": {"query_key_norm": True, "head_dim": 6, "qkv_bias": True},
    "mistral": {"sliding_window": 5, "kv_heads": 1},
    "window of one": {"sliding_window": 1},
    "half rotary": {"rotary_fraction": 0.5, "activation": "relu_squared", "gated": False},
    "no positions": {"positions": "none"},
    "adapters": {"adapters": AdapterSettings(rank=2)},
    "dropout": {"dropout": 0.5},
}


def model_of(name: str, dtype: torch.dtype = torch.float64) -> TrainableModel:
    model = built(DecoderSettings(**SIZES, init_std=0.5, **SETTINGS[name]), 1, dtype)
    with torch.no_grad():
        for parameter in model.module.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3), dtype=dtype)
    return model


@pytest.mark.parametrize("name", SETTINGS)
def test_logits_with_a_cache_are_those_without(name: str) -> None:
    model = model_of(name)
    module, next_logits = model.module.eval(), model.next_logits
    assert next_logits is not None
    tokens = torch.randint(0, 30, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = module(tokens)
        for sizes in ([1] * 16, [7, 1, 1, 5, 2], [16]):  # any parts
            cache, first = KeyValueCache(16), 0
            for size in sizes:
                first += size
                logits = next_logits(tokens[:, first - size : first], cache)
                difference = (logits - expected[:, first - 1]).abs().max()
                assert difference <= 1e-12 * expected.abs().max(), (sizes, first)


@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral"])
def test_tokens_with_a_cache_are_those_without(name: str) -> None:
    model = model_of(name)
    for temperature in (0.0, 1.0):
        tokens = [
            generate_tokens(m, [3, 1], 25, seed=2, temperature=temperature) for m in (model, without_cache(model))
        ]
        assert tokens[0] == tokens[1] and len(tokens[0]) == 25  # 11 beyond the context


def without_cache(model: TrainableModel) -> TrainableModel:
    from dataclasses import replace

    return replace(model, next_logits=None)


def test_probabilities_by_their_definition() -> None:
    scores = torch.tensor([2.0, -1.0, 0.5, 2.0, 0.0, float("-inf")], dtype=torch.float64)
    for temperature, top_p in product((0.3, 1.0, 4.0), (1e-9, 0.3, 0.5, 0.7, 0.9, 0.999, 1.0)):
        plain = (scores / temperature).exp() / (scores / temperature).exp().sum()
        drawn, reached = set[int](), 0.0
        for token in sorted(range(6), key=lambda token: (-plain[token].item(), token)):
            if reached < top_p or not drawn:
                drawn.add(token)
            reached += plain[token].item()
        probabilities = TokenSampler(0, temperature, top_p).probabilities(scores)
        for token in range(6):
            assert probabilities[token].item() == pytest.approx(plain[token].item() if token in drawn else 0, abs=1e-14)


def test_frequencies_of_tokens() -> None:
    scores = torch.tensor([1.0, 0.0, 3.0, 2.0])
    sampler, drawn = TokenSampler(7, temperature=1.5, top_p=0.8), torch.zeros(4, dtype=torch.float64)
    for n in range(4000):
        drawn[sampler.choose(scores, n)] += 1
    wanted = sampler.probabilities(scores.double())
    assert (drawn / 4000 - wanted / wanted.sum()).abs().max() < 0.03 and drawn[1] == 0
    assert TokenSampler(0, 0).choose(scores, 0) == 2 and TokenSampler(0, 1e-300).choose(scores, 0) == 2
    assert TokenSampler(0).choose(torch.tensor([0.0, float("nan"), 1.0]), 0) == 1


def test_how_a_text_ends() -> None:
    model, seen = model_of("llama"), list[int]()
    long = continue_text(model, [1, 2], GeneratedText(TokenSampler(0, 0), 99))
    assert long.stop == "context" and len(long.tokens) == 15  # the last token is not read again
    few = continue_text(model, [1, 2], GeneratedText(TokenSampler(0, 0), 4, on_token=seen.append))
    assert few == (long.tokens[:4], "tokens") and seen == few.tokens
    end = long.tokens[6]
    ended = continue_text(model, [1, 2], GeneratedText(TokenSampler(0, 0), 99, stop_ids=[end]))
    assert ended == (long.tokens[: long.tokens.index(end)], "end")


def test_what_is_refused() -> None:
    model, text = model_of("llama"), GeneratedText(TokenSampler(0), 4)
    refused("the prompt has 16 tokens, but the context of the model holds 16", continue_text, model, [1] * 16, text)
    refused("no token after which", continue_text, model, [], text)
