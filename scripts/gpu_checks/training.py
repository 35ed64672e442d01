"""Small jobs, trained on a rank of the pool, and the difference of two results."""

import json
import math
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

STEPS = 4
ROWS = 8
_DECODER = "vocab_size=260, context=32, layers=4, hidden=48, heads=4, kv_heads=2, ffn_hidden=72"
_ENCODER = "vocab_size=260, context=40, layers=4, hidden=48, heads=4, ffn_hidden=72, dropout=0.1"
_GPT2 = "norm='layer', bias=true, positions='learned', gated=false, activation='gelu_tanh', dropout=0.1"
_HUGGING_FACE = {
    "gpt2 of transformers": {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 48, "n_layer": 2, "n_head": 4,
        "n_positions": 32, "vocab_size": 260,
    },
    "llama of transformers": {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 48, "intermediate_size": 72,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 260,
        "max_position_embeddings": 32,
    },
}  # fmt: skip
MODELS: dict[str, list[str]] = {
    "decoder": [f"model={{family='decoder', {_DECODER}}}"],
    "GPT-2": [f"model={{family='decoder', {_DECODER.replace('kv_heads=2, ', '')}, {_GPT2}}}"],
    "BERT": [f"model={{family='encoder', {_ENCODER}}}", "data.objective=masked"],
    "T5": [f"model={{family='encoder-decoder', {_ENCODER.replace('260', '359')}}}", "data.objective=spans"],
    "packed documents": [f"model={{family='decoder', {_DECODER}, sliding_window=12}}", "data.restart_documents=true"],
    **{name: [] for name in _HUGGING_FACE},
}


@dataclass(frozen=True)
class Trained:
    """The result of a few steps: the numbers of each step, and the tensors of the checkpoint."""

    losses: list[float]
    norms: list[float]
    tensors: dict[str, Any]
    rates: float  # The sum of the learning rates
    to_host: int = 0  # Bytes of sums and activations
    to_device: int = 0
    graphs: int = 0  # Compiled graphs of blocks
    launched: frozenset[str] = frozenset()  # Kernels in Triton, where they are recorded


def train(place: Any, device: str, folder: str, overrides: Sequence[str], model: str, stop_at: int = 0) -> Trained:
    """Train a small job on this rank, of several that share a device or alone. With `stop_at`, training ends there, and
    components that are built anew continue from the checkpoint."""
    import torch

    from motet.parallel.process.launch_environment import SINGLE_RANK
    from motet.parallel.process.process_group import pick_device, start_process_group
    from motet.train.build import build_components, precision_context

    place, job = place or SINGLE_RANK, small_job(folder, device, overrides, model)
    where = pick_device(job.run.device, place, share_device=place.world > 1)
    torch.use_deterministic_algorithms(bool(job.run.reproducible) and device == "cuda")
    warnings.simplefilter("ignore")
    losses, norms = list[float](), list[float]()
    shared = start_process_group(place, where, 60.0, share_device=place.world > 1)
    with shared as group, precision_context(job, where), _folder_of_run(place) as run_folder:
        done = 0
        for last in filter(None, (stop_at, STEPS)):
            parts = build_components(job, group, run_folder)
            done = parts.state.restore_newest().completed_steps
            stepper = parts.make_train_step(job)
            for step in range(done, last):
                result = stepper.step(step, job.optimizer.learning_rate)
                losses.append(result.loss)
                norms.append(result.grad_norm)
            parts.state.save(last)
        torch.use_deterministic_algorithms(False)
        tensors = _saved_tensors(parts.state.checkpoint_folder) if place.rank == 0 else {}
        graphs, sent = parts.engine.compiled.graphs if parts.engine.compiled else 0, sent_bytes(parts.engine)
        return Trained(losses, norms, tensors, job.optimizer.learning_rate * STEPS, *sent, graphs)


def train_with_triton(*arguments: Any) -> Trained:
    """Train with every kernel in Triton, also for tensors so small that the table chooses others."""
    from gpu_checks.kernel_patches import kernels_forced, recorded_launches

    with kernels_forced("triton"), recorded_launches() as launches:
        trained = train(*arguments)
    return replace(trained, launched=frozenset(launch.kernel for launch in launches))


def sent_bytes(engine: Any) -> tuple[int, int]:
    """The bytes that an engine has sent to the host and to the device."""
    states, recomputation = engine.optimizer.states, engine.recomputation.recomputation
    users = [states, None if recomputation is None else recomputation.offloaded]
    links = [user.link for user in users if user is not None]
    return sum(link.sent_to_host for link in links), sum(link.sent_to_device for link in links)


def small_job(folder: str, device: str, overrides: Sequence[str], model: str) -> Any:
    from motet.train.job import load_job

    text = Path(folder, "text.md")
    settings = [
        *(f"data.source={text}", "data.tokenizer=bytes", "data.sequence_length=32", f"data.batch_sequences={ROWS}"),
        *(f"data.cache={folder}/cache", "data.workers=1", "data.validation_fraction=0.1", "precision.recipe=fp64"),
        *("optimizer.learning_rate=0.003", "optimizer.clip_norm=0.5", "optimizer.schedule.kind=constant"),
        *("monitor.tensorboard=false", "monitor.sample_tokens=0", "checkpoint.every=1000", f"run.device={device}"),
        *(f"run.steps={STEPS}", "run.ranks=1", "run.compile=off", "data.restart_documents=false", *MODELS[model]),
    ]
    if model in _HUGGING_FACE:
        where = Path(folder, model.replace(" ", "-"))
        where.mkdir(exist_ok=True)
        (where / "config.json").write_text(json.dumps(_HUGGING_FACE[model]))
        settings.append(f"model={{factory='hf:{where}'}}")
    return load_job("tiny", [*settings, *overrides])


class _folder_of_run:  # noqa: N801  # A context
    """A folder that all ranks know, next to the store of their rendezvous."""

    def __init__(self, place: Any) -> None:
        self._own = None if place.rendezvous else tempfile.TemporaryDirectory(prefix="motet-gpu-run-")
        self._path = Path(self._own.name if self._own else place.rendezvous.removeprefix("file://")).parent
        if self._own:
            self._path = Path(self._own.name)

    def __enter__(self) -> Path:
        return self._path / "run"

    def __exit__(self, *problem: object) -> None:
        if self._own:
            self._own.cleanup()


def _saved_tensors(folder: Path) -> dict[str, Any]:
    import torch

    from motet.checkpoint.data_files import CheckpointShard
    from motet.checkpoint.loading import load_checkpoint
    from motet.checkpoint.manifest import read_manifest
    from motet.train.state import newest_checkpoint

    newest = newest_checkpoint(folder)
    assert newest is not None
    manifest = read_manifest(newest)
    dtypes = manifest.dtypes | manifest.saved_by.dtypes
    state = {n: torch.empty(shape, dtype=getattr(torch, dtypes[n])) for n, shape in manifest.all_shapes.items()}
    load_checkpoint(newest, {name: CheckpointShard.from_tensor(tensor) for name, tensor in state.items()}, None)
    return {name: tensor.numpy() for name, tensor in state.items() if tensor.is_floating_point()}


def worst_difference(a: Trained, b: Trained) -> float:
    """The largest relative difference of losses, gradient norms and tensors of a checkpoint. A tensor counts at least
    as large as its share of all tensors of its kind, and a parameter as its largest possible update."""
    import numpy as np

    pairs = [*zip(a.losses, b.losses, strict=True), *zip(a.norms, b.norms, strict=True)]
    differences = [abs(x - y) / (abs(y) or 1.0) for x, y in pairs]
    if a.tensors.keys() != b.tensors.keys():
        return math.inf
    kinds: dict[str, list[Any]] = {}
    for name, tensor in b.tensors.items():
        kinds.setdefault(name.partition("/")[0], []).append(tensor.astype(np.float64))
    for name, tensor in b.tensors.items():
        wanted, kind = tensor.astype(np.float64), kinds[name.partition("/")[0]]
        mean = (sum((each**2).sum() for each in kind) / sum(each.size for each in kind)) ** 0.5
        scale = max(np.linalg.norm(wanted), mean * wanted.size**0.5, 1e-300)
        differences.append(float(np.linalg.norm(a.tensors[name].astype(np.float64) - wanted) / scale))
    return max(differences) if all(map(math.isfinite, differences)) else math.inf


def same_bits(a: Trained, b: Trained) -> bool:
    """Whether the tensors of two checkpoints have the same bits."""
    return a.tensors.keys() == b.tensors.keys() and all((a.tensors[n] == b.tensors[n]).all() for n in a.tensors)
