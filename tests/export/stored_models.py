"""Models with random values in checkpoints, without training, and their exports."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from motet.checkpoint.background_writer import save_checkpoint
from motet.checkpoint.data_files import CheckpointShard
from motet.checkpoint.manifest import CheckpointManifest, SavedBy
from motet.checkpoint.reader import open_checkpoint
from motet.core.units import dtype_name
from motet.export.hf_folder import ExportSettings, export_to_hf
from motet.models.build import build_trainable_model
from motet.train.job import Job, job_from_tree

TEXT = Path(__file__).parents[1] / "data/small.txt"
OWN = {"vocab_size": 300, "hidden": 32, "ffn_hidden": 48, "layers": 2, "heads": 4, "context": 64}
GPT2 = {"positions": "learned", "norm": "layer", "gated": False, "bias": True, "activation": "gelu_tanh"}
DECODERS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-3.1": {
        "kv_heads": 2,
        "tied": False,
        "rope_theta": 500.0,
        "rope_scaling": {"factor": 8.0, "original_context": 16},
    },
    "llama with biases": {"bias": True, "head_dim": 12},
    "qwen2": {"qkv_bias": True, "sliding_window": 4, "kv_heads": 2},
    "qwen3": {"query_key_norm": True, "head_dim": 10},
    "qwen3 with biases": {
        "query_key_norm": True, "bias": True, "ffn_bias": False, "sliding_window": 5, "norm_eps": 1e-3,
    },
    "mistral": {"sliding_window": 3, "kv_heads": 1, "activation": "gelu"},
    "gpt2": GPT2,
    "gpt2 untied": {**GPT2, "tied": False, "activation": "relu_squared", "norm_eps": 1e-3},
}  # fmt: skip


def job_of(model: dict[str, Any], cache: Path) -> Job:
    data = {"source": str(TEXT), "tokenizer": "bytes", "sequence_length": 16, "cache": str(cache)}
    return job_from_tree({"name": "stored", "model": model, "data": data, "run": {"steps": 1}})


def hf_job(folder: Path, config: dict[str, Any], **model: Any) -> Job:
    """A job of a model of transformers with random weights."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return job_of({"factory": f"hf:{folder / 'config.json'}", **model}, folder / "cache")


def built_with_random_values(job: Job, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Every value random, so that a bias or a norm at the wrong place shows."""
    module = build_trainable_model(job.model, 0, dtype, torch.device("cpu")).module.eval()
    torch.manual_seed(1)
    for parameter in module.parameters():
        parameter.data.normal_(0, 0.2)
    return module


def store(job: Job, module: nn.Module, run: Path) -> Path:
    """Save the parameters and buffers of a module as a checkpoint."""
    parameters = dict(module.named_parameters())
    tensors = {f"{'master' if p.requires_grad else 'frozen'}/{n}": p.detach() for n, p in parameters.items()}
    all_names = dict(module.named_parameters(remove_duplicate=False))
    tensors |= {f"buffer/{n}": b for n, b in module.state_dict().items() if n not in all_names}
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    dtypes = {name: dtype_name(tensor.dtype) for name, tensor in tensors.items()}
    manifest = CheckpointManifest(1, "", shapes, dtypes, SavedBy(1, 1, "2"))
    (run / "checkpoints").mkdir(parents=True)
    shards = {name: CheckpointShard.from_tensor(tensor) for name, tensor in tensors.items()}
    return save_checkpoint(run / "checkpoints", shards, manifest, keep=1, group=None)


def export(
    job: Job, module: nn.Module, folder: Path, *, log: Callable[[str], None] | None = None, **settings: Any
) -> Path:
    """Store a module next to a new folder, and export it there."""
    run = folder.with_name(f"{folder.name}-run")
    with open_checkpoint(store(job, module, run)) as checkpoint:
        export_to_hf(job, checkpoint, folder, settings=ExportSettings(**settings), log=log or refuse_to_log)
    return folder


def refuse_to_log(text: str) -> None:
    """Refuse remarks; a slow machine may show progress."""
    assert text.endswith(" ..."), text


def distance(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference of logits in float64, relative to the largest of them."""
    assert ours.dtype == theirs.dtype == torch.float64
    return float((ours - theirs).detach().abs().max() / theirs.detach().abs().max())


def load_exported(folder: Path, dtype: torch.dtype = torch.float64) -> nn.Module:
    """The model as transformers loads it, without a missing or an unexpected key."""
    from transformers import AutoModelForCausalLM

    module, report = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    assert not any(report.values()), report
    return module.eval()
