"""Forward and backward of complete models with every kernel in Triton, against the plain definitions."""

from collections import Counter

import pytest
import torch
from gpu_checks.kernel_patches import kernels_forced, recorded_launches
from torch import Tensor

from motet.core.batch import Batch
from motet.models.build import build_trainable_model
from motet.models.settings import DecoderSettings, EncoderDecoderSettings, ModelSettings
from motet.train.job import load_job
from triton_interpreter import Interpreted

SMALL = {"vocab_size": 30, "context": 16, "layers": 2, "hidden": 20, "heads": 2, "ffn_hidden": 23}
LATENT = {"key_value_rank": 5, "query_rank": 7, "plain_head_dim": 6, "rotary_head_dim": 4, "value_head_dim": 5}


def settings_of(name: str) -> ModelSettings:
    if name == "tiny":
        return load_job("tiny", []).model
    if name == "t5":
        return EncoderDecoderSettings(family="encoder-decoder", **SMALL, norm="rms", gated=True, dropout=0.2)
    options = {
        "query-key norm and dropout": {"query_key_norm": True, "kv_heads": 1, "rotary_fraction": 0.4, "dropout": 0.2},
        "latent attention": {"latent_attention": LATENT, "activation": "gelu_tanh"},
        "layer norm": {"norm": "layer", "gated": False},
    }
    return DecoderSettings(family="decoder", **SMALL, **options[name])


def step(settings: ModelSettings, implementation: str) -> tuple[Tensor, dict[str, Tensor], Counter[str]]:
    """The loss, all gradients and the launches of kernels, in float64."""
    model = build_trainable_model(settings, 0, torch.float64, torch.device("cpu"))
    for parameter in model.module.parameters():
        parameter.data.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)), alpha=0.1)
    tokens, targets, source = (
        torch.randint(30, (3, 9), generator=torch.Generator().manual_seed(seed)) for seed in range(3)
    )
    rows, weights = torch.arange(3), torch.ones(3, 9)
    is_encoder_decoder = isinstance(settings, EncoderDecoderSettings)
    batch = Batch(tokens, targets, weights, rows, source=source if is_encoder_decoder else None)
    with kernels_forced(implementation), recorded_launches() as launches, model.randomness(0, rows):
        loss = model.loss_sum(batch)
        loss.backward()
    gradients = {name: p.grad for name, p in model.module.named_parameters() if p.grad is not None}
    return loss.detach(), gradients, Counter(launch.kernel for launch in launches)


def check_step(name: str) -> dict[str, int]:
    settings = settings_of(name)
    loss, gradients, launches = step(settings, "triton")
    plain_loss, plain_gradients, none = step(settings, "plain")
    assert not none and gradients.keys() == plain_gradients.keys() and abs(loss - plain_loss) < 1e-12 * abs(plain_loss)
    for parameter, gradient in gradients.items():
        expected = plain_gradients[parameter]
        assert expected.abs().max() > 0 and (gradient - expected).abs().max() < 1e-12 * max(1, expected.abs().max())
    return dict(launches)


def test_a_step_of_tiny(interpreted: Interpreted) -> None:
    """Each of its 4 blocks has two norms, of which one follows an addition, a rotation and a gate; a norm ends it."""
    launches = interpreted(check_step, "tiny")
    blocks = {"rms_norm_forward": 9, "rms_norm_backward": 9, "rotate_pairs": 8, "gate_forward": 4, "gate_backward": 4}
    assert {name: launches.get(name) for name in blocks} == blocks


@pytest.mark.parametrize("name", ["t5", "query-key norm and dropout", "latent attention", "layer norm"])
def test_a_step_of_other_models(interpreted: Interpreted, name: str) -> None:
    launches = interpreted(check_step, name)
    assert ("drop_elements" in launches) == (name in ("t5", "query-key norm and dropout"))
    assert ("rms_norm_forward" in launches) == (name != "layer norm")
