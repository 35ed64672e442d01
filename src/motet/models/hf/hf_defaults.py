"""Defaults of transformers for absent keys of a config.json, by family, where sizes depend on them."""

from typing import Any

_SIZE_KEYS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)


def _sizes(*values: int) -> dict[str, Any]:
    return dict(zip(_SIZE_KEYS, values, strict=True))


COMMON = {"initializer_range": 0.02, "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False}
LLAMA = _sizes(32000, 4096, 11008, 32, 32, 2048)
MISTRAL = {**_sizes(32000, 4096, 14336, 32, 32, 131072), "num_key_value_heads": 8, "sliding_window": 4096}
MIXTRAL = {
    **_sizes(32000, 4096, 14336, 32, 32, 131072),
    "num_key_value_heads": 8,
    "sliding_window": None,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
}
QWEN2 = {
    **_sizes(151936, 4096, 22016, 32, 32, 32768),
    "num_key_value_heads": 32,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
QWEN3 = {**QWEN2, "head_dim": 128}
NEMOTRON = {
    **_sizes(256000, 6144, 24576, 32, 48, 4096),
    "hidden_act": "relu2",
    "initializer_range": 0.0134,
    "norm_eps": 1e-5,
    "partial_rotary_factor": 0.5,
}
DEEPSEEK_V3 = {
    **_sizes(129280, 7168, 18432, 61, 128, 4096),
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
BERT = {
    **_sizes(30522, 768, 3072, 12, 12, 512),
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "tie_word_embeddings": True,
}
GPT2 = {
    "vocab_size": 50257,
    "n_positions": 1024,
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "activation_function": "gelu_new",
    "resid_pdrop": 0.1,
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": True,
}
T5 = {
    "vocab_size": 32128,
    "n_positions": 512,
    "d_model": 512,
    "d_kv": 64,
    "d_ff": 2048,
    "num_layers": 6,
    "num_heads": 8,
    "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128,
    "dropout_rate": 0.1,
    "layer_norm_epsilon": 1e-6,
    "feed_forward_proj": "relu",
}
GPT2_ALIASES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}
T5_ALIASES = {
    "hidden_size": "d_model",
    "num_attention_heads": "num_heads",
    "num_hidden_layers": "num_layers",
    "head_dim": "d_kv",
}
