"""A shard of a tensor as a checkpoint stores it: a run of its elements, as boxes of the whole tensor.
Checkpoints hold whole shapes and nothing about the layout that wrote them, so any other layout can read them."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from torch import Tensor

from motet.parallel.shard_spec import ShardSpec


@dataclass(frozen=True, eq=False)
class CheckpointShard:
    """Consecutive elements of a shard, in local order, saved from and loaded into the memory of `values`."""

    values: Tensor
    spec: ShardSpec
    start: int
    boxes: dict[tuple[int, ...], tuple[tuple[int, ...], slice]]  # Offset in the whole -> lengths, elements of the shard

    @staticmethod
    def from_values(
        values: Tensor, spec: ShardSpec, start: int = 0, *, parts: Iterable[tuple[int, int]] | None = None
    ) -> "CheckpointShard":
        """The elements of a shard from `start` on; only these `parts`, (first, stop), are saved or loaded."""
        ranges = [(start, start + values.numel())] if parts is None else parts
        boxes = (each for first, stop in ranges for each in spec.boxes(first, stop))
        by_offset = {offsets: (lengths, elements) for (offsets, lengths), elements in boxes}
        return CheckpointShard(values.detach(), spec, start, by_offset)

    @staticmethod
    def from_tensor(tensor: Tensor) -> "CheckpointShard":
        """A tensor that one rank holds and writes completely."""
        return CheckpointShard.from_values(tensor, ShardSpec.full(tuple(tensor.shape)))

    def zero_padding(self) -> None:
        """Set the elements that no checkpoint holds to zero: those of the run that are in no box."""
        inside = (edge for _, elements in self.boxes.values() for edge in (elements.start, elements.stop))
        edges = [self.start, *inside, self.start + self.values.numel()]
        for first, stop in zip(edges[::2], edges[1::2], strict=True) if self.spec.padding else ():
            self.values.view(-1)[first - self.start : stop - self.start].zero_()

    def box_values(self, offsets: tuple[int, ...]) -> Tensor:
        """The elements of a box, as a view."""
        lengths, elements = self.boxes[offsets]
        first, stop = elements.start - self.start, elements.stop - self.start
        if self.values.is_contiguous():
            return self.values.view(-1)[first:stop].view(lengths)
        row = prod(self.spec.local_shape[1:])  # only complete tensors have other strides, and are cut between rows
        return self.values[first // row : stop // row]
