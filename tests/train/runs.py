"""Small jobs for tests, and running them on a rank of the pool."""

import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from motet.checkpoint.data_files import CheckpointShard
from motet.checkpoint.loading import load_checkpoint
from motet.checkpoint.manifest import read_manifest
from motet.collectives.execute.api import all_reduce
from motet.parallel.data_parallel.flat_parameters import LocalShard
from motet.parallel.data_parallel.fsdp import local_shard
from motet.parallel.process.launch_environment import RankEnvironment
from motet.parallel.process.process_group import RankGroup
from motet.train.build import TrainingComponents, build_components, precision_context
from motet.train.job import Job, load_job
from motet.train.launch.failures import StopFlag
from motet.train.loop import run_rank
from motet.train.optimizer.optimizer_settings import learning_rate_factor
from motet.train.state import newest_checkpoint

TEXT = Path(__file__).parent.parent / "data" / "small.txt"
LLAMA = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32,
}  # fmt: skip
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
LATENT = {
    "num_key_value_heads": 4, "moe_intermediate_size": 16, "first_k_dense_replace": 1, "n_routed_experts": 8,
    "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "n_shared_experts": 1, "q_lora_rank": 24,
    "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8,
}  # fmt: skip
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
HUGGING_FACE: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **LLAMA},
    "qwen2": {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True, **LLAMA},
    "gpt2": {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **GPT2},
    "bert of transformers": {"model_type": "bert", "architectures": ["BertForMaskedLM"], **LLAMA},
    "mixtral": {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], **LLAMA, **EXPERTS},
    "deepseek_v3": {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], **(LLAMA | LATENT)},
    "gpt_oss": {
        "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "sliding_window": 8, "head_dim": 8, **LLAMA,
        **EXPERTS,
    },
}  # fmt: skip
"""Everything else is the family's default: GPT-2 has dropout 0.1 everywhere."""
DECODER = "vocab_size=260, context=32, layers=2, hidden=32, heads=4, kv_heads=2, ffn_hidden=48"
ENCODER = "vocab_size=260, context=40, layers=2, hidden=32, heads=4, ffn_hidden=48"
MODELS: dict[str, list[str]] = {
    "decoder": [f"model={{family='decoder', {DECODER}}}"],
    "bert": [f"model={{family='encoder', {ENCODER}, dropout=0.1}}", "data.objective=masked"],
    "t5": [f"model={{family='encoder-decoder', {ENCODER.replace('260', '359')}, dropout=0.1}}", "data.objective=spans"],
    "classify": [
        f"model={{family='encoder', {ENCODER}, head='classify', classes=2}}",
        *("data.objective=classify", "data.source=synthetic:majority", "data.samples=46", "run.epochs=2"),
    ],
    "recomputed": ["model={factory='train.trainable_user_models:Recomputed'}"],
}
"""Our own: what a job of each needs. With `classify` the last batch of 12 is not full: 2 x 46 = 7 x 12 + 8."""


def small_job(folder: Path, *overrides: str, model: str = "decoder") -> Job:
    """A job of some thousand parameters on a small text; `model` is of MODELS, a Hugging Face family or `adapters`."""
    settings = [
        *(f"data.source={TEXT}", "data.tokenizer=bytes", "data.sequence_length=32", "data.batch_sequences=12"),
        *(f"data.cache={folder}", "data.workers=1", "data.validation_fraction=0.1", "precision.recipe=fp64"),
        *("optimizer.learning_rate=0.003", "optimizer.schedule.warmup_steps=3", "optimizer.clip_norm=0.5"),
        *("monitor.tensorboard=false", "monitor.sample_tokens=0", "checkpoint.every=1000", "run.device=cpu"),
        *("run.steps=20", "run.ranks=1", "run.threads=1"),
    ]
    return load_job("tiny", [*settings, *(MODELS.get(model) or _hugging_face(model, folder)), *overrides])


def _hugging_face(model: str, folder: Path) -> list[str]:
    """`adapters` is a llama of which low-rank adapters on attention are trained."""
    where = Path(tempfile.mkdtemp(dir=folder))
    family = "llama" if model == "adapters" else model
    (where / "config.json").write_text(json.dumps({**HUGGING_FACE[family], "vocab_size": 260}))
    adapters = ["model.adapters={rank=4, targets=['*q_proj', '*v_proj']}"] if model == "adapters" else []
    return [f"model={{factory='hf:{where}'}}", *adapters]


@dataclass(frozen=True)
class Trained:
    losses: list[float]
    norms: list[float]
    parameters: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor]  # Of the last step, as the optimizer gets them
    rates: float  # The sum of the learning rates
    masters: dict[str, torch.Tensor] = field(default_factory=dict)  # The parameters as the optimizer has them


def train(group: RankGroup, job: Job, steps: int | None = None) -> Trained:
    """The first steps of a job on this rank, or all of them, without files."""
    with precision_context(job), tempfile.TemporaryDirectory() as folder:
        parts = build_components(job, group, Path(folder))
        stepper, losses, norms, rates = parts.make_train_step(job), [], [], 0.0
        steps = parts.total_steps if steps is None else steps
        for step in range(steps):
            rate = job.optimizer.learning_rate * learning_rate_factor(job.optimizer.schedule, step, steps)
            result = stepper.step(step, rate)
            losses.append(result.loss)
            norms.append(result.grad_norm)
            rates += rate
        spread = parts.engine.optimizer.sharded_parameters
        masters = {n: whole_tensor(p, group) for n, p in spread.local_shards(spread.local_masters).items()}
        return Trained(losses, norms, *parameters_and_gradients(parts), rates, masters)


class StopAt(StopFlag):
    """A request to stop before a step, counted from 0."""

    def __init__(self, step: int) -> None:
        self._left = step

    @property
    def requested(self) -> bool:  # type: ignore[override]  # the loop reads it once a step
        self._left -= 1
        return self._left < 0


def run_job(place: RankEnvironment, job: Job, folder: Path) -> int:
    return run_rank(job, place, folder, StopFlag()).completed_steps


def parameters_and_gradients(parts: TrainingComponents) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Parameters and gradients after a step, assembled from the shards of the ranks."""
    spread, group = parts.engine.optimizer.sharded_parameters, parts.group
    spread.wait_for_pending()
    parameters = {n: whole_tensor(local_shard(p), group) for n, p in parts.model.module.named_parameters()}
    return parameters, {
        n: whole_tensor(piece, group) for n, piece in spread.local_shards(spread.local_gradients()).items()
    }


def whole_tensor(piece: LocalShard, group: RankGroup) -> torch.Tensor:
    """The unsharded tensor of a shard, of which several ranks may have copies."""
    everywhere = torch.tensor(int(piece.values.numel() == piece.shape.numel()))
    all_reduce(everywhere, group, op="min")
    if everywhere:
        return piece.values.cpu().clone().view(piece.shape)
    whole = piece.values.new_full((piece.shape.numel(),), -torch.inf)
    whole[piece.start : piece.start + piece.values.numel()] = piece.values
    all_reduce(whole, group, op="max")
    return whole.cpu().view(piece.shape)


def worst_difference(a: Trained, b: Trained) -> float:
    """The largest relative difference of losses, norms, gradients and parameters.
    |p| counts at least as what updates could do, and |g| as its share of the norm of all gradients."""
    pairs = [*zip(a.losses, b.losses, strict=True), *zip(a.norms, b.norms, strict=True)]
    scalars = [abs(x - y) / (abs(y) or 1.0) for x, y in pairs]
    assert a.gradients.keys() == b.gradients.keys()
    total = sum(g.double().norm().item() ** 2 for g in b.gradients.values()) ** 0.5
    each = total / sum(g.numel() for g in b.gradients.values()) ** 0.5
    tensors = [
        ((found[n] - t).double().norm() / max(t.double().norm().item(), unit * t.numel() ** 0.5)).item()
        for found, wanted, unit in ((a.parameters, b.parameters, b.rates), (a.gradients, b.gradients, each))
        for n, t in wanted.items()
    ]
    return max(scalars + tensors)


def saved_tensors(run: Path) -> dict[str, torch.Tensor]:
    where = newest_checkpoint(run / "checkpoints")
    assert where is not None
    manifest = read_manifest(where)
    dtypes = manifest.dtypes | manifest.saved_by.dtypes
    state = {n: torch.empty(shape, dtype=getattr(torch, dtypes[n])) for n, shape in manifest.all_shapes.items()}
    load_checkpoint(where, {name: CheckpointShard.from_tensor(tensor) for name, tensor in state.items()}, None)
    return state


def same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
