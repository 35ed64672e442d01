"""Settings from a Hugging Face-style config.json, without transformers and without torch.

They tell the sizes: parameters, FLOPs and activations of the model that transformers would build from the same
config. What changes numbers but no size (stretched rotary wavelengths other than Llama 3.1's, scaled logits, routing
details) is left out, so a model is trained from its config with `factory = "hf:..."`, not from these settings.
Keys that are absent get the values that transformers gives them.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from motet.core.errors import InputError
from motet.models import config_defaults as defaults
from motet.models.settings import Architecture, DecoderSettings, EncoderDecoderSettings, EncoderSettings

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu_squared",
}


@dataclass(frozen=True)
class _Config:
    """The values of a config, with sentences about those that cannot be."""

    values: dict[str, Any]

    def whole(self, key: str, least: int = 1) -> int:
        value = self.values.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self.wrong(key, f"it must be a whole number of at least {least}")
        return value

    def optional(self, key: str) -> int | None:
        return None if self.values.get(key) is None else self.whole(key)

    def flag(self, key: str) -> bool:
        value = self.values.get(key, False)
        if not isinstance(value, bool):
            raise self.wrong(key, "it must be true or false")
        return value

    def group(self, key: str) -> dict[str, Any]:
        value = self.values.get(key) or {}
        if not isinstance(value, dict):
            raise self.wrong(key, "it must be a group of values")
        return value

    def activation(self, key: str) -> str:
        value = self.values.get(key)
        if not isinstance(value, str) or value not in _ACTIVATIONS:
            raise self.wrong(key, f"known activations: {', '.join(_ACTIVATIONS)}")
        return _ACTIVATIONS[value]

    def refuse(self, *keys: str) -> None:
        for key in keys:
            if self.values.get(key):
                raise self.wrong(key, "models with it are not described here; leave it out")

    def wrong(self, key: str, remedy: str) -> InputError:
        return InputError(f"config.json: {key} = {self.values.get(key)!r}: {remedy}")


@dataclass(frozen=True)
class _Family:
    """A `model_type`: how it is read, the classes whose parameters are meant, and the defaults of its keys."""

    read: Callable[[_Config], Architecture]
    classes: tuple[str, ...]
    defaults: dict[str, Any]
    aliases: dict[str, str]
    """Another name of a key -> the name it is read by."""


def settings_from_config(config: dict[str, Any]) -> Architecture:
    """The settings of one of our architectures that has the sizes of the model of `config`."""
    kind = config.get("model_type")
    family = _FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        raise InputError(f"config.json: model_type = {kind!r} is unknown; known are {', '.join(sorted(_FAMILIES))}")
    named = {family.aliases.get(key, key): value for key, value in config.items()}
    values = _Config({**defaults.COMMON, **family.defaults, **named})
    classes = named.get("architectures") or [family.classes[0]]
    if not isinstance(classes, list) or classes[0] not in family.classes:
        raise values.wrong("architectures", f"for {kind}, sizes are known of {' and '.join(family.classes)}")
    try:
        return family.read(values)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in problem["loc"])
        raise InputError(f"config.json of a {kind}: {place} = {problem['input']!r}: {problem['msg']}") from None


def read_config(path: str | Path) -> dict[str, Any]:
    """The config of a Hugging Face folder, or of the path of its config.json."""
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(
            f"cannot read {file}: {error.strerror}; give a folder with a config.json, or its path"
        ) from None
    except ValueError as error:
        raise InputError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise InputError(f"{file} holds a {type(config).__name__}; a config is a JSON object with a model_type")
    return config


# --- families --------------------------------------------------------------------------------------


def _rotary(c: _Config) -> dict[str, Any]:
    """Old configs have `rope_theta` and `rope_scaling`, newer ones `rope_parameters`."""
    rope = {**c.group("rope_scaling"), **c.group("rope_parameters")}
    found: dict[str, Any] = {
        "rope_theta": rope.get("rope_theta", c.values.get("rope_theta", 10000.0)),
        "rotary_fraction": rope.get("partial_rotary_factor", c.values.get("partial_rotary_factor", 1.0)),
    }
    if rope.get("rope_type", rope.get("type")) == "llama3":
        names = {
            "factor": "factor",
            "low_frequency_factor": "low_freq_factor",
            "high_frequency_factor": "high_freq_factor",
            "original_context": "original_max_position_embeddings",
        }
        found["rope_scaling"] = {ours: rope[theirs] for ours, theirs in names.items() if theirs in rope}
    return found


def _decoder_values(c: _Config) -> dict[str, Any]:
    """What the relatives of Llama have in common."""
    hidden, heads = c.whole("hidden_size"), c.whole("num_attention_heads")
    return {
        "vocab_size": c.whole("vocab_size"),
        "context": c.whole("max_position_embeddings"),
        "layers": c.whole("num_hidden_layers"),
        "hidden": hidden,
        "heads": heads,
        "head_dim": c.optional("head_dim") or hidden // heads,
        "kv_heads": c.optional("num_key_value_heads") or heads,
        "ffn_hidden": c.whole("intermediate_size"),
        "activation": c.activation("hidden_act"),
        "norm_eps": c.values.get("norm_eps", c.values["rms_norm_eps"]),
        "init_std": c.values["initializer_range"],
        "tied": c.flag("tie_word_embeddings"),
        **_rotary(c),
    }


def _decoder(c: _Config, **more: object) -> DecoderSettings:
    return DecoderSettings.model_validate({**_decoder_values(c), **more})


def _attention_biases(c: _Config) -> dict[str, bool]:
    """`attention_bias` stands for all four projections, `mlp_bias` for the feed-forward network."""
    attention = c.flag("attention_bias")
    return {"qkv_bias": attention, "bias": attention, "ffn_bias": c.flag("mlp_bias")}


def _llama(c: _Config) -> DecoderSettings:
    return _decoder(c, **_attention_biases(c))


def _mistral(c: _Config) -> DecoderSettings:
    return _decoder(c, sliding_window=c.optional("sliding_window"))


def _qwen_window(c: _Config) -> int | None:
    """Qwen's first `max_window_layers` see everything; the window is kept only if every layer has it."""
    everywhere = c.flag("use_sliding_window") and c.whole("max_window_layers", 0) == 0
    return c.optional("sliding_window") if everywhere else None


def _qwen2(c: _Config) -> DecoderSettings:
    return _decoder(c, qkv_bias=True, sliding_window=_qwen_window(c))


def _qwen3(c: _Config) -> DecoderSettings:
    biases = {**_attention_biases(c), "ffn_bias": False}
    return _decoder(c, query_key_norm=True, sliding_window=_qwen_window(c), **biases)


def _nemotron(c: _Config) -> DecoderSettings:
    return _decoder(c, norm="layer", norm_bias=True, gated=False, **_attention_biases(c))


def _mixtral(c: _Config) -> DecoderSettings:
    experts = {
        "count": c.whole("num_local_experts"),
        "per_token": c.whole("num_experts_per_tok"),
        "hidden": c.whole("intermediate_size"),
    }
    return _decoder(c, experts=experts, sliding_window=c.optional("sliding_window"))


def _deepseek_v3(c: _Config) -> DecoderSettings:
    """The main model; the module that predicts further tokens is not a part of it in transformers either."""
    attention = c.flag("attention_bias")
    latent = {
        "query_rank": c.optional("q_lora_rank"),
        "key_value_rank": c.whole("kv_lora_rank"),
        "rotary_head_dim": c.whole("qk_rope_head_dim"),
        "plain_head_dim": c.whole("qk_nope_head_dim"),
        "value_head_dim": c.whole("v_head_dim"),
    }
    experts = {
        "count": c.whole("n_routed_experts"),
        "per_token": c.whole("num_experts_per_tok"),
        "hidden": c.whole("moe_intermediate_size"),
        "shared": c.whole("n_shared_experts", 0),
        "first_dense_layers": min(c.whole("first_k_dense_replace", 0), c.whole("num_hidden_layers")),
    }
    # `head_dim` is the rotated part of a head here, and every head has keys of its own.
    heads = {"head_dim": latent["plain_head_dim"], "kv_heads": c.whole("num_attention_heads")}
    biases = {"qkv_bias": attention, "bias": attention, "ffn_bias": False}
    return _decoder(c, latent_attention=latent, experts=experts, **heads, **biases)


def _gpt2(c: _Config) -> DecoderSettings:
    c.refuse("add_cross_attention")
    hidden = c.whole("n_embd")
    return DecoderSettings.model_validate(
        {
            "vocab_size": c.whole("vocab_size"),
            "context": c.whole("n_positions"),
            "layers": c.whole("n_layer"),
            "hidden": hidden,
            "heads": c.whole("n_head"),
            "ffn_hidden": c.optional("n_inner") or 4 * hidden,
            "activation": c.activation("activation_function"),
            "gated": False,
            "norm": "layer",
            "norm_eps": c.values["layer_norm_epsilon"],
            "positions": "learned",
            "bias": True,
            "dropout": c.values["resid_pdrop"],
            "init_std": c.values["initializer_range"],
            "tied": c.flag("tie_word_embeddings"),
        }
    )


def _bert(c: _Config) -> EncoderSettings:
    c.refuse("add_cross_attention", "is_decoder")
    classify = (c.values.get("architectures") or [""])[0] == "BertForSequenceClassification"
    if not classify and not c.flag("tie_word_embeddings"):
        raise c.wrong("tie_word_embeddings", "the masked-token head is the embedding table; it must be true")
    labels = c.group("id2label")
    return EncoderSettings.model_validate(
        {
            "vocab_size": c.whole("vocab_size"),
            "context": c.whole("max_position_embeddings"),
            "layers": c.whole("num_hidden_layers"),
            "hidden": c.whole("hidden_size"),
            "heads": c.whole("num_attention_heads"),
            "ffn_hidden": c.whole("intermediate_size"),
            "activation": c.activation("hidden_act"),
            "norm_eps": c.values["layer_norm_eps"],
            "dropout": c.values["hidden_dropout_prob"],
            "init_std": c.values["initializer_range"],
            "head": "classify" if classify else "masked",
            "classes": len(labels) or c.values.get("num_labels", 2),
            "token_types": c.whole("type_vocab_size", 0),
        }
    )


def _t5(c: _Config) -> EncoderDecoderSettings:
    """`tie_word_embeddings` is not read: transformers ties T5's head to its table whatever it says."""
    gate, _, activation = str(c.values["feed_forward_proj"]).rpartition("-")
    if gate not in ("", "gated") or activation not in _ACTIVATIONS:
        raise c.wrong(
            "feed_forward_proj", f"it must be ACTIVATION or gated-ACTIVATION; known: {', '.join(_ACTIVATIONS)}"
        )
    gated_gelu = gate == "gated" and activation == "gelu"  # which means the approximation by tanh, for this pair alone
    return EncoderDecoderSettings.model_validate(
        {
            "vocab_size": c.whole("vocab_size"),
            "context": c.whole("n_positions"),
            "layers": c.whole("num_layers"),
            "decoder_layers": c.optional("num_decoder_layers"),
            "hidden": c.whole("d_model"),
            "heads": c.whole("num_heads"),
            "head_dim": c.whole("d_kv"),
            "ffn_hidden": c.whole("d_ff"),
            "activation": "gelu_tanh" if gated_gelu else _ACTIVATIONS[activation],
            "gated": gate == "gated",
            "norm_eps": c.values["layer_norm_epsilon"],
            "dropout": c.values["dropout_rate"],
            "relative_buckets": c.whole("relative_attention_num_buckets"),
            "relative_distance": c.whole("relative_attention_max_distance"),
        }
    )


_FAMILIES: dict[str, _Family] = {
    "bert": _Family(_bert, ("BertForMaskedLM", "BertForSequenceClassification"), defaults.BERT, {}),
    "deepseek_v3": _Family(
        _deepseek_v3, ("DeepseekV3ForCausalLM",), defaults.DEEPSEEK_V3, {"num_local_experts": "n_routed_experts"}
    ),
    "gpt2": _Family(_gpt2, ("GPT2LMHeadModel",), defaults.GPT2, defaults.GPT2_ALIASES),
    "llama": _Family(_llama, ("LlamaForCausalLM",), defaults.LLAMA, {}),
    "mistral": _Family(_mistral, ("MistralForCausalLM",), defaults.MISTRAL, {}),
    "mixtral": _Family(_mixtral, ("MixtralForCausalLM",), defaults.MIXTRAL, {"num_experts": "num_local_experts"}),
    "nemotron": _Family(_nemotron, ("NemotronForCausalLM",), defaults.NEMOTRON, {}),
    "qwen2": _Family(_qwen2, ("Qwen2ForCausalLM",), defaults.QWEN2, {}),
    "qwen3": _Family(_qwen3, ("Qwen3ForCausalLM",), defaults.QWEN3, {}),
    "t5": _Family(_t5, ("T5ForConditionalGeneration", "T5WithLMHeadModel"), defaults.T5, defaults.T5_ALIASES),
}
