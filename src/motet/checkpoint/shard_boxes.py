"""A shard of a tensor as a checkpoint stores it: a run of its elements, as boxes of the whole tensor.
Checkpoints hold whole shapes and nothing about the layout that wrote them, so any other layout can read them."""

from collections.abc import Iterable
from math import prod

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from motet.parallel.shard_spec import ShardSpec


class CheckpointShard(Tensor):
    """Consecutive elements of a shard, in local order, saved from and loaded into the memory of `values`."""

    spec: ShardSpec
    start: int
    boxes: dict[tuple[int, ...], tuple[tuple[int, ...], slice]]  # Offset in the whole -> lengths, elements of the shard

    @staticmethod
    def from_values(
        values: Tensor, spec: ShardSpec, start: int = 0, *, parts: Iterable[tuple[int, int]] | None = None
    ) -> "CheckpointShard":
        """The elements of a shard from `start` on; only these `parts`, (first, stop), are saved or loaded."""
        shard = values.detach().as_subclass(CheckpointShard)
        ranges = [(start, start + values.numel())] if parts is None else parts
        boxes = (each for first, stop in ranges for each in spec.boxes(first, stop))
        shard.spec, shard.start = spec, start
        shard.boxes = {offsets: (lengths, elements) for (offsets, lengths), elements in boxes}
        return shard

    @staticmethod
    def from_tensor(tensor: Tensor) -> "CheckpointShard":
        """A tensor that one rank holds and writes completely."""
        return CheckpointShard.from_values(tensor, ShardSpec.full(tuple(tensor.shape)))

    def size(self) -> torch.Size:  # type: ignore[override]  # what DCP compares with what is stored
        return torch.Size(self.spec.shape)

    def zero_padding(self) -> None:
        """Set the elements that no checkpoint holds to zero: those of the run that are in no box."""
        inside = (edge for _, elements in self.boxes.values() for edge in (elements.start, elements.stop))
        edges = [self.start, *inside, self.start + self.numel()]
        for first, stop in zip(edges[::2], edges[1::2], strict=True) if self.spec.padding else ():
            self.as_subclass(Tensor).view(-1)[first - self.start : stop - self.start].zero_()

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(at), torch.Size(lengths)) for at, (lengths, _) in self.boxes.items()]

    def __create_write_items__(self, name: str, shard: object) -> list[WriteItem]:
        properties, size = TensorProperties.create_from_tensor(self.as_subclass(Tensor)), self.size()
        kind = WriteItemType.SHARD
        return [
            WriteItem(MetadataIndex(name, chunk.offsets), kind, tensor_data=TensorWriteData(chunk, properties, size))
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None and index.offset in self.boxes, f"{index}: this rank does not have it"
        values, (lengths, elements) = self.as_subclass(Tensor), self.boxes[index.offset]
        first, stop = elements.start - self.start, elements.stop - self.start
        if values.is_contiguous():
            return _as_own_storage(values.view(-1)[first:stop]).view(lengths)
        row = prod(self.spec.local_shape[1:])  # only complete tensors have other strides, and are cut between rows
        return values[first // row : stop // row]


def _as_own_storage(values: Tensor) -> Tensor:
    """The same memory as a storage that holds nothing else: DCP copies a view of a larger one, and keeps all copies."""
    if values.device.type != "cpu":
        return values
    return torch.from_numpy(values.view(torch.uint8).numpy()).view(values.dtype)
