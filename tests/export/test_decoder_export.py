"""Checkpoints of motet's decoder become folders that transformers loads, with the same logits."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from export.stored_models import (
    DECODERS,
    GPT2,
    OWN,
    built_with_random_values,
    distance,
    export,
    job_of,
    load_exported,
    store,
)
from motet.checkpoint.reader import open_checkpoint
from motet.core.errors import InputError
from motet.export import stored_parameters
from motet.export.hf_folder import ExportSettings, export_to_hf
from motet.models.build import build_trainable_model
from motet.models.hf.decoder_config import config_of_settings, settings_differences
from motet.models.hf.hf_config import read_config, settings_from_config
from motet.models.settings import DecoderSettings
from motet.precision.float64_mode import use_float64
from refusals import refused

transformers = pytest.importorskip("transformers")
TOKENS = torch.arange(96).view(3, 32) * 7 % 300


@pytest.fixture(autouse=True)
def quiet() -> None:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


@pytest.mark.parametrize("family", DECODERS)
def test_logits_of_the_exported_decoder_and_its_way_back(family: str, tmp_path: Path) -> None:
    job = job_of({**OWN, **DECODERS[family]}, tmp_path / "cache")
    with use_float64():
        module = built_with_random_values(job, torch.float64)
        export(job, module, tmp_path / "out", shard_bytes=60_000)
        expected = module(TOKENS)
        theirs = load_exported(tmp_path / "out")
        assert json.loads((tmp_path / "out/config.json").read_text())["model_type"] == family.split("-")[0].split()[0]
        assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 1
        assert distance(expected, theirs(TOKENS).logits) <= 1e-12
        again = job.model.model_copy(update={"weights": str(tmp_path / "out")})
        back = build_trainable_model(again, 5, torch.float64, torch.device("cpu")).module
    assert all(torch.equal(p, back.get_parameter(name)) for name, p in module.named_parameters())


def test_the_folder_has_the_tokenizer_and_its_special_tokens(tmp_path: Path) -> None:
    job = job_of(OWN, tmp_path / "cache")
    out = export(job, built_with_random_values(job), tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert tokenizer("h\u00e4").input_ids == list("h\u00e4".encode()) and tokenizer.decode([104, 105]) == "hi"
    config = json.loads((out / "config.json").read_text())
    assert config["eos_token_id"] == tokenizer.eos_token_id == 256 and config["bos_token_id"] is None
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == 256


def test_a_tokenizer_that_cannot_be_made_again_is_left_out(tmp_path: Path) -> None:
    job = job_of(OWN, tmp_path / "cache")
    gone = job.data.model_copy(update={"source": str(tmp_path / "gone.txt")})
    lines: list[str] = []
    job = job.model_copy(update={"data": gone})
    out = export(job, built_with_random_values(job), tmp_path / "out", log=lines.append)
    assert len(lines) == 1 and lines[0].startswith("the folder gets no tokenizer: ")
    assert not list(out.glob("tokenizer*")) and load_exported(out)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_values_are_cast(dtype: str, tmp_path: Path) -> None:
    job = job_of(OWN, tmp_path / "cache")
    module = built_with_random_values(job)
    out = export(job, module, tmp_path / "out", dtype=dtype)
    values = load_file(out / "model.safetensors")
    assert {value.dtype for value in values.values()} == {getattr(torch, dtype)}
    expected = module.get_parameter("embedding.weight").to(getattr(torch, dtype))
    assert torch.equal(values["model.embed_tokens.weight"], expected)
    assert json.loads((out / "config.json").read_text())["dtype"] == dtype


def test_a_value_that_fp16_cannot_hold_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    job = job_of(OWN, tmp_path / "cache")
    module = built_with_random_values(job)
    module.get_parameter("norm.weight").data[3] = 7e4
    refused(
        r"norm.weight holds 70000, and fp16 nothing above 65504", export, job, module, tmp_path / "out", dtype="float16"
    )
    assert {path.name for path in tmp_path.iterdir()} <= {"cache", "out-run"}


def test_a_changed_checkpoint_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where no read of the export is of a complete box, whose checksum the reader compares."""
    monkeypatch.setattr(stored_parameters, "PIECE_BYTES", 1000)
    job = job_of(OWN, tmp_path / "cache")
    checkpoint = store(job, built_with_random_values(job), tmp_path / "run")
    file = checkpoint / "rank-00000.safetensors"
    content = bytearray(file.read_bytes())
    with open_checkpoint(checkpoint) as opened:
        content[opened.index["master/blocks.1.ffn.up.weight"][0].start + 70] ^= 1
        file.write_bytes(content)
        refused(r"is damaged \(rank-00000.safetensors has changed\)", to_out, job, opened, tmp_path)
    assert not (tmp_path / "out").exists()


def to_out(job: Any, checkpoint: Any, folder: Path) -> None:
    export_to_hf(job, checkpoint, folder / "out", settings=ExportSettings(), log=print)


def test_a_folder_that_is_not_empty_is_refused(tmp_path: Path) -> None:
    job = job_of(OWN, tmp_path / "cache")
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine.txt").write_text("words")
    refused(
        r"out is not empty; remove it or give another folder",
        export,
        job,
        built_with_random_values(job),
        tmp_path / "out",
    )


REFUSED = {
    r"model\.positions = none": {"positions": "none"},
    r"model\.norm = layer": {"norm": "layer"},
    r"model\.rotary_fraction = 0\.5": {"rotary_fraction": 0.5},
    r"model\.sliding_window = 4": {"bias": True, "sliding_window": 4},
    r"model\.query_key_norm = true": {"query_key_norm": True, "qkv_bias": True},
    r"model\.head_dim = 10": {**GPT2, "head_dim": 10},
    r"model\.kv_heads = 2": {**GPT2, "kv_heads": 2},
    r"model\.norm_bias = false": {**GPT2, "norm_bias": False},
}


@pytest.mark.parametrize("says", REFUSED)
def test_settings_that_no_family_has(says: str) -> None:
    refused(
        f"{says}.*: no model of transformers",
        config_of_settings,
        DecoderSettings.model_validate({**OWN, **REFUSED[says]}),
    )


def test_other_architectures_are_refused(tmp_path: Path) -> None:
    encoder = job_of({**OWN, "family": "encoder"}, tmp_path / "cache")
    refused("model.family = 'encoder': motet exports", export, encoder, torch.nn.Linear(1, 1), tmp_path / "out")
    own = job_of({"factory": "mine:model"}, tmp_path / "cache")
    refused("model.factory = 'mine:model' is code of yours", export, own, torch.nn.Linear(1, 1), tmp_path / "two")


@pytest.mark.parametrize("family", DECODERS)
def test_a_config_is_read_back_by_transformers_and_by_motet(family: str, tmp_path: Path) -> None:
    settings = DecoderSettings.model_validate({**OWN, **DECODERS[family]})
    config = config_of_settings(settings)
    transformers.AutoConfig.for_model(**config).save_pretrained(tmp_path)
    assert not settings_differences(settings, settings_from_config(read_config(tmp_path)))


def test_the_newest_checkpoint_must_be_of_this_model(tmp_path: Path) -> None:
    job, other = job_of(OWN, tmp_path / "cache"), job_of({**OWN, "layers": 3}, tmp_path / "cache")
    with pytest.raises(InputError, match=r"has no blocks\.2\.\S+, which the model of its job has"):
        export(other, built_with_random_values(job), tmp_path / "out")
