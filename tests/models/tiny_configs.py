"""Tiny configs of families of transformers, with sizes that differ from each other and are multiples of 8."""

from typing import Any

_SIZES = {"vocab_size": 104, "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 3}
_TOKENS = {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 0}
_LLAMA = {**_SIZES, **_TOKENS, "num_attention_heads": 6, "max_position_embeddings": 160}
_GROUPED = {**_LLAMA, "num_key_value_heads": 2}
_EXPERTS = {**_GROUPED, "num_experts_per_tok": 2}
_LATENT = {"kv_lora_rank": 16, "q_lora_rank": 40, "qk_rope_head_dim": 8, "qk_nope_head_dim": 24, "v_head_dim": 16}
_WINDOWS = {"head_dim": 16, "sliding_window": 100}

TINY_CONFIGS: dict[str, dict[str, Any]] = {
    "bert": {**_LLAMA, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "bloom": {**_TOKENS, "vocab_size": 104, "hidden_size": 48, "n_layer": 3, "n_head": 6},
    "deepseek_v3": {
        **_EXPERTS,
        **_LATENT,
        "num_key_value_heads": 6,
        "moe_intermediate_size": 24,
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    "falcon": {**_TOKENS, "vocab_size": 104, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6},
    "gemma": {**_GROUPED, "head_dim": 16},
    "gemma2": {**_GROUPED, **_WINDOWS},
    "gemma3_text": {**_GROUPED, **_WINDOWS},
    "gpt2": {
        **_TOKENS,
        "vocab_size": 104,
        "n_positions": 160,
        "n_embd": 48,
        "n_layer": 3,
        "n_head": 6,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    },
    "gpt_neox": _LLAMA,
    "gpt_oss": {**_EXPERTS, **_WINDOWS, "num_local_experts": 4},
    "llama": _GROUPED,
    "mistral": {**_GROUPED, "sliding_window": 100},
    "mixtral": {**_EXPERTS, "num_local_experts": 4},
    "olmo2": _GROUPED,
    "opt": {
        **_TOKENS,
        "vocab_size": 104,
        "hidden_size": 48,
        "ffn_dim": 72,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "max_position_embeddings": 160,
        "dropout": 0.0,
    },
    "phi3": _GROUPED,
    "qwen2": _GROUPED,
    "qwen3": {**_GROUPED, "head_dim": 16},
    "qwen3_moe": {**_EXPERTS, "head_dim": 16, "num_experts": 8, "moe_intermediate_size": 24},
    "t5": {
        "vocab_size": 104,
        "d_model": 48,
        "d_kv": 8,
        "d_ff": 72,
        "num_layers": 3,
        "num_heads": 6,
        "dropout_rate": 0.0,
    },
}
