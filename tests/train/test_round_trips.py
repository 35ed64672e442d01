"""A folder of Hugging Face, a run in some layout, its checkpoint, and back: the same bytes, the same logits."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from export.stored_models import distance, load_exported
from models.tiny_configs import TINY_CONFIGS
from motet.checkpoint.reader import open_checkpoint
from motet.export.hf_folder import ExportSettings, export_to_hf
from motet.models.build import build_trainable_model
from motet.models.hf.hf_config import settings_from_config
from motet.parallel.process.process_group import RankGroup
from motet.precision.float64_mode import use_float64
from motet.train.build import build_components, precision_context
from motet.train.job import Job
from ranks import Ranks
from train.runs import small_job

transformers = pytest.importorskip("transformers")
OWN = ("llama", "qwen2", "qwen3", "mistral", "gpt2")
HF = (*OWN, "gemma3_text", "mixtral", "phi3")
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "one rank": (1, []),
    "stage 2": (2, ["layout.zero=2"]),
    "stage 3": (4, ["layout.zero=3"]),
    "tp=2": (2, ["layout.tp=2"]),
    "tp=2 dp=2 stage 1": (4, ["layout.tp=2", "layout.dp=2", "layout.zero=1"]),
    "pp=2": (2, ["layout.pp=2"]),
    "cp=2": (2, ["layout.cp=2"]),
    "replicas": (4, ["layout.zero=2", "layout.shard_group=2", "outer.every=1"]),
}
QUICK = [("own", "qwen3", "tp=2")]
ALL = [("own", family, layout) for family in OWN for layout in LAYOUTS]
ALL += [("hf", family, layout) for family in HF for layout in LAYOUTS]
CASES = [*QUICK, *(pytest.param(*case, marks=pytest.mark.proof) for case in ALL if case not in QUICK)]


def save_steps(group: RankGroup, job: Job, folder: str) -> None:
    """Save at the start, and after two steps."""
    with precision_context(job):
        parts = build_components(job, group, Path(folder))
        parts.state.save(0)
        stepper = parts.make_train_step(job)
        for step in range(2):
            stepper.step(step, 0.01)
        parts.state.save(2)


def folder_of(family: str, folder: Path) -> dict[str, Any]:
    """A model of transformers with random weights in float32. Returns its config."""
    values = TINY_CONFIGS[family] | {"vocab_size": 264, "num_hidden_layers": 2, "attention_dropout": 0.0}
    config = transformers.AutoConfig.for_model(family, **values)
    torch.manual_seed(0)
    module = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in module.parameters():
        parameter.data.normal_(0, 0.1)
    module.save_pretrained(folder)
    content: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return content


def job_of(kind: str, config: dict[str, Any], folder: Path, *changes: str) -> Job:
    job = small_job(folder.parent, "precision.recipe=fp32", "data.batch_sequences=4", "checkpoint.keep=9", *changes)
    if kind == "own":
        model = settings_from_config(config).model_copy(update={"weights": str(folder)})
        return job.model_copy(update={"model": model})
    return small_job(
        folder.parent,
        *("precision.recipe=fp32", "data.batch_sequences=4", "checkpoint.keep=9", f"model={{factory='hf:{folder}'}}"),
        *changes,
    )


@pytest.mark.parametrize(("kind", "family", "layout"), CASES)
def test_round_trip(kind: str, family: str, layout: str, ranks: Ranks, tmp_path: Path) -> None:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    source, (world, changes) = tmp_path / "source", LAYOUTS[layout]
    job = job_of(kind, folder_of(family, source), source, *changes)
    (tmp_path / "run").mkdir()
    ranks.run(world, save_steps, job, str(tmp_path / "run"))
    for step in (0, 2):
        out = tmp_path / f"out-{step}"
        with open_checkpoint(tmp_path / f"run/checkpoints/step-{step:08d}") as checkpoint:
            export_to_hf(job, checkpoint, out, settings=ExportSettings(), log=print)
            masters = {name: checkpoint[name] for name in checkpoint.names}
        theirs, ours = (load_file(folder / "model.safetensors") for folder in (source, out))
        assert ours.keys() == theirs.keys()
        is_same = all(torch.equal(value, theirs[name]) for name, value in ours.items())
        assert is_same == (step == 0), [name for name, value in ours.items() if not torch.equal(value, theirs[name])]
    tokens = torch.arange(40).view(2, 20) * 7 % 260
    with use_float64():
        model = build_trainable_model(job.model, 0, torch.float64, torch.device("cpu"))
        for name, parameter in model.module.named_parameters():
            parameter.data.copy_(masters[f"master/{name}"])
        logits = model.module.eval()(tokens)
        assert distance(getattr(logits, "logits", logits), load_exported(out)(tokens).logits) <= 1e-12
