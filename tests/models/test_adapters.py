"""Frozen parameters and low-rank adapters."""

import copy

import pytest
import torch
from small_models import SIZES, built
from torch import nn

from motet.models.adapters import add_adapters, freeze
from motet.models.hf.peft_weights import DrawnAdapters
from motet.models.settings import AdapterSettings, DecoderSettings
from refusals import refused

TOKENS = torch.arange(10).view(2, 5)


def decoder(**more: object) -> nn.Module:
    return built(DecoderSettings(**SIZES, **more), 3, torch.float64).module


def test_an_adapted_model_begins_as_the_model_it_was() -> None:
    plain, adapted = decoder(), decoder(adapters=AdapterSettings(rank=2))
    assert torch.equal(plain(TOKENS), adapted(TOKENS))
    names = dict(adapted.named_parameters())
    assert all(torch.equal(p, names[name]) and not names[name].requires_grad for name, p in plain.named_parameters())
    added = {name: tuple(p.shape) for name, p in names.items() if p.requires_grad}
    assert added.keys() == names.keys() - dict(plain.named_parameters()).keys()
    assert added["blocks.0.ffn.up.adapter_a"] == (2, 16) and added["blocks.0.ffn.up.adapter_b"] == (48, 2)
    assert len(added) == 2 * 4 * 2  # two of each of four linear layers in two blocks


def test_an_adapter_adds_its_low_rank_product() -> None:
    adapted = decoder(adapters=AdapterSettings(rank=2, alpha=6.0, targets=("*.ffn.down",)))
    layer = adapted.get_submodule("blocks.0.ffn.down")
    layer.adapter_b.data.normal_()
    merged = layer.weight + 3.0 * layer.adapter_b @ layer.adapter_a
    x = torch.randn(4, 24, dtype=torch.float64)
    assert (layer(x) - x @ merged.T).abs().max() < 1e-13
    assert not hasattr(adapted.get_submodule("blocks.0.ffn.up"), "adapter_a")


def test_gradients_reach_adapters_alone_and_copies_keep_them() -> None:
    adapted = copy.deepcopy(decoder(adapters=AdapterSettings(rank=2)))
    for name, parameter in adapted.named_parameters():
        if name.endswith("adapter_b"):
            parameter.data.normal_()
    adapted(TOKENS).square().sum().backward()
    for name, parameter in adapted.named_parameters():
        assert (parameter.grad is not None) == ("adapter" in name)
        assert parameter.grad is None or parameter.grad.any()


def test_values_of_an_adapter_depend_on_seed_and_name() -> None:
    one, all_of_them = (decoder(adapters=AdapterSettings(targets=t)) for t in (("blocks.1.ffn.up",), ("*",)))
    name = "blocks.1.ffn.up.adapter_a"
    assert torch.equal(one.get_parameter(name), all_of_them.get_parameter(name))
    assert not torch.equal(one.get_parameter(name), all_of_them.get_parameter("blocks.0.ffn.up.adapter_a"))


def test_a_convolution_of_gpt2_is_linear_too() -> None:
    layer = pytest.importorskip("transformers.pytorch_utils").Conv1D(12, 4)
    model = nn.Sequential(layer)
    add_adapters(model, AdapterSettings(rank=3, alpha=3.0), DrawnAdapters(0))
    assert layer.adapter_a.shape == (3, 4) and layer.adapter_b.shape == (12, 3)
    layer.adapter_b.data.normal_()
    x = torch.randn(2, 4)
    expected = x @ layer.weight + layer.bias + x @ (layer.adapter_b @ layer.adapter_a).T
    assert torch.allclose(model(x), expected, rtol=1e-5, atol=1e-6)


def test_projections_inside_torch_attention_are_no_layers_to_adapt() -> None:
    refused(r"the model has none", add_adapters, nn.MultiheadAttention(8, 2), AdapterSettings(), DrawnAdapters(0))


def test_frozen_parameters() -> None:
    model = decoder(frozen=("embedding.*", "blocks.0.*"))
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen == {n for n, _ in model.named_parameters() if n.startswith(("embedding.", "blocks.0."))}


def test_frozen_by_either_name_of_a_shared_tensor() -> None:
    model = nn.Module()
    model.table, model.head = nn.Embedding(4, 3), nn.Linear(3, 4, bias=False)
    model.head.weight = model.table.weight
    freeze(model, ("head.weight",))
    assert not model.table.weight.requires_grad


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"frozen": ("blocks.9.*",)}, r"model.frozen: 'blocks.9.\*' matches no parameter; the nearest names are block"),
        ({"frozen": ("*",)}, "nothing is left to train"),
        ({"adapters": AdapterSettings(targets=("*.q_proj",))}, r"targets: '\*.q_proj' matches no linear layer"),
        ({"adapters": AdapterSettings(), "frozen": ("*adapter*",)}, "nothing is left to train"),
    ],
)
def test_patterns_that_cannot_be_meant(more: dict[str, object], says: str) -> None:
    refused(says, decoder, **more)
