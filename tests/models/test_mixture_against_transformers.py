"""Mixtures of motet give the logits and all gradients of transformers' modules, in float64, with copied weights."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from test_against_transformers import (
    COMMON,
    LENGTH,
    OURS,
    VOCAB,
    Weights,
    fused_rows,
    llama_weights,
    load,
    randomised,
    renamed,
)
from torch import Tensor, nn

from motet.models.arch.decoder import CausalDecoder
from motet.models.arch.mixture.mixture_of_experts import MixtureOfExperts
from motet.models.arch.mixture.router import Router
from motet.models.settings import DecoderSettings
from motet.precision.float64_mode import use_float64

transformers = pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def in_float64() -> Iterator[None]:
    torch.manual_seed(0)
    transformers.utils.logging.set_verbosity_error()
    with use_float64():
        yield


def difference(ours: Tensor | None, theirs: Tensor | None) -> float:
    assert ours is not None and theirs is not None
    ours, theirs = ours.detach(), theirs.detach()
    assert ours.dtype == torch.float64 and theirs.norm() > 0
    return ((ours - theirs).norm() / theirs.norm()).item()


def mixture_weights(values: Weights, theirs: str, ours: str) -> Weights:
    """A router, experts and shared experts by our names."""
    weights = renamed(values, {"router": "gate"}, ours, theirs)
    names = {"router.correction": "gate.e_score_correction_bias", "experts.up": "experts.gate_up_proj"}
    names["experts.down"] = "experts.down_proj"
    weights |= {f"{ours}{a}": values[f"{theirs}{b}"] for a, b in names.items() if f"{theirs}{b}" in values}
    if f"{theirs}shared_experts.gate_proj.weight" in values:
        shared = f"{theirs}shared_experts.%s_proj.weight"
        weights[f"{ours}shared.up.weight"] = fused_rows(values, shared, ("gate", "up"))
        weights[f"{ours}shared.down.weight"] = values[shared % "down"]
    return weights


def latent_weights(values: Weights, theirs: str, ours: str, *, plain: int, rotated: int) -> Weights:
    """Latent attention; the rotated rows of a head are its last ones there."""
    names = {"query_down": "q_a_proj", "query_norm": "q_a_layernorm", "key_value_down": "kv_a_proj_with_mqa"}
    names |= {"key_value_norm": "kv_a_layernorm", "key_value_up": "kv_b_proj", "output": "o_proj"}
    weights = renamed(values, names, f"{ours}attention.", f"{theirs}self_attn.")
    for a, b in {"query_up": "q_b_proj", "query": "q_proj"}.items():
        if (heads := values.get(f"{theirs}self_attn.{b}.weight")) is not None:
            parts = heads.unflatten(0, (-1, plain + rotated)).split((plain, rotated), dim=1)
            weights[f"{ours}attention.{a}.weight"] = torch.cat(parts[::-1], dim=1).flatten(0, 1)
    return weights


def all_weights(theirs: Any, ours: DecoderSettings, values: Weights) -> Weights:
    weights = llama_weights(theirs, ours.dim_per_head, values)
    for i in range(ours.layers):
        names = f"model.layers.{i}.", f"blocks.{i}."
        weights |= mixture_weights(values, f"{names[0]}mlp.", f"{names[1]}ffn.")
        if (latent := ours.latent_attention) is not None:
            sizes = {"plain": latent.plain_head_dim, "rotated": latent.rotary_head_dim}
            weights |= latent_weights(values, *names, **sizes)
    return weights


FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {}
FAMILIES["mixtral"] = (
    "Mixtral",
    {"num_local_experts": 5, "num_experts_per_tok": 2, "num_key_value_heads": 2, "sliding_window": 6},
    {
        "experts": {"count": 5, "per_token": 2, "hidden": 48},
        "kv_heads": 2,
        "sliding_window": 6,
        "norm_eps": 1e-5,
        "rope_theta": 1e6,
    },
)
_QWEN = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 12, "head_dim": 10}
FAMILIES["qwen3-moe"] = (
    "Qwen3Moe",
    {**_QWEN, "num_key_value_heads": 2, "norm_topk_prob": False, "mlp_only_layers": [0]},
    {
        "experts": {
            "count": 6,
            "per_token": 3,
            "hidden": 12,
            "normalize_weights": False,
            "first_dense_layers": 1,
        },
        "kv_heads": 2,
        "head_dim": 10,
        "query_key_norm": True,
        "norm_eps": 1e-6,
    },
)
_DEEPSEEK = {"moe_intermediate_size": 12, "n_shared_experts": 2, "n_routed_experts": 12, "num_experts_per_tok": 3}
_DEEPSEEK |= {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "first_k_dense_replace": 1}
_DEEPSEEK |= {"kv_lora_rank": 14, "qk_rope_head_dim": 6, "qk_nope_head_dim": 8, "v_head_dim": 10}
_EXPERTS = {"count": 12, "per_token": 3, "hidden": 12, "shared": 2, "first_dense_layers": 1, "scores": "sigmoid"}
_EXPERTS |= {"groups": 4, "groups_per_token": 2, "weight_scale": 2.5}
_LATENT = {"key_value_rank": 14, "rotary_head_dim": 6, "plain_head_dim": 8, "value_head_dim": 10}
for rank in (None, 18):
    FAMILIES[f"deepseek-v3-{rank or 'direct'}"] = (
        "DeepseekV3",
        {**_DEEPSEEK, "q_lora_rank": rank, "num_key_value_heads": 4},
        {
            "experts": _EXPERTS,
            "latent_attention": {**_LATENT, "query_rank": rank},
            "balance": {"kind": "bias"},
            "norm_eps": 1e-6,
        },
    )


FAMILIES["olmoe with one head"] = (  # One head is all heads, of which OLMoE norms queries and keys together
    "Olmoe",
    {
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "norm_topk_prob": False,
        "num_attention_heads": 1,
        "pad_token_id": None,
    },
    {
        "experts": {"count": 6, "per_token": 3, "hidden": 48, "normalize_weights": False},
        "heads": 1,
        "query_key_norm": True,
    },
)


def made_by_transformers(name: str, **values: Any) -> Any:
    """A model with random values, corrections included."""
    config = getattr(transformers, f"{name}Config")(**{**COMMON, **values})
    theirs = randomised(getattr(transformers, f"{name}ForCausalLM")(config))
    for buffer_name, buffer in theirs.named_buffers():
        if buffer_name.endswith("correction_bias"):
            buffer.normal_(0, 0.2)
    return theirs


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_all_gradients(family: str) -> None:
    name, values, more = FAMILIES[family]
    theirs, settings = made_by_transformers(name, **values), settings_with(**more)
    compare_models(theirs, settings, all_weights(theirs, settings, theirs.state_dict()), all_weights)


def settings_with(**more: Any) -> DecoderSettings:
    return DecoderSettings.model_validate({**OURS, "tied": False, **more})


def compare_models(
    theirs: Any, settings: DecoderSettings, weights: Weights, named: Callable[[Any, DecoderSettings, Weights], Weights]
) -> None:
    """Logits and all of our gradients; `named` gives gradients of their tensors our names."""
    ours = load(CausalDecoder(settings).double(), weights)
    tokens = torch.randint(0, VOCAB, (3, LENGTH))
    logits, expected = ours(tokens), theirs(tokens).logits
    assert difference(logits, expected) < 1e-12
    weight = torch.randn_like(logits)
    for output in (logits, expected):
        (output * weight).sum().backward()
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters() if parameter.grad is not None}
    by_our_names = named(theirs, settings, gradients)
    for name, parameter in ours.named_parameters():
        assert difference(parameter.grad, by_our_names[name]) < 1e-12, name


def test_olmoe_with_its_heads_but_no_norms_of_queries_and_keys() -> None:
    """Its attention norms all heads together, as motet's does not; all else is compared."""
    values: dict[str, Any] = {
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "num_key_value_heads": 2,
    }
    values["pad_token_id"] = None  # The embedding of such a token would get no gradient
    theirs = made_by_transformers("Olmoe", **values)
    for layer in theirs.model.layers:
        layer.self_attn.q_norm = layer.self_attn.k_norm = nn.Identity()
    settings = settings_with(experts={"count": 6, "per_token": 3, "hidden": 48}, kv_heads=2)
    compare_models(theirs, settings, all_weights(theirs, settings, theirs.state_dict()), all_weights)


def gpt_oss_weights(theirs: Any, ours: DecoderSettings, values: Weights, *, gate: float) -> Weights:
    """Their gates and values alternate, and their matrices are transposed. Our gates are theirs times a factor."""
    weights = llama_weights(theirs, ours.dim_per_head, values)
    for i in range(ours.layers):
        mlp = f"model.layers.{i}.mlp."
        weights[f"blocks.{i}.ffn.router.weight"] = values[f"{mlp}router.weight"]
        up, down = (values[f"{mlp}experts.{name}_proj"].mT for name in ("gate_up", "down"))
        weights[f"blocks.{i}.ffn.experts.up"] = torch.cat((up[:, ::2] * gate, up[:, 1::2]), dim=1)
        weights[f"blocks.{i}.ffn.experts.down"] = down / gate
    return weights


def test_gpt_oss_without_what_motet_has_not() -> None:
    """Sinks that take no weight, no biases in routers and experts but the -1 that its 1 + up needs, and no clamped
    value. With a = 1.702, its g sigmoid(a g) is silu(a g) / a, so our gates are a times theirs, our outputs 1 / a."""
    sizes = {"num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 10, "head_dim": 10}
    layers = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 6, "num_key_value_heads": 2}
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    theirs = made_by_transformers("GptOss", **sizes, **layers, **rope, attn_implementation="eager")
    with torch.no_grad():
        for layer in theirs.model.layers:
            experts, alpha = layer.mlp.experts, layer.mlp.experts.alpha
            layer.self_attn.sinks.fill_(-torch.inf)
            for bias in (layer.mlp.router.bias, experts.gate_up_proj_bias, experts.down_proj_bias):
                bias.zero_()
            experts.gate_up_proj_bias[:, 1::2] = -1
            experts.register_forward_pre_hook(partial(check_nothing_is_clamped, limit=experts.limit))
    settings = settings_with(
        experts={"count": 6, "per_token": 3, "hidden": 10}, kv_heads=2, head_dim=10, sliding_window=6, bias=True
    )
    weights = gpt_oss_weights(theirs, settings, theirs.state_dict(), gate=alpha)
    compare_models(theirs, settings, weights, partial(gpt_oss_weights, gate=1 / alpha))


def check_nothing_is_clamped(experts: Any, inputs: tuple[Tensor, ...], *, limit: float) -> None:
    values = torch.einsum("...h,ehi->...ei", inputs[0], experts.gate_up_proj) + experts.gate_up_proj_bias
    assert values.abs().max() < limit


def test_the_layer_of_olmoe() -> None:
    """A layer alone, whose input has a gradient."""
    config = transformers.OlmoeConfig(**COMMON, num_experts=6, num_experts_per_tok=3, norm_topk_prob=False)
    theirs = randomised(transformers.models.olmoe.modeling_olmoe.OlmoeSparseMoeBlock(config))
    experts = {"count": 6, "per_token": 3, "hidden": 48, "normalize_weights": False}
    settings = DecoderSettings.model_validate({**OURS, "experts": experts})
    assert settings.experts is not None
    ours = load(MixtureOfExperts(settings, settings.experts), mixture_weights(theirs.state_dict(), "", ""))
    compare_layers(ours, theirs, {"router.weight": "gate.weight", "experts.up": "experts.gate_up_proj"})


def test_the_routing_of_gpt_oss() -> None:
    """Its experts have biases and a clamped gate, as motet's do not: here they get what motet's router chooses."""
    sizes = {"num_local_experts": 6, "num_experts_per_tok": 3, "hidden_size": 32, "intermediate_size": 10}
    theirs = randomised(transformers.models.gpt_oss.modeling_gpt_oss.GptOssMLP(transformers.GptOssConfig(**sizes)))
    nn.init.zeros_(theirs.router.bias)
    experts = {"count": 6, "per_token": 3, "hidden": 10}
    settings = DecoderSettings.model_validate({**OURS, "experts": experts})
    assert settings.experts is not None
    router = load(Router(32, settings.experts), {"weight": theirs.router.weight.detach()})

    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = router

        def forward(self, x: Tensor) -> Tensor:
            _, weights, chosen = self.router(x)
            return theirs.experts(x.flatten(0, 1), chosen.flatten(0, 1), weights.flatten(0, 1)).view_as(x)

    compare_layers(Routed(), theirs, {"router.weight": "router.weight"})


def compare_layers(ours: nn.Module, theirs: nn.Module, names: dict[str, str]) -> None:
    x = torch.randn(3, LENGTH, 32, requires_grad=True)
    copy, outputs = x.detach().clone().requires_grad_(), []
    for module, inputs in ((ours, x), (theirs, copy)):
        result = module(inputs)
        outputs.append(result[0] if isinstance(result, tuple) else result)
    assert difference(*outputs) < 1e-12
    for output in outputs:
        (output * torch.linspace(-1, 1, output.numel()).view_as(output)).sum().backward()
    assert difference(x.grad, copy.grad) < 1e-12
    for name, other in names.items():
        assert difference(ours.get_parameter(name).grad, theirs.get_parameter(other).grad) < 1e-12, name
