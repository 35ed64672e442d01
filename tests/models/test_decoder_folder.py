"""motet's decoder starts from a folder of Hugging Face: the same logits, read by boxes, and other models refused."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch as safetensors_torch
import torch
from small_models import built
from torch import Tensor, nn

from motet.models.build import build_trainable_model
from motet.models.hf.decoder_files import find_decoder_tensors
from motet.models.hf.hf_config import read_config, settings_from_config
from motet.models.settings import DecoderSettings
from motet.precision.float64_mode import use_float64
from refusals import refused

transformers = pytest.importorskip("transformers")
SIZES = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "max_position_embeddings": 64, "num_key_value_heads": 2}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3["original_max_position_embeddings"] = 16
GPT2 = {"vocab_size": 50, "n_positions": 20, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": 40}
GPT2 |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0) | {"bos_token_id": 0, "eos_token_id": 0}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", SIZES),
    "llama-3.1": ("Llama", {**SIZES, "rope_parameters": LLAMA3, "attention_bias": True, "mlp_bias": True}),
    "tied llama": ("Llama", {**SIZES, "tie_word_embeddings": True, "rms_norm_eps": 1e-3}),
    "qwen2": ("Qwen2", {**SIZES, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}),
    "qwen3": ("Qwen3", {**SIZES, "head_dim": 10, "attention_bias": True}),
    "mistral": ("Mistral", {**SIZES, "sliding_window": 5, "head_dim": 12}),
    "gpt2": ("GPT2", GPT2),
}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    yield


def saved(folder: Path, family: str, **changes: Any) -> nn.Module:
    """A model of transformers with random values, in a folder."""
    name, values = MODELS[family]
    config = getattr(transformers, f"{name}Config")(**{**values, **changes})
    module = getattr(transformers, "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM")(config)
    for parameter in module.parameters():
        parameter.data.normal_(0, 0.2)
    module.save_pretrained(folder, max_shard_size=30_000)
    return module.eval()


def settings_of(folder: Path, **changes: Any) -> DecoderSettings:
    settings = settings_from_config(read_config(folder))
    assert isinstance(settings, DecoderSettings)
    return settings.model_copy(update={"weights": str(folder), **changes})


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {k: v for file in folder.glob("*.safetensors") for k, v in safetensors_torch.load_file(file).items()}


def rewrite(folder: Path, tensors: dict[str, Tensor]) -> None:
    """One file in place of all."""
    for file in folder.glob("model*"):
        file.unlink()
    safetensors_torch.save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")


@pytest.mark.parametrize("family", MODELS)
def test_logits_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    tokens = torch.randint(50, (3, 19))
    with use_float64():
        theirs = saved(tmp_path, family)
        assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
        ours = built(settings_of(tmp_path), 3, torch.float64).module.eval()
        expected = theirs(tokens).logits
        assert (ours(tokens) - expected).abs().max() <= 1e-12 * expected.abs().max()


@pytest.mark.parametrize("family", ["llama-3.1", "qwen3", "gpt2"])
def test_ranks_read_boxes(family: str, tmp_path: Path) -> None:
    saved(tmp_path, family)
    settings = settings_of(tmp_path)
    complete = built(settings).module
    values = build_trainable_model(settings, 0, torch.float32, torch.device("cpu"), on_meta=True).initial_values
    assert values is not None and values.fingerprint
    for name, parameter in complete.named_parameters():
        read, shape = values.open(name), parameter.shape
        for _ in range(20):
            offsets = tuple(int(torch.randint(n, ())) for n in shape)
            lengths = tuple(int(torch.randint(1, n - o + 1, ())) for n, o in zip(shape, offsets, strict=True))
            part = tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))
            assert torch.equal(read((offsets, lengths)), parameter[part]), (name, offsets, lengths)


def test_values_in_bfloat16(tmp_path: Path) -> None:
    theirs = saved(tmp_path, "llama").to(torch.bfloat16)
    theirs.save_pretrained(tmp_path / "half")
    ours = built(settings_of(tmp_path / "half")).module
    table = ours.get_parameter("embedding.weight")
    assert table.dtype == torch.float32 and torch.equal(table, theirs.model.embed_tokens.weight.float())


def test_names_without_the_prefix_and_old_masks(tmp_path: Path) -> None:
    """The files of GPT-2 on the Hub are of a model without its head, and hold its masks."""
    saved(tmp_path, "gpt2")
    expected = built(settings_of(tmp_path)).module.state_dict()
    tensors = {name.removeprefix("transformer."): value for name, value in tensors_of(tmp_path).items()}
    rewrite(tmp_path, tensors | {"h.0.attn.bias": torch.ones(1, 1, 20, 20), "h.0.attn.masked_bias": torch.zeros(())})
    found = built(settings_of(tmp_path)).module.state_dict()
    assert all(torch.equal(value, found[name]) for name, value in expected.items())


def test_configs_of_older_versions(tmp_path: Path) -> None:
    """They have `rope_scaling` and `rope_theta`, and keys that change nothing."""
    saved(tmp_path, "llama-3.1")
    expected = settings_of(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config |= {
        "rope_theta": rope.pop("rope_theta"),
        "rope_scaling": rope,
        "pretraining_tp": 1,
        "torch_dtype": "float32",
    }
    (tmp_path / "config.json").write_text(json.dumps(config | {"_name_or_path": "org/name", "use_cache": True}))
    assert settings_of(tmp_path) == expected and expected.rope_scaling is not None
    find_decoder_tensors(expected)
    (tmp_path / "config.json").write_text(json.dumps(config | {"rope_scaling": {"type": "linear", "factor": 2.0}}))
    refused("rope_type = 'linear', which", find_decoder_tensors, settings_of(tmp_path))


def test_a_tied_head_may_be_there_as_a_copy(tmp_path: Path) -> None:
    saved(tmp_path, "tied llama")
    tensors = tensors_of(tmp_path)
    table = tensors["model.embed_tokens.weight"]
    rewrite(tmp_path, tensors | {"lm_head.weight": table.clone()})
    assert torch.equal(built(settings_of(tmp_path)).module.get_parameter("embedding.weight"), table)
    rewrite(tmp_path, tensors | {"lm_head.weight": table + 1})
    refused(r"no tensor for lm_head.weight; set model.tied=false", find_decoder_tensors, settings_of(tmp_path))


def test_shorter_sequences_and_another_dropout_are_no_other_model(tmp_path: Path) -> None:
    saved(tmp_path, "llama")
    find_decoder_tensors(settings_of(tmp_path, context=8, dropout=0.1, init_std=0.5))
    refused(
        r"model.context = 65, but .*; set model.context=64$", find_decoder_tensors, settings_of(tmp_path, context=65)
    )


WRONG: dict[str, tuple[str, dict[str, Any]]] = {
    r"model.layers = 3, but the model in \S+ has others; set model.layers=2$": ("llama", {"layers": 3}),
    r"model.hidden = 16, model.tied = true, .* set model.hidden=32 model.tied=false$": (
        "llama",
        {"hidden": 16, "head_dim": 8, "tied": True},
    ),
    r"model.rope_scaling = none, .*set model.rope_scaling=\{factor=8.0,": ("llama-3.1", {"rope_scaling": None}),
    r"model.norm_eps = 1e-05, .*set model.norm_eps=0.001": ("tied llama", {"norm_eps": 1e-5}),
    r"model.sliding_window = none.*set model.sliding_window=4": ("qwen2", {"sliding_window": None}),
    r"model.query_key_norm = false": ("qwen3", {"query_key_norm": False}),
    r"model.activation = silu.*set model.activation=gelu_tanh": ("gpt2", {"activation": "silu"}),
}


@pytest.mark.parametrize("says", WRONG)
def test_another_model_is_refused_by_the_names_of_its_settings(says: str, tmp_path: Path) -> None:
    family, changes = WRONG[says]
    saved(tmp_path, family)
    refused(says, find_decoder_tensors, settings_of(tmp_path, **changes))


OTHER_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    r"not of model_type = 'gemma'; train it with model.factory = 'hf:": ("llama", {"model_type": "gemma"}),
    r"rope_type = 'yarn', which": (
        "llama",
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}},
    ),
    r"layer_types = \['full_attention', 'sliding_attention'\], which": (
        "mistral",
        {"layer_types": ["full_attention", "sliding_attention"]},
    ),
    r"max_window_layers = 1, which": (
        "qwen2",
        {"max_window_layers": 1, "layer_types": None},
    ),
    r"scale_attn_by_inverse_layer_idx = True, which": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    r"quantization_config = \{'bits': 4\}, which": ("llama", {"quantization_config": {"bits": 4}}),
}


@pytest.mark.parametrize("says", OTHER_CONFIGS)
def test_what_a_decoder_does_not_compute_is_refused(says: str, tmp_path: Path) -> None:
    family, changes = OTHER_CONFIGS[says]
    saved(tmp_path, family)
    settings = settings_of(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    if "max_window" in says:
        settings = settings.model_copy(update={"sliding_window": None})
    refused(says, find_decoder_tensors, settings)


def test_files_that_do_not_hold_the_model(tmp_path: Path) -> None:
    saved(tmp_path, "llama")
    settings, tensors = settings_of(tmp_path), tensors_of(tmp_path)
    name = "model.layers.1.mlp.up_proj.weight"
    rewrite(tmp_path, {key: value for key, value in tensors.items() if key != name})
    refused(f"there is no {re.escape(name)}", find_decoder_tensors, settings)
    rewrite(tmp_path, tensors | {name: torch.zeros(3, 4)})
    refused(r"up_proj.weight has the shape \[3, 4\] and must have \[48, 32\]", find_decoder_tensors, settings)
    rewrite(tmp_path, tensors | {"model.extra": torch.zeros(3)})
    refused("the decoder has no tensor for model.extra", find_decoder_tensors, settings)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-9])
    refused(r"a safetensors file there is damaged", find_decoder_tensors, settings)
    file.rename(tmp_path / "pytorch_model.bin")
    refused(r"cannot read the weights in .*save its pickled weights as safetensors", find_decoder_tensors, settings)
