"""Continuing a text."""

import pytest
import torch
from small_models import SIZES as LARGER
from small_models import built

from motet.models.build import TrainableModel
from motet.models.generation import generate_tokens
from motet.models.settings import DecoderSettings, EncoderSettings
from refusals import refused

SIZES = {**LARGER, "context": 6, "layers": 1}


@pytest.fixture
def model() -> TrainableModel:
    return built(DecoderSettings(**SIZES, dropout=0.5, init_std=0.5), 1)


def test_the_likeliest_token_each_time_also_beyond_the_context(model: TrainableModel) -> None:
    written = generate_tokens(model, [1, 2, 3], 8, seed=0, temperature=0)
    assert len(written) == 8
    assert model.module.training  # as it was before
    model.module.eval()
    for n in range(8):
        seen = ([1, 2, 3, *written[:n]])[-6:]
        assert written[n] == int(model.module(torch.tensor([seen]))[0, -1].argmax())


def test_samples_depend_on_the_seed_alone(model: TrainableModel) -> None:
    written = generate_tokens(model, [1], 12, seed=5)
    torch.manual_seed(9)
    assert generate_tokens(model, [1], 12, seed=5) == written and generate_tokens(model, [1], 12, seed=6) != written
    assert generate_tokens(model, [1], 4, seed=5) == written[:4]


def test_the_temperature_spreads_the_samples(model: TrainableModel) -> None:
    cold = generate_tokens(model, [1], 8, seed=3, temperature=1e-6)
    assert cold == generate_tokens(model, [1], 8, seed=0, temperature=0)
    assert len(set(generate_tokens(model, [1], 20, seed=3, temperature=50.0))) > 10


def test_what_cannot_be_continued(model: TrainableModel) -> None:
    refused(r"is not a causal decoder", generate_tokens, built(EncoderSettings(**SIZES)), [1], 1, seed=0)
    refused(r"no token after which", generate_tokens, model, [], 1, seed=0)
