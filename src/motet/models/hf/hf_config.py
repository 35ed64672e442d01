"""Settings from a Hugging Face config.json, without transformers and without torch.
They give the sizes of the model that transformers would build: parameters, FLOPs and activations. Values that change no
size (most rotary scaling, scaled logits, routing details) are omitted, so a model is trained with `factory = "hf:..."`,
not from these settings. Absent keys get the defaults of transformers.

The values of a Hugging Face config.json, checked by their kinds, and the settings that a family derives from them.

The families of models whose sizes are known from their config.json, with the defaults of transformers.

Families of published decoders that differ from motet's own in their norms, positions, windows or experts.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from motet.core.errors import InputError, check_input, convert_os_errors
from motet.core.text_files import parse_json
from motet.models.settings import DecoderSettings, EncoderDecoderSettings, EncoderSettings, TransformerSettings
from motet.models.spec.block_costs import DecoderVariant, PublishedDecoderSettings


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
_BOOLEAN_KEYS = frozenset({"tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window", "norm_topk_prob"})
_OPTIONAL_KEYS = frozenset(
    {"head_dim", "num_key_value_heads", "sliding_window", "q_lora_rank", "n_inner", "num_decoder_layers"}
)
_ZERO_KEYS = frozenset({"max_window_layers", "n_shared_experts", "first_k_dense_replace", "type_vocab_size"})
# Validated by the settings.
_EPS_KEYS = frozenset({"rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"})
_NUMBER_KEYS = _EPS_KEYS | {"initializer_range", "resid_pdrop", "hidden_dropout_prob", "dropout_rate"}
_NUMBER_KEYS |= {"routed_scaling_factor"}


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
    # Functions that return values of settings; later values replace earlier ones
    readers: tuple[Callable[[ConfigValues], dict[str, Any]], ...]
    fixed: dict[str, Any] = field(default_factory=dict)  # Values that no key decides
    settings: type[TransformerSettings] = DecoderSettings
    aliases: dict[str, str] = field(default_factory=dict)  # Another name of a key -> the key


# Our settings and the keys of a config.
_LLAMA_AND_BERT = (
    "vocab_size=vocab_size context=max_position_embeddings layers=num_hidden_layers hidden=hidden_size "
    "heads=num_attention_heads ffn_hidden=intermediate_size activation=hidden_act init_std=initializer_range "
)
LLAMA_KEYS = _LLAMA_AND_BERT + "tied=tie_word_embeddings"
_BERT = _LLAMA_AND_BERT + "norm_eps=layer_norm_eps dropout=hidden_dropout_prob token_types=type_vocab_size"
GPT2_KEYS = (
    "vocab_size=vocab_size context=n_positions layers=n_layer hidden=n_embd heads=n_head tied=tie_word_embeddings "
    "activation=activation_function norm_eps=layer_norm_epsilon dropout=resid_pdrop init_std=initializer_range"
)
_T5 = (
    "vocab_size=vocab_size context=n_positions layers=num_layers hidden=d_model heads=num_heads "
    "decoder_layers=num_decoder_layers head_dim=d_kv ffn_hidden=d_ff norm_eps=layer_norm_epsilon dropout=dropout_rate "
    "relative_buckets=relative_attention_num_buckets relative_distance=relative_attention_max_distance"
)
_LATENT_ATTENTION = (
    "query_rank=q_lora_rank key_value_rank=kv_lora_rank rotary_head_dim=qk_rope_head_dim "
    "plain_head_dim=qk_nope_head_dim value_head_dim=v_head_dim"
)
_EXPERTS = (
    "count=n_routed_experts per_token=num_experts_per_tok hidden=moe_intermediate_size shared=n_shared_experts "
    "normalize_weights=norm_topk_prob groups=n_group groups_per_token=topk_group weight_scale=routed_scaling_factor"
)
_QWEN_EXPERTS = (
    "count=num_experts per_token=num_experts_per_tok hidden=moe_intermediate_size normalize_weights=norm_topk_prob"
)
LLAMA3_ROPE_KEYS = pairs(
    "factor=factor low_frequency_factor=low_freq_factor high_frequency_factor=high_freq_factor "
    "original_context=original_max_position_embeddings"
)

# Defaults of transformers for absent keys, where sizes depend on them.
SIZES = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads max_position_embeddings"
COMMON = table("initializer_range rms_norm_eps hidden_act tie_word_embeddings", 0.02, 1e-6, "silu", False)
_WINDOW = "num_key_value_heads sliding_window"
MISTRAL_DEFAULTS = table(f"{SIZES} {_WINDOW}", 32000, 4096, 14336, 32, 32, 131072, 8, 4096)
QWEN2_DEFAULTS = table(f"{SIZES} {_WINDOW} max_window_layers", 151936, 4096, 22016, 32, 32, 32768, 32, 4096, 28)


def rotary_values(c: ConfigValues) -> dict[str, Any]:
    """Old configs have `rope_theta` and `rope_scaling`, newer ones `rope_parameters`."""
    rope = {**c.section("rope_scaling"), **c.section("rope_parameters")}
    values: dict[str, Any] = {
        "rope_theta": rope.get("rope_theta", c.values.get("rope_theta", 10000.0)),
        "rotary_fraction": rope.get("partial_rotary_factor", c.values.get("partial_rotary_factor", 1.0)),
    }
    if rope.get("rope_type", rope.get("type")) == "llama3":
        values["rope_scaling"] = {setting: rope[key] for setting, key in LLAMA3_ROPE_KEYS.items() if key in rope}
    return values


def llama_values(c: ConfigValues) -> dict[str, Any]:
    values = {**c.read_all(LLAMA_KEYS), **rotary_values(c)}
    values["norm_eps"] = c.values.get("norm_eps", c.values["rms_norm_eps"])
    values["head_dim"] = c.read("head_dim") or values["hidden"] // values["heads"]
    return {**values, "kv_heads": c.read("num_key_value_heads") or values["heads"]}


def bias_values(c: ConfigValues) -> dict[str, Any]:
    """`attention_bias` stands for all four projections, `mlp_bias` for the feed-forward network."""
    attention = c.read("attention_bias")
    return {"qkv_bias": attention, "bias": attention, "ffn_bias": c.read("mlp_bias")}


def window_values(c: ConfigValues) -> dict[str, Any]:
    return {"sliding_window": c.read("sliding_window")}


def qwen_window_values(c: ConfigValues) -> dict[str, Any]:
    """Qwen's first `max_window_layers` see everything; the window is kept only if every layer has it."""
    return window_values(c) if c.read("use_sliding_window") and c.read("max_window_layers") == 0 else {}


def _mixtral_values(c: ConfigValues) -> dict[str, Any]:
    experts = c.read_all("count=num_local_experts per_token=num_experts_per_tok hidden=intermediate_size")
    return {"experts": experts, **window_values(c)}


def _deepseek_values(c: ConfigValues) -> dict[str, Any]:
    """The main model; transformers leaves out the module that predicts further tokens too."""
    latent, experts = c.read_all(_LATENT_ATTENTION), c.read_all(_EXPERTS)
    experts["first_dense_layers"] = min(c.read("first_k_dense_replace"), c.read("num_hidden_layers"))
    experts["scores"] = c.values["scoring_func"]
    c.check("scoring_func", experts["scores"] == "sigmoid", "models of this kind have 'sigmoid'")
    # `head_dim` is the rotated part of a head here, and keys are not shared by heads.
    heads = {"head_dim": latent["plain_head_dim"], "kv_heads": c.read("num_attention_heads")}
    return {"latent_attention": latent, "experts": experts, **heads}


def _gpt2_values(c: ConfigValues) -> dict[str, Any]:
    c.reject_keys("add_cross_attention")
    values = c.read_all(GPT2_KEYS)
    return {**values, "ffn_hidden": c.read("n_inner") or 4 * values["hidden"]}


def _bert_values(c: ConfigValues) -> dict[str, Any]:
    c.reject_keys("add_cross_attention", "is_decoder")
    classify = (c.values.get("architectures") or [""])[0] == "BertForSequenceClassification"
    is_tied = classify or c.read("tie_word_embeddings")
    c.check("tie_word_embeddings", is_tied, "the masked-token head is the embedding table; it must be true")
    classes = len(c.section("id2label")) or c.values.get("num_labels", 2)
    return {**c.read_all(_BERT), "head": "classify" if classify else "masked", "classes": classes}


def _t5_values(c: ConfigValues) -> dict[str, Any]:
    """`tie_word_embeddings` has no effect: transformers always ties T5's head to its table."""
    gate, _, activation = str(c.values["feed_forward_proj"]).rpartition("-")
    is_known, known = gate in ("", "gated") and activation in ACTIVATIONS, ", ".join(ACTIVATIONS)
    c.check("feed_forward_proj", is_known, f"it must be ACTIVATION or gated-ACTIVATION; known: {known}")
    # transformers takes gated-gelu, and this pair alone, for the approximation by tanh.
    name = "gelu_tanh" if (gate, activation) == ("gated", "gelu") else ACTIVATIONS[activation]
    return {**c.read_all(_T5), "activation": name, "gated": gate == "gated"}


LLAMA_READERS, NO_FFN_BIAS = (llama_values, bias_values), {"ffn_bias": False}
FAMILIES: dict[str, ConfigFamily] = {
    "bert": ConfigFamily(
        "BertForMaskedLM BertForSequenceClassification",
        {
            **table(SIZES, 30522, 768, 3072, 12, 12, 512),
            **table("hidden_act hidden_dropout_prob type_vocab_size layer_norm_eps", "gelu", 0.1, 2, 1e-12),
            "tie_word_embeddings": True,
        },
        (_bert_values,),
        settings=EncoderSettings,
    ),
    "deepseek_v3": ConfigFamily(
        "DeepseekV3ForCausalLM",
        {
            **table(SIZES, 129280, 7168, 18432, 61, 128, 4096),
            **table("moe_intermediate_size n_shared_experts n_routed_experts num_experts_per_tok", 2048, 1, 256, 8),
            **table("first_k_dense_replace q_lora_rank kv_lora_rank", 3, 1536, 512),
            **table("n_group topk_group routed_scaling_factor", 8, 4, 2.5),
            **table("norm_topk_prob scoring_func", True, "sigmoid"),
            **table("qk_rope_head_dim qk_nope_head_dim v_head_dim", 64, 128, 128),
        },
        (*LLAMA_READERS, _deepseek_values),
        fixed=NO_FFN_BIAS,
        aliases=pairs("num_local_experts=n_routed_experts"),
    ),
    "gpt2": ConfigFamily(
        "GPT2LMHeadModel",
        {
            **table("vocab_size n_positions n_embd n_layer n_head", 50257, 1024, 768, 12, 12),
            **table("activation_function resid_pdrop layer_norm_epsilon", "gelu_new", 0.1, 1e-5),
            "tie_word_embeddings": True,
        },
        (_gpt2_values,),
        fixed={"gated": False, "norm": "layer", "positions": "learned", "bias": True},
        aliases=pairs(
            "hidden_size=n_embd max_position_embeddings=n_positions "
            "num_attention_heads=n_head num_hidden_layers=n_layer"
        ),
    ),
    "llama": ConfigFamily("LlamaForCausalLM", table(SIZES, 32000, 4096, 11008, 32, 32, 2048), LLAMA_READERS),
    "mistral": ConfigFamily("MistralForCausalLM", MISTRAL_DEFAULTS, (llama_values, window_values)),
    "mixtral": ConfigFamily(
        "MixtralForCausalLM",
        {
            **MISTRAL_DEFAULTS,
            **table("rms_norm_eps rope_theta num_experts_per_tok num_local_experts", 1e-5, 1e6, 2, 8),
            "sliding_window": None,
        },
        (llama_values, _mixtral_values),
        aliases=pairs("num_experts=num_local_experts"),
    ),
    "nemotron": ConfigFamily(
        "NemotronForCausalLM",
        {
            **table(SIZES, 256000, 6144, 24576, 32, 48, 4096),
            **table("hidden_act initializer_range norm_eps partial_rotary_factor", "relu2", 0.0134, 1e-5, 0.5),
        },
        LLAMA_READERS,
        fixed={"norm": "layer", "norm_bias": True, "gated": False},
    ),
    "qwen2": ConfigFamily("Qwen2ForCausalLM", QWEN2_DEFAULTS, (llama_values, qwen_window_values), {"qkv_bias": True}),
    "qwen3": ConfigFamily(
        "Qwen3ForCausalLM",
        {**QWEN2_DEFAULTS, "head_dim": 128},
        (*LLAMA_READERS, qwen_window_values),
        fixed={**NO_FFN_BIAS, "query_key_norm": True},
    ),
    "t5": ConfigFamily(
        "T5ForConditionalGeneration T5WithLMHeadModel",
        {
            **table("vocab_size n_positions d_model d_kv d_ff num_layers num_heads", 32128, 512, 512, 64, 2048, 6, 8),
            **table("relative_attention_num_buckets relative_attention_max_distance dropout_rate", 32, 128, 0.1),
            **table("layer_norm_epsilon feed_forward_proj", 1e-6, "relu"),
        },
        (_t5_values,),
        settings=EncoderDecoderSettings,
        aliases=pairs("hidden_size=d_model num_attention_heads=num_heads num_hidden_layers=num_layers head_dim=d_kv"),
    ),
}


_LAYER_NORM = {"norm": "layer", "gated": False}
_BIASED = {**_LAYER_NORM, "bias": True}
_SLIDING, _FULL = "sliding_attention", "full_attention"


def _full_layers(c: ConfigValues, period: int) -> list[int]:
    """Layers without a window: those in `layer_types`, or each `period`-th."""
    layers, kinds = c.read("num_hidden_layers"), c.values.get("layer_types")
    if kinds is None:
        c.check(
            "sliding_window_pattern", isinstance(period, int) and period > 0, "it must be a whole number of at least 1"
        )
        return [layer for layer in range(layers) if (layer + 1) % period == 0]
    is_valid = isinstance(kinds, list) and len(kinds) == layers and all(kind in (_SLIDING, _FULL) for kind in kinds)
    c.check("layer_types", is_valid, f"it must name {_SLIDING!r} or {_FULL!r} for each of the {layers} layers")
    return [layer for layer, kind in enumerate(kinds) if kind == _FULL]


def _gemma_values(c: ConfigValues) -> dict[str, Any]:
    return {**llama_values(c), "activation": "gelu_tanh"}


def _gemma2_values(c: ConfigValues) -> dict[str, Any]:
    variant = DecoderVariant(norms="both", full_layers=tuple(_full_layers(c, 2)))
    return {**_gemma_values(c), **window_values(c), "variant": variant}


def _gemma3_values(c: ConfigValues) -> dict[str, Any]:
    variant = DecoderVariant(
        norms="both", full_layers=tuple(_full_layers(c, c.values.get("sliding_window_pattern", 6)))
    )
    return {**_gemma_values(c), **window_values(c), "query_key_norm": True, "rotary_fraction": 1.0, "variant": variant}


def _layer_norm_values(c: ConfigValues) -> dict[str, Any]:
    return {"norm_eps": c.values.get("layer_norm_eps", 1e-5), "dropout": c.values.get("hidden_dropout", 0.0)}


def _neox_values(c: ConfigValues) -> dict[str, Any]:
    bias = c.read("attention_bias")
    fraction = (
        rotary_values(c)["rotary_fraction"] if "partial_rotary_factor" in str(c.values) else c.values["rotary_pct"]
    )
    biases = {"bias": bias, "ffn_bias": True, "norm_bias": True, "rotary_fraction": fraction}
    return {**llama_values(c), **_layer_norm_values(c), **biases}


def _opt_values(c: ConfigValues) -> dict[str, Any]:
    width, hidden = c.values.get("word_embed_proj_dim"), c.read("hidden_size")
    c.check("word_embed_proj_dim", width in (None, hidden), f"only the hidden size {hidden} is known; leave it out")
    for key in ("do_layer_norm_before", "layer_norm_elementwise_affine"):
        c.check(key, c.values.get(key, True), "only models with it are known")
    c.reject_keys("_remove_final_layer_norm")
    bias = c.values.get("enable_bias", True)
    values = {**llama_values(c), "bias": bias, "norm_bias": True, "dropout": c.values["dropout"]}
    return {**values, "positions": "learned", "variant": DecoderVariant(more_positions=2)}


def _bloom_values(c: ConfigValues) -> dict[str, Any]:
    values = {"positions": "none", "variant": DecoderVariant(embedding_norm=True)}
    c.values["intermediate_size"] = 4 * c.read("hidden_size")
    return {**llama_values(c), **_layer_norm_values(c), **values}


def _falcon_values(c: ConfigValues) -> dict[str, Any]:
    """New decoders share keys in groups and have two norms; old ones share all keys or none."""
    hidden, heads = c.read("hidden_size"), c.read("num_attention_heads")
    is_new, is_parallel = bool(c.values.get("new_decoder_architecture")), c.values.get("parallel_attn", True)
    c.values["intermediate_size"] = c.values.get("ffn_hidden_size") or 4 * hidden
    shared = 1 if c.values.get("multi_query", True) else heads
    kv_heads = (c.values.get("num_kv_heads") or heads) if is_new else shared
    has_one_norm = is_parallel and (c.values.get("num_ln_in_parallel_attn") or (2 if is_new else 1)) == 1
    bias = c.values.get("bias", False)
    return {
        **llama_values(c),
        **_layer_norm_values(c),
        "kv_heads": kv_heads,
        "bias": bias,
        "norm_bias": True,
        "positions": "none" if c.values.get("alibi") else "rotary",
        "variant": DecoderVariant(norms="shared" if has_one_norm else "before"),
    }


def _olmo2_values(c: ConfigValues) -> dict[str, Any]:
    return {"variant": DecoderVariant(norms="after", query_key_norm_of_all_heads=True)}


def _qwen3_moe_values(c: ConfigValues) -> dict[str, Any]:
    """Layers with a plain network must be the first ones."""
    plain = c.values.get("mlp_only_layers") or []
    is_start = isinstance(plain, list) and all(layer in plain for layer in range(len(plain)))
    c.check("mlp_only_layers", is_start, "sizes are known where these are the first layers")
    c.check("decoder_sparse_step", c.values.get("decoder_sparse_step", 1) == 1, "sizes are known for 1")
    experts = c.read_all(_QWEN_EXPERTS)
    window = window_values(c) if c.read("use_sliding_window") else {}
    return {"experts": {**experts, "first_dense_layers": len(plain)}, "query_key_norm": True, **window}


def _gpt_oss_values(c: ConfigValues) -> dict[str, Any]:
    experts = c.read_all("count=num_local_experts per_token=num_experts_per_tok hidden=intermediate_size")
    variant = DecoderVariant(attention_sinks=True, expert_biases=True, full_layers=tuple(_full_layers(c, 2)))
    return {**window_values(c), "experts": experts, "variant": variant}


def _openai_gpt_values(c: ConfigValues) -> dict[str, Any]:
    values = _gpt2_values(c)
    activation = "gelu_tanh" if values["activation"] == "gelu" else values["activation"]  # It says gelu for gelu_new
    return {**values, "activation": activation, "variant": DecoderVariant(norms="after", final_norm=False)}


_KEYS = f"{SIZES} num_key_value_heads"
_GEMMA = {"tie_word_embeddings": True, "sliding_window": 4096}
_DECODERS: dict[str, ConfigFamily] = {
    "bloom": ConfigFamily(
        "BloomForCausalLM",
        {**table(SIZES, 250880, 64, 256, 2, 8, 2048), "hidden_act": "gelu", "tie_word_embeddings": True},
        (_bloom_values,),
        fixed=_BIASED,
        aliases=pairs(
            "n_layer=num_hidden_layers n_head=num_attention_heads layer_norm_epsilon=layer_norm_eps n_embed=hidden_size"
        ),
    ),
    "falcon": ConfigFamily(
        "FalconForCausalLM",
        {**table(SIZES, 65024, 4544, 18176, 32, 71, 2048), "hidden_act": "gelu", "tie_word_embeddings": True},
        (_falcon_values,),
        fixed=_LAYER_NORM,
        aliases=pairs("activation=hidden_act layer_norm_epsilon=layer_norm_eps n_embed=hidden_size"),
    ),
    "gemma": ConfigFamily(
        "GemmaForCausalLM",
        {**table(f"{_KEYS} head_dim", 256000, 3072, 24576, 28, 16, 8192, 16, 256), "tie_word_embeddings": True},
        (*LLAMA_READERS, _gemma_values),
        fixed=NO_FFN_BIAS,
    ),
    "gemma2": ConfigFamily(
        "Gemma2ForCausalLM",
        {**_GEMMA, **table(f"{_KEYS} head_dim", 256000, 2304, 9216, 26, 8, 8192, 4, 256)},
        (*LLAMA_READERS, _gemma2_values),
        fixed=NO_FFN_BIAS,
    ),
    "gemma3_text": ConfigFamily(
        "Gemma3ForCausalLM",
        {**_GEMMA, **table(f"{_KEYS} head_dim", 262208, 2304, 9216, 26, 8, 131072, 4, 256)},
        (*LLAMA_READERS, _gemma3_values),
        fixed=NO_FFN_BIAS,
    ),
    "gpt_neox": ConfigFamily(
        "GPTNeoXForCausalLM",
        {
            **table(SIZES, 50432, 6144, 24576, 44, 64, 2048),
            **table("hidden_act rotary_pct attention_bias", "gelu", 0.25, True),
        },
        (_neox_values,),
        fixed=_LAYER_NORM,
    ),
    "gpt_oss": ConfigFamily(
        "GptOssForCausalLM",
        {
            **table(f"{_KEYS} head_dim", 201088, 2880, 2880, 36, 64, 131072, 8, 64),
            **table("num_local_experts num_experts_per_tok sliding_window attention_bias", 128, 4, 128, True),
        },
        (*LLAMA_READERS, _gpt_oss_values),
        aliases=pairs("num_experts=num_local_experts"),
    ),
    "olmo2": ConfigFamily(
        "Olmo2ForCausalLM", table(SIZES, 50304, 4096, 11008, 32, 32, 2048), (*LLAMA_READERS, _olmo2_values), NO_FFN_BIAS
    ),
    "openai-gpt": ConfigFamily(
        "OpenAIGPTLMHeadModel",
        {**FAMILIES["gpt2"].defaults, **table("vocab_size n_positions activation_function", 40478, 512, "gelu")},
        (_openai_gpt_values,),
        FAMILIES["gpt2"].fixed,
        aliases={**FAMILIES["gpt2"].aliases, "afn": "activation_function"},
    ),
    "opt": ConfigFamily(
        "OPTForCausalLM",
        {
            **table(SIZES, 50272, 768, 3072, 12, 12, 2048),
            **table("hidden_act tie_word_embeddings dropout", "relu", True, 0.1),
        },
        (_opt_values,),
        fixed=_LAYER_NORM,
        aliases=pairs("ffn_dim=intermediate_size activation_function=hidden_act init_std=initializer_range"),
    ),
    "phi3": ConfigFamily(
        "Phi3ForCausalLM", table(SIZES, 32064, 3072, 8192, 32, 32, 4096), (llama_values, window_values)
    ),
    "qwen3_moe": ConfigFamily(
        "Qwen3MoeForCausalLM",
        {
            **table(_KEYS, 151936, 2048, 6144, 24, 32, 32768, 4),
            **table("num_experts num_experts_per_tok moe_intermediate_size sliding_window", 128, 8, 768, 4096),
        },
        (*LLAMA_READERS, _qwen3_moe_values),
        fixed=NO_FFN_BIAS,
        aliases=pairs("num_local_experts=num_experts"),
    ),
}
MORE_FAMILIES = {name: replace(family, settings=PublishedDecoderSettings) for name, family in _DECODERS.items()}


_FAMILIES = FAMILIES | MORE_FAMILIES


def settings_from_config(config: dict[str, Any]) -> TransformerSettings:
    """The settings of one of motet's architectures that has the sizes of the model of `config`."""
    kind = config.get("model_type")
    family = _FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        raise InputError(
            f"config.json: the sizes of model_type = {kind!r} are unknown; known are {', '.join(sorted(_FAMILIES))}; "
            "`motet show model hf:FOLDER --trace` finds those of others"
        )
    named = {family.aliases.get(key, key): value for key, value in config.items()}
    c = ConfigValues({**COMMON, **family.defaults, **named})
    known = family.class_names.split()
    classes = named.get("architectures") or known
    is_known = isinstance(classes, list) and classes[0] in known
    c.check("architectures", is_known, f"for {kind}, sizes are known of {' and '.join(known)}")
    values = {name: value for read in family.readers for name, value in read(c).items()}
    try:
        return family.settings.model_validate({**values, **family.fixed})
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        path = ".".join(str(part) for part in problem["loc"])
        raise InputError(
            f"config.json of a {kind}: {path} = {problem['input']!r}: {problem['msg'].removeprefix('Value error, ')}"
        ) from None


def known_model_types() -> frozenset[str]:
    """The values of `model_type` whose sizes are known."""
    return frozenset(_FAMILIES)


def is_hub_name(text: str) -> bool:
    """Whether a text may be the name of a model of the Hugging Face Hub, such as `org/name`."""
    return bool(re.fullmatch(r"[\w.-]+/[\w.-]+", text)) and not text.endswith((".json", ".toml"))


def download_command(hub_name: str) -> str:
    """The command that makes a folder with the config of a model of the Hub."""
    return f"`hf download {hub_name} config.json --local-dir {hub_name.rpartition('/')[2]}`"


def read_config(path: str | Path) -> dict[str, Any]:
    """The config of a Hugging Face folder, or of the path of its config.json."""
    file = Path(path, "config.json") if Path(path).is_dir() else Path(path)
    remedy = "give a folder with a config.json, or its path"
    if is_hub_name(str(path)):
        remedy += f"; motet downloads nothing: {download_command(str(path))}"
    with convert_os_errors(f"read {file}", remedy):
        text = file.read_bytes()
    try:
        config: dict[str, Any] = parse_json(text)
    except ValueError as error:
        raise InputError(f"{file} is not valid JSON: {error}") from None
    problem = f"{file} holds a {type(config).__name__}; a config is a JSON object with a model_type"
    check_input(isinstance(config, dict), problem)
    return config


def dropout_settings(config: dict[str, Any]) -> list[str]:
    """The names of a config's values for dropout, or for the noise of a router, that are above 0."""
    inner = [name for value in config.values() if isinstance(value, dict) for name in dropout_settings(value)]
    numbers = {str(key): value for key, value in config.items() if isinstance(value, int | float)}
    return [*inner, *(key for key, p in numbers.items() if ("drop" in key or "noise" in key) and p > 0)]
