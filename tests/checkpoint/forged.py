"""Checkpoints for tests, and forged ones: whatever is changed, all checksums fit again, as a forger would make them."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zlib import crc32

import torch

from motet.checkpoint.background_writer import save_checkpoint
from motet.checkpoint.data_files import CheckpointShard
from motet.checkpoint.loading import load_checkpoint
from motet.checkpoint.manifest import CheckpointManifest, SavedBy
from motet.core.units import dtype_name
from motet.parallel.process.process_group import RankGroup

State = dict[str, torch.Tensor]


class Evil:
    """An object whose pickle makes a folder when it is loaded."""

    folder = Path("/nonexistent")

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(Evil.folder),)


def some_state(value: float = 1.0, size: int = 6) -> State:
    half = torch.ones(3).bfloat16() * value
    return {"a/weight": torch.full((size, 2), value), "b": torch.tensor(value), "c/half": half}


def save_state(folder: Path, step: int, state: State, group: RankGroup | None = None, *, keep: int = 2) -> Path:
    """The first rank writes everything."""
    shapes, dtypes = {n: list(t.shape) for n, t in state.items()}, {n: dtype_name(t.dtype) for n, t in state.items()}
    manifest = CheckpointManifest(step, "data", shapes, dtypes, SavedBy(1, 1, torch.__version__))
    shards = whole_shards(state) if group is None or group.rank == 0 else {}
    return save_checkpoint(folder, shards, manifest, keep=keep, group=group.process_group if group else None)


def whole_shards(state: State) -> dict[str, CheckpointShard]:
    return {name: CheckpointShard.from_tensor(tensor) for name, tensor in state.items()}


def load_state(where: Path, state: State, group: RankGroup | None = None) -> CheckpointManifest:
    return load_checkpoint(where, whole_shards(state), group.process_group if group else None)


def _fit_index(index_path: Path, data: Path) -> None:
    """Enter the checksums of the boxes in a data file as they are now."""
    index, content = json.loads(index_path.read_text()), data.read_bytes()
    for chunk in (chunk for chunks in index.values() for chunk in chunks if chunk[2] == data.name):
        chunk[5] = crc32(content[chunk[3] : chunk[3] + chunk[4]])
    index_path.write_text(json.dumps(index, separators=(",", ":")))


def forge(where: Path, changed: str, change: Callable[[Any], Any]) -> None:
    """Change the content of a file of JSON, or the bytes of another file, and fit all checksums and sizes to it."""
    path, manifest_path = where / changed, where / "manifest.json"
    if changed.endswith(".json"):
        content = json.loads(path.read_text())
        change(content)
        path.write_text(json.dumps(content))
    else:
        path.write_bytes(change(path.read_bytes()))
        _fit_index(where / "tensors.json", path)
    manifest = json.loads(manifest_path.read_text())
    for name in {changed, "tensors.json"} if changed != "manifest.json" else ():
        if name.endswith(".json"):
            manifest["checksums"][name] = crc32((where / name).read_bytes())
        manifest["sizes"][name] = len((where / name).read_bytes())
    if manifest.pop("checksum", None) is not None:
        manifest["checksum"] = crc32(json.dumps(manifest, indent=1).encode())
    manifest_path.write_text(json.dumps(manifest, indent=1))
