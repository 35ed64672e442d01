"""A shard of a tensor as a checkpoint stores it: a range of its elements, as boxes of the full tensor.
Checkpoints hold full shapes and nothing about the layout that wrote them, so any other layout can read them."""

from math import prod

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from motet.parallel.shard_spec import ShardBox, ShardSpec


class CheckpointShard(Tensor):
    """The elements of a tensor of `full_shape` from `start` on, saved from and loaded into the memory of `values`."""

    full_shape: tuple[int, ...]
    start: int

    @staticmethod
    def from_values(values: Tensor, shape: tuple[int, ...], start: int) -> "CheckpointShard":
        shard = values.detach().as_subclass(CheckpointShard)
        shard.full_shape, shard.start = shape, start
        return shard

    def size(self) -> torch.Size:  # type: ignore[override]  # what DCP compares with what is stored
        return torch.Size(self.full_shape)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(offsets), torch.Size(lengths)) for offsets, lengths in self._boxes()]

    def __create_write_items__(self, name: str, shard: object) -> list[WriteItem]:
        properties, size = TensorProperties.create_from_tensor(self.as_subclass(Tensor)), torch.Size(self.full_shape)
        kind = WriteItemType.SHARD
        return [
            WriteItem(MetadataIndex(name, chunk.offsets), kind, tensor_data=TensorWriteData(chunk, properties, size))
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        before = 0
        for offsets, lengths in self._boxes():
            count = prod(lengths)
            if index.offset == torch.Size(offsets):
                return self.as_subclass(Tensor)[before : before + count].view(lengths)
            before += count
        raise ValueError(f"{index}: this rank does not have it")

    def _boxes(self) -> list[ShardBox]:
        spec = ShardSpec.full(self.full_shape)
        return [box for box, _ in spec.boxes(self.start, self.start + self.numel())]
