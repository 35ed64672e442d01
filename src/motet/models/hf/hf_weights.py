"""Weights of a Hugging Face folder, of which a rank reads only its shards.

The tensors in the files must be those of the module, one to one. Where transformers would rename, convert or tie
weights while it loads them, the reason is returned, and transformers must load the complete model.
"""

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from motet.models.hf.safetensors_files import HEADER_ERRORS, WeightOnDisk, fingerprint_of, read_weight_headers
from motet.models.parameter_values import BoxReader, whole_box
from motet.models.weight_init import TensorBox


def read_box(weight: WeightOnDisk, box: TensorBox) -> Tensor:
    """A box of a tensor of a file, in its dtype on disk."""
    values = torch.from_numpy(weight.read(box))
    return values.view(torch.bfloat16) if weight.dtype == "BF16" else values


class WeightsOnDisk:
    """The values of a module's parameters by name, in the dtype in which transformers would load them."""

    def __init__(self, weights: dict[str, WeightOnDisk]) -> None:
        self._weights, self._dtype = weights, torch.get_default_dtype()
        self.fingerprint = fingerprint_of(weights.values())

    def open(self, name: str) -> BoxReader:
        weight = self._weights[name]
        return lambda box: read_box(weight, box).to(self._dtype)


def find_weights(module: nn.Module, folder: Path) -> tuple[WeightsOnDisk | None, str | None]:
    """The weights of all parameters, or why they cannot be read by slices. Persistent buffers get their values."""
    try:
        weights = read_weight_headers(folder)
    except HEADER_ERRORS as error:
        return None, f"its header cannot be read ({type(error).__name__}: {error})"
    tensors: dict[Tensor, list[str]] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        tensors.setdefault(tensor, []).append(name)
    problem = _special_loading(module, folder) or _renamed_key(module, weights)
    problem = problem or _mismatch(tensors, weights) or _needed_value(module)
    if problem:
        return None, problem
    on_disk = {tensor: next(weights[name] for name in names if name in weights) for tensor, names in tensors.items()}
    for tensor, weight in on_disk.items():
        if not isinstance(tensor, nn.Parameter):
            tensor.copy_(read_box(weight, whole_box(weight.shape)))
    return WeightsOnDisk({names[0]: on_disk[tensor] for tensor, names in tensors.items()}), None


def _mismatch(tensors: Mapping[Tensor, Sequence[str]], weights: Mapping[str, WeightOnDisk]) -> str | None:
    for tensor, names in tensors.items():
        keys = [name for name in names if name in weights]
        if len(keys) != 1 or weights[keys[0]].shape != tensor.shape:
            return f"{names[0]} is not one tensor of shape {list(tensor.shape)} there"
    unknown = sorted(weights.keys() - {name for names in tensors.values() for name in names})
    return f"the module has no {unknown[0]}" if unknown else None


def _needed_value(module: nn.Module) -> str | None:
    """A tensor besides parameters that has no memory either, because it was computed from one."""
    for name, inner in module.named_modules():
        for key, value in {**vars(inner), **dict(inner.named_buffers(recurse=False))}.items():
            if isinstance(value, Tensor) and value.is_meta:
                return f"{name}.{key} is computed from values of parameters"
    return None


def _special_loading(module: Any, folder: Path) -> str | None:
    """A way of loading in which transformers does more than read tensors by name."""
    config = module.config
    known = ("quantization_config", "transformers_weights", "fusion_config")
    special = [name for name in known if hasattr(config, name)]
    special += ["extra_files"] if getattr(type(config), "extra_files", None) else []
    special += ["adapter_config.json"] if (folder / "adapter_config.json").exists() else []
    return f"transformers loads a model with {special[0]} in another way" if special else None


def _renamed_key(module: nn.Module, weights: dict[str, WeightOnDisk]) -> str | None:
    """A key that transformers would rename or convert, by its own rules."""
    try:
        loading = import_module("transformers.core_model_loading")
        transforms = import_module("transformers.conversion_mapping").get_model_conversion_mapping(module)
        renamings = [each for each in transforms if isinstance(each, loading.WeightRenaming)]
        converters = [each for each in transforms if isinstance(each, loading.WeightConverter)]
        others = len(transforms) - len(renamings) - len(converters)
        rules = (renamings, converters, module.base_model_prefix, module.state_dict())
        key = next((key for key in weights if loading.rename_source_key(key, *rules) != (key, None)), None)
    except (ImportError, AttributeError, TypeError) as error:
        return f"this version of transformers does not say how it renames weights ({error})"
    if others:
        return "transformers has other rules than renamings and conversions for these weights"
    return f"transformers renames or converts {key}" if key else None
