"""The config.json of motet's decoder, and the check that a folder of Hugging Face holds the decoder of a job.

Both directions read the same tables: a config is written by the keys that `settings_from_config` reads, and is right if
it is read back as the same settings. Nothing here imports torch or transformers.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from motet.core.config_loading import FrozenSettings
from motet.core.errors import InputError, check_input
from motet.models.hf.hf_config import (
    ACTIVATIONS,
    GPT2_KEYS,
    LLAMA3_ROPE_KEYS,
    LLAMA_KEYS,
    pairs,
    read_config,
    settings_from_config,
)
from motet.models.settings import DecoderSettings, RopeScalingSettings, TransformerSettings

_ACTIVATION_NAMES = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
# Settings that do not change the values that a decoder computes in evaluation.
_OF_TRAINING = {"family", "frozen", "adapters", "weights", "dropout", "init_std"}
_REMEDY = "motet exports Llama, Qwen 2, Qwen 3, Mistral and GPT-2"


def _llama(s: DecoderSettings) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": s.rope_theta}
    if s.rope_scaling is not None:
        scaling = {key: getattr(s.rope_scaling, setting) for setting, key in LLAMA3_ROPE_KEYS.items()}
        rope |= {"rope_type": "llama3", **scaling}
    return {
        **_named(s, LLAMA_KEYS),
        "num_key_value_heads": s.kv_heads or s.heads,
        "head_dim": s.dim_per_head,
        "rms_norm_eps": s.norm_eps,
        "rope_parameters": rope,
        "attention_dropout": s.dropout,
    }


def _plain_llama(s: DecoderSettings) -> dict[str, Any]:
    return {**_llama(s), "attention_bias": s.bias, "mlp_bias": s.has_ffn_bias}


def _mistral(s: DecoderSettings) -> dict[str, Any]:
    return {**_llama(s), "sliding_window": s.sliding_window}


def _qwen(s: DecoderSettings) -> dict[str, Any]:
    has_window = s.sliding_window is not None
    window = {"sliding_window": s.sliding_window, "max_window_layers": 0} if has_window else {}
    return {**_llama(s), "use_sliding_window": has_window, **window}


def _biased_qwen(s: DecoderSettings) -> dict[str, Any]:
    return {**_qwen(s), "attention_bias": s.bias}


def _gpt2(s: DecoderSettings) -> dict[str, Any]:
    dropout = dict.fromkeys(("embd_pdrop", "attn_pdrop"), s.dropout)
    return {**_named(s, GPT2_KEYS), "n_inner": s.ffn_hidden, **dropout}


def _named(s: DecoderSettings, keys: str) -> dict[str, Any]:
    values = {key: getattr(s, setting) for setting, key in pairs(keys).items()}
    return {key: _ACTIVATION_NAMES[value] if key in _ACTIVATION_KEYS else value for key, value in values.items()}


_ACTIVATION_KEYS = {"hidden_act", "activation_function"}
# Families by their `model_type`, in the order in which they are tried, with their class.
_WRITERS: dict[str, tuple[str, Callable[[DecoderSettings], dict[str, Any]]]] = {
    "llama": ("LlamaForCausalLM", _plain_llama),
    "qwen2": ("Qwen2ForCausalLM", _qwen),
    "mistral": ("MistralForCausalLM", _mistral),
    "qwen3": ("Qwen3ForCausalLM", _biased_qwen),
    "gpt2": ("GPT2LMHeadModel", _gpt2),
}
DECODER_FAMILIES = tuple(_WRITERS)


def config_of_settings(settings: DecoderSettings) -> dict[str, Any]:
    """The config of the model of transformers that computes the logits of motet's decoder with these settings."""
    missing: dict[str, list[str]] = {}
    for family, (class_name, write) in _WRITERS.items():
        config = {"architectures": [class_name], "model_type": family, **write(settings)}
        try:
            differences = settings_differences(settings, settings_from_config(config))
        except InputError:
            continue
        if not differences:
            return config
        missing[family] = [
            f"model.{name} = {_written(ours)}" for name, (ours, _) in differences.items() if ours is not None
        ]
    nearest = min(missing, key=lambda family: len(missing[family]), default="llama")
    problem = " and ".join(missing.get(nearest, ["these settings"]))
    raise InputError(f"{problem}: no model of transformers has it together with the other settings; {_REMEDY}")


def settings_differences(a: DecoderSettings, b: TransformerSettings) -> dict[str, tuple[Any, Any]]:
    """Settings in which two decoders differ in their values: name -> both values, with defaults resolved."""
    assert isinstance(b, DecoderSettings), type(b).__name__
    first, second = _resolved(a), _resolved(b)
    both = {name: (first.get(name), second.get(name)) for name in first | second}
    return {name: values for name, values in both.items() if values[0] != values[1]}


def _resolved(s: DecoderSettings) -> dict[str, Any]:
    values = {name: getattr(s, name) for name in type(s).model_fields if name not in _OF_TRAINING}
    values |= {"head_dim": s.dim_per_head, "kv_heads": s.kv_heads or s.heads, "qkv_bias": s.qkv_bias or s.bias}
    values |= {"ffn_bias": s.has_ffn_bias, "norm_bias": s.has_norm_bias}
    unused = () if s.positions == "rotary" else ("rope_theta", "rotary_fraction", "rope_scaling")
    return {name: value for name, value in values.items() if name not in unused}


# --- the folder that a run starts from --------------------------------------------------------------------


def check_decoder_folder(settings: DecoderSettings, folder: Path) -> str:
    """Refuse a folder whose model is not the decoder of these settings. Returns its `model_type`."""
    config = read_config(folder)
    model_type, place = config.get("model_type"), f"model.weights = {str(folder)!r}"
    check_input(
        model_type in DECODER_FAMILIES,
        f"{place}: a decoder of motet takes the weights of {', '.join(DECODER_FAMILIES)}, not of model_type = "
        f"{model_type!r}; train it with model.factory = 'hf:{folder}'",
    )
    differences = settings_differences(settings, settings_from_config(config))
    if settings.positions == "rotary" and settings.context <= differences.get("context", (0, 0))[1]:
        differences.pop("context", None)  # Shorter sequences change no number
    if differences:
        listed = ", ".join(f"model.{name} = {_written(ours)}" for name, (ours, _) in differences.items())
        remedy = " ".join(f"model.{name}={_written(theirs)}" for name, (_, theirs) in differences.items())
        raise InputError(f"{listed}, but the model in {folder} has others; set {remedy}")
    for problem in _other_functions(config, settings):
        raise InputError(
            f"{place}: its config.json has {problem}, which motet's decoder does not compute; train it with "
            f"model.factory = 'hf:{folder}'"
        )
    return str(model_type)


def _other_functions(config: Mapping[str, Any], settings: DecoderSettings) -> Iterator[str]:
    """Values of a config that change what the model computes, and that no setting of motet's decoder stands for."""
    ropes = [config.get(key) or {} for key in ("rope_scaling", "rope_parameters")]
    for kind in (rope.get("rope_type", rope.get("type", "default")) for rope in ropes):
        if kind not in ("default", "llama3"):
            yield f"rope_type = {kind!r}"
    layers = settings.layers
    kind = "full_attention" if settings.sliding_window is None else "sliding_attention"
    if (kinds := config.get("layer_types")) not in (None, [kind] * layers):
        yield f"layer_types = {kinds!r}"
    first_window = config.get("max_window_layers", layers)
    is_mixed = config.get("use_sliding_window") and isinstance(first_window, int) and 0 < first_window < layers
    if is_mixed and config.get("layer_types") is None and config.get("sliding_window") is not None:
        yield f"max_window_layers = {first_window}"
    expected = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "quantization_config": None}
    for key, value in expected.items():
        if config.get(key, value) != value:
            yield f"{key} = {config[key]!r}"


def _written(value: object) -> str:
    """A value as a job has it."""
    if isinstance(value, FrozenSettings):
        is_short = not isinstance(value, RopeScalingSettings)
        values = value.model_dump(exclude_defaults=is_short)
        return "{" + ",".join(f"{name}={each}" for name, each in values.items()) + "}"
    return str(value).lower() if isinstance(value, bool) else "none" if value is None else str(value)
