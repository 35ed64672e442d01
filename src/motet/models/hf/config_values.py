"""The values of a Hugging Face config.json, checked by their kinds, and what a family of models makes of them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from motet.core.errors import check_input
from motet.models.settings import DecoderSettings, TransformerSettings


def table(keys: str, *values: Any) -> dict[str, Any]:
    return dict(zip(keys.split(), values, strict=True))


def pairs(words: str) -> dict[str, str]:
    """Name -> name, from words `name=name`."""
    return dict(word.split("=") for word in words.split())


ACTIVATIONS = pairs(
    "silu=silu swish=silu gelu=gelu gelu_new=gelu_tanh gelu_fast=gelu_tanh gelu_pytorch_tanh=gelu_tanh relu=relu "
    "relu2=relu_squared"
)

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


@dataclass(frozen=True)
class ConfigValues:
    values: dict[str, Any]

    def read(self, key: str) -> Any:
        """The value of a key, checked by its kind."""
        value: Any = self.values.get(key)
        if key in _NUMBER_KEYS or (key in _OPTIONAL_KEYS and value is None):
            return value
        if key in _ACTIVATION_KEYS:
            is_known = isinstance(value, str) and value in ACTIVATIONS
            self.check(key, is_known, f"known activations: {', '.join(ACTIVATIONS)}")
            return ACTIVATIONS[value]
        if key in _BOOLEAN_KEYS:
            value = self.values.get(key, False)
            self.check(key, isinstance(value, bool), "it must be true or false")
            return value
        minimum = 0 if key in _ZERO_KEYS else 1
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        self.check(key, is_whole and value >= minimum, f"it must be a whole number of at least {minimum}")
        return value

    def read_all(self, words: str) -> dict[str, Any]:
        """Our setting -> value, from words `setting=key`."""
        return {setting: self.read(key) for setting, key in pairs(words).items()}

    def section(self, key: str) -> dict[str, Any]:
        value = self.values.get(key) or {}
        self.check(key, isinstance(value, dict), "it must be a group of values")
        return value

    def reject_keys(self, *keys: str) -> None:
        for key in keys:
            self.check(key, not self.values.get(key), "models with it are not supported here; leave it out")

    def check(self, key: str, is_valid: bool, remedy: str) -> None:
        check_input(is_valid, f"config.json: {key} = {self.values.get(key)!r}: {remedy}")


@dataclass(frozen=True)
class ConfigFamily:
    """A `model_type`: the classes whose parameters are counted, the defaults of its keys, and its settings."""

    class_names: str
    defaults: dict[str, Any]
    # Values of settings; later ones replace earlier
    readers: tuple[Callable[[ConfigValues], dict[str, Any]], ...]
    fixed: dict[str, Any] = field(default_factory=dict)  # Values that no key decides
    settings: type[TransformerSettings] = DecoderSettings
    aliases: dict[str, str] = field(default_factory=dict)  # Another name of a key -> the key
