"""Weights of a Hugging Face folder, of which a rank reads only its shards.

The tensors in the files must be those of the module, one to one. Where transformers would rename, convert or tie
weights while it loads them, the reason is returned, and transformers must load the complete model.
"""

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from motet.models.parameter_values import BoxReader, whole_box
from motet.models.weight_init import TensorBox

_DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.uint16}  # NumPy has no bfloat16
FINGERPRINT_BYTES = 4 << 20
_INDEX, _SINGLE_FILE = "model.safetensors.index.json", "model.safetensors"


@dataclass(frozen=True)
class WeightOnDisk:
    """A tensor of a safetensors file. The file is mapped for reading only, so no memory is reserved for it."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int  # The first byte in the file
    stop: int

    def read(self, box: TensorBox) -> Tensor:
        """A box of the tensor, in its dtype on disk."""
        mapped = np.memmap(self.file, mode="r")[self.start : self.stop].view(_DTYPES[self.dtype]).reshape(self.shape)
        values = np.array(mapped[tuple(slice(first, first + n) for first, n in zip(*box, strict=True))])
        return torch.from_numpy(values).view(torch.bfloat16) if self.dtype == "BF16" else torch.from_numpy(values)


class WeightsOnDisk:
    """The values of a module's parameters by name, in the dtype in which transformers would load them."""

    def __init__(self, weights: dict[str, WeightOnDisk]) -> None:
        self._weights, self._dtype = weights, torch.get_default_dtype()
        self.fingerprint = " ".join(map(_fingerprint, sorted({weight.file for weight in weights.values()})))

    def open(self, name: str) -> BoxReader:
        weight = self._weights[name]
        return lambda box: weight.read(box).to(self._dtype)


def find_weights(module: nn.Module, folder: Path) -> tuple[WeightsOnDisk | None, str | None]:
    """The weights of all parameters, or why they cannot be read by slices. Persistent buffers get their values."""
    try:
        weights = {key: weight for file in _weight_files(folder) for key, weight in _read_header(file).items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
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
            tensor.copy_(weight.read(whole_box(weight.shape)))
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


def _fingerprint(file: Path) -> str:
    """The name, the size, and a checksum of the header and the first values: quick to compute for a large file."""
    with file.open("rb") as stream:
        return f"{file.name}:{file.stat().st_size}:{zlib.crc32(stream.read(FINGERPRINT_BYTES)):08x}"


def _weight_files(folder: Path) -> list[Path]:
    if (folder / _INDEX).is_file() and not (folder / _SINGLE_FILE).is_file():
        files = json.loads((folder / _INDEX).read_text())["weight_map"].values()
        return [folder / file for file in dict.fromkeys(files)]
    return [folder / _SINGLE_FILE]


def _read_header(file: Path) -> dict[str, WeightOnDisk]:
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(min(length, file.stat().st_size)))
    header.pop("__metadata__", None)
    base, weights = 8 + length, {}
    for name, entry in header.items():
        start, stop = (base + offset for offset in entry["data_offsets"])
        weights[name] = WeightOnDisk(file, entry["dtype"], tuple(entry["shape"]), start, stop)
        if stop - start != np.dtype(_DTYPES[entry["dtype"]]).itemsize * prod(entry["shape"]):
            raise ValueError(f"{name} has {stop - start} bytes")
    if file.stat().st_size != max((weight.stop for weight in weights.values()), default=base):
        raise ValueError(f"{file.name} is not as long as its header says")
    return weights


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
