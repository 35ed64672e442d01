"""The gradients of a stage during a pass: flat sums, buckets that are reduced in each backward, or rows of stage 3.

At stage 3 ranks hold the parameters that they gather, too, as FSDP2 does it: it prefetches one block in backward; in
forward it frees the gathered buffer of a unit after the gather of the next unit, and in backward the sent buffer of a
unit at the next reduction.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from motet.core.units import DTYPE_BYTES
from motet.memory.policy_choice import Place
from motet.models.spec.kernel_memory import BackwardMoment
from motet.models.spec.layer_specs import BlockSpec
from motet.models.spec.model_spec import ModelSpec
from motet.parallel.data_parallel.buckets import ALIGN_ELEMENTS, Bucket, build_buckets
from motet.parallel.data_parallel.zero import MIB, padded_shard_numel, peak_of_fetch, sharded_states
from motet.precision.recipe import PrecisionRecipe

SINGLE_BLOCKS = {"flat": 1, "buckets": 2, "rows": 2}  # Blocks that are single at both ends of many equal ones


@dataclass(frozen=True)
class GradientStorage:
    """Sums of gradients: `flat` ones that are state, buckets that are reduced in each backward, or rows of stage 3."""

    kind: Literal["flat", "buckets", "rows"]
    recipe: PrecisionRecipe
    shards: int = 1
    reshards: bool = True
    microbatches: int = 1
    reduces_once: bool = False  # Rows: unsharded sums are kept from one micro-batch to the next
    in_pipeline: bool = False  # The first stage has the embedding, and the last one the output head
    has_replicas: bool = False  # Rows: sums over micro-batches wait for the all-reduce over replicas
    overlaps: bool = True  # Buckets travel while others are filled
    bucket_mib: tuple[float, float] = (1.0, 25.0)  # Size of the first bucket, and of the others
    plan_buckets: tuple[Bucket, ...] = ()  # Buckets of a plan; else they are built from the parameters
    rows: Place = "device"  # The place of rows of parameters and of their sums

    @classmethod
    def for_stage(
        cls, zero: int, recipe: PrecisionRecipe, *, shards: int, reduces_once: bool = False, **rest: Any
    ) -> "GradientStorage":
        """The storage of a stage of ZeRO."""
        sharded = sharded_states(zero, reduces_once=reduces_once)
        if (shards == 1 and rest.get("rows", "device") == "device") or not sharded.gradients:
            return cls("flat", recipe)  # Nothing else matters
        kind: Literal["buckets", "rows"] = "rows" if sharded.parameters else "buckets"
        return cls(kind, recipe, shards, reduces_once=reduces_once, **rest)

    def bytes_of(self, tensor: Literal["compute", "reduce", "master"]) -> int:
        """Bytes of one element."""
        return DTYPE_BYTES[getattr(self.recipe, tensor)]

    @property
    def keeps_unsharded_sums(self) -> bool:
        return self.kind == "rows" and self.reduces_once and self.microbatches > 1

    @property
    def adds_to_sums(self) -> bool:
        """Whether autograd adds each gradient to an unsharded sum that exists."""
        return self.keeps_unsharded_sums and self.recipe.reduce == self.recipe.compute

    def blocks_together(self, block: BlockSpec) -> int:
        """The blocks in the middle of a run of equal ones that are like those before them: buckets must be smaller."""
        fills_bucket = self.bytes_of("reduce") * block.trained_count > self.bucket_mib[1] * MIB
        return max(1, block.repeat - 2 * SINGLE_BLOCKS[self.kind]) if self.kind != "buckets" or fills_bucket else 1

    def buckets(self, spec: ModelSpec) -> tuple[Bucket, ...]:
        """The buckets of the parameters, without those of blocks that are taken together."""
        if self.plan_buckets:
            return self.plan_buckets
        sizes = dict[str, tuple[int, int]]()
        for block in spec.blocks:
            together = self.blocks_together(block)
            skipped = range(SINGLE_BLOCKS[self.kind], SINGLE_BLOCKS[self.kind] + together * (together > 1))
            for index in (index for index in range(block.repeat) if index not in skipped):
                start = block.prefix.format(i=block.first_index + index)
                trained = [p for p in block.layer.parameters if p.is_trained]
                sizes |= {start + p.name: (int(len(p.shape) == 1), p.numel) for p in trained}
        first, most = (int(mib * MIB / self.bytes_of("reduce")) for mib in self.bucket_mib)
        align = max(ALIGN_ELEMENTS, self.recipe.block_alignment)
        return build_buckets(sizes, self.shards, most, first_max_numel=first, align=align) if sizes else ()


class BlockBytes(NamedTuple):
    """The bytes of a block with its policy."""

    block: BlockSpec
    kept: int
    kept_as_first: int  # Where the block splits the stream of its input
    sent: int  # Kept bytes that travel to the host, if activations do
    saved: int  # Bytes without recomputation
    recomputed: int
    workspace: int  # Workspace of the forward
    moments: tuple[BackwardMoment, ...]
    largest_moments: tuple[BackwardMoment, ...]  # The largest one, where sums of gradients are flat
    is_head: bool
    block_id: int = 0
    repeats: int = (
        1  # More than one: blocks in the middle of equal ones, during which there is less than before or after
    )

    @property
    def is_root(self) -> bool:
        """Whether it lies outside of the blocks that stage 3 gathers one by one."""
        return self.block.input is None


class FlatSums:
    """Gradients are added to existing sums, one at a time. Each method yields bytes of moments."""

    sums = 0  # Bytes of sums that are not state
    kept = 0  # Gathered parameters, from forward to backward

    def __init__(self, buckets: Sequence[Bucket], storage: GradientStorage) -> None:
        self._shards = [each.length if each.owner is not None else each.length // each.shards for each in buckets]
        is_cast = storage.recipe.reduce != storage.recipe.master
        self._cast = storage.bytes_of("master") * max(self._shards, default=0) * is_cast  # Cast for the optimizer

    def before_forward(self, each: BlockBytes) -> Iterator[int]:
        """Bytes before a block computes."""
        yield from ()

    def in_forward(self, each: BlockBytes) -> int:
        """Bytes while a block computes."""
        return 0

    def before_backward(self, each: BlockBytes) -> Iterator[int]:
        """Bytes before the kernels of a block, or blocks that are taken together."""
        yield from ()

    def in_kernel(self, moment: BackwardMoment) -> int:
        """Bytes while a kernel of a backward computes."""
        return moment.gradient

    def after_kernel(self, each: BlockBytes, moment: BackwardMoment) -> Iterator[int]:
        """Bytes when the workspace of a kernel is freed."""
        yield from ()

    def after_backward(self, each: BlockBytes) -> Iterator[int]:
        """Bytes when all gradients of a block are there."""
        yield from ()

    def end(self) -> Iterator[int]:
        """Bytes after the last block."""
        yield self._cast


class OpenBuckets(FlatSums):
    """A bucket exists from its first gradient until the bucket after it is complete."""

    def __init__(self, buckets: Sequence[Bucket], storage: GradientStorage) -> None:
        super().__init__(buckets, storage)
        width, self._storage = storage.bytes_of("reduce"), storage
        self._bytes = [width * bucket.length for bucket in buckets]
        self._arriving = [width * shard * (storage.microbatches > 1) for shard in self._shards]
        self._bucket_of = {member.name: i for i, bucket in enumerate(buckets) for member in bucket.members}
        self._missing = [{member.name for member in bucket.members} for bucket in buckets]
        self._started, self._open = 0, set[int]()

    def in_kernel(self, moment: BackwardMoment) -> int:
        return moment.gradient + self._live()

    def after_kernel(self, each: BlockBytes, moment: BackwardMoment) -> Iterator[int]:
        done = self._names(each, moment.finishes) if moment.finishes else []
        self._open |= {self._bucket_of[name] for name in done}
        yield moment.gradient + self._live()
        yield from self._finish(done)

    def after_backward(self, each: BlockBytes) -> Iterator[int]:
        done = self._names(each, "") if each.repeats == 1 else []
        self._open |= {self._bucket_of[name] for name in done}
        yield from self._finish(done)

    def end(self) -> Iterator[int]:
        for bucket_id in range(len(self._bytes)) if not self._storage.overlaps else ():
            yield sum(self._bytes[bucket_id:]) + sum(self._arriving[bucket_id : bucket_id + 2])
        yield self._cast

    def _names(self, each: BlockBytes, layer: str) -> list[str]:
        """The parameters whose gradients have just become complete."""
        start, inner = each.block.prefix.format(i=each.block_id), f"{layer}." if layer else ""
        names = (start + p.name for p in each.block.layer.parameters if f"{p.name}.".startswith(inner))
        return [n for n in names if n in self._bucket_of and n in self._missing[self._bucket_of[n]]]

    def _finish(self, names: Iterable[str]) -> Iterator[int]:
        for name in names:
            self._missing[self._bucket_of[name]].discard(name)
        while self._storage.overlaps and self._started < len(self._missing) and not self._missing[self._started]:
            yield self._live() + self._arriving[self._started]
            self._open.discard(self._started - 1)
            self._started += 1

    def _live(self) -> int:
        travelling = self._started - 1
        return sum(self._bytes[i] + (self._arriving[i] if i == travelling else 0) for i in self._open)


class _UnitBytes:
    """A block, or all parameters outside of blocks, which stage 3 gathers together."""

    def __init__(self, blocks: Sequence[BlockSpec], storage: GradientStorage) -> None:
        parameters = [
            parameter
            for block in blocks
            for parameter in block.layer.parameters
            if not (storage.in_pipeline and parameter.is_tied)  # Two stages have it; its gradients travel in a bucket
        ]
        trained = [parameter for parameter in parameters if parameter.is_trained]
        compute, shards = storage.bytes_of("compute"), storage.shards
        self.gathered = compute * shards * padded_shard_numel((p.shape for p in parameters), shards)
        self.shard_numel = padded_shard_numel((p.shape for p in trained), shards)
        self.trained_numel = sum(p.numel for p in trained)
        copies = [(compute * p.numel, storage.bytes_of("master") if p.is_trained else compute) for p in parameters]
        self.fetched = peak_of_fetch(copies, compute)
        sizes = [compute * p.numel for p in trained if p.gradient == "backward"]
        self.gradients = max(sizes, default=0) if storage.adds_to_sums else sum(sizes)
        self.last_gradient = sum(sizes[-1:])


class _RowsCase(NamedTuple):
    """A micro-batch of stage 3: the first of a step, one of the middle, or the last."""

    has_sums: bool = False  # Sums of the micro-batches before
    waits: bool = False  # Copies of the sums wait for the all-reduce over replicas
    growth: int = 0  # Copies that each unit adds to those


class GatheredRows(FlatSums):
    """Stage 3: the block that computes and the one before it are gathered, the gradients of the one after it travel."""

    def __init__(self, runs: Sequence[BlockBytes], storage: GradientStorage, case: _RowsCase) -> None:
        super().__init__((), storage)
        self._storage, self._case = storage, case
        layers = {id(each.block.layer): each.block for each in runs}
        self._units = {key: _UnitBytes([block], storage) for key, block in layers.items()}
        self._root = _UnitBytes([each.block for each in runs if each.is_root], storage)
        self._sizes = [self._unit(each).gathered for each in runs if not each.is_root]  # Sizes left for backward
        self._reduce, self._master = storage.bytes_of("reduce"), storage.bytes_of("master")
        counts = [(self._root, 1), *((self._unit(each), each.repeats) for each in runs if not each.is_root)]
        shard = sum(count * unit.shard_numel for unit, count in counts)
        self._adds_on_device, self._is_alone, self._has_root = storage.rows == "device", storage.shards == 1, False
        self.sums = self._master * shard * (case.has_sums and self._adds_on_device) + self._reduce * shard * case.waits
        if storage.keeps_unsharded_sums:  # The sum of a block is freed when it is sent
            self.sums += self._reduce * sum(count * unit.trained_numel for unit, count in counts)
        self._gathered = self._buffer = self.kept = self._root.gathered
        self._buffer *= not self._is_alone
        self.kept += 0 if storage.reshards else sum(count * unit.gathered for unit, count in counts[1:])
        self._prefetched = self._sent = self._gradients = self._root_gradients = 0
        self._is_root = False

    @classmethod
    def cases(cls, storage: GradientStorage) -> list[_RowsCase]:
        """The micro-batches that can have the most bytes."""
        last, replicas = storage.microbatches - 1, storage.has_replicas
        if storage.keeps_unsharded_sums or not last:
            return [_RowsCase()]
        first = [_RowsCase(growth=1)] if replicas else []
        middle = [_RowsCase(True, True)] if replicas and last > 1 else []
        return [*first, *middle, _RowsCase(True, replicas, -int(replicas))]

    def _unit(self, each: BlockBytes) -> _UnitBytes:
        return self._units[id(each.block.layer)]

    def before_forward(self, each: BlockBytes) -> Iterator[int]:
        """The buffer of the block before is freed after this gather. A single rank has no buffers."""
        if self._is_alone and not self._has_root:
            yield self._root.fetched
        self._has_root = True
        if not each.is_root:
            unit = self._unit(each)
            yield self._gathered + (unit.fetched if self._is_alone else self._buffer + 2 * unit.gathered)

    def in_forward(self, each: BlockBytes) -> int:
        if each.is_root:
            return self._gathered + self._buffer
        size, reshards = self._unit(each).gathered, self._storage.reshards
        self._buffer = 0 if self._is_alone else size
        self._gathered += 0 if reshards else size * each.repeats
        return self._gathered + self._buffer + (size if reshards else 0)

    def before_backward(self, each: BlockBytes) -> Iterator[int]:
        self._is_root = each.is_root
        if each.is_root:
            return
        size = self._sizes.pop()
        if self._storage.reshards:
            arriving = self._unit(each).fetched if self._is_alone else (self._prefetched or size) + size
            yield self._gathered + self._root_gradients + self._sent + arriving
            self._gathered += size
            self._prefetched = self._sizes[-1] if self._sizes and not self._is_alone else 0

    def in_kernel(self, moment: BackwardMoment) -> int:
        live = self._live() + moment.gradient
        if not self._storage.adds_to_sums and self._is_root:
            self._root_gradients += moment.gradient
        elif not self._storage.adds_to_sums:
            self._gradients += moment.gradient
        return live

    def after_backward(self, each: BlockBytes) -> Iterator[int]:
        """Gradients of a block are sent together; those outside of blocks wait for the end."""
        if each.is_root:
            return
        unit = self._unit(each)
        self._gradients = 0
        self._gathered -= unit.gathered * (1 if self._storage.reshards else each.repeats)
        yield from self._reduce_unit(unit, each.repeats)

    def end(self) -> Iterator[int]:
        self._gathered, self._root_gradients = self._gathered - self._root.gathered, 0
        yield from self._reduce_unit(self._root, 1)

    def _reduce_unit(self, unit: _UnitBytes, count: int) -> Iterator[int]:
        """The unit is resharded before its gradients are sent, and sums are cast for the optimizer."""
        storage, growth = self._storage, self._case.growth
        shard, master = self._reduce * unit.shard_numel, self._master * unit.shard_numel
        self._sent = storage.shards * shard
        yield self._live() + (0 if storage.keeps_unsharded_sums else unit.gradients)  # They are in the sums
        self.sums -= self._reduce * unit.trained_numel * count * storage.keeps_unsharded_sums
        yield self._live() + (1 + max(growth, 0)) * shard + unit.last_gradient
        cast = master * (storage.recipe.reduce != storage.recipe.master)
        yield self._live() + (1 + growth) * shard + cast + unit.last_gradient
        self.sums += count * (growth * shard + master * (self._adds_on_device and not self._case.has_sums))

    def _live(self) -> int:
        return self._gathered + self._prefetched + self._sent + self._gradients + self._root_gradients
