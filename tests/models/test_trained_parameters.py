"""Adapters and frozen parameters in the sizes of a model: those of the module, and what torch keeps and computes."""

from typing import Any

import pytest
import torch
from spec_cases import CASES, LATENT, MIXTURES, SMALL, forward, kept_bytes
from torch.utils.flop_counter import FlopCounterMode

from motet.models.arch import logit_slices
from motet.models.build import build_trainable_model
from motet.models.settings import AdapterSettings, DecoderSettings, EncoderDecoderSettings, TransformerSettings
from motet.models.spec.layer_specs import MicroBatchShape
from motet.models.spec.model_spec import ModelSpec, spec_from_settings

SHAPE = MicroBatchShape(3, 11, 9)
TABLE = "embedding.weight"
CHOICES: list[dict[str, Any]] = [
    {"adapters": AdapterSettings(rank=2)},
    {"adapters": AdapterSettings(rank=3, targets=("*1.*.up", "*output"))},
    {"adapters": AdapterSettings(targets=("*.down",)), "frozen": ("*0.*adapter_a",)},
    {"frozen": ("embedding*",)},
    {"frozen": ("*blocks.0.*", "embedding*")},
    {"frozen": ("*blocks.1.*",)},
    {"frozen": ("*norm*", "*.down.*")},
    {"frozen": ("*.weight",), "adapters": AdapterSettings(targets=("*blocks.1.attention.qkv",))},
]


@pytest.fixture(autouse=True)
def _as_many_targets_as_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logit_slices, "TARGET_COUNT_MULTIPLE", 1)


OF_MIXTURES: list[dict[str, Any]] = [
    {"adapters": AdapterSettings(rank=2)},
    {"adapters": AdapterSettings(rank=2, targets=("*attention*",))},
    {"frozen": ("*blocks.0.*", "embedding*")},
    {"frozen": ("*router*", "*experts.up")},
    {"frozen": ("*experts*",)},
]


def models(kind: type[TransformerSettings], choice: dict[str, Any]) -> list[TransformerSettings]:
    cases, mixtures = CASES[kind], [*MIXTURES, LATENT[-1]]
    if kind is DecoderSettings:
        is_for_mixtures = any(choice is each for each in OF_MIXTURES)
        cases = mixtures if is_for_mixtures else [each for each in cases if each not in (*MIXTURES, *LATENT)]
    return [kind.model_validate({**SMALL, **values, **choice}) for values in cases]


def parameters(spec: ModelSpec) -> dict[str, tuple[tuple[int, ...], bool]]:
    each = (p for block in spec.blocks for repetition in block.parameters_by_repetition() for p in repetition)
    return {parameter.name: (parameter.shape, parameter.is_trained) for parameter in each}


KINDS_AND_CHOICES = [(kind, choice) for kind in CASES for choice in CHOICES]
KINDS_AND_CHOICES += [(DecoderSettings, choice) for choice in OF_MIXTURES]


@pytest.mark.parametrize(("kind", "choice"), KINDS_AND_CHOICES, ids=str)
def test_parameters_are_those_of_the_module(kind: type[TransformerSettings], choice: dict[str, Any]) -> None:
    for model in models(kind, choice):
        module = build_trainable_model(model, 0, torch.float32, torch.device("cpu"), on_meta=True).module
        expected = {name: (tuple(p.shape), p.requires_grad) for name, p in module.named_parameters()}
        assert parameters(spec_from_settings(model)) == expected


@pytest.mark.parametrize(
    ("kind", "choice"), [each for each in KINDS_AND_CHOICES if each[0] is not EncoderDecoderSettings], ids=str
)
def test_a_forward_keeps_what_gradients_need(kind: type[TransformerSettings], choice: dict[str, Any]) -> None:
    for model in models(kind, choice):
        spec = spec_from_settings(model)
        assert kept_bytes(model, SHAPE, torch.float32) == spec.saved_bytes(SHAPE, "float32"), model


def computed_flops(model: TransformerSettings) -> int:
    _, loss = forward(model, SHAPE, torch.float32)
    with FlopCounterMode(display=False) as counter:
        loss().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_a_backward_computes_the_products_of_what_is_trained(choice: dict[str, Any]) -> None:
    sizes = {**SMALL, "dropout": 0.1, "tied": False}  # So that attention is no fused kernel
    for more in ({}, choice):
        model = DecoderSettings.model_validate({**sizes, **more})
        spec = spec_from_settings(model)
        head = 2 * SHAPE.count("token") * model.hidden * model.vocab_size  # Added in place, which torch does not count
        uncounted = head * parameters(spec)["head.weight"][1]
        assert spec.training_flops(SHAPE, "full") == computed_flops(model) + uncounted
