"""A folder of PEFT with the adapters that a run starts from, checked before ranks start. Nothing here imports torch."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import isclose
from pathlib import Path
from typing import Any

from motet.core.errors import InputError, check_input, convert_os_errors
from motet.core.text_files import parse_json
from motet.models.hf.decoder_config import config_of_settings
from motet.models.hf.decoder_tensors import FolderPart, is_adapter, map_decoder_tensors
from motet.models.hf.safetensors_files import HEADER_ERRORS, WeightOnDisk, have_equal_bytes, read_header
from motet.models.settings import AdapterSettings, DecoderSettings, TrainableParameterSettings

_TENSOR = re.compile(r"(?:base_model\.model\.)?(.+)\.(lora_[AB])\.weight")
# Keys of a config that do not change what an adapter computes; another key must be unset.
_NEUTRAL = (
    *("peft_type", "r", "lora_alpha", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *("fan_in_fan_out", "task_type", "base_model_name_or_path", "revision", "inference_mode", "peft_version"),
    *("auto_mapping", "lora_dropout", "megatron_core", "qalora_group_size", "runtime_config", "eva_config"),
    "loftq_config",
)
_NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {"bias": ("none",), "init_lora_weights": (True, False, "gaussian", "eva")}


@dataclass(frozen=True)
class LoraPair:
    """The two matrices of a layer of the folder, W + (alpha / r) B A."""

    a: WeightOnDisk  # [r, in]
    b: WeightOnDisk  # [out, r]


@dataclass(frozen=True)
class PeftFolder:
    """The adapters of a folder of PEFT by the layer that they are on."""

    place: str
    rank: int
    alpha: float
    layers: dict[str, LoraPair]

    def check_layers(self, adapted: list[str]) -> None:
        """Refuse other layers than those of the folder."""
        for layer in sorted({*adapted} ^ self.layers.keys()):
            where = "and not in the folder" if layer in adapted else "in the folder, and not in model.adapters.targets"
            raise InputError(f"{self.place}: {layer} has an adapter {where}; {self._remedy()}")

    def _remedy(self) -> str:
        endings = sorted({layer.rpartition(".")[2] for layer in self.layers})
        return f"set model.adapters.targets={[f'*.{ending}' for ending in endings]} or those layers of it"


def read_peft_folder(settings: AdapterSettings) -> PeftFolder:
    """The adapters in the folder of `model.adapters.weights`. Refuse kinds of adapters that motet does not have."""
    assert settings.weights is not None
    folder, place = Path(settings.weights).expanduser(), f"model.adapters.weights = {settings.weights!r}"
    config = _read_config(folder, place)
    has_pickle = (folder / "adapter_model.bin").is_file()
    remedy = "save its pickled weights as safetensors" if has_pickle else "give a folder of PEFT"
    try:
        with convert_os_errors(f"read {folder / 'adapter_model.safetensors'}", remedy):
            headers = read_header(folder / "adapter_model.safetensors")
    except InputError:
        raise
    except HEADER_ERRORS as error:
        problem = f"adapter_model.safetensors is damaged ({type(error).__name__}: {error})"
        raise InputError(f"{place}: {problem}; copy it again") from None
    return PeftFolder(place, config["r"], config["lora_alpha"], _pairs(headers, config["r"], place))


def _read_config(folder: Path, place: str) -> dict[str, Any]:
    file = folder / "adapter_config.json"
    with convert_os_errors(f"read {file}", "give a folder of PEFT, which has an adapter_config.json"):
        text = file.read_bytes()
    try:
        config: dict[str, Any] = parse_json(text)
    except ValueError as error:
        raise InputError(f"{file} is not valid JSON: {error}") from None
    check_input(isinstance(config, dict), f"{file} holds a {type(config).__name__}; it must be a JSON object")
    check_input(
        config.get("peft_type") == "LORA", f"{place}: peft_type = {config.get('peft_type')!r}; motet reads LORA alone"
    )
    for key, value in config.items():
        is_neutral = key in _NEUTRAL or value in _NEUTRAL_VALUES.get(key, ()) or not value
        check_input(is_neutral, f"{place}: motet's adapters have no {key} = {value!r}; train them without it")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    check_input(isinstance(rank, int) and rank > 0, f"{file}: r = {rank!r} must be a whole number of at least 1")
    check_input(isinstance(alpha, int | float) and alpha > 0, f"{file}: lora_alpha = {alpha!r} must be above 0")
    return config


def _pairs(headers: Mapping[str, WeightOnDisk], rank: int, place: str) -> dict[str, LoraPair]:
    layers: dict[str, dict[str, WeightOnDisk]] = {}
    for name, weight in headers.items():
        match = _TENSOR.fullmatch(name)
        if match is None:
            raise InputError(f"{place}: {name} is not a matrix of a low-rank adapter on a linear layer; leave it out")
        layers.setdefault(match[1], {})[match[2]] = weight
        has_rank = len(weight.shape) == 2 and weight.shape[0 if match[2] == "lora_A" else 1] == rank
        check_input(has_rank, f"{place}: {name} has the shape {list(weight.shape)}, which is not of rank {rank}")
    for layer, parts in layers.items():
        check_input(len(parts) == 2, f"{place}: {layer} has {' and '.join(parts)} alone; save the adapters again")
    return {layer: LoraPair(parts["lora_A"], parts["lora_B"]) for layer, parts in layers.items()}


def check_peft_folder(model: TrainableParameterSettings) -> None:
    """Refuse a folder of PEFT that does not fit the adapters of a job, as far as files say it."""
    settings = model.adapters
    if settings is None or settings.weights is None:
        return
    if isinstance(model, DecoderSettings):
        find_decoder_adapters(model)
        return
    folder = read_peft_folder(settings)
    _check_sizes(folder, settings, folder.rank)
    for layer in folder.layers:
        is_named = any(fnmatchcase(layer, pattern) for pattern in settings.targets)
        check_input(
            is_named, f"{folder.place}: no pattern in model.adapters.targets matches its layer {layer}; add one"
        )


def _check_sizes(folder: PeftFolder, settings: AdapterSettings, rank: int) -> None:
    """`rank` holds the adapters of the folder; where it is larger than theirs, alpha is so, too."""
    alpha = folder.alpha * rank / folder.rank
    remedy = f"set model.adapters.rank={rank} model.adapters.alpha={alpha:g}"
    stored = f"the adapters in {settings.weights} have r = {folder.rank} and lora_alpha = {folder.alpha:g}"
    check_input(settings.rank == rank, f"model.adapters.rank = {settings.rank}, but {stored}; {remedy}")
    check_input(
        isclose(settings.alpha, alpha, rel_tol=1e-12),
        f"model.adapters.alpha = {settings.alpha:g}, but {stored}; {remedy}",
    )


# --- adapters of motet's decoder ---------------------------------------------------------------------------


@dataclass(frozen=True)
class JoinedPart:
    """A matrix of the folder inside of one of motet's, which adapts several layers of the folder."""

    part: FolderPart
    weight: WeightOnDisk
    first_rank: int  # The first of its ranks among those of motet's adapter


@dataclass(frozen=True)
class DecoderAdapters:
    """The parts of each matrix A and B of motet's decoder that a folder has."""

    folder: PeftFolder
    parts: dict[str, list[JoinedPart]]


def find_decoder_adapters(model: DecoderSettings) -> DecoderAdapters:
    """The adapters in a folder of PEFT for motet's decoder, whose joined layers have one matrix A for all projections.

    Projections with different matrices A get different ranks of the joined adapter.
    """
    assert model.adapters is not None
    folder = read_peft_folder(model.adapters)
    mapped = map_decoder_tensors(model, config_of_settings(model)["model_type"])
    adapters = {name: parts for name, parts in mapped.parts.items() if is_adapter(name)}
    by_layer = {name.rpartition(".")[0]: parts for name, parts in adapters.items() if name.endswith(".adapter_b")}
    modules = {layer: [_module(part.name) for part in parts] for layer, parts in by_layer.items()}
    known = {module for layer in modules.values() for module in layer}
    for module in folder.layers:
        check_input(
            module in known,
            f"{folder.place}: no layer with an adapter is its {module}; add it to model.adapters.targets",
        )
    slots = {layer: _slots(folder, names) for layer, names in modules.items()}
    for layer, numbers in slots.items():
        check_input(numbers, f"{folder.place}: it has no adapter for {layer}; leave it out of model.adapters.targets")
    _check_sizes(folder, model.adapters, folder.rank * max(1 + max(each.values()) for each in slots.values()))
    joined: dict[str, list[JoinedPart]] = {}
    for name, parts in adapters.items():
        layer, kind = name.rpartition(".")[0], name[-1]
        for part in (part for part in parts if _module(part.name) in folder.layers):
            pair, first = folder.layers[_module(part.name)], slots[layer][_module(part.name)] * folder.rank
            weight = pair.a if kind == "a" else pair.b
            expected = (folder.rank, *part.columns) if kind == "a" else (part.rows, folder.rank)
            problem = f"{folder.place}: {part.name} has the shape {list(weight.shape)} and must have {list(expected)}"
            check_input(weight.shape == expected, f"{problem}; give the adapters of this model")
            joined.setdefault(name, []).append(JoinedPart(part, weight, first))
    return DecoderAdapters(folder, joined)


def _module(name: str) -> str:
    return name.rpartition(".lora_")[0]


def _slots(folder: PeftFolder, modules: list[str]) -> dict[str, int]:
    """The number of the matrix A of each joined module among the different ones."""
    different, slots = list[WeightOnDisk](), dict[str, int]()
    for module in (module for module in modules if module in folder.layers):
        a = folder.layers[module].a
        equal = [index for index, other in enumerate(different) if have_equal_bytes(a, other)]
        if not equal:
            different.append(a)
        slots[module] = equal[0] if equal else len(different) - 1
    return slots
