"""Checkpoints of models of transformers become the files that `save_pretrained` writes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from export.stored_models import built_with_random_values, distance, export, hf_job, load_exported
from models.tiny_configs import TINY_CONFIGS
from motet.precision.float64_mode import use_float64
from refusals import refused

transformers = pytest.importorskip("transformers")
# What each has: tied weights; weights of [in, out]; experts and projections that transformers joins; many norms
QUICK = ["llama", "gpt2", "mixtral", "phi3", "gemma3_text", "qwen2", "qwen3", "mistral"]
SLOW = sorted(TINY_CONFIGS.keys() - {*QUICK})
FAMILIES = [*QUICK, *(pytest.param(family, marks=pytest.mark.proof) for family in SLOW)]
FUSED_EXPERTS = {"mixtral", "qwen3_moe", "deepseek_v3"}  # transformers counts views of one tensor as one, in its shards


@pytest.fixture(autouse=True)
def quiet() -> None:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def config_of(family: str, **changes: Any) -> dict[str, Any]:
    return {"model_type": family, **TINY_CONFIGS[family], **changes}


def contents(folder: Path) -> dict[str, bytes]:
    names = ("tokenizer.json", "tokenizer_config.json")
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name not in names}


def tensors(folder: Path) -> dict[str, Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_files_are_those_of_save_pretrained(family: str, tmp_path: Path) -> None:
    job = hf_job(tmp_path / "hf", config_of(family, num_hidden_layers=2) if family in QUICK else config_of(family))
    module = built_with_random_values(job)
    out = export(job, module, tmp_path / "out", shard_bytes=50_000)
    module.save_pretrained(tmp_path / "theirs", max_shard_size=50_000)
    if family in FUSED_EXPERTS:
        ours, theirs = tensors(out), tensors(tmp_path / "theirs")
        assert ours.keys() == theirs.keys()
        assert all(
            value.dtype == theirs[name].dtype and torch.equal(value, theirs[name]) for name, value in ours.items()
        )
        assert contents(out)["config.json"] == contents(tmp_path / "theirs")["config.json"]
    else:
        assert contents(out) == contents(tmp_path / "theirs")
    if family not in ("bert", "t5"):
        loaded = load_exported(out, torch.float32).state_dict()
        assert all(torch.equal(value, loaded[name]) for name, value in module.state_dict().items())


@pytest.mark.proof
def test_projections_that_files_join_are_converted_in_groups(tmp_path: Path) -> None:
    config = {"model_type": "hrm_text", "vocab_size": 104, "hidden_size": 48, "intermediate_size": 72}
    job = hf_job(tmp_path / "hf", config | {"num_attention_heads": 6, "num_key_value_heads": 6, "head_dim": 8})
    module = built_with_random_values(job)
    out = export(job, module, tmp_path / "out")
    module.save_pretrained(tmp_path / "theirs")
    assert contents(out) == contents(tmp_path / "theirs")


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_adapters_are_merged_and_a_tied_head_gets_its_weight(family: str, tmp_path: Path) -> None:
    """The pattern * adapts the head, too, whose weight is the table of tokens."""
    adapters = {"rank": 3, "alpha": 5.0, "targets": ["*"]}
    job = hf_job(tmp_path / "hf", config_of(family, tie_word_embeddings=True), adapters=adapters)
    tokens = torch.arange(40).view(2, 20)
    with use_float64():
        module = built_with_random_values(job, torch.float64)
        loaded = load_exported(export(job, module, tmp_path / "out"))
        assert distance(module(tokens).logits, loaded(tokens).logits) <= 1e-12
    assert json.loads((tmp_path / "out/config.json").read_text())["tie_word_embeddings"] is False


def test_a_chat_template_and_a_generation_config_come_along(tmp_path: Path) -> None:
    config = config_of("llama")
    job = hf_job(tmp_path / "hf", config)
    source = export(job, built_with_random_values(job), tmp_path / "source")
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "generation_config.json").write_text('{"temperature": 0.5, "do_sample": true}')
    model = job.model.model_copy(update={"factory": f"hf:{source}"})
    again = job.model_copy(update={"model": model, "data": job.data.model_copy(update={"tokenizer": str(source)})})
    module = built_with_random_values(again)
    out = export(again, module, tmp_path / "out")
    for name in ("chat_template.jinja", "generation_config.json", "tokenizer.json"):
        assert (out / name).read_bytes() == (source / name).read_bytes()


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    job, other = (hf_job(tmp_path / name, config_of(name)) for name in ("llama", "gpt2"))
    refused(
        r"has no \S+, which the model of its job has", export, other, built_with_random_values(job), tmp_path / "out"
    )
