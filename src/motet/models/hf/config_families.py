"""The families of models whose sizes are known from their config.json, with the defaults of transformers."""

from typing import Any

from motet.models.hf.config_values import ACTIVATIONS, ConfigFamily, ConfigValues, pairs, table
from motet.models.settings import EncoderDecoderSettings, EncoderSettings

# Our settings and the keys of a config.
_LLAMA_AND_BERT = (
    "vocab_size=vocab_size context=max_position_embeddings layers=num_hidden_layers hidden=hidden_size "
    "heads=num_attention_heads ffn_hidden=intermediate_size activation=hidden_act init_std=initializer_range "
)
_LLAMA = _LLAMA_AND_BERT + "tied=tie_word_embeddings"
_BERT = _LLAMA_AND_BERT + "norm_eps=layer_norm_eps dropout=hidden_dropout_prob token_types=type_vocab_size"
_GPT2 = (
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
_EXPERTS = "count=n_routed_experts per_token=num_experts_per_tok hidden=moe_intermediate_size shared=n_shared_experts"
_LLAMA3_ROPE = pairs(
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
        values["rope_scaling"] = {setting: rope[key] for setting, key in _LLAMA3_ROPE.items() if key in rope}
    return values


def llama_values(c: ConfigValues) -> dict[str, Any]:
    values = {**c.read_all(_LLAMA), **rotary_values(c)}
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
    # `head_dim` is the rotated part of a head here, and keys are not shared by heads.
    heads = {"head_dim": latent["plain_head_dim"], "kv_heads": c.read("num_attention_heads")}
    return {"latent_attention": latent, "experts": experts, **heads}


def _gpt2_values(c: ConfigValues) -> dict[str, Any]:
    c.reject_keys("add_cross_attention")
    values = c.read_all(_GPT2)
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
