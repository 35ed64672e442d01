"""`motet checkpoint export`: from a run or one checkpoint of it to a folder, with its options."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from export.stored_models import OWN, built_with_random_values, job_of, store
from motet.checkpoint.reader import open_checkpoint
from motet.cli.main import app
from motet.train.launch.run_folder import write_run_start

ADAPTERS = {"rank": 2, "targets": ["*.down"]}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    job = job_of({**OWN, "adapters": ADAPTERS}, tmp_path / "cache")
    store(job, built_with_random_values(job), tmp_path / "run")
    write_run_start(tmp_path / "run", job, {})
    return tmp_path / "run"


def export(*arguments: str | Path) -> str:
    result = CliRunner().invoke(app, ["checkpoint", "export", *map(str, arguments)])
    assert result.exception is None, result.exception
    return result.stdout


def test_a_run_and_one_of_its_checkpoints(run: Path, tmp_path: Path) -> None:
    assert "of stored at step 1" in export(run, tmp_path / "a")
    export(run / "checkpoints/step-00000001", tmp_path / "deep/b", "--to", "hf")
    names = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    for folder in (tmp_path / "a", tmp_path / "deep/b"):
        assert {path.name for path in folder.iterdir()} == names and folder.stat().st_mode & 0o777 != 0o700
    a, b = (load_file(folder / "model.safetensors") for folder in (tmp_path / "a", tmp_path / "deep/b"))
    assert all(torch.equal(value, b[name]) for name, value in a.items())


def test_options(run: Path, tmp_path: Path) -> None:
    export(run, tmp_path / "base", "--adapters", "base", "--dtype", "bf16", "--shard-size", "20KB")
    assert json.loads((tmp_path / "base/config.json").read_text())["dtype"] == "bfloat16"
    index = json.loads((tmp_path / "base/model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "base").glob("*.safetensors"))
    assert sorted({*index["weight_map"].values()}) == files and len(files) > 2
    export(run, tmp_path / "peft", "--adapters", "peft")
    tensors = load_file(tmp_path / "peft/adapter_model.safetensors")
    with open_checkpoint(run) as checkpoint:
        expected = checkpoint["master/blocks.1.ffn.down.adapter_a"]
    assert torch.equal(tensors["base_model.model.model.layers.1.mlp.down_proj.lora_A.weight"], expected)
    config = json.loads((tmp_path / "peft/adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (2, 16.0, ["down_proj"])
