"""Lets `torch.distributed.checkpoint.load` fill a state dict, sharded or not, from a checkpoint of motet."""

import os
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from motet.checkpoint.reader import CheckpointReader, open_checkpoint
from motet.checkpoint.tools.dcp_names import aliases


class CheckpointStorageReader(StorageReader):
    """A storage reader for `dcp.load`. Each rank reads the rows that it needs, and no rank sends any.

    A tensor has the names `master/NAME` of the checkpoint, `model.NAME` and `optimizer.state.NAME.KIND` of torch, and
    the bare `NAME` of a module's state dict. Settings of the optimizer, such as the learning rate, are not there.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._open(path)

    def _open(self, path: str | os.PathLike[str]) -> None:
        self._checkpoint: CheckpointReader = open_checkpoint(Path(path))
        self._names = aliases(self._checkpoint.names)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id:
            self._open(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return Metadata({key: self._tensor_metadata(name) for key, name in self._names.items()})

    def _tensor_metadata(self, name: str) -> TensorStorageMetadata:
        chunks = [ChunkStorageMetadata(*map(torch.Size, box)) for box in self._checkpoint.boxes(name)]
        shape = torch.Size(self._checkpoint.shape(name))
        return TensorStorageMetadata(TensorProperties(dtype=self._checkpoint.dtype(name)), shape, chunks)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Prepare nothing: the checkpoint is open."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> "Future[None]":
        for item in plan.items:
            name, origin = self._names[item.storage_index.fqn], item.storage_index.offset
            assert origin is not None  # as `read_metadata` says of all chunks
            offsets = tuple(at + inside for at, inside in zip(origin, item.storage_offsets, strict=True))
            target = planner.resolve_tensor(item).detach()
            self._checkpoint.read_box(name, (offsets, tuple(item.lengths)), out=target)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return Path(checkpoint_id).is_dir()


def checkpoint_dcp_reader(path: str | os.PathLike[str]) -> CheckpointStorageReader:
    """A reader for `dcp.load(state_dict, storage_reader=...)`: a checkpoint's folder, or a run for its newest one."""
    return CheckpointStorageReader(path)
