"""Bytes that come and go in a backward beyond activations: gradients before their reduction, and at stage 3 the
parameters that ranks gather and the shards of sums.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from motet.core.dtypes import DTYPE_BYTES
from motet.models.spec.kernel_memory import BackwardMoment
from motet.models.spec.layer_specs import BlockSpec
from motet.models.spec.model_spec import ModelSpec
from motet.parallel.data_parallel.buckets import ALIGN_ELEMENTS, Bucket, build_buckets
from motet.parallel.data_parallel.zero import MIB, padded_shard_numel
from motet.precision.recipe import PrecisionRecipe

_SINGLE_BLOCKS = {"flat": 1, "buckets": 2, "rows": 2}  # At both ends of many equal blocks


@dataclass(frozen=True)
class GradientStorage:
    """Sums of gradients: `flat` ones that are state, buckets that are reduced in each backward, or rows of stage 3."""

    kind: Literal["flat", "buckets", "rows"]
    recipe: PrecisionRecipe
    shards: int = 1
    reshards: bool = True
    microbatches: int = 1
    reduces_once: bool = False  # Rows: unsharded sums are kept from one micro-batch to the next
    bucket_mib: tuple[float, float] = (1.0, 25.0)  # The first, and the others

    @classmethod
    def of_stage(cls, zero: int, recipe: PrecisionRecipe, *, shards: int, **rest: Any) -> "GradientStorage":
        """The storage of a stage of ZeRO."""
        kind: Literal["flat", "buckets", "rows"] = "flat"
        if zero == 2:
            kind = "buckets"
        elif zero == 3 and shards > 1:
            kind = "rows"
        return cls(kind, recipe, shards, **rest)

    def blocks_together(self, block: BlockSpec) -> int:
        """How many blocks in the middle of a run of equal ones are like those before them: buckets must be smaller."""
        fills_bucket = DTYPE_BYTES[self.recipe.reduce] * block.parameter_count > self.bucket_mib[1] * MIB
        return max(1, block.repeat - 2 * self.single_blocks) if self.kind != "buckets" or fills_bucket else 1

    @property
    def single_blocks(self) -> int:
        """The blocks at each end of a run of equal ones that are not like those in the middle."""
        return _SINGLE_BLOCKS[self.kind]

    def skipped_blocks(self, block: BlockSpec) -> range:
        """The blocks that are taken together, if several are."""
        together = self.blocks_together(block)
        return range(self.single_blocks, self.single_blocks + together * (together > 1))

    def buckets(self, names: Mapping[str, tuple[int, int]]) -> tuple[Bucket, ...]:
        """Buckets of parameters, name -> (optimizer group, elements), in the order of use."""
        width = DTYPE_BYTES[self.recipe.reduce]
        first, most = (int(mib * MIB / width) for mib in self.bucket_mib)
        align = max(ALIGN_ELEMENTS, self.recipe.block_alignment)
        return build_buckets(names, self.shards, most, first_max_numel=first, align=align)


@dataclass(frozen=True)
class BlockBytes:
    """The bytes of a block with its policy."""

    block: BlockSpec
    kept: int
    kept_as_first: int  # Where the block splits the stream of its input
    saved: int  # Without recomputation
    recomputed: int
    workspace: int  # In forward
    moments: tuple[BackwardMoment, ...]
    largest_moments: tuple[BackwardMoment, ...]  # The one with the most, where sums of gradients are flat
    is_head: bool
    index: int = 0
    count: int = 1  # More than one: blocks in the middle of equal ones, during which there is less than before or after


class GatheredParameters:
    """Parameters that stage 3 gathers: those outside of blocks stay, those of a block come and go."""

    def __init__(self, spec: ModelSpec, storage: GradientStorage) -> None:
        self._storage, self._width = storage, DTYPE_BYTES[storage.recipe.compute]
        self._is_sharded = storage.kind == "rows"
        self._sizes = {id(block.layer): self._gathered(block) for block in spec.blocks if self._is_sharded}
        self.root = sum(self.size(block) for block in spec.blocks if block.input is None)
        in_blocks = [block for block in spec.blocks if block.input is not None]
        self.last = self.size(in_blocks[-1]) if in_blocks else 0
        self.all_blocks = sum(self.size(block) * block.repeat for block in in_blocks)

    def size(self, block: BlockSpec) -> int:
        return self._sizes[id(block.layer)] if self._is_sharded else 0

    def _gathered(self, block: BlockSpec) -> int:
        shapes = [parameter.shape for parameter in block.layer.parameters]
        return self._width * self._storage.shards * padded_shard_numel(shapes, self._storage.shards)

    def in_forward(self, block: BlockSpec) -> int:
        """While a block computes: its parameters, and the buffer that they were gathered into, which is freed later."""
        if not self._is_sharded:
            return 0
        if not self._storage.reshards:
            return self.root + self.all_blocks + self.last
        return self.root + (2 * self.size(block) if block.input is not None else self.last)


class FlatSums:
    """Gradients are added to sums that exist: one comes and goes."""

    shards = 0  # Bytes of sums that are no state

    def begin_block(self, each: BlockBytes) -> None:
        """Nothing begins."""

    def advance(self, each: BlockBytes, moment: BackwardMoment) -> int:
        """Bytes that are alive in a moment."""
        return moment.gradient

    def end_block(self, each: BlockBytes) -> None:
        """Nothing ends."""


class _OpenBuckets(FlatSums):
    """A bucket exists from its first gradient until the bucket after it is complete."""

    def __init__(self, spec: ModelSpec, storage: GradientStorage) -> None:
        sizes = {
            block.prefix.format(i=block.first_index + index) + p.name: (int(len(p.shape) == 1), p.numel)
            for block in spec.blocks
            for index in range(block.repeat)
            if index not in storage.skipped_blocks(block)
            for p in block.layer.parameters
        }
        width = DTYPE_BYTES[storage.recipe.reduce]
        buckets = storage.buckets(sizes) if sizes else ()
        self._bytes = [width * bucket.length for bucket in buckets]
        arriving = storage.microbatches > 1
        self._arriving = [width * bucket.length // storage.shards * arriving for bucket in buckets]
        self._bucket_of = {member.name: i for i, bucket in enumerate(buckets) for member in bucket.members}
        self._missing = [{member.name for member in bucket.members} for bucket in buckets]
        self._started, self._open = 0, set[int]()

    def advance(self, each: BlockBytes, moment: BackwardMoment) -> int:
        """Bytes in a moment. A bucket begins when the kernel has ended, and its other gradients are freed."""
        done = self._names(each, moment.finishes) if moment.finishes else []
        live = moment.gradient + self._live()
        self._open |= {self._bucket_of[name] for name in done}
        if not moment.left:  # The gradient of the embedding is as large as all else
            live = moment.gradient + self._live()
        self._finish(done)
        return live

    def end_block(self, each: BlockBytes) -> None:
        """All gradients of the block are there."""
        done = self._names(each, "") if each.count == 1 else []
        self._open |= {self._bucket_of[name] for name in done}
        self._finish(done)

    def _names(self, each: BlockBytes, prefix: str) -> list[str]:
        """The parameters whose gradients are complete now, and were not before."""
        start = each.block.prefix.format(i=each.index)
        names = (start + p.name for p in each.block.layer.parameters if p.name.startswith(prefix))
        return [name for name in names if name in self._missing[self._bucket_of[name]]]

    def _finish(self, names: Iterable[str]) -> None:
        for name in names:
            self._missing[self._bucket_of[name]].discard(name)
        while self._started < len(self._missing) and not self._missing[self._started]:
            self._open.discard(self._started - 1)
            self._started += 1

    def _live(self) -> int:
        travelling = self._started - 1
        return sum(self._bytes[i] + (self._arriving[i] if i == travelling else 0) for i in self._open)


class _GatheredRows(FlatSums):
    """Stage 3: the block that computes and the one before it are gathered, the gradients of the one after it travel."""

    def __init__(self, spec: ModelSpec, storage: GradientStorage) -> None:
        recipe = storage.recipe
        self._gathered, self._storage = GatheredParameters(spec, storage), storage
        self._of_reduce = DTYPE_BYTES[recipe.reduce] / DTYPE_BYTES[recipe.compute]
        self._of_master = DTYPE_BYTES[recipe.master] / DTYPE_BYTES[recipe.compute] / storage.shards
        all_shards = sum(self._shard(block) * block.repeat for block in spec.blocks)
        self.shards, self._grows = (0, True) if storage.microbatches == 1 else (all_shards, False)
        self._keeps_sums = storage.reduces_once and storage.microbatches > 1
        if self._keeps_sums:  # The sum of a block is freed when it is sent
            sums = sum(self._gathered.size(block) * block.repeat for block in spec.blocks)
            self.shards = int(sums * self._of_reduce)
        self._gradients = self._sent = 0
        self._left = sum(block.repeat for block in spec.blocks if block.input is not None)

    def begin_block(self, each: BlockBytes) -> None:
        self._left -= each.count * (each.block.input is not None)

    def _shard(self, block: BlockSpec) -> int:
        return int(self._gathered.size(block) * self._of_master)

    def advance(self, each: BlockBytes, moment: BackwardMoment) -> int:
        """Parameters, gradients of the block so far, and what is sent."""
        gathered, size = self._gathered, self._gathered.size(each.block)
        is_added = self._keeps_sums and self._of_reduce == 1  # Autograd adds each gradient to its sum
        self._gradients = moment.gradient + (0 if is_added else self._gradients)
        live = gathered.root + self._gradients + self._sent
        if not self._storage.reshards:
            return live + gathered.all_blocks
        if each.block.input is None:
            return live + (gathered.last if self._left else 0)
        return live + size + (size if self._left else 0)

    def end_block(self, each: BlockBytes) -> None:
        """Gradients of a block are sent together; those outside of blocks wait for the end."""
        if each.block.input is not None:
            self._sent = 0 if self._keeps_sums else int(self._gathered.size(each.block) * self._of_reduce)
            self._gradients = 0
            self.shards += self._shard(each.block) * each.count * self._grows


def make_open_sums(spec: ModelSpec, storage: GradientStorage) -> FlatSums:
    kinds = {"flat": lambda *_: FlatSums(), "buckets": _OpenBuckets, "rows": _GatheredRows}
    return kinds[storage.kind](spec, storage)
