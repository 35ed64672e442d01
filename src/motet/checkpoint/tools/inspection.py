"""The content of a checkpoint in numbers, read from its files of JSON. Nothing here imports torch."""

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from motet.checkpoint.checkpoint_folders import find_checkpoint
from motet.checkpoint.manifest import CheckpointManifest, SavedBy
from motet.checkpoint.tensor_index import read_checkpoint
from motet.core.units import DTYPE_BYTES


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint, and in how many boxes it is stored."""

    name: str
    kind: str  # The first part of its name, such as `master`
    shape: tuple[int, ...]
    dtype: str
    size_bytes: int
    boxes: int


@dataclass(frozen=True)
class CheckpointContent:
    """The tensors and files of a checkpoint, and the run that saved it."""

    path: str
    step: int
    format: int
    data_fingerprint: str
    size_bytes: int  # All files but the manifest
    saved_by: SavedBy
    files: dict[str, int]  # Bytes of each but the manifest
    tensors: tuple[StoredTensor, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain values, with the tensors by name."""
        saved_by = {key: value for key, value in vars(self.saved_by).items() if key not in ("shapes", "dtypes")}
        scaling = self.saved_by.loss_scaling
        tensors = {
            tensor.name: {key: value for key, value in vars(tensor).items() if key != "name"} for tensor in self.tensors
        }
        return vars(self) | {
            "saved_by": saved_by | {"loss_scaling": None if scaling is None else vars(scaling)},
            "tensors": tensors,
        }


def checkpoint_content(path: Path) -> CheckpointContent:
    """The content of a checkpoint, or of the newest one of a run. Its data files are not read."""
    folder = find_checkpoint(path)
    manifest, index = read_checkpoint(folder)
    return CheckpointContent(
        path=str(folder),
        step=manifest.step,
        format=manifest.format,
        data_fingerprint=manifest.data_fingerprint,
        size_bytes=sum(manifest.sizes.values()),
        saved_by=manifest.saved_by,
        files=manifest.sizes,
        tensors=tuple(_stored_tensor(manifest, name, len(index.get(name, []))) for name in manifest.all_shapes),
    )


def _stored_tensor(manifest: CheckpointManifest, name: str, boxes: int) -> StoredTensor:
    shape, dtype = tuple(manifest.all_shapes[name]), manifest.all_dtypes[name]
    kind, _, _ = name.partition("/")
    return StoredTensor(name, kind, shape, dtype, prod(shape) * DTYPE_BYTES[dtype], boxes)
