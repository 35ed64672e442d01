"""Settings from a Hugging Face config.json, without transformers and without torch.

They give the sizes of the model that transformers would build: parameters, FLOPs and activations. Values that change no
size (most rotary scaling, scaled logits, routing details) are omitted, so a model is trained with `factory = "hf:..."`,
not from these settings. Absent keys get the defaults of transformers.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from motet.core.errors import InputError, check_input
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

# Kinds of keys; all others are integers of at least 1.
_ACTIVATION_KEYS = frozenset({"hidden_act", "activation_function"})
_BOOLEAN_KEYS = frozenset({"tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window"})
_OPTIONAL_KEYS = frozenset(
    {"head_dim", "num_key_value_heads", "sliding_window", "q_lora_rank", "n_inner", "num_decoder_layers"}
)
_ZERO_KEYS = frozenset({"max_window_layers", "n_shared_experts", "first_k_dense_replace", "type_vocab_size"})
# Validated by the settings.
_EPS_KEYS = frozenset({"rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"})
_NUMBER_KEYS = _EPS_KEYS | {"initializer_range", "resid_pdrop", "hidden_dropout_prob", "dropout_rate"}


# Our setting -> the key of a config.
def _size_keys(*keys: str) -> dict[str, str]:
    return dict(zip(("vocab_size", "context", "layers", "hidden", "heads"), ("vocab_size", *keys), strict=True))


_LLAMA_AND_BERT = {
    **_size_keys("max_position_embeddings", "num_hidden_layers", "hidden_size", "num_attention_heads"),
    "ffn_hidden": "intermediate_size",
    "activation": "hidden_act",
    "init_std": "initializer_range",
}
_LLAMA = {**_LLAMA_AND_BERT, "tied": "tie_word_embeddings"}
_MIXTRAL_EXPERTS = {"count": "num_local_experts", "per_token": "num_experts_per_tok", "hidden": "intermediate_size"}
_DEEPSEEK_EXPERTS = {
    "count": "n_routed_experts",
    "per_token": "num_experts_per_tok",
    "hidden": "moe_intermediate_size",
    "shared": "n_shared_experts",
}
_LATENT_ATTENTION = {
    "query_rank": "q_lora_rank",
    "key_value_rank": "kv_lora_rank",
    "rotary_head_dim": "qk_rope_head_dim",
    "plain_head_dim": "qk_nope_head_dim",
    "value_head_dim": "v_head_dim",
}
_GPT2 = {
    **_size_keys("n_positions", "n_layer", "n_embd", "n_head"),
    "activation": "activation_function",
    "norm_eps": "layer_norm_epsilon",
    "dropout": "resid_pdrop",
    "init_std": "initializer_range",
    "tied": "tie_word_embeddings",
}
_BERT = {
    **_LLAMA_AND_BERT,
    "norm_eps": "layer_norm_eps",
    "dropout": "hidden_dropout_prob",
    "token_types": "type_vocab_size",
}
_T5 = {
    **_size_keys("n_positions", "num_layers", "d_model", "num_heads"),
    "decoder_layers": "num_decoder_layers",
    "head_dim": "d_kv",
    "ffn_hidden": "d_ff",
    "norm_eps": "layer_norm_epsilon",
    "dropout": "dropout_rate",
    "relative_buckets": "relative_attention_num_buckets",
    "relative_distance": "relative_attention_max_distance",
}
_LLAMA3_ROPE = {
    "factor": "factor",
    "low_frequency_factor": "low_freq_factor",
    "high_frequency_factor": "high_freq_factor",
    "original_context": "original_max_position_embeddings",
}


@dataclass(frozen=True)
class _HuggingFaceConfig:
    values: dict[str, Any]

    def read(self, key: str) -> Any:
        """The value of a key, checked by its kind."""
        value = self.values.get(key)
        if key in _NUMBER_KEYS or (key in _OPTIONAL_KEYS and value is None):
            return value
        if key in _ACTIVATION_KEYS:
            if not isinstance(value, str) or value not in _ACTIVATIONS:
                raise self.error_for(key, f"known activations: {', '.join(_ACTIVATIONS)}")
            return _ACTIVATIONS[value]
        if key in _BOOLEAN_KEYS:
            value = self.values.get(key, False)
            if not isinstance(value, bool):
                raise self.error_for(key, "it must be true or false")
            return value
        minimum = 0 if key in _ZERO_KEYS else 1
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise self.error_for(key, f"it must be a whole number of at least {minimum}")
        return value

    def read_all(self, keys: dict[str, str]) -> dict[str, Any]:
        """Setting -> value, for a table of settings and their keys."""
        return {setting: self.read(key) for setting, key in keys.items()}

    def section(self, key: str) -> dict[str, Any]:
        value = self.values.get(key) or {}
        if not isinstance(value, dict):
            raise self.error_for(key, "it must be a group of values")
        return value

    def reject_keys(self, *keys: str) -> None:
        for key in keys:
            if self.values.get(key):
                raise self.error_for(key, "models with it are not supported here; leave it out")

    def error_for(self, key: str, remedy: str) -> InputError:
        return InputError(f"config.json: {key} = {self.values.get(key)!r}: {remedy}")


@dataclass(frozen=True)
class _Family:
    """A `model_type`: the classes whose parameters are counted, the defaults of its keys, and its settings."""

    class_names: tuple[str, ...]
    defaults: dict[str, Any]
    # Values of settings; later ones replace earlier
    readers: tuple[Callable[[_HuggingFaceConfig], dict[str, Any]], ...]
    fixed: dict[str, Any] = field(default_factory=dict)  # Values that no key decides
    settings: type[TransformerSettings] = DecoderSettings
    aliases: dict[str, str] = field(default_factory=dict)  # Another name of a key -> the key


def settings_from_config(config: dict[str, Any]) -> TransformerSettings:
    """The settings of one of motet's architectures that has the sizes of the model of `config`."""
    kind = config.get("model_type")
    family = _FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        raise InputError(f"config.json: model_type = {kind!r} is unknown; known are {', '.join(sorted(_FAMILIES))}")
    named = {family.aliases.get(key, key): value for key, value in config.items()}
    c = _HuggingFaceConfig({**defaults.COMMON, **family.defaults, **named})
    classes = named.get("architectures") or [family.class_names[0]]
    if not isinstance(classes, list) or classes[0] not in family.class_names:
        raise c.error_for("architectures", f"for {kind}, sizes are known of {' and '.join(family.class_names)}")
    values = {name: value for read in family.readers for name, value in read(c).items()}
    try:
        return family.settings.model_validate({**values, **family.fixed})
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        path = ".".join(str(part) for part in problem["loc"])
        raise InputError(f"config.json of a {kind}: {path} = {problem['input']!r}: {problem['msg']}") from None


def read_config(path: str | Path) -> dict[str, Any]:
    """The config of a Hugging Face folder, or of the path of its config.json."""
    file = Path(path, "config.json") if Path(path).is_dir() else Path(path)
    try:
        config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(
            f"cannot read {file}: {error.strerror}; give a folder with a config.json, or its path"
        ) from None
    except ValueError as error:
        raise InputError(f"{file} is not valid JSON: {error}") from None
    check_input(
        isinstance(config, dict), f"{file} holds a {type(config).__name__}; a config is a JSON object with a model_type"
    )
    return config


# --- families --------------------------------------------------------------------------------------


def _rotary_values(c: _HuggingFaceConfig) -> dict[str, Any]:
    """Old configs have `rope_theta` and `rope_scaling`, newer ones `rope_parameters`."""
    rope = {**c.section("rope_scaling"), **c.section("rope_parameters")}
    values: dict[str, Any] = {
        "rope_theta": rope.get("rope_theta", c.values.get("rope_theta", 10000.0)),
        "rotary_fraction": rope.get("partial_rotary_factor", c.values.get("partial_rotary_factor", 1.0)),
    }
    if rope.get("rope_type", rope.get("type")) == "llama3":
        values["rope_scaling"] = {setting: rope[key] for setting, key in _LLAMA3_ROPE.items() if key in rope}
    return values


def _llama_values(c: _HuggingFaceConfig) -> dict[str, Any]:
    values = {**c.read_all(_LLAMA), "norm_eps": c.values.get("norm_eps", c.values["rms_norm_eps"]), **_rotary_values(c)}
    values["head_dim"] = c.read("head_dim") or values["hidden"] // values["heads"]
    return {**values, "kv_heads": c.read("num_key_value_heads") or values["heads"]}


def _bias_values(c: _HuggingFaceConfig) -> dict[str, Any]:
    """`attention_bias` stands for all four projections, `mlp_bias` for the feed-forward network."""
    attention = c.read("attention_bias")
    return {"qkv_bias": attention, "bias": attention, "ffn_bias": c.read("mlp_bias")}


def _window_values(c: _HuggingFaceConfig) -> dict[str, Any]:
    return {"sliding_window": c.read("sliding_window")}


def _qwen_window_values(c: _HuggingFaceConfig) -> dict[str, Any]:
    """Qwen's first `max_window_layers` see everything; the window is kept only if every layer has it."""
    everywhere = c.read("use_sliding_window") and c.read("max_window_layers") == 0
    return _window_values(c) if everywhere else {}


def _mixtral_values(c: _HuggingFaceConfig) -> dict[str, Any]:
    return {"experts": c.read_all(_MIXTRAL_EXPERTS), **_window_values(c)}


def _deepseek_values(c: _HuggingFaceConfig) -> dict[str, Any]:
    """The main model; transformers leaves out the module that predicts further tokens too."""
    latent, experts = c.read_all(_LATENT_ATTENTION), c.read_all(_DEEPSEEK_EXPERTS)
    experts["first_dense_layers"] = min(c.read("first_k_dense_replace"), c.read("num_hidden_layers"))
    # `head_dim` is the rotated part of a head here, and keys are not shared by heads.
    heads = {"head_dim": latent["plain_head_dim"], "kv_heads": c.read("num_attention_heads")}
    return {"latent_attention": latent, "experts": experts, **heads}


def _gpt2_values(c: _HuggingFaceConfig) -> dict[str, Any]:
    c.reject_keys("add_cross_attention")
    values = c.read_all(_GPT2)
    return {**values, "ffn_hidden": c.read("n_inner") or 4 * values["hidden"]}


def _bert_values(c: _HuggingFaceConfig) -> dict[str, Any]:
    c.reject_keys("add_cross_attention", "is_decoder")
    classify = (c.values.get("architectures") or [""])[0] == "BertForSequenceClassification"
    if not classify and not c.read("tie_word_embeddings"):
        raise c.error_for("tie_word_embeddings", "the masked-token head is the embedding table; it must be true")
    classes = len(c.section("id2label")) or c.values.get("num_labels", 2)
    return {**c.read_all(_BERT), "head": "classify" if classify else "masked", "classes": classes}


def _t5_values(c: _HuggingFaceConfig) -> dict[str, Any]:
    """`tie_word_embeddings` has no effect: transformers always ties T5's head to its table."""
    gate, _, activation = str(c.values["feed_forward_proj"]).rpartition("-")
    if gate not in ("", "gated") or activation not in _ACTIVATIONS:
        raise c.error_for(
            "feed_forward_proj", f"it must be ACTIVATION or gated-ACTIVATION; known: {', '.join(_ACTIVATIONS)}"
        )
    # transformers takes gated-gelu, and this pair alone, for the approximation by tanh.
    name = "gelu_tanh" if (gate, activation) == ("gated", "gelu") else _ACTIVATIONS[activation]
    return {**c.read_all(_T5), "activation": name, "gated": gate == "gated"}


_LLAMA_READERS, _NO_FFN_BIAS = (_llama_values, _bias_values), {"ffn_bias": False}
_FAMILIES: dict[str, _Family] = {
    "bert": _Family(
        ("BertForMaskedLM", "BertForSequenceClassification"), defaults.BERT, (_bert_values,), settings=EncoderSettings
    ),
    "deepseek_v3": _Family(
        ("DeepseekV3ForCausalLM",),
        defaults.DEEPSEEK_V3,
        (*_LLAMA_READERS, _deepseek_values),
        fixed=_NO_FFN_BIAS,
        aliases={"num_local_experts": "n_routed_experts"},
    ),
    "gpt2": _Family(
        ("GPT2LMHeadModel",),
        defaults.GPT2,
        (_gpt2_values,),
        fixed={"gated": False, "norm": "layer", "positions": "learned", "bias": True},
        aliases=defaults.GPT2_ALIASES,
    ),
    "llama": _Family(("LlamaForCausalLM",), defaults.LLAMA, _LLAMA_READERS),
    "mistral": _Family(("MistralForCausalLM",), defaults.MISTRAL, (_llama_values, _window_values)),
    "mixtral": _Family(
        ("MixtralForCausalLM",),
        defaults.MIXTRAL,
        (_llama_values, _mixtral_values),
        aliases={"num_experts": "num_local_experts"},
    ),
    "nemotron": _Family(
        ("NemotronForCausalLM",),
        defaults.NEMOTRON,
        _LLAMA_READERS,
        fixed={"norm": "layer", "norm_bias": True, "gated": False},
    ),
    "qwen2": _Family(
        ("Qwen2ForCausalLM",), defaults.QWEN2, (_llama_values, _qwen_window_values), fixed={"qkv_bias": True}
    ),
    "qwen3": _Family(
        ("Qwen3ForCausalLM",),
        defaults.QWEN3,
        (*_LLAMA_READERS, _qwen_window_values),
        fixed={**_NO_FFN_BIAS, "query_key_norm": True},
    ),
    "t5": _Family(
        ("T5ForConditionalGeneration", "T5WithLMHeadModel"),
        defaults.T5,
        (_t5_values,),
        settings=EncoderDecoderSettings,
        aliases=defaults.T5_ALIASES,
    ),
}
