"""What a server has of its pieces, kept on disk in the background for whoever takes its place."""

import contextlib
import threading
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from motet.core.errors import CheckpointSaveError
from motet.parallel.parameter_server.process.parameter_store import deserialize_tensors, serialize_tensors


class ServerSnapshots:
    """The newest of each piece; what is not written yet when a newer one comes is left out."""

    def __init__(self, folder: Path, interval_updates: int) -> None:
        self.interval_updates = interval_updates
        self._folder = folder
        self._changed = threading.Condition()
        self._pending: dict[int, tuple[int, dict[str, Tensor]]] = {}
        self._write_error: OSError | None = None
        self._closed = False
        folder.mkdir(parents=True, exist_ok=True)
        self._thread = threading.Thread(target=self._write_all, daemon=True)
        self._thread.start()

    def save(self, slice_id: int, version: int, tensors: Mapping[str, Tensor]) -> None:
        """They are copied before this returns."""
        if self._write_error:
            raise CheckpointSaveError(
                f"cannot keep a snapshot in {self._folder}: {self._write_error.strerror}; free some space"
            )
        copies = {name: tensor.clone() for name, tensor in tensors.items()}
        with self._changed:
            self._pending[slice_id] = version, copies
            self._changed.notify()

    def load_all(self) -> dict[int, tuple[int, dict[str, Tensor]]]:
        """Piece -> (version, what it was)."""
        snapshots = {}
        for path in self._folder.glob("*.pt"):
            tensors = deserialize_tensors(path.read_bytes())
            snapshots[int(path.stem)] = int(tensors.pop("version")), tensors
        return snapshots

    def close(self) -> None:
        """What is pending is written."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def clear(self) -> None:
        for path in self._folder.glob("*.pt"):
            path.unlink()
        with contextlib.suppress(OSError):  # another server has something there
            for folder in (self._folder, *list(self._folder.parents)[:2]):
                folder.rmdir()

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending or self._closed)
                if not self._pending:
                    return
                slice_id = next(iter(self._pending))
                version, tensors = self._pending.pop(slice_id)
            try:
                self._write(slice_id, version, tensors)
            except OSError as error:
                self._write_error = error
                return

    def _write(self, slice_id: int, version: int, tensors: dict[str, Tensor]) -> None:
        partial = self._folder / f"{slice_id}.partial"
        with partial.open("wb") as file:
            file.write(serialize_tensors(tensors | {"version": torch.tensor(version)}))
        partial.replace(self._folder / f"{slice_id}.pt")
