"""Models of transformers: built, loaded exactly, and called with positions and documents."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch as safetensors_torch
import torch
from small_models import built
from test_packed_rows import packed
from test_randomness import check_layouts_agree
from test_row_parts import OUTER, check_part_that_is_a_document, whole_rows

from motet.core.batch import Batch
from motet.core.errors import InputError
from motet.models.build import TrainableModel, build_module
from motet.models.hf import hf_model
from motet.models.hf.hf_config import read_config
from motet.models.settings import AdapterSettings, UserModuleSettings
from motet.precision.float64_mode import use_float64
from refusals import refused

transformers = pytest.importorskip("transformers")
SIZES = {"vocab_size": 30, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "max_position_embeddings": 32, "initializer_range": 0.3}
LLAMA = {**SIZES, "num_key_value_heads": 2, "pad_token_id": None}
BERT = {**SIZES, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GPT2 = {"vocab_size": 30, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32, "initializer_range": 0.3}
GPT2 |= {"bos_token_id": None, "eos_token_id": None}
T5 = {"vocab_size": 30, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
SLIDING = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": dict(model_type="llama", **LLAMA),
    "qwen2": dict(model_type="qwen2", **LLAMA),
    "qwen2-mixed": dict(model_type="qwen2", **LLAMA, **SLIDING),
    "qwen3": dict(model_type="qwen3", **LLAMA, head_dim=8),
    "mistral": dict(model_type="mistral", **LLAMA, sliding_window=3),
    "gpt2": dict(model_type="gpt2", **GPT2, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0),
    "gpt_neox": dict(model_type="gpt_neox", **{**LLAMA, "num_key_value_heads": None}),
    "bert": dict(model_type="bert", architectures=["BertForMaskedLM"], **BERT),
    "t5": dict(model_type="t5", architectures=["T5ForConditionalGeneration"], **T5),
}


def folder(path: Path, config: dict[str, Any]) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    return path


def settings(path: Path | str, **more: Any) -> UserModuleSettings:
    return UserModuleSettings(factory=f"hf:{path}", **more)


def trainee(path: Path | str, seed: int = 1, dtype: torch.dtype = torch.float64, **more: Any) -> TrainableModel:
    return built(settings(path, **more), seed, dtype)


def one(length: int, seed: int) -> Batch:
    torch.manual_seed(seed)
    tokens, targets = torch.randint(1, 30, (2, 1, length))
    source = torch.randint(1, 30, (1, length + 2))
    return Batch(tokens, targets, torch.ones(1, length), rows=torch.tensor([seed]), source=source)


@pytest.mark.parametrize("name", list(CONFIGS))
def test_packed_documents_are_as_the_documents_alone(tmp_path: Path, name: str) -> None:
    with use_float64():
        model, batches = trainee(folder(tmp_path, CONFIGS[name])), [one(6, 1), one(4, 2), one(5, 3)]
        alone = torch.stack([model.loss_sum(b) for b in batches]).sum()
        assert abs(alone - model.loss_sum(packed(batches, 2))) < 1e-12 * alone
        joined = replace(packed(batches, 2), documents=None, positions=None, source_documents=None)
        assert abs(model.loss_sum(joined) - alone) > 1e-3 and model.vocab_size == 30
        assert model.is_autoregressive == (name not in ("bert", "t5"))


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "t5"])
def test_a_part_that_is_a_document(tmp_path: Path, name: str) -> None:
    with use_float64():
        check_part_that_is_a_document(trainee(folder(tmp_path, CONFIGS[name])))


BLOOM = {"model_type": "bloom", "hidden_size": 16, "n_layer": 2, "n_head": 4}


@pytest.mark.parametrize("config", [CONFIGS["t5"], BLOOM])
def test_a_model_that_counts_its_tokens_itself_computes_whole_rows_only(tmp_path: Path, config: dict[str, Any]) -> None:
    model, part = trainee(folder(tmp_path, {"vocab_size": 30, **config})), whole_rows().at_places(OUTER)
    says = f"a {config['model_type']} computes whole rows only .*, and got 4 tokens of each; give it whole rows"
    refused(says, model.logits, part)


@pytest.mark.parametrize("is_argument", [False, True])
def test_classes_by_config_or_argument(tmp_path: Path, is_argument: bool) -> None:
    classes = {"num_labels": 3}
    config = {**CONFIGS["bert"], "architectures": ["BertForSequenceClassification"]}
    path = folder(tmp_path, config if is_argument else {**config, **classes})
    model = trainee(path, arguments=classes if is_argument else {})
    batch = replace(one(6, 1), targets=torch.tensor([2]), weights=torch.ones(1))
    assert (model.objective, model.num_classes, model.logits(batch).shape) == ("classify", 3, (1, 3))
    assert model.loss_sum(batch) > 0
    refused(r"data.objective", model.loss_sum, one(6, 1))


def test_without_architectures_a_model_is_what_it_is_mostly_used_for(tmp_path: Path) -> None:
    classes = {"bert": "BertForMaskedLM", "t5": "T5ForConditionalGeneration", "llama": "LlamaForCausalLM"}
    for kind, expected in classes.items():
        config = {key: value for key, value in CONFIGS[kind].items() if key != "architectures"}
        assert type(build_module(settings(folder(tmp_path, config)))).__name__ == expected


def test_random_weights_depend_on_the_seed_alone(tmp_path: Path) -> None:
    path = folder(tmp_path, CONFIGS["llama"])
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    first, second, third = (trainee(path / "config.json", seed).module for seed in (1, 1, 2))
    assert torch.equal(torch.rand(1), expected)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(first.get_parameter(name), third.get_parameter(name))


def test_rotary_tables_keep_their_bits(tmp_path: Path) -> None:
    module = trainee(folder(tmp_path, CONFIGS["llama"]), dtype=torch.bfloat16).module
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
    assert {b.dtype for b in module.buffers()} == {torch.float32}
    assert trainee(tmp_path, dtype=torch.bfloat16).loss_sum(one(6, 1)).dtype == torch.float32


def test_arguments_replace_values_of_the_config(tmp_path: Path) -> None:
    path = folder(tmp_path, CONFIGS["llama"])
    assert len(build_module(settings(path, arguments={"num_hidden_layers": 1})).model.layers) == 1
    with pytest.raises(InputError, match=r"has no 'num_hiden_layers'; did you mean 'num_hidden_layers'"):
        build_module(settings(path, arguments={"num_hiden_layers": 1}))


def test_the_config_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []
    monkeypatch.setattr(hf_model, "read_config", lambda path: read.append(path) or read_config(path))
    trainee(folder(tmp_path, CONFIGS["llama"])).loss_sum(one(6, 1))
    assert read == [tmp_path]


def test_on_the_meta_device(tmp_path: Path) -> None:
    with torch.device("meta"):
        module = build_module(settings(folder(tmp_path, CONFIGS["gpt2"])))
    assert all(p.is_meta for p in module.parameters())


# --- weights -----------------------------------------------------------------------------------------
def saved(path: Path, name: str, **how: Any) -> torch.nn.Module:
    folder(path, CONFIGS[name])
    module = trainee(path, 5, torch.float32).module
    module.save_pretrained(path, **how)
    return module


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "t5"])
@pytest.mark.parametrize("how", [{}, {"max_shard_size": 4000}], ids=["one file", "sharded"])
def test_weights_are_loaded_exactly(tmp_path: Path, name: str, how: dict[str, Any]) -> None:
    module = saved(tmp_path, name, **how)
    assert (tmp_path / "model.safetensors.index.json").exists() == bool(how)
    loaded = trainee(tmp_path, 99, torch.float32).module.state_dict()
    assert loaded.keys() == module.state_dict().keys()
    assert all(torch.equal(value, loaded[key]) for key, value in module.state_dict().items())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda w: w.pop("model.norm.weight"), "model.norm.weight are missing"),
        (lambda w: w.update(extra=torch.zeros(2)), "extra are not part of this model"),
        (lambda w: w.update({"model.norm.weight": torch.zeros(3)}), r"norm.weight \[3\] for \[16\] do not fit"),
        (lambda w: [w.pop(key) for key in list(w) if "mlp" in key], "and 3 more are missing"),
    ],
)
def test_weights_of_another_model_are_refused(tmp_path: Path, change: Any, says: str) -> None:
    saved(tmp_path, "llama")
    weights = safetensors_torch.load_file(tmp_path / "model.safetensors")
    change(weights)
    safetensors_torch.save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    refused(says, trainee, tmp_path)


def test_a_config_alone_has_random_weights_beside_a_file_of_weights(tmp_path: Path) -> None:
    table = saved(tmp_path, "llama").model.embed_tokens.weight
    assert not torch.equal(trainee(tmp_path / "config.json", 6, torch.float32).module.model.embed_tokens.weight, table)


def test_adapters_on_loaded_weights(tmp_path: Path) -> None:
    module = saved(tmp_path, "gpt2")
    model = trainee(tmp_path, dtype=torch.float32, adapters=AdapterSettings(rank=2, targets=("*attn.c_*",)))
    batch = one(6, 1)
    assert torch.equal(model.logits(batch), module(batch.tokens).logits)
    model.loss_sum(batch).backward()
    trained = {name for name, p in model.module.named_parameters() if p.grad is not None}
    layers = [f"transformer.h.{i}.attn.{layer}" for i in range(2) for layer in ("c_attn", "c_proj")]
    assert trained == {f"{layer}.adapter_{part}" for layer in layers for part in "ab"}


@pytest.mark.parametrize("family", ["llama", "granitemoe"])  # The cache is an argument of the inner model alone
def test_a_training_step_keeps_no_cache(tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recomputation would append keys to it again."""
    from transformers.cache_utils import DynamicCache

    monkeypatch.setattr(DynamicCache, "update", lambda *_, **__: pytest.fail("a cache is filled"))
    sizes = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
    with use_float64():
        model = trainee(folder(tmp_path, {"model_type": family, "vocab_size": 50, "num_local_experts": 4, **sizes}))
        assert model.loss_sum(one(7, 0)).isfinite()


def test_frozen(tmp_path: Path) -> None:
    model = trainee(folder(tmp_path, CONFIGS["llama"]), frozen=("model.embed_tokens.*", "*.layers.0.*"))
    assert not any(p.requires_grad for n, p in model.module.named_parameters() if ".layers.0." in n)
    assert all(p.requires_grad for n, p in model.module.named_parameters() if ".layers.1." in n)


# --- what is wrong -----------------------------------------------------------------------------------
def refuse(says: str, path: Path | str, **more: Any) -> None:
    with pytest.raises(InputError, match=says):
        trainee(path, **more).loss_sum(one(33, 1))


def test_refused(tmp_path: Path) -> None:
    refuse("model_type = 'lama' is not known to transformers", folder(tmp_path, {"model_type": "lama"}))
    refuse("model_type = None is not known", folder(tmp_path, {}))
    question = {"model_type": "bert", "architectures": ["BertForQuestion"]}
    refuse("BertForQuestion.*can be trained", folder(tmp_path, question))
    refuse("transformers rejects this config", folder(tmp_path, {**CONFIGS["llama"], "hidden_size": "wide"}))
    refuse(r"cannot read .*nowhere", tmp_path / "nowhere")
    refuse(r"cannot read gpt2", "gpt2")
    refuse(r"model.vocab_size = 31, but the config of .* has 30", folder(tmp_path, CONFIGS["llama"]), vocab_size=31)
    refuse(r"33 tokens does not fit model.arguments.max_position_embeddings = 32", folder(tmp_path, CONFIGS["gpt2"]))
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    refuse(r"pytorch_model.bin, which is a pickle", tmp_path)


def test_without_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    refused(r"pip install motet\[hf\]", trainee, folder(tmp_path, CONFIGS["llama"]))


# --- dropout -----------------------------------------------------------------------------------------
def test_gpt2_with_its_default_dropout_does_not_depend_on_the_split_of_the_batch(tmp_path: Path) -> None:
    with use_float64():
        model = trainee(folder(tmp_path, dict(model_type="gpt2", **GPT2)))
        assert model.module.config.attn_pdrop == 0.1
        check_layouts_agree(model, 30)


def test_a_model_that_drops_nothing_has_no_mode(tmp_path: Path) -> None:
    with trainee(folder(tmp_path, CONFIGS["llama"])).randomness(0, torch.tensor([0])) as entered:
        assert entered is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_mask_in_float32_follows_the_weights(tmp_path: Path, dtype: torch.dtype) -> None:
    """Parameters are cast after the model is built, and GPT-1 multiplies its scores with a buffer."""
    sizes = {"vocab_size": 30, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "openai-gpt", **sizes}))
    model = built(UserModuleSettings(factory=f"hf:{tmp_path}"), 0, torch.float32)
    for parameter in model.module.parameters():
        parameter.data = parameter.data.to(dtype)
    tokens = torch.randint(0, 30, (2, 8))
    assert model.loss_sum(Batch(tokens, tokens, torch.ones(2, 8), torch.arange(2))).isfinite()
    assert model.module.get_buffer("transformer.h.1.attn.bias").dtype == dtype
