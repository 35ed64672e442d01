"""The adapters of a model as a folder of PEFT."""

import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

from torch import Tensor

from motet.core.errors import InputError
from motet.export.decoder_export import config_and_tensors, exported_part
from motet.export.hf_module_export import StoredModule
from motet.export.safetensors_shards import ExportedTensor, Progress, write_shards
from motet.export.stored_parameters import StoredParameters
from motet.models.adapters import adaptable_layers
from motet.models.hf.decoder_tensors import LORA_PARTS, adaptable_modules, is_adapter
from motet.models.hf.hf_model import HuggingFaceCheckpoint
from motet.models.settings import AdapterSettings, DecoderSettings

_PREFIX = "base_model.model."
_TASKS = {"causal": "CAUSAL_LM", "encoder-decoder": "SEQ_2_SEQ_LM"}


@dataclass(frozen=True)
class ExportedAdapters:
    """The adapters of a model of transformers."""

    tensors: Sequence[ExportedTensor]
    adaptable: Collection[str]  # All layers that could have an adapter
    has_transposed_weights: bool  # Those of GPT-2 are [in, out]
    base: str | None  # The folder of the model without adapters
    task: str | None = "CAUSAL_LM"

    @property
    def layers(self) -> set[str]:
        """The layers that have an adapter."""
        return {tensor.name.removeprefix(_PREFIX).rpartition(".lora_")[0] for tensor in self.tensors}


def decoder_adapters(settings: DecoderSettings, parameters: StoredParameters) -> ExportedAdapters:
    """The adapters of motet's decoder, for the model that its export makes."""
    config, mapped = config_and_tensors(settings)
    parts = [(name, part) for name, part in mapped.in_folder() if is_adapter(name)]
    tensors = [exported_part(name, part, parameters, prefix=_PREFIX) for name, part in parts]
    layers = adaptable_modules(settings, config["model_type"])
    return ExportedAdapters(tensors, layers, config["model_type"] == "gpt2", settings.weights)


def module_adapters(stored: StoredModule, checkpoint: HuggingFaceCheckpoint, base: str | None) -> ExportedAdapters:
    """The adapters of a model of transformers that a job has trained."""
    parameters, layers = stored.parameters, adaptable_layers(stored.module)
    adapted = [layer for layer in layers if parameters.has(f"{layer}.adapter_a")]
    tensors = [
        _exported(f"{layer}.{kind}", f"{_PREFIX}{layer}.{ending}", parameters)
        for layer in adapted
        for kind, ending in LORA_PARTS.items()
    ]
    has_transposed_weights = any(layer in parameters.transposed_layers for layer in adapted)
    return ExportedAdapters(tensors, layers, has_transposed_weights, base, _TASKS.get(checkpoint.kind))


def _exported(name: str, folder_name: str, parameters: StoredParameters) -> ExportedTensor:
    shape = parameters.shape(name)
    pieces = partial(_pieces, name, parameters)
    return ExportedTensor(folder_name, parameters.exported_dtype(name), shape, pieces, (name,))


def _pieces(name: str, parameters: StoredParameters) -> Iterator[Tensor]:
    for rows in parameters.pieces(name, 0, parameters.shape(name)[0]):
        yield parameters.cast(name, rows)


def write_adapters(
    folder: Path, settings: AdapterSettings | None, adapters: ExportedAdapters, *, progress: Progress
) -> None:
    """Write adapter_config.json and adapter_model.safetensors."""
    if settings is None:
        raise InputError("--adapters peft: the job of this checkpoint has no [model.adapters]; leave the option out")
    write_shards(folder, adapters.tensors, inf, stem="adapter_model", progress=progress)
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": adapters.task,
        "base_model_name_or_path": adapters.base,
        "r": settings.rank,
        "lora_alpha": settings.alpha,
        "target_modules": _target_modules(adapters),
        "fan_in_fan_out": adapters.has_transposed_weights,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _target_modules(adapters: ExportedAdapters) -> list[str]:
    """The last words of the names of layers, where these name no others; else the names."""
    layers, endings = adapters.layers, {layer.rpartition(".")[2] for layer in adapters.layers}
    named = {layer for layer in adapters.adaptable if layer.rpartition(".")[2] in endings}
    return sorted(endings if named == layers else layers)
