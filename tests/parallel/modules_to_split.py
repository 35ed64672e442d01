"""Modules whose splits are proven, each with forwards of two lengths: our models and those of transformers."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from motet.models.build import build_module
from motet.models.settings import DecoderSettings, EncoderDecoderSettings, EncoderSettings, ModelSettings

ROWS = 2  # Of each batch
LENGTHS = (6, 11)
VOCABULARY = 64
ModuleAndForwards = tuple[nn.Module, list[Callable[[], Any]]]

_OUR_SIZES: Any = {
    "vocab_size": VOCABULARY,
    "context": 32,
    "layers": 2,
    "hidden": 32,
    "heads": 4,
    "ffn_hidden": 48,
    "dropout": 0.1,
}
_GPT2: Any = {"positions": "learned", "norm": "layer", "bias": True, "gated": False, "activation": "gelu_tanh"}
_OUR_MODELS: dict[str, Callable[..., ModelSettings]] = {
    "tiny": lambda **changed: DecoderSettings(**{**_OUR_SIZES, "kv_heads": 2, **changed}),
    "gpt2-like": lambda **changed: DecoderSettings(**{**_OUR_SIZES, **_GPT2, **changed}),
    "bert-like": lambda **changed: EncoderSettings(**{**_OUR_SIZES, **changed}),
    "t5-like": lambda **changed: EncoderDecoderSettings(**{**_OUR_SIZES, "gated": False, **changed}),
}


def our_model(name: str, lengths: tuple[int, ...] = LENGTHS, **changed: object) -> ModuleAndForwards:
    """One of motet's models, with parameters on the meta device."""
    with torch.device("meta"):
        module = build_module(_OUR_MODELS[name](**changed))
    has_source = name == "t5-like"

    def forward(length: int) -> Tensor:
        inputs = {"source": tokens(2 * length)} if has_source else {}
        logits: Tensor = module(tokens(length), **inputs)
        return logits

    return module, forwards_of(forward, lengths)


def tokens(length: int) -> Tensor:
    """Tokens [ROWS, length]."""
    generator = torch.Generator().manual_seed(length)
    return torch.randint(3, VOCABULARY, (ROWS, length), generator=generator)


def forwards_of(forward: Callable[[int], Any], lengths: tuple[int, ...] = LENGTHS) -> list[Callable[[], Any]]:
    """The forward with each length."""
    return [lambda length=length: forward(length) for length in lengths]


_COMMON: Any = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED: Any = {"num_key_value_heads": 2, "head_dim": 8}
# Family -> what its config has beyond the common values.
FAMILIES: dict[str, Any] = {
    "llama": _GROUPED,
    "qwen2": _GROUPED,
    "qwen3": _GROUPED,
    "mistral": _GROUPED,
    "gemma2": _GROUPED,
    "gemma3_text": _GROUPED,
    "phi3": _GROUPED,
    "starcoder2": _GROUPED,
    "olmo2": _GROUPED,
    "cohere": _GROUPED,
    "granite": _GROUPED,
    "stablelm": _GROUPED,
    "phi": _GROUPED,
    "mixtral": _GROUPED,
    "gpt_neox": {},
    "gpt2": {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True},
    "bloom": {"n_head": 4, "n_layer": 2},
    "bert": {},
    "t5": {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4, "num_layers": 2},
}


def huggingface_model(family: str, lengths: tuple[int, ...] = LENGTHS, **changed: object) -> ModuleAndForwards:
    """A small model of a family, whose attention is the usual one."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    config_class: Any = transformers.models.auto.configuration_auto.CONFIG_MAPPING[family]
    config = config_class(**{**_COMMON, **FAMILIES[family], **changed})
    special = {"t5": transformers.AutoModelForSeq2SeqLM, "bert": transformers.AutoModelForMaskedLM}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = special.get(family, transformers.AutoModelForCausalLM).from_config(config)

    def forward(length: int) -> Tensor:
        inputs = {"decoder_input_ids": tokens(2 * length)} if family == "t5" else {}
        logits: Tensor = module(tokens(length), **inputs).logits
        return logits

    return module, forwards_of(forward, lengths)
