"""Snapshots of a server's slices on disk, written in the background for the process that replaces it."""

import contextlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from motet.core.errors import CheckpointSaveError, check_input
from motet.parallel.parameter_server.process.parameter_store import deserialize_tensors, serialize_tensors

_SUFFIX = ".safetensors"


class ServerSnapshots:
    """The newest snapshot of each slice; a newer one replaces one that is not yet written."""

    def __init__(self, folder: Path, interval_updates: int) -> None:
        self.interval_updates, self._folder = interval_updates, folder
        self._pending: dict[int, dict[str, Tensor]] = {}
        self._write_error: OSError | None = None
        self._writer = ThreadPoolExecutor(1)
        folder.mkdir(parents=True, exist_ok=True)

    def save(self, slice_id: int, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Copy the tensors, and write them later."""
        if self._write_error:
            reason = f"{self._write_error.strerror}; free some space"
            raise CheckpointSaveError(f"cannot write a snapshot to {self._folder}: {reason}")
        copies = {name: tensor.clone() for name, tensor in tensors.items()}
        self._pending[slice_id] = copies | {"version": torch.tensor(version)}
        self._writer.submit(self._write, slice_id)

    def load_all(self) -> dict[int, tuple[int, dict[str, Tensor]]]:
        snapshots = {}
        for path in self._folder.glob(f"*{_SUFFIX}"):
            tensors = deserialize_tensors(path.read_bytes())
            version = tensors.pop("version", torch.empty(0))
            is_whole = path.stem.isdecimal() and version.dtype == torch.int64 and version.numel() == 1
            check_input(is_whole, f"snapshot {path} is damaged; remove it and start the run again with --resume")
            snapshots[int(path.stem)] = int(version), tensors
        return snapshots

    def close_and_delete(self) -> None:
        self._writer.shutdown()
        for path in self._folder.glob(f"*{_SUFFIX}"):
            path.unlink()
        with contextlib.suppress(OSError):  # another server has files there
            for folder in (self._folder, *list(self._folder.parents)[:2]):
                folder.rmdir()

    def _write(self, slice_id: int) -> None:
        tensors = self._pending.pop(slice_id, None)
        if tensors is None or self._write_error:  # a newer one was written already
            return
        try:
            partial = self._folder / f"{slice_id}.partial"
            partial.write_bytes(serialize_tensors(tensors))
            partial.replace(self._folder / f"{slice_id}{_SUFFIX}")
        except OSError as error:
            self._write_error = error
