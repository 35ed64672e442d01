"""Families of published decoders that differ from motet's own in their norms, positions, windows or experts."""

from dataclasses import replace
from typing import Any

from motet.models.hf.config_families import (
    LLAMA_READERS,
    NO_FFN_BIAS,
    SIZES,
    llama_values,
    rotary_values,
    window_values,
)
from motet.models.hf.config_values import ConfigFamily, ConfigValues, pairs, table
from motet.models.spec.decoder_variant import DecoderVariant, PublishedDecoderSettings

_LAYER_NORM = {"norm": "layer", "gated": False}
_BIASED = {**_LAYER_NORM, "bias": True}
_SLIDING, _FULL = "sliding_attention", "full_attention"


def _full_layers(c: ConfigValues, period: int) -> list[int]:
    """Layers without a window: as `layer_types` says, or each `period`-th."""
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
    experts = c.read_all("count=num_experts per_token=num_experts_per_tok hidden=moe_intermediate_size")
    window = window_values(c) if c.read("use_sliding_window") else {}
    return {"experts": {**experts, "first_dense_layers": len(plain)}, "query_key_norm": True, **window}


def _gpt_oss_values(c: ConfigValues) -> dict[str, Any]:
    experts = c.read_all("count=num_local_experts per_token=num_experts_per_tok hidden=intermediate_size")
    variant = DecoderVariant(attention_sinks=True, expert_biases=True, full_layers=tuple(_full_layers(c, 2)))
    return {**window_values(c), "experts": experts, "variant": variant}


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
