"""A job of the same structure that is small: every kind of block stays, and the ratios that matter to a layout."""

import math
from pathlib import Path
from typing import Any

from motet.models.hf.hf_config import read_config
from motet.models.settings import DecoderSettings, EncoderDecoderSettings, TransformerSettings, UserModuleSettings
from motet.train.job import Job, job_from_tree

LAYERS, HEADS, HEAD_DIM, TOKENS = 2, 4, 16, 32
BUCKET_MIB = 0.5
"""A small model has as many buckets as a large one, so that the second one is looked at too."""
HUGGING_FACE = "hf:"
SLOWEST = 0.1
"""Of the learning rate, which the last step has: with 0 it would show no mistake of the optimizer."""
LOSSY = ("compress_gradients", "compress_parameters", "compress_over", "compress_after", "error_feedback")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers")
_MORE_LAYERS = ("num_decoder_layers", "decoder_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads")
_HIDDEN = ("hidden_size", "n_embd", "d_model", "dim", "embedding_size")
_INNER = ("intermediate_size", "n_inner", "d_ff", "hidden_dim", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim")


def shrink(job: Job, rows: int, steps: int) -> Job:
    """Steps of so many rows."""
    tree = job.model_dump(mode="json", exclude_unset=True)
    tree.setdefault("name", job.name)
    tree["model"] = {**tree["model"], **_model(job)}
    tokens = min(job.data.sequence_length, TOKENS)
    tree["data"] = {**tree.get("data", {}), "sequence_length": tokens, "batch_sequences": rows}
    tree["run"] = {**tree.get("run", {}), "steps": steps, "ranks": 1, "threads": 1}
    tree["checkpoint"] = {"keep": 1000}
    for name in ("epochs", "stop_at", "folder", "existing", "restarts"):
        tree["run"].pop(name, None)
    if job.optimizer.schedule.final_fraction < SLOWEST:
        given = tree.get("optimizer", {})
        schedule = {**given.get("schedule", {}), "final_fraction": SLOWEST}
        tree["optimizer"] = {**given, "schedule": schedule}
    tree["precision"] = {"recipe": "fp64"}
    tree["communication"] = {
        **{key: value for key, value in tree.get("communication", {}).items() if key not in LOSSY},
        "bucket_mib": min(job.communication.bucket_mib, BUCKET_MIB),
        "first_bucket_mib": min(job.communication.first_bucket_mib, BUCKET_MIB / 4),
    }
    for section in ("layout", "outer"):
        tree.pop(section, None)
    tree["monitor"] = {"evaluate_batches": 3}
    return job_from_tree(tree, job.name)


def _model(job: Job) -> dict[str, Any]:
    model, tokens = job.model, min(job.data.sequence_length, TOKENS)
    if isinstance(model, TransformerSettings):
        return _ours(model, tokens)
    assert isinstance(model, UserModuleSettings)
    if not model.factory.startswith(HUGGING_FACE):
        return {}
    place = model.factory.removeprefix(HUGGING_FACE)
    config = {**read_config_of(place), **model.arguments}
    where = place if place.endswith(".json") else f"{place.rstrip('/')}/config.json"  # its weights would not fit
    return {"factory": f"{HUGGING_FACE}{where}", "arguments": {**model.arguments, **of_config(config, tokens)}}


def read_config_of(place: str) -> dict[str, Any]:
    return read_config(Path(place).expanduser())


def heads_of(heads: int, shared: int) -> tuple[int, int]:
    """Fewer heads, of which as many share a key as before; two keys or more stay where there were as many."""
    together = heads // shared
    keys = 1 if shared == 1 else min(shared, 2 if together > 1 else HEADS)
    return together * keys, keys


def _ours(model: TransformerSettings, tokens: int) -> dict[str, Any]:
    shared = (model.kv_heads if isinstance(model, DecoderSettings) else None) or model.heads
    heads, keys = heads_of(model.heads, shared)
    head_dim = min(model.dim_per_head, HEAD_DIM)
    hidden = _scaled(model.hidden, heads * head_dim / (model.heads * model.dim_per_head))
    found: dict[str, Any] = {
        "layers": min(model.layers, LAYERS),
        "heads": heads,
        "hidden": hidden,
        "ffn_hidden": _scaled(model.ffn_hidden, hidden / model.hidden),
        "context": min(model.context, 2 * tokens),
    }
    if model.head_dim is not None or hidden != heads * head_dim:
        found["head_dim"] = head_dim
    if isinstance(model, DecoderSettings):
        if model.kv_heads is not None:
            found["kv_heads"] = keys
        if model.sliding_window is not None:
            found["sliding_window"] = min(model.sliding_window, tokens // 2)
    if isinstance(model, EncoderDecoderSettings) and model.decoder_layers is not None:
        found["decoder_layers"] = min(model.decoder_layers, LAYERS)
    return found


def of_config(config: dict[str, Any], tokens: int) -> dict[str, Any]:
    """Of a config of Hugging Face: what replaces its values."""
    found: dict[str, Any] = {}
    heads = next((config[name] for name in _HEADS if config.get(name)), None)
    hidden = next((config[name] for name in _HIDDEN if config.get(name)), None)
    if heads and hidden:
        fewer, keys = heads_of(heads, config.get("num_key_value_heads") or heads)
        per_head = config.get("head_dim") or config.get("d_kv") or hidden // heads
        head_dim = min(per_head, HEAD_DIM)
        scale = fewer * head_dim / (heads * per_head)
        found |= {name: fewer for name in _HEADS if config.get(name)}
        found |= {name: _scaled(config[name], scale) for name in (*_HIDDEN, *_INNER) if config.get(name)}
        found |= {name: head_dim for name in ("head_dim", "d_kv") if config.get(name)}
        found |= {"num_key_value_heads": keys} if config.get("num_key_value_heads") else {}
    layers = _kinds(config)
    found |= {name: min(config[name], layers) for name in (*_LAYERS, *_MORE_LAYERS) if config.get(name)}
    if config.get("layer_types"):
        found["layer_types"] = config["layer_types"][:layers]
    if config.get("sliding_window"):
        found["sliding_window"] = min(config["sliding_window"], tokens // 2)
    return found


def _kinds(config: dict[str, Any]) -> int:
    """So many layers from the first on have one of each kind."""
    kinds = config.get("layer_types") or []
    return max(LAYERS, 1 + max((kinds.index(kind) for kind in set(kinds)), default=0))


def _scaled(size: int, by: float) -> int:
    """A multiple of 8, as sizes are."""
    return max(8, math.ceil(size * by / 8) * 8)
