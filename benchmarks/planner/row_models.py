"""The model and the precision of a measured row, from its columns."""

import re
from dataclasses import replace
from typing import Any

from motet.collectives.cost.published_curves import Row, count, optional_number
from motet.models.settings import DecoderSettings, LatentAttentionSettings, MixtureOfExpertsSettings
from motet.models.spec.block_costs import DecoderVariant, PublishedDecoderSettings
from motet.precision.recipe import RECIPES, PrecisionRecipe

# Families whose feed-forward networks have a gate, rotary positions and RMS norms.
_GATED = re.compile(r"llama|qwen|mixtral|mistral|deepseek|gpt.?oss|olmo|gemma|yi-|moonlight|kimi|glm", re.IGNORECASE)
_TIED = re.compile(r"^gpt|megatron|turing|bloom|mpt|gemma", re.IGNORECASE)
# DeepSeek V3, whose latent attention others take over.
LATENT_ATTENTION = LatentAttentionSettings(
    query_rank=1536, key_value_rank=512, rotary_head_dim=64, plain_head_dim=128, value_head_dim=128
)
_WINDOW_OF_GPT_OSS = 128
_VOCABULARY = 50257  # That of GPT-2, where a row has none
_FLOAT8 = re.compile(r"fp8|float8|mxfp8|e4m3|hybrid")


def model_of_row(row: Row) -> DecoderSettings:
    """The model that a row of steps.csv describes."""
    name, notes = row["model"], row.get("notes", "")
    hidden, heads = count(row, "hidden"), count(row, "heads")
    experts, ffn = count(row, "experts", 1), optional_number(row, "ffn")
    inner = int(ffn) if ffn else (count(row, "moe_ffn") if experts > 1 else 4 * hidden)
    is_latent = "MLA" in f"{name} {notes}" or re.search("deepseek", name, re.IGNORECASE) is not None
    is_gated = bool(_GATED.search(name)) or experts > 1 or (inner != 4 * hidden)
    is_gated = is_gated and "gpt 7B" not in name
    values: dict[str, Any] = {
        "vocab_size": count(row, "vocab", _VOCABULARY),
        "context": count(row, "seq"),
        "layers": count(row, "layers"),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": count(row, "kv_heads", heads),
        "ffn_hidden": inner,
        "gated": is_gated,
        "activation": "silu" if is_gated else "gelu_tanh",
        "norm": "rms" if is_gated else "layer",
        "bias": not is_gated,
        "positions": "rotary" if is_gated else "learned",
        "tied": bool(_TIED.search(name)) and not is_gated and "untied" not in notes,
    }
    if hidden % heads or _is_gpt_oss(name) or re.search(r"qwen3", name, re.IGNORECASE):
        values["head_dim"] = 64 if _is_gpt_oss(name) else 128
    if experts > 1:
        dense = 3 if is_latent and count(row, "layers") > 30 else 1 if is_latent else 0
        values["experts"] = MixtureOfExpertsSettings(
            count=experts,
            per_token=count(row, "topk"),
            hidden=count(row, "moe_ffn", inner),
            shared=1 if is_latent else 0,
            first_dense_layers=dense,
        )
    if is_latent:
        values["latent_attention"] = LATENT_ATTENTION
    if _is_gpt_oss(name):
        full = tuple(range(1, count(row, "layers"), 2))
        variant = DecoderVariant(attention_sinks=True, expert_biases=True, full_layers=full)
        return PublishedDecoderSettings(sliding_window=_WINDOW_OF_GPT_OSS, variant=variant, **values)
    return DecoderSettings(**values)


def _is_gpt_oss(model: str) -> bool:
    """Whether attention has sinks, every second layer a window, and experts have biases."""
    return re.search(r"gpt.?oss", model, re.IGNORECASE) is not None


def training_of_row(row: Row) -> dict[str, Any]:
    """Settings of a run that only memory depends on, as arguments of `PlannedStep`. Dropout is Megatron-LM's
    default for GPT models of papers, its tests, and BigScience, whose scripts do not set it."""
    notes, source = row["notes"], row["source"]
    has_dropout = re.search(
        r"megatron-lm tests/.*/gpt/|korthikanti|narayanan|calculon|bigscience", source, re.IGNORECASE
    )
    values: dict[str, Any] = {
        "has_dropout": has_dropout is not None,
        "extra_outputs": int("MTP 1" in notes or "MTP depth 1" in notes),
        "shards_gradient_sums": "grad sharded" in row["shard"],
    }
    return values | ({"expert_imbalance": 1.0} if "force-balanced" in notes else {})


def precision_of_row(row: Row) -> tuple[PrecisionRecipe, str]:
    """The dtypes of tensors, and the dtype of the inputs of products."""
    text, notes = row["precision"].lower(), row.get("notes", "")
    compute = "float16" if text.startswith("fp16") else "float32" if text.startswith("fp32") else "bfloat16"
    eight = "mxfloat8" if re.search(r"mx-?fp8|mxfloat8", text) else "float8"
    matmul = "float4" if "fp4" in text else eight if _FLOAT8.search(text) else compute
    name = {"float16": "fp16", "float32": "fp32"}.get(compute, "bf16")
    recipe = RECIPES[name]
    # NVIDIA's recipes for performance pages set grad_reduce_in_fp32 = False.
    if "grad reduce in bf16" in notes or re.search(r"performance[-_ ]summary", row.get("source", "")):
        recipe = replace(recipe, reduce="bfloat16")
    if text.startswith("fp16"):
        recipe = replace(recipe, reduce="float16")
    if "pure" in text:
        recipe = replace(recipe, reduce="bfloat16", master="bfloat16", state="bfloat16")
    if "bf16 exp_avg" in notes:
        recipe = replace(recipe, state="bfloat16")
    return recipe, matmul
