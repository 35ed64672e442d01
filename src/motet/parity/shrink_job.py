"""A small job of the same structure: it keeps every kind of block, and the ratios that matter to a layout."""

import math
from pathlib import Path
from typing import Any

from motet.models.hf.hf_config import read_config
from motet.models.settings import TransformerSettings, UserModuleSettings
from motet.train.job import Job, job_from_tree

MAX_LAYERS, MAX_HEADS, MAX_HEAD_DIM, MAX_TOKENS = 2, 4, 16, 32
SMALL_BUCKET_MIB = 0.5  # A small model then has several buckets, too
HF_PREFIX = "hf:"
# The last step has this fraction of the learning rate; with 0 it would show no mistake of the optimizer.
MIN_FINAL_LR_FRACTION = 0.1
DROPPED_SETTINGS = {
    "run": ("epochs", "stop_at", "folder", "existing", "restarts"),
    "communication": ("compress_gradients", "compress_parameters", "compress_over", "compress_after", "error_feedback"),
}
_LAYER_KEYS = (
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers"),
    *("num_decoder_layers", "decoder_layers"),
)
_HEAD_KEYS = (
    *("num_attention_heads", "n_head", "n_heads", "num_heads"),
    *("encoder_attention_heads", "decoder_attention_heads"),
)
_HIDDEN_KEYS = ("hidden_size", "n_embd", "d_model", "dim", "embedding_size")
_FFN_KEYS = ("intermediate_size", "n_inner", "d_ff", "hidden_dim", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim")


def make_small_job(job: Job, rows: int, steps: int, *, max_tokens: int = MAX_TOKENS, blocks: int = MAX_LAYERS) -> Job:
    """The job with a small model and `steps` steps of `rows` rows; `blocks` are kept, if the model has as many."""
    tree, tokens = job.model_dump(mode="json", exclude_unset=True), min(job.data.sequence_length, max_tokens)
    replacements: dict[str, dict[str, Any]] = {
        "model": _small_model(job, tokens, max(blocks, MAX_LAYERS)),
        "data": {"sequence_length": tokens, "batch_sequences": rows},
        "run": {"steps": steps, "ranks": 1, "threads": 1},
        "communication": {
            "bucket_mib": min(job.communication.bucket_mib, SMALL_BUCKET_MIB),
            "first_bucket_mib": min(job.communication.first_bucket_mib, SMALL_BUCKET_MIB / 4),
        },
    }
    if job.optimizer.schedule.final_fraction < MIN_FINAL_LR_FRACTION:
        schedule = tree.get("optimizer", {}).get("schedule", {})
        replacements["optimizer"] = {"schedule": {**schedule, "final_fraction": MIN_FINAL_LR_FRACTION}}
    small = {
        section: _without(tree.get(section, {}), DROPPED_SETTINGS.get(section, ())) | new
        for section, new in replacements.items()
    }
    fixed = {"precision": {"recipe": "fp64"}, "checkpoint": {"keep": 1000}, "monitor": {"evaluate_batches": 3}}
    return job_from_tree({"name": job.name} | _without(tree, ("layout", "outer")) | small | fixed, job.name)


def _without(tree: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: value for name, value in tree.items() if name not in names}


def _small_model(job: Job, tokens: int, blocks: int) -> dict[str, Any]:
    model = job.model
    if isinstance(model, TransformerSettings):
        return _small_spec(model, tokens, blocks)
    assert isinstance(model, UserModuleSettings)
    if not model.factory.startswith(HF_PREFIX):
        return {}
    path = model.factory.removeprefix(HF_PREFIX)
    config = {**read_config(Path(path).expanduser()), **model.arguments}
    file = path if path.endswith(".json") else f"{path.rstrip('/')}/config.json"  # The stored weights do not fit
    return {
        "factory": f"{HF_PREFIX}{file}",
        "arguments": {**model.arguments, **shrink_hf_config(config, tokens, blocks)},
    }


def shrink_heads(heads: int, kv_heads: int) -> tuple[int, int]:
    """Fewer heads with the same number of queries per key, which two and four ranks divide if they divided the many."""
    queries_per_key = heads // kv_heads
    limit = 3 if kv_heads % 2 else 2 if queries_per_key > 1 or kv_heads % 4 else MAX_HEADS
    small_kv_heads = min(kv_heads, limit)
    return queries_per_key * small_kv_heads, small_kv_heads


def _small_spec(model: TransformerSettings, tokens: int, blocks: int) -> dict[str, Any]:
    heads, small_kv_heads = shrink_heads(model.heads, getattr(model, "kv_heads", None) or model.heads)
    head_dim = min(model.dim_per_head, MAX_HEAD_DIM)
    hidden = _scale_to_multiple_of_8(model.hidden, heads * head_dim / (model.heads * model.dim_per_head))
    small: dict[str, Any] = {
        "layers": min(model.layers, blocks),
        "heads": heads,
        "hidden": hidden,
        "ffn_hidden": _scale_width(model.ffn_hidden, hidden / model.hidden),
        "context": min(model.context, 2 * tokens),
    }
    if model.head_dim is not None or hidden != heads * head_dim:
        small["head_dim"] = head_dim
    limits = {"kv_heads": small_kv_heads, "sliding_window": tokens // 2, "decoder_layers": blocks}
    sizes = {name: getattr(model, name, None) for name in limits}  # Some models have them
    return small | {name: min(size, limits[name]) for name, size in sizes.items() if size is not None}


def shrink_hf_config(config: dict[str, Any], tokens: int, blocks: int = MAX_LAYERS) -> dict[str, Any]:
    """The smaller sizes of a config of Hugging Face."""
    present = {name: value for name, value in config.items() if value}
    kinds = present.get("layer_types", [])
    layers = max(blocks, 1 + max((kinds.index(kind) for kind in set(kinds)), default=0))  # One of each kind
    limits = {**dict.fromkeys(_LAYER_KEYS, layers), "sliding_window": tokens // 2}
    small = {name: min(present[name], limit) for name, limit in limits.items() if name in present}
    if kinds:
        small["layer_types"] = kinds[:layers]
    heads = next((present[name] for name in _HEAD_KEYS if name in present), None)
    hidden = next((present[name] for name in _HIDDEN_KEYS if name in present), None)
    if not heads or not hidden:
        return small
    small_heads, small_kv_heads = shrink_heads(heads, present.get("num_key_value_heads", heads))
    per_head = present.get("head_dim") or present.get("d_kv") or hidden // heads
    head_dim = min(per_head, MAX_HEAD_DIM)
    scale = small_heads * head_dim / (heads * per_head)
    sizes = {
        **{name: _scale_to_multiple_of_8(size, scale) for name, size in present.items() if name in _HIDDEN_KEYS},
        **{name: _scale_width(size, scale) for name, size in present.items() if name in _FFN_KEYS},
        **dict.fromkeys(_HEAD_KEYS, small_heads),
        **dict.fromkeys(("head_dim", "d_kv"), head_dim),
        "num_key_value_heads": small_kv_heads,
    }
    return small | {name: size for name, size in sizes.items() if name in present}


def _scale_width(size: int, factor: float) -> int:
    """An inner width, which stays one that ranks do not divide."""
    return _scale_to_multiple_of_8(size - size % 8, factor) + size % 8


def _scale_to_multiple_of_8(size: int, factor: float) -> int:
    return max(8, math.ceil(size * factor / 8) * 8)
