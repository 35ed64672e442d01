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
from motet.models.hf import hf_defaults as defaults
from motet.models.settings import DecoderSettings, EncoderDecoderSettings, EncoderSettings, TransformerSettings

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
class _HuggingFaceConfig:
    """The values of a config, with sentences about those that cannot be."""

    values: dict[str, Any]

    def integer(self, key: str, minimum: int = 1) -> int:
        value = self.values.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise self.error_for(key, f"it must be a whole number of at least {minimum}")
        return value

    def optional_integer(self, key: str) -> int | None:
        return None if self.values.get(key) is None else self.integer(key)

    def boolean(self, key: str) -> bool:
        value = self.values.get(key, False)
        if not isinstance(value, bool):
            raise self.error_for(key, "it must be true or false")
        return value

    def section(self, key: str) -> dict[str, Any]:
        value = self.values.get(key) or {}
        if not isinstance(value, dict):
            raise self.error_for(key, "it must be a group of values")
        return value

    def activation(self, key: str) -> str:
        value = self.values.get(key)
        if not isinstance(value, str) or value not in _ACTIVATIONS:
            raise self.error_for(key, f"known activations: {', '.join(_ACTIVATIONS)}")
        return _ACTIVATIONS[value]

    def reject_keys(self, *keys: str) -> None:
        for key in keys:
            if self.values.get(key):
                raise self.error_for(key, "models with it are not described here; leave it out")

    def error_for(self, key: str, remedy: str) -> InputError:
        return InputError(f"config.json: {key} = {self.values.get(key)!r}: {remedy}")


@dataclass(frozen=True)
class _ModelTypeReader:
    """A `model_type`: how it is read, the classes whose parameters are meant, and the defaults of its keys."""

    read: Callable[[_HuggingFaceConfig], TransformerSettings]
    class_names: tuple[str, ...]
    defaults: dict[str, Any]
    aliases: dict[str, str]  # Another name of a key -> the name it is read by


def settings_from_config(config: dict[str, Any]) -> TransformerSettings:
    """The settings of one of our architectures that has the sizes of the model of `config`."""
    kind = config.get("model_type")
    family = _READERS_BY_MODEL_TYPE.get(kind) if isinstance(kind, str) else None
    if family is None:
        raise InputError(
            f"config.json: model_type = {kind!r} is unknown; known are {', '.join(sorted(_READERS_BY_MODEL_TYPE))}"
        )
    named = {family.aliases.get(key, key): value for key, value in config.items()}
    values = _HuggingFaceConfig({**defaults.COMMON, **family.defaults, **named})
    classes = named.get("architectures") or [family.class_names[0]]
    if not isinstance(classes, list) or classes[0] not in family.class_names:
        raise values.error_for("architectures", f"for {kind}, sizes are known of {' and '.join(family.class_names)}")
    try:
        return family.read(values)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        field_path = ".".join(str(part) for part in problem["loc"])
        raise InputError(f"config.json of a {kind}: {field_path} = {problem['input']!r}: {problem['msg']}") from None


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


def _rotary_values(c: _HuggingFaceConfig) -> dict[str, Any]:
    """Old configs have `rope_theta` and `rope_scaling`, newer ones `rope_parameters`."""
    rope = {**c.section("rope_scaling"), **c.section("rope_parameters")}
    rotary_values: dict[str, Any] = {
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
        rotary_values["rope_scaling"] = {ours: rope[theirs] for ours, theirs in names.items() if theirs in rope}
    return rotary_values


def _decoder_values(c: _HuggingFaceConfig) -> dict[str, Any]:
    """What the relatives of Llama have in common."""
    hidden, heads = c.integer("hidden_size"), c.integer("num_attention_heads")
    return {
        "vocab_size": c.integer("vocab_size"),
        "context": c.integer("max_position_embeddings"),
        "layers": c.integer("num_hidden_layers"),
        "hidden": hidden,
        "heads": heads,
        "head_dim": c.optional_integer("head_dim") or hidden // heads,
        "kv_heads": c.optional_integer("num_key_value_heads") or heads,
        "ffn_hidden": c.integer("intermediate_size"),
        "activation": c.activation("hidden_act"),
        "norm_eps": c.values.get("norm_eps", c.values["rms_norm_eps"]),
        "init_std": c.values["initializer_range"],
        "tied": c.boolean("tie_word_embeddings"),
        **_rotary_values(c),
    }


def _decoder_settings(c: _HuggingFaceConfig, **more: object) -> DecoderSettings:
    return DecoderSettings.model_validate({**_decoder_values(c), **more})


def _bias_values(c: _HuggingFaceConfig) -> dict[str, bool]:
    """`attention_bias` stands for all four projections, `mlp_bias` for the feed-forward network."""
    attention = c.boolean("attention_bias")
    return {"qkv_bias": attention, "bias": attention, "ffn_bias": c.boolean("mlp_bias")}


def _llama(c: _HuggingFaceConfig) -> DecoderSettings:
    return _decoder_settings(c, **_bias_values(c))


def _mistral(c: _HuggingFaceConfig) -> DecoderSettings:
    return _decoder_settings(c, sliding_window=c.optional_integer("sliding_window"))


def _qwen_window(c: _HuggingFaceConfig) -> int | None:
    """Qwen's first `max_window_layers` see everything; the window is kept only if every layer has it."""
    everywhere = c.boolean("use_sliding_window") and c.integer("max_window_layers", 0) == 0
    return c.optional_integer("sliding_window") if everywhere else None


def _qwen2(c: _HuggingFaceConfig) -> DecoderSettings:
    return _decoder_settings(c, qkv_bias=True, sliding_window=_qwen_window(c))


def _qwen3(c: _HuggingFaceConfig) -> DecoderSettings:
    biases = {**_bias_values(c), "ffn_bias": False}
    return _decoder_settings(c, query_key_norm=True, sliding_window=_qwen_window(c), **biases)


def _nemotron(c: _HuggingFaceConfig) -> DecoderSettings:
    return _decoder_settings(c, norm="layer", norm_bias=True, gated=False, **_bias_values(c))


def _mixtral(c: _HuggingFaceConfig) -> DecoderSettings:
    experts = {
        "count": c.integer("num_local_experts"),
        "per_token": c.integer("num_experts_per_tok"),
        "hidden": c.integer("intermediate_size"),
    }
    return _decoder_settings(c, experts=experts, sliding_window=c.optional_integer("sliding_window"))


def _deepseek_v3(c: _HuggingFaceConfig) -> DecoderSettings:
    """The main model; the module that predicts further tokens is not a part of it in transformers either."""
    attention = c.boolean("attention_bias")
    latent = {
        "query_rank": c.optional_integer("q_lora_rank"),
        "key_value_rank": c.integer("kv_lora_rank"),
        "rotary_head_dim": c.integer("qk_rope_head_dim"),
        "plain_head_dim": c.integer("qk_nope_head_dim"),
        "value_head_dim": c.integer("v_head_dim"),
    }
    experts = {
        "count": c.integer("n_routed_experts"),
        "per_token": c.integer("num_experts_per_tok"),
        "hidden": c.integer("moe_intermediate_size"),
        "shared": c.integer("n_shared_experts", 0),
        "first_dense_layers": min(c.integer("first_k_dense_replace", 0), c.integer("num_hidden_layers")),
    }
    # `head_dim` is the rotated part of a head here, and every head has keys of its own.
    heads = {"head_dim": latent["plain_head_dim"], "kv_heads": c.integer("num_attention_heads")}
    biases = {"qkv_bias": attention, "bias": attention, "ffn_bias": False}
    return _decoder_settings(c, latent_attention=latent, experts=experts, **heads, **biases)


def _gpt2(c: _HuggingFaceConfig) -> DecoderSettings:
    c.reject_keys("add_cross_attention")
    hidden = c.integer("n_embd")
    return DecoderSettings.model_validate(
        {
            "vocab_size": c.integer("vocab_size"),
            "context": c.integer("n_positions"),
            "layers": c.integer("n_layer"),
            "hidden": hidden,
            "heads": c.integer("n_head"),
            "ffn_hidden": c.optional_integer("n_inner") or 4 * hidden,
            "activation": c.activation("activation_function"),
            "gated": False,
            "norm": "layer",
            "norm_eps": c.values["layer_norm_epsilon"],
            "positions": "learned",
            "bias": True,
            "dropout": c.values["resid_pdrop"],
            "init_std": c.values["initializer_range"],
            "tied": c.boolean("tie_word_embeddings"),
        }
    )


def _bert(c: _HuggingFaceConfig) -> EncoderSettings:
    c.reject_keys("add_cross_attention", "is_decoder")
    classify = (c.values.get("architectures") or [""])[0] == "BertForSequenceClassification"
    if not classify and not c.boolean("tie_word_embeddings"):
        raise c.error_for("tie_word_embeddings", "the masked-token head is the embedding table; it must be true")
    labels = c.section("id2label")
    return EncoderSettings.model_validate(
        {
            "vocab_size": c.integer("vocab_size"),
            "context": c.integer("max_position_embeddings"),
            "layers": c.integer("num_hidden_layers"),
            "hidden": c.integer("hidden_size"),
            "heads": c.integer("num_attention_heads"),
            "ffn_hidden": c.integer("intermediate_size"),
            "activation": c.activation("hidden_act"),
            "norm_eps": c.values["layer_norm_eps"],
            "dropout": c.values["hidden_dropout_prob"],
            "init_std": c.values["initializer_range"],
            "head": "classify" if classify else "masked",
            "classes": len(labels) or c.values.get("num_labels", 2),
            "token_types": c.integer("type_vocab_size", 0),
        }
    )


def _t5(c: _HuggingFaceConfig) -> EncoderDecoderSettings:
    """`tie_word_embeddings` is not read: transformers ties T5's head to its table whatever it says."""
    gate, _, activation = str(c.values["feed_forward_proj"]).rpartition("-")
    if gate not in ("", "gated") or activation not in _ACTIVATIONS:
        raise c.error_for(
            "feed_forward_proj", f"it must be ACTIVATION or gated-ACTIVATION; known: {', '.join(_ACTIVATIONS)}"
        )
    gated_gelu = gate == "gated" and activation == "gelu"  # which means the approximation by tanh, for this pair alone
    return EncoderDecoderSettings.model_validate(
        {
            "vocab_size": c.integer("vocab_size"),
            "context": c.integer("n_positions"),
            "layers": c.integer("num_layers"),
            "decoder_layers": c.optional_integer("num_decoder_layers"),
            "hidden": c.integer("d_model"),
            "heads": c.integer("num_heads"),
            "head_dim": c.integer("d_kv"),
            "ffn_hidden": c.integer("d_ff"),
            "activation": "gelu_tanh" if gated_gelu else _ACTIVATIONS[activation],
            "gated": gate == "gated",
            "norm_eps": c.values["layer_norm_epsilon"],
            "dropout": c.values["dropout_rate"],
            "relative_buckets": c.integer("relative_attention_num_buckets"),
            "relative_distance": c.integer("relative_attention_max_distance"),
        }
    )


_READERS_BY_MODEL_TYPE: dict[str, _ModelTypeReader] = {
    "bert": _ModelTypeReader(_bert, ("BertForMaskedLM", "BertForSequenceClassification"), defaults.BERT, {}),
    "deepseek_v3": _ModelTypeReader(
        _deepseek_v3, ("DeepseekV3ForCausalLM",), defaults.DEEPSEEK_V3, {"num_local_experts": "n_routed_experts"}
    ),
    "gpt2": _ModelTypeReader(_gpt2, ("GPT2LMHeadModel",), defaults.GPT2, defaults.GPT2_ALIASES),
    "llama": _ModelTypeReader(_llama, ("LlamaForCausalLM",), defaults.LLAMA, {}),
    "mistral": _ModelTypeReader(_mistral, ("MistralForCausalLM",), defaults.MISTRAL, {}),
    "mixtral": _ModelTypeReader(
        _mixtral, ("MixtralForCausalLM",), defaults.MIXTRAL, {"num_experts": "num_local_experts"}
    ),
    "nemotron": _ModelTypeReader(_nemotron, ("NemotronForCausalLM",), defaults.NEMOTRON, {}),
    "qwen2": _ModelTypeReader(_qwen2, ("Qwen2ForCausalLM",), defaults.QWEN2, {}),
    "qwen3": _ModelTypeReader(_qwen3, ("Qwen3ForCausalLM",), defaults.QWEN3, {}),
    "t5": _ModelTypeReader(_t5, ("T5ForConditionalGeneration", "T5WithLMHeadModel"), defaults.T5, defaults.T5_ALIASES),
}
