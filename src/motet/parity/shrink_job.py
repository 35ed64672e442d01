"""A small job of the same structure: it keeps every kind of block, and the ratios that matter to a layout."""

import math
from pathlib import Path
from typing import Any

from motet.models.hf.hf_config import read_config
from motet.models.settings import DecoderSettings, EncoderDecoderSettings, TransformerSettings, UserModuleSettings
from motet.train.job import Job, job_from_tree

MAX_LAYERS, MAX_HEADS, MAX_HEAD_DIM, MAX_TOKENS = 2, 4, 16, 32
SMALL_BUCKET_MIB = 0.5  # A small model then has several buckets, too
HF_PREFIX = "hf:"
# The last step has this fraction of the learning rate; with 0 it would show no mistake of the optimizer.
MIN_FINAL_LR_FRACTION = 0.1
LOSSY_SETTINGS = ("compress_gradients", "compress_parameters", "compress_over", "compress_after", "error_feedback")
_LAYER_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers")
_DECODER_LAYER_KEYS = ("num_decoder_layers", "decoder_layers")
_HEAD_KEYS = (
    "num_attention_heads",
    "n_head",
    "n_heads",
    "num_heads",
    "encoder_attention_heads",
    "decoder_attention_heads",
)
_HIDDEN_KEYS = ("hidden_size", "n_embd", "d_model", "dim", "embedding_size")
_FFN_KEYS = ("intermediate_size", "n_inner", "d_ff", "hidden_dim", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim")


def make_small_job(job: Job, rows: int, steps: int) -> Job:
    """The job with a small model and `steps` steps of `rows` rows."""
    tree = job.model_dump(mode="json", exclude_unset=True)
    tree.setdefault("name", job.name)
    tree["model"] = {**tree["model"], **_small_model(job)}
    tokens = min(job.data.sequence_length, MAX_TOKENS)
    tree["data"] = {**tree.get("data", {}), "sequence_length": tokens, "batch_sequences": rows}
    tree["run"] = {**tree.get("run", {}), "steps": steps, "ranks": 1, "threads": 1}
    tree["checkpoint"] = {"keep": 1000}
    for name in ("epochs", "stop_at", "folder", "existing", "restarts"):
        tree["run"].pop(name, None)
    if job.optimizer.schedule.final_fraction < MIN_FINAL_LR_FRACTION:
        optimizer_tree = tree.get("optimizer", {})
        schedule = {**optimizer_tree.get("schedule", {}), "final_fraction": MIN_FINAL_LR_FRACTION}
        tree["optimizer"] = {**optimizer_tree, "schedule": schedule}
    tree["precision"] = {"recipe": "fp64"}
    tree["communication"] = {
        **{key: value for key, value in tree.get("communication", {}).items() if key not in LOSSY_SETTINGS},
        "bucket_mib": min(job.communication.bucket_mib, SMALL_BUCKET_MIB),
        "first_bucket_mib": min(job.communication.first_bucket_mib, SMALL_BUCKET_MIB / 4),
    }
    for section in ("layout", "outer"):
        tree.pop(section, None)
    tree["monitor"] = {"evaluate_batches": 3}
    return job_from_tree(tree, job.name)


def _small_model(job: Job) -> dict[str, Any]:
    model, tokens = job.model, min(job.data.sequence_length, MAX_TOKENS)
    if isinstance(model, TransformerSettings):
        return _small_spec(model, tokens)
    assert isinstance(model, UserModuleSettings)
    if not model.factory.startswith(HF_PREFIX):
        return {}
    config_path = model.factory.removeprefix(HF_PREFIX)
    config = {**read_hf_config(config_path), **model.arguments}
    config_file = (
        config_path if config_path.endswith(".json") else f"{config_path.rstrip('/')}/config.json"
    )  # its weights would not fit
    return {
        "factory": f"{HF_PREFIX}{config_file}",
        "arguments": {**model.arguments, **shrink_hf_config(config, tokens)},
    }


def read_hf_config(config_path: str) -> dict[str, Any]:
    return read_config(Path(config_path).expanduser())


def shrink_heads(heads: int, kv_heads: int) -> tuple[int, int]:
    """Fewer heads with the same number of queries per key; at least two keys stay where there were two."""
    queries_per_key = heads // kv_heads
    small_kv_heads = 1 if kv_heads == 1 else min(kv_heads, 2 if queries_per_key > 1 else MAX_HEADS)
    return queries_per_key * small_kv_heads, small_kv_heads


def _small_spec(model: TransformerSettings, tokens: int) -> dict[str, Any]:
    kv_heads = (model.kv_heads if isinstance(model, DecoderSettings) else None) or model.heads
    heads, small_kv_heads = shrink_heads(model.heads, kv_heads)
    head_dim = min(model.dim_per_head, MAX_HEAD_DIM)
    hidden = _scale_to_multiple_of_8(model.hidden, heads * head_dim / (model.heads * model.dim_per_head))
    small: dict[str, Any] = {
        "layers": min(model.layers, MAX_LAYERS),
        "heads": heads,
        "hidden": hidden,
        "ffn_hidden": _scale_to_multiple_of_8(model.ffn_hidden, hidden / model.hidden),
        "context": min(model.context, 2 * tokens),
    }
    if model.head_dim is not None or hidden != heads * head_dim:
        small["head_dim"] = head_dim
    if isinstance(model, DecoderSettings):
        if model.kv_heads is not None:
            small["kv_heads"] = small_kv_heads
        if model.sliding_window is not None:
            small["sliding_window"] = min(model.sliding_window, tokens // 2)
    if isinstance(model, EncoderDecoderSettings) and model.decoder_layers is not None:
        small["decoder_layers"] = min(model.decoder_layers, MAX_LAYERS)
    return small


def shrink_hf_config(config: dict[str, Any], tokens: int) -> dict[str, Any]:
    """The smaller sizes of a config of Hugging Face."""
    small: dict[str, Any] = {}
    heads = next((config[name] for name in _HEAD_KEYS if config.get(name)), None)
    hidden = next((config[name] for name in _HIDDEN_KEYS if config.get(name)), None)
    if heads and hidden:
        small_heads, small_kv_heads = shrink_heads(heads, config.get("num_key_value_heads") or heads)
        per_head = config.get("head_dim") or config.get("d_kv") or hidden // heads
        head_dim = min(per_head, MAX_HEAD_DIM)
        scale = small_heads * head_dim / (heads * per_head)
        small |= {name: small_heads for name in _HEAD_KEYS if config.get(name)}
        small |= {
            name: _scale_to_multiple_of_8(config[name], scale)
            for name in (*_HIDDEN_KEYS, *_FFN_KEYS)
            if config.get(name)
        }
        small |= {name: head_dim for name in ("head_dim", "d_kv") if config.get(name)}
        small |= {"num_key_value_heads": small_kv_heads} if config.get("num_key_value_heads") else {}
    layers = _layers_with_all_kinds(config)
    small |= {name: min(config[name], layers) for name in (*_LAYER_KEYS, *_DECODER_LAYER_KEYS) if config.get(name)}
    if config.get("layer_types"):
        small["layer_types"] = config["layer_types"][:layers]
    if config.get("sliding_window"):
        small["sliding_window"] = min(config["sliding_window"], tokens // 2)
    return small


def _layers_with_all_kinds(config: dict[str, Any]) -> int:
    """The count of first layers that have each kind at least once."""
    kinds = config.get("layer_types") or []
    return max(MAX_LAYERS, 1 + max((kinds.index(kind) for kind in set(kinds)), default=0))


def _scale_to_multiple_of_8(size: int, factor: float) -> int:
    return max(8, math.ceil(size * factor / 8) * 8)
