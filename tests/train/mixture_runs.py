"""Small jobs of mixtures of experts of transformers, and the numbers of their balance after some steps."""

import json
import math
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from motet.parallel.data_parallel.fsdp import local_shard
from motet.parallel.process.module_inventory import load_buffers
from motet.parallel.process.process_group import RankGroup
from motet.train.balance.expert_balance import ExpertLoads
from motet.train.build import build_components, precision_context
from motet.train.job import Job
from motet.train.optimizer.optimizer_settings import learning_rate_factor
from train.runs import Trained, small_job, worst_difference
from train.tensor_parallel_runs import reassembled

STEPS, TOLERANCE = 10, 1e-12
BALANCES = {"row": "kind='row', weight=0.3, z_weight=0.05", "bias": "kind='bias', weight=0.2, speed=0.02"}
_SIZES = {
    "vocab_size": 260, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 24, "num_experts_per_tok": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_GROUPED = {**_SIZES, "num_key_value_heads": 2, "head_dim": 8}
_NARROW = {"moe_intermediate_size": 24}
_GROUPS = {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "n_shared_experts": 1}
_LATENT = {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
_DEEPSEEK = {**_SIZES, **_NARROW, **_LATENT, **_GROUPS, "num_key_value_heads": 4, "first_k_dense_replace": 0}
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {**_GROUPED, "num_local_experts": 4},
    "olmoe": {**_GROUPED, "num_experts": 8, "num_key_value_heads": 4},
    "qwen2_moe": {**_GROUPED, **_NARROW, "num_experts": 8, "shared_expert_intermediate_size": 24},
    "qwen3_moe": {**_GROUPED, **_NARROW, "num_experts": 8},
    "deepseek_v2": {**_DEEPSEEK, "topk_method": "greedy"},
    "deepseek_v3": _DEEPSEEK,
    "gpt_oss": {**_GROUPED, "num_local_experts": 4, "sliding_window": 16},
    "granitemoe": {**_GROUPED, "num_local_experts": 4},
    "glm4_moe": {**_GROUPED, **_NARROW, **_GROUPS, "first_k_dense_replace": 0},
    "minimax_m2": {**_GROUPED, "num_local_experts": 4, "rotary_dim": 8},
    "ernie4_5_moe": {
        **_GROUPED, **_NARROW, "moe_num_experts": 8, "moe_k": 2, "moe_num_shared_experts": 1,
        "moe_layer_start_index": 0,
    },
}  # fmt: skip
MORE_FAMILIES: dict[str, dict[str, Any]] = {
    "phimoe": {**_GROUPED, "num_local_experts": 4},
    "jetmoe": {**_GROUPED, "num_local_experts": 4, "kv_channels": 8, "num_attention_heads": 2},
    "llama4_text": {
        **_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 40,
        "attention_chunk_size": 24,
    },
    "longcat_flash": {
        **_DEEPSEEK, "ffn_hidden_size": 40, "expert_ffn_hidden_size": 24, "moe_topk": 2, "zero_expert_num": 2,
        "num_layers": 2,
    },
}  # fmt: skip
"""Families of the page of mixtures alone, whose routers or experts are of another kind."""
_OURS = "family='decoder', vocab_size=260, context=24, layers=2, hidden=32, heads=4, kv_heads=2, ffn_hidden=40"
_EXPERTS = "count=8, per_token=2, hidden=24, shared=1"
OURS = {
    "motet": f"{_OURS}, experts={{{_EXPERTS}, scores='sigmoid', groups=2, groups_per_token=1}}",
    "motet with capacity": f"{_OURS}, experts={{{_EXPERTS}, capacity=1.0, drop='lowest'}}",
}
SCORES = dict.fromkeys(FAMILIES, "softmax") | dict.fromkeys(("deepseek_v3", "glm4_moe", "minimax_m2"), "sigmoid")
CORRECTIONS = {
    "deepseek_v3": "mlp.gate.e_score_correction_bias",
    "glm4_moe": "mlp.gate.e_score_correction_bias",
    "minimax_m2": "mlp.e_score_correction_bias",
    **dict.fromkeys(OURS, "ffn.router.correction"),
}


def model_of_family(folder: Path, family: str, balance: str = "", **more: Any) -> str:
    """The setting of a model whose config is written below a folder; `balance` is the section, such as `kind='row'`."""
    if family in OURS:
        return f"model={{{OURS[family]}, balance={{{balance}}}}}"
    where = Path(tempfile.mkdtemp(dir=folder))
    (where / "config.json").write_text(
        json.dumps({"model_type": family, **{**MORE_FAMILIES, **FAMILIES}[family], **more})
    )
    section = f", balance={{{balance}}}" if balance else ""
    return f"model={{factory='hf:{where}'{section}}}"


def job_of_family(folder: Path, family: str, balance: str, *overrides: str, **more: Any) -> Job:
    """A job of batches of eight sequences of 24 tokens, of which a quarter has fewer targets than others."""
    common = ["data.sequence_length=24", "data.batch_sequences=8", "optimizer.clip_norm=0.5"]
    return small_job(folder, *common, model_of_family(folder, family, balance, **more), *overrides)


@dataclass(frozen=True)
class TrainedMixture:
    """The numbers of some steps, the same on every rank."""

    trained: Trained
    experts: list[ExpertLoads]  # Of each step
    buffers: dict[str, Tensor] = field(default_factory=dict)  # Loads and corrections after the last step


def train_mixture(group: RankGroup, job: Job, steps: int = STEPS) -> TrainedMixture:
    """Train on this rank, and put parameters and gradients together."""
    with precision_context(job), tempfile.TemporaryDirectory() as folder:
        parts = build_components(job, group, Path(folder))
        stepper, losses, norms, experts, rates = parts.make_train_step(job), [], [], [], 0.0
        for step in range(steps):
            rate = job.optimizer.learning_rate * learning_rate_factor(job.optimizer.schedule, step, steps)
            result = stepper.step(step, rate)
            assert result.replica_check is None or not result.replica_check.violations, result.replica_check
            losses.append(result.loss)
            norms.append(result.grad_norm)
            experts += [result.experts] if result.experts else []
            rates += rate
        parallel = parts.engine.optimizer.sharded_parameters
        parallel.wait_for_pending()
        gradients = reassembled(parts, parallel.local_shards(parallel.local_gradients()))
        local = {n: local_shard(p) for n, p in parts.model.module.named_parameters() if p.requires_grad}
        trained = Trained(losses, norms, reassembled(parts, local), gradients, rates)
        buffers = load_buffers(parts.model.module)
        return TrainedMixture(trained, experts, {name: b.clone() for name, b in buffers.items() if not b.is_meta})


def settings_of(layout: str) -> list[str]:
    words = [word for word in layout.split() if not word.startswith("dp=")]
    return [f"memory.{word}" if word.startswith("recompute") else f"layout.{word}" for word in words]


def check_equal(result: TrainedMixture, expected: TrainedMixture) -> None:
    assert worst_mixture_difference(result, expected) < TOLERANCE


def worst_mixture_difference(result: TrainedMixture, expected: TrainedMixture) -> float:
    """The largest relative difference of any number that is rounded; loads and corrections must be equal."""
    worst = worst_difference(result.trained, expected.trained)
    assert len(result.experts) == len(expected.experts) == len(expected.trained.losses)
    for ours, theirs in zip(result.experts, expected.experts, strict=True):
        assert [layer.loads for layer in ours.layers] == [layer.loads for layer in theirs.layers]
        pairs = [(ours.loss_sum, theirs.loss_sum)]
        pairs += [(a.entropy, b.entropy) for a, b in zip(ours.layers, theirs.layers, strict=True)]
        assert all(math.isfinite(value) for pair in pairs for value in pair)
        worst = max(worst, *(abs(a - b) / (abs(b) or 1.0) for a, b in pairs))
    for name, buffer in result.buffers.items():
        assert torch.equal(buffer, expected.buffers[name]), name
    return worst
