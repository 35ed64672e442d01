"""Small jobs of models with eight blocks, for training in pipelines."""

from pathlib import Path
from typing import Any

from motet.train.job import Job
from train.runs import small_job
from train.tensor_parallel_runs import GPT2_LIKE, written_config

OWN = "vocab_size=260, context=24, layers=8, hidden=16, heads=4"
# Model -> its settings, and other ones of the job.
OWN_MODELS: dict[str, tuple[str, list[str]]] = {
    "decoder": (f"family='decoder', {OWN}, kv_heads=2, ffn_hidden=24", []),
    "gpt2-like": (f"family='decoder', {OWN}, ffn_hidden=32, {GPT2_LIKE}".replace(", tied=true", ""), []),
    "bert": (f"family='encoder', {OWN}, ffn_hidden=32", ["data.objective=masked"]),
    "t5": (
        f"family='encoder-decoder', {OWN.replace('260', '359').replace('8', '4')}, ffn_hidden=24",
        ["data.objective=spans"],
    ),
}
SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 8, "num_attention_heads": 4}
CAUSAL = {**SMALL, "num_key_value_heads": 2, "max_position_embeddings": 24, "head_dim": 4}
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
# Model of transformers -> its config, and the keys of its dropouts.
HUGGING_FACE: dict[str, tuple[dict[str, Any], list[str]]] = {
    "opt": (
        {
            "architectures": ["OPTForCausalLM"],
            **SMALL,
            "ffn_dim": 24,
            "max_position_embeddings": 24,
            "word_embed_proj_dim": 16,
        },
        ["attention_dropout", "dropout"],
    ),
    "qwen2": ({"architectures": ["Qwen2ForCausalLM"], **CAUSAL}, ["attention_dropout"]),
    "gpt2": (
        {"architectures": ["GPT2LMHeadModel"], "n_embd": 16, "n_layer": 8, "n_head": 4, "n_positions": 24},
        ["attn_pdrop", "embd_pdrop", "resid_pdrop"],
    ),
    "gemma2": ({"architectures": ["Gemma2ForCausalLM"], **CAUSAL, "sliding_window": 8}, ["attention_dropout"]),
    "phi3": (
        {"architectures": ["Phi3ForCausalLM"], **CAUSAL, **ENDS},
        ["attention_dropout", "embd_pdrop", "resid_pdrop"],
    ),
    "llama": ({"architectures": ["LlamaForCausalLM"], **CAUSAL}, ["attention_dropout"]),
}
ALWAYS_TIED = {"bert"}
MODELS = (*OWN_MODELS, *HUGGING_FACE)


def job_of_model(folder: Path, model: str, *overrides: str, dropout: float = 0.0, tied: bool = False) -> Job:
    """A job of batches of 24 sequences of 12 tokens."""
    common = ["data.sequence_length=12", "data.batch_sequences=24", "optimizer.clip_norm=0.5"]
    if model in OWN_MODELS:
        settings, more = OWN_MODELS[model]
        ties = "" if model in ALWAYS_TIED else f", tied={str(tied).lower()}"
        return small_job(folder, *common, f"model={{{settings}{ties}, dropout={dropout}}}", *more, *overrides)
    config, keys = HUGGING_FACE[model]
    config = {**config, "model_type": model, "tie_word_embeddings": tied, **dict.fromkeys(keys, dropout)}
    return small_job(folder, *common, written_config(folder, config), *overrides)
