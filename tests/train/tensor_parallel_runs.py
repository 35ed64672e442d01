"""Training of small jobs over tensor-parallel ranks, whose tensors are put together again for a comparison."""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from motet.collectives.execute.api import all_reduce
from motet.parallel.data_parallel.flat_parameters import LocalShard
from motet.parallel.data_parallel.fsdp import local_shard
from motet.parallel.model_sharding import ModelSharding
from motet.parallel.process.process_group import RankGroup
from motet.parallel.roles_of_tensors import TensorRole, tensor_roles
from motet.train.build import TrainingComponents, build_components, precision_context
from motet.train.job import Job
from motet.train.optimizer.optimizer_settings import learning_rate_factor
from train.runs import Trained, small_job

STEPS = 10
OWN = "vocab_size=260, context=24, layers=2, hidden=48"
GPT2_LIKE = "norm='layer', bias=true, positions='learned', gated=false, activation='gelu_tanh', tied=true"
# Model -> its settings, and other ones of the job.
OWN_MODELS: dict[str, tuple[str, list[str]]] = {
    "decoder": (f"family='decoder', {OWN}, heads=12, kv_heads=12, ffn_hidden=50", []),
    "grouped decoder": (f"family='decoder', {OWN}, heads=12, kv_heads=6, ffn_hidden=72, tied=false", []),
    "gpt2-like": (f"family='decoder', {OWN}, heads=12, ffn_hidden=96, {GPT2_LIKE}", []),
    "bert": (f"family='encoder', {OWN}, heads=12, ffn_hidden=72", ["data.objective=masked"]),
    "t5": (
        f"family='encoder-decoder', {OWN.replace('260', '359')}, heads=12, ffn_hidden=72",
        ["data.objective=spans"],
    ),
}
SMALL = {"hidden_size": 48, "intermediate_size": 60, "num_hidden_layers": 2, "num_attention_heads": 12}
CAUSAL = {**SMALL, "num_key_value_heads": 6, "max_position_embeddings": 24, "head_dim": 4}
# Model of transformers -> its config, and the keys of its dropouts.
HUGGING_FACE: dict[str, tuple[dict[str, Any], list[str]]] = {
    "llama": ({"model_type": "llama", "architectures": ["LlamaForCausalLM"], **CAUSAL}, ["attention_dropout"]),
    "llama of two key heads": (
        {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **CAUSAL, "num_key_value_heads": 2},
        ["attention_dropout"],
    ),
    "qwen3": ({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], **CAUSAL}, ["attention_dropout"]),
    "gpt2": (
        {
            "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 48, "n_layer": 2, "n_head": 12,
            "n_positions": 24, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0,
        },
        ["attn_pdrop", "embd_pdrop", "resid_pdrop"],
    ),
}  # fmt: skip
MODELS = (*OWN_MODELS, *HUGGING_FACE)


def job_of_model(folder: Path, model: str, *overrides: str, dropout: float = 0.0) -> Job:
    """A job of batches of eight sequences of 24 tokens."""
    common = ["data.sequence_length=24", "data.batch_sequences=8", "optimizer.clip_norm=0.5"]
    if model in OWN_MODELS:
        settings, more = OWN_MODELS[model]
        return small_job(folder, *common, f"model={{{settings}, dropout={dropout}}}", *more, *overrides)
    config, keys = HUGGING_FACE[model]
    factory = written_config(folder, {**config, **dict.fromkeys(keys, dropout)})
    return small_job(folder, *common, factory, *overrides)


def written_config(folder: Path, config: Mapping[str, Any]) -> str:
    """The setting of a model of transformers, whose config is written below a folder."""
    where = Path(tempfile.mkdtemp(dir=folder))
    (where / "config.json").write_text(json.dumps({**config, "vocab_size": 260}))
    return f"model={{factory='hf:{where}'}}"


def train_and_reassemble(
    group: RankGroup, job: Job, steps: int = STEPS, sharding: ModelSharding | None = None
) -> Trained | None:
    """Train, and put parameters, masters and gradients together; only the first rank returns them."""
    with precision_context(job), tempfile.TemporaryDirectory() as folder:
        parts = build_components(job, group, Path(folder), model_sharding=sharding)
        stepper, losses, norms, rates = parts.make_train_step(job), [], [], 0.0
        for step in range(steps):
            rate = job.optimizer.learning_rate * learning_rate_factor(job.optimizer.schedule, step, steps)
            result = stepper.step(step, rate)
            assert result.replica_check is None or not result.replica_check.violations, result.replica_check
            losses.append(result.loss)
            norms.append(result.grad_norm)
            rates += rate
        parallel = parts.engine.optimizer.sharded_parameters
        parallel.wait_for_pending()
        masters, gradients = (
            reassembled(parts, parallel.local_shards(tensors))
            for tensors in (parallel.local_masters, parallel.local_gradients())
        )
        local = {n: local_shard(p) for n, p in parts.model.module.named_parameters() if p.requires_grad}
        parameters = reassembled(parts, local)
        return Trained(losses, norms, parameters, gradients, rates, masters) if group.rank == 0 else None


def reassembled(parts: TrainingComponents, shards: Mapping[str, LocalShard]) -> dict[str, Tensor]:
    """Whole tensors, from what all ranks hold; ranks that hold the same element have the same bits, padding is zero."""
    held = [tensor.name for tensor in parts.engine.plan.inventory.trained]
    assert set(shards) <= set(held)
    return {name: _whole(parts, name, shards.get(name)) for name in held}


def _whole(parts: TrainingComponents, name: str, shard: LocalShard | None) -> Tensor:
    specs, rank = parts.engine.plan.specs[name], parts.group.rank
    assert (shard is None) == (rank not in specs), f"{name}: rank {rank} holds it, or not, other than planned"
    dtype = parts.engine.optimizer.sharded_parameters.no_elements.dtype  # Holds the values of narrower ones, too
    low = torch.full(next(iter(specs.values())).shape, torch.inf, dtype=dtype)
    high = -low
    if shard is not None:
        values, stop = shard.values.flatten().to(dtype), shard.start + shard.values.numel()
        padding = torch.ones_like(values, dtype=torch.bool)
        for (offsets, lengths), local in specs[rank].boxes(shard.start, stop):
            box = tuple(slice(first, first + length) for first, length in zip(offsets, lengths, strict=True))
            place = slice(local.start - shard.start, local.stop - shard.start)
            low[box] = high[box] = values[place].view(lengths)
            padding[place] = False
        assert not values[padding].any(), f"{name}: padding is {values[padding].abs().max()}"
    all_reduce(low, parts.group, op="min")
    all_reduce(high, parts.group, op="max")
    assert torch.equal(low, high), f"{name}: ranks hold different values of the same elements"
    return high


def roles_on_rank(group: RankGroup, job: Job) -> list[TensorRole]:
    """The roles of the tensors of a job's model in its split."""
    with precision_context(job), tempfile.TemporaryDirectory() as folder:
        plan = build_components(job, group, Path(folder)).engine.plan
        return tensor_roles(plan.inventory, plan.model_sharding, plan.dims)
