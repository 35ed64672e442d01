"""Adapters go to PEFT and come from there with equal logits; adapters that motet does not have are refused."""

import json
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from export.stored_models import (
    DECODERS,
    OWN,
    built_with_random_values,
    distance,
    export,
    hf_job,
    job_of,
    load_exported,
)
from models.tiny_configs import TINY_CONFIGS
from motet.models.build import build_trainable_model
from motet.models.hf.hf_config import read_config, settings_from_config
from motet.models.hf.peft_files import check_peft_folder
from motet.models.settings import AdapterSettings, DecoderSettings, UserModuleSettings
from motet.precision.float64_mode import use_float64
from refusals import refused

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft", reason="PEFT is not installed")
TOKENS = torch.arange(60).view(3, 20) * 7 % 100
ADAPTERS = {"rank": 3, "alpha": 5.0, "targets": ["*.qkv", "blocks.0.*"]}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    with use_float64():
        yield


def adapted(base: nn.Module, folder: Path) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Of fan_in_fan_out, tied heads and deprecated names
        module: nn.Module = peft.PeftModel.from_pretrained(base, folder).eval()
    return module


def quick_first(names: Iterable[str], *quick: str) -> list[Any]:
    """Cases of which `make test` takes the quick ones."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.proof) for name in names]


@pytest.mark.parametrize("family", quick_first(DECODERS, "llama-3.1", "gpt2"))
def test_adapters_of_a_decoder_in_peft_and_merged(family: str, tmp_path: Path) -> None:
    job = job_of({**OWN, **DECODERS[family], "adapters": ADAPTERS}, tmp_path / "cache")
    module = built_with_random_values(job, torch.float64)
    expected = module(TOKENS)
    for kind in ("merge", "base", "peft"):
        export(job, module, tmp_path / kind, adapters=kind)
    assert distance(expected, load_exported(tmp_path / "merge")(TOKENS).logits) <= 1e-12
    base = load_exported(tmp_path / "base")
    assert distance(expected, base(TOKENS).logits) > 1e-3
    assert distance(expected, adapted(base, tmp_path / "peft")(TOKENS).logits) <= 1e-12
    # The way back: motet's own export fits its joined projections
    weights = {"weights": str(tmp_path / "base"), "adapters": {**ADAPTERS, "weights": str(tmp_path / "peft")}}
    again = job_of({**OWN, **DECODERS[family], **weights}, tmp_path / "cache").model
    check_peft_folder(again)
    back = built(again)
    assert all(torch.equal(p, back.get_parameter(name)) for name, p in module.named_parameters())


@pytest.mark.parametrize("family", quick_first(["llama", "gpt2", "gemma3_text", "mixtral", "phi3"], "gpt2"))
def test_adapters_of_a_model_of_transformers(family: str, tmp_path: Path) -> None:
    config = {"model_type": family, **TINY_CONFIGS[family], "num_hidden_layers": 2}
    job = hf_job(tmp_path / "hf", config, adapters={"rank": 3, "alpha": 5.0, "targets": ["*"]})
    module = built_with_random_values(job, torch.float64)
    expected = module(TOKENS).logits
    for kind in ("base", "peft"):
        export(job, module, tmp_path / kind, adapters=kind)
    assert distance(expected, adapted(load_exported(tmp_path / "base"), tmp_path / "peft")(TOKENS).logits) <= 1e-12


# --- adapters that PEFT has trained ----------------------------------------------------------------------
LORA = {"r": 3, "lora_alpha": 5, "task_type": "CAUSAL_LM"}


def trained_by_peft(folder: Path, family: str, targets: list[str], **changes: Any) -> Tensor:
    """A base model and its adapters, in two folders. Returns the logits of both together."""
    config = transformers.AutoConfig.for_model(family, **TINY_CONFIGS[family] | {"num_hidden_layers": 2})
    base = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    for parameter in base.parameters():
        parameter.data.normal_(0, 0.2)
    base.save_pretrained(folder / "base")
    lora = peft.LoraConfig(**LORA, target_modules=targets, fan_in_fan_out=family == "gpt2", **changes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(base, lora).eval()
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data.normal_(0, 0.2)
        model.save_pretrained(folder / "adapters")
    logits: Tensor = model(TOKENS).logits.detach()
    return logits


def own_settings(folder: Path, rank: int, alpha: float, targets: tuple[str, ...]) -> DecoderSettings:
    settings = settings_from_config(read_config(folder / "base"))
    assert isinstance(settings, DecoderSettings)
    adapters = AdapterSettings(rank=rank, alpha=alpha, targets=targets, weights=str(folder / "adapters"))
    return settings.model_copy(update={"weights": str(folder / "base"), "adapters": adapters})


def hf_settings(folder: Path, targets: tuple[str, ...], rank: int = 3, alpha: float = 5.0) -> UserModuleSettings:
    adapters = AdapterSettings(rank=rank, alpha=alpha, targets=targets, weights=str(folder / "adapters"))
    return UserModuleSettings(factory=f"hf:{folder / 'base'}", adapters=adapters)


def built(settings: Any) -> nn.Module:
    return build_trainable_model(settings, 0, torch.float64, torch.device("cpu")).module.eval()


# Family, targets in PEFT, and what motet's decoder needs for them: different A of joined projections need more ranks
FOREIGN: dict[str, tuple[str, list[str], int, tuple[str, ...]]] = {
    "llama, queries and values": ("llama", ["q_proj", "v_proj"], 2, ("*.attention.qkv",)),
    "qwen2, everything": (
        "qwen2", ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"], 3, ("*",),
    ),
    "mistral, the feed-forward network": ("mistral", ["gate_proj", "down_proj"], 1, ("*.ffn.*",)),
    "gpt2": ("gpt2", ["c_attn", "c_proj"], 1, ("*.qkv", "*.output", "*.down")),
}  # fmt: skip


@pytest.mark.parametrize("case", quick_first(FOREIGN, "llama, queries and values"))
def test_runs_start_from_adapters_of_peft(case: str, tmp_path: Path) -> None:
    family, theirs, times, ours = FOREIGN[case]
    expected = trained_by_peft(tmp_path, family, theirs)
    hf = hf_settings(tmp_path, tuple(f"*.{name}" for name in theirs))
    own = own_settings(tmp_path, 3 * times, 5.0 * times, ours)
    for settings in (hf, own):
        check_peft_folder(settings)
    assert distance(built(hf)(TOKENS).logits, expected) <= 1e-12
    module = built(own)
    assert distance(module(TOKENS), expected) <= 1e-12
    on_meta = build_trainable_model(own, 0, torch.float64, torch.device("cpu"), on_meta=True).initial_values
    assert on_meta is not None
    for name, parameter in module.named_parameters():
        read, shape = on_meta.open(name), parameter.shape
        for _ in range(6 if "adapter" in name else 0):
            offsets = tuple(int(torch.randint(n, ())) for n in shape)
            lengths = tuple(int(torch.randint(1, n - o + 1, ())) for n, o in zip(shape, offsets, strict=True))
            part = tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))
            assert torch.equal(read((offsets, lengths)).double(), parameter[part]), (name, offsets, lengths)


def test_ranks_without_an_adapter_of_the_folder_can_be_trained(tmp_path: Path) -> None:
    """A matrix B of zeros on an A of zeros would never change."""
    trained_by_peft(tmp_path, "llama", ["q_proj", "v_proj", "o_proj"])
    module = built(own_settings(tmp_path, 6, 10.0, ("*.attention.*",)))
    a, b = (module.get_parameter(f"blocks.0.attention.output.adapter_{part}") for part in "ab")
    assert a[3:].ne(0).all() and not b[:, 3:].any() and b[:, :3].ne(0).all()


def test_sizes_must_agree(tmp_path: Path) -> None:
    trained_by_peft(tmp_path, "llama", ["q_proj", "v_proj"])
    told = r"but the adapters in \S+ have r = 3 and lora_alpha = 5; set model.adapters.rank=%s model.adapters.alpha=%s$"
    targets = ("*.q_proj", "*.v_proj")
    rank, alpha = r"model.adapters.rank = 4, ", r"model.adapters.alpha = 7, "
    refused(rank + told % (3, 5), check_peft_folder, hf_settings(tmp_path, targets, rank=4))
    refused(alpha + told % (3, 5), check_peft_folder, hf_settings(tmp_path, targets, alpha=7.0))
    refused(rank + told % (6, 10), check_peft_folder, own_settings(tmp_path, 4, 5.0, ("*.qkv",)))
    refused(alpha + told % (6, 10), check_peft_folder, own_settings(tmp_path, 6, 7.0, ("*.qkv",)))


def test_layers_must_agree(tmp_path: Path) -> None:
    trained_by_peft(tmp_path, "llama", ["q_proj", "v_proj"])
    says = r"no pattern in model.adapters.targets matches its layer model.layers.0.self_attn.v_proj; add one"
    refused(says, check_peft_folder, hf_settings(tmp_path, ("*.q_proj",)))
    says = r"model.layers.0.self_attn.k_proj has an adapter and not in the folder; set model.adapters.targets=\['\*.q_"
    refused(says, built, hf_settings(tmp_path, ("*.q_proj", "*.v_proj", "*.k_proj")))
    refused(
        r"it has no adapter for blocks.0.attention.output", check_peft_folder, own_settings(tmp_path, 6, 10.0, ("*",))
    )
    says = r"no layer with an adapter is its model.layers.0.self_attn.q_proj; add it"
    refused(says, check_peft_folder, own_settings(tmp_path, 6, 10.0, ("*.ffn.down",)))


UNSUPPORTED: dict[str, dict[str, Any]] = {
    "use_dora = True": {"use_dora": True},
    "use_rslora = True": {"use_rslora": True},
    "bias = 'all'": {"bias": "all"},
    r"modules_to_save = \['lm_head'\]": {"modules_to_save": ["lm_head"]},
    r"rank_pattern = \{'q_proj': 4\}": {"rank_pattern": {"q_proj": 4}},
    "init_lora_weights = 'pissa'": {"init_lora_weights": "pissa"},
    "use_something_new = True": {"use_something_new": True},
}


def test_other_kinds_of_adapters_are_refused_by_name(tmp_path: Path) -> None:
    trained_by_peft(tmp_path, "llama", ["q_proj"])
    file = tmp_path / "adapters/adapter_config.json"
    config = json.loads(file.read_text())
    for says, values in UNSUPPORTED.items():
        file.write_text(json.dumps(config | values))
        refused(f"motet's adapters have no {says}", check_peft_folder, hf_settings(tmp_path, ("*.q_proj",)))


def test_damaged_folders(tmp_path: Path) -> None:
    trained_by_peft(tmp_path, "llama", ["q_proj"])
    settings, folder = hf_settings(tmp_path, ("*.q_proj",)), tmp_path / "adapters"
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if "lora_A" in name)
    save_file({key: value for key, value in tensors.items() if key != name}, file)
    refused(r"q_proj has lora_B alone; save the adapters again", check_peft_folder, settings)
    save_file(tensors | {name: torch.zeros(4, 48)}, file)
    refused(r"lora_A.weight has the shape \[4, 48\], which is not of rank 3", check_peft_folder, settings)
    save_file(tensors | {"base_model.model.lm_head.lora_embedding_A": torch.zeros(3, 48)}, file)
    refused(r"lora_embedding_A is not a matrix of a low-rank adapter", check_peft_folder, settings)
    save_file(tensors | {name: torch.zeros(3, 40)}, file)
    refused(r"adapter_a has the shape \[3, 40\] and must have \[3, 48\]", built, settings)
    file.write_bytes(b"x" * 30)
    refused(r"adapter_model.safetensors is damaged", check_peft_folder, settings)
    file.unlink()
    refused(r"cannot read \S+adapter_model.safetensors: No such file", check_peft_folder, settings)
    config = folder / "adapter_config.json"
    config.write_text(json.dumps({"peft_type": "IA3"}))
    refused(r"peft_type = 'IA3'; motet reads LORA alone", check_peft_folder, settings)
    config.unlink()
    refused(r"cannot read \S+adapter_config.json.*give a folder of PEFT", check_peft_folder, settings)
