"""Writes a checkpoint in the format of torch's Distributed Checkpoint, with torch's storage writer.

The state dict has the keys `model` and `optimizer`, and the names of `torch.distributed.checkpoint.state_dict`. Boxes
are read while they are written, so a few hundred megabytes are in memory.
"""

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType

from motet.checkpoint.reader import CheckpointReader
from motet.checkpoint.tensor_index import Box
from motet.checkpoint.tools.boxes import cut_box
from motet.checkpoint.tools.dcp_names import torch_names

# The writer of torch holds the boxes of a file until the file is complete.
_FILE_BYTES = 2**28


@dataclass(frozen=True)
class DcpExport:
    """The state dict that is exported: the tensors of a checkpoint, and groups of parameters as torch's optimizers
    have them."""

    checkpoint: CheckpointReader
    param_groups: Sequence[Mapping[str, Any]] = ()
    tied_names: Sequence[Sequence[str]] = ()  # Names of the same parameter, of which the checkpoint has some

    @cached_property
    def names(self) -> dict[str, str]:
        """Torch's name -> that in the checkpoint."""
        names = torch_names(self.checkpoint.names)
        for tied in ([f"model.{name}" for name in each] for each in self.tied_names):
            stored = [names[key] for key in tied if key in names]
            names = dict.fromkeys(tied, stored[0]) | names if stored else names
        return names

    @cached_property
    def values(self) -> dict[str, tuple[tuple[str | int, ...], Any]]:
        """Values other than tensors by torch's name, with their keys in the nested state dict."""
        return {
            f"optimizer.param_groups.{i}.{key}": (("optimizer", "param_groups", i, key), value)
            for i, group in enumerate(self.param_groups)
            for key, value in group.items()
        }

    @property
    def size_bytes(self) -> int:
        return sum(self.checkpoint.tensor_bytes(name) for name in self.names.values())

    def boxes(self, name: str) -> list[Box]:
        """The boxes of a tensor, each small enough to be held; a tensor without elements has an empty one."""
        shape = self.checkpoint.shape(name)
        parts = [part for box in self.checkpoint.boxes(name) for part in cut_box(box)]
        return parts or [((0,) * len(shape), shape)]

    def metadata(self) -> Metadata:
        tensors = {key: self._tensor_metadata(name) for key, name in self.names.items()}
        nested: dict[str, tuple[str | int, ...]] = {key: _nested_key(key, name) for key, name in self.names.items()}
        nested |= {key: path for key, (path, _) in self.values.items()}
        return Metadata(tensors | {key: BytesStorageMetadata() for key in self.values}, planner_data=nested)

    def _tensor_metadata(self, name: str) -> TensorStorageMetadata:
        chunks = [ChunkStorageMetadata(*map(torch.Size, box)) for box in self.boxes(name)]
        properties = TensorProperties(dtype=self.checkpoint.dtype(name))
        return TensorStorageMetadata(properties, torch.Size(self.checkpoint.shape(name)), chunks)


def _nested_key(key: str, name: str) -> tuple[str, ...]:
    """The keys of a tensor in the nested state dict; a name of a parameter has dots itself."""
    if key.startswith("model."):
        return "model", key.removeprefix("model.")
    kind, _, _ = name.partition("/")
    parameter = key.removeprefix("optimizer.state.").removesuffix(f".{kind}")
    return "optimizer", "state", parameter, kind


def export_to_dcp(export: DcpExport, folder: Path, *, report: Callable[[int], None]) -> None:
    """Write a folder that `FileSystemReader` reads; `report` gets the bytes of each box."""
    writer = FileSystemWriter(folder, overwrite=False)
    writer.set_up_storage_writer(True)
    planner = _StreamingPlanner(export, report)
    plans = writer.prepare_global_plan([writer.prepare_local_plan(SavePlan(items)) for items in _items_by_file(export)])
    results = [writer.write_data(plan, planner).wait() for plan in plans]
    writer.finish(export.metadata(), results)


def _items_by_file(export: DcpExport) -> Iterator[list[WriteItem]]:
    items = [WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO) for key in export.values]
    size_bytes = 0
    for key, name in export.names.items():
        dtype, shape = export.checkpoint.dtype(name), export.checkpoint.shape(name)
        for i, box in enumerate(export.boxes(name)):
            chunk = ChunkStorageMetadata(*map(torch.Size, box))
            data = TensorWriteData(chunk, TensorProperties(dtype=dtype), torch.Size(shape))
            items.append(WriteItem(MetadataIndex(key, chunk.offsets, i), WriteItemType.SHARD, tensor_data=data))
            size_bytes += chunk.sizes.numel() * dtype.itemsize
            if size_bytes >= _FILE_BYTES:
                yield items
                items, size_bytes = [], 0
    if items:
        yield items


class _StreamingPlanner(SavePlanner):
    """Reads the data of an item when torch's writer asks for it."""

    def __init__(self, export: DcpExport, report: Callable[[int], None]) -> None:
        self._export, self._report = export, report

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        key = write_item.index.fqn
        if write_item.type == WriteItemType.BYTE_IO:
            content = io.BytesIO()
            torch.save(self._export.values[key][1], content)
            return content
        assert write_item.tensor_data is not None
        chunk = write_item.tensor_data.chunk
        values = self._export.checkpoint.read_box(self._export.names[key], (tuple(chunk.offsets), tuple(chunk.sizes)))
        self._report(values.nbytes)
        return values

    def set_up_planner(self, *_: Any, **__: Any) -> None:
        """Prepare nothing: the plans are made beforehand."""

    def create_local_plan(self) -> SavePlan:
        raise AssertionError("the plans are made beforehand")

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        raise AssertionError("the plans are made beforehand")

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        raise AssertionError("the plans are made beforehand")
