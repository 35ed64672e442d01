"""The bytes that a stage of a model takes in one forward and one backward of a micro-batch, without its state.

A backward goes through the kernels of the blocks. While it computes, ranks hold gradients that are not reduced yet, and
at stage 3 the parameters that they gather, as FSDP2 does it: it prefetches one block in backward; in forward it frees
the gathered buffer of a unit after the gather of the next unit, and in backward the sent buffer of a unit at the next
reduction. The peak of a step follows from the order of forwards and backwards.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal, NamedTuple

from motet.core.units import DTYPE_BYTES
from motet.models.spec.kernel_memory import BackwardMoment, backward_moments, forward_workspace, recomputed_bytes
from motet.models.spec.layer_specs import BlockPolicy, BlockSpec, MicroBatchShape, SameBlock
from motet.models.spec.model_spec import ModelSpec
from motet.parallel.data_parallel.buckets import ALIGN_ELEMENTS, Bucket, build_buckets
from motet.parallel.data_parallel.zero import MIB, padded_shard_numel, sharded_states
from motet.parallel.pipeline.pipeline_schedule import PipelineAction
from motet.parallel.step_plan.sent_activations import sent_sizes
from motet.precision.recipe import PrecisionRecipe

_SINGLE_BLOCKS = {"flat": 1, "buckets": 2, "rows": 2}  # Blocks that are single at both ends of many equal ones


class MomentBytes(NamedTuple):
    """The bytes of a stage in a moment, by category."""

    saved: int = 0
    recomputed: int = 0
    gathered: int = 0  # Gathered parameters, and gradients not reduced yet
    workspace: int = 0
    gradients: int = 0  # Sums of stage 3 over micro-batches, which a step begins without

    @property
    def total(self) -> int:
        return sum(self)

    def with_saved(self, more: int) -> "MomentBytes":
        """The same with more saved bytes."""
        return self._replace(saved=self.saved + more)


@dataclass(frozen=True)
class StagePeaks:
    """A micro-batch on one stage."""

    kept: int  # Bytes from its forward to its backward
    forward: MomentBytes  # The largest moment; kept bytes are a part
    backward: MomentBytes
    gathered: int = 0  # Parameters of stage 3 that stay gathered from a forward to its backward


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

    @classmethod
    def for_stage(
        cls, zero: int, recipe: PrecisionRecipe, *, shards: int, reduces_once: bool = False, **rest: Any
    ) -> "GradientStorage":
        """The storage of a stage of ZeRO."""
        sharded = sharded_states(zero, reduces_once=reduces_once)
        if shards == 1 or not sharded.gradients:
            return cls("flat", recipe)  # Nothing else matters
        return cls("rows" if sharded.parameters else "buckets", recipe, shards, reduces_once=reduces_once, **rest)

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
        return max(1, block.repeat - 2 * _SINGLE_BLOCKS[self.kind]) if self.kind != "buckets" or fills_bucket else 1

    def buckets(self, spec: ModelSpec) -> tuple[Bucket, ...]:
        """The buckets of the parameters, without those of blocks that are taken together."""
        if self.plan_buckets:
            return self.plan_buckets
        sizes = dict[str, tuple[int, int]]()
        for block in spec.blocks:
            together = self.blocks_together(block)
            skipped = range(_SINGLE_BLOCKS[self.kind], _SINGLE_BLOCKS[self.kind] + together * (together > 1))
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


class _FlatSums:
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


class _OpenBuckets(_FlatSums):
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
        sizes = [compute * p.numel for p in trained if p.gradient == "backward"]
        self.gradients = max(sizes, default=0) if storage.adds_to_sums else sum(sizes)
        self.last_gradient = sum(sizes[-1:])


class _RowsCase(NamedTuple):
    """A micro-batch of stage 3: the first of a step, one of the middle, or the last."""

    has_sums: bool = False  # Sums of the micro-batches before
    waits: bool = False  # Copies of the sums wait for the all-reduce over replicas
    growth: int = 0  # Copies that each unit adds to those


class _GatheredRows(_FlatSums):
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
        self.sums = self._master * shard * case.has_sums + self._reduce * shard * case.waits
        if storage.keeps_unsharded_sums:  # The sum of a block is freed when it is sent
            self.sums += self._reduce * sum(count * unit.trained_numel for unit, count in counts)
        self._gathered = self._buffer = self.kept = self._root.gathered
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
        """The buffer of the block before is freed after this gather."""
        if not each.is_root:
            yield self._gathered + self._buffer + 2 * self._unit(each).gathered

    def in_forward(self, each: BlockBytes) -> int:
        if each.is_root:
            return self._gathered + self._buffer
        size, reshards = self._unit(each).gathered, self._storage.reshards
        self._buffer, self._gathered = size, self._gathered + (0 if reshards else size * each.repeats)
        return self._gathered + size + (size if reshards else 0)

    def before_backward(self, each: BlockBytes) -> Iterator[int]:
        self._is_root = each.is_root
        if each.is_root:
            return
        size = self._sizes.pop()
        if self._storage.reshards:
            yield self._gathered + self._root_gradients + self._sent + (self._prefetched or size) + size
            self._gathered += size
            self._prefetched = self._sizes[-1] if self._sizes else 0

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
        self.sums += count * (growth * shard + (0 if self._case.has_sums else master))

    def _live(self) -> int:
        return self._gathered + self._prefetched + self._sent + self._gradients + self._root_gradients


@dataclass(frozen=True)
class StageBlocks:
    """The blocks of a stage, one after the other, with their policies."""

    spec: ModelSpec
    shape: MicroBatchShape
    policies: Sequence[BlockPolicy]
    storage: GradientStorage
    splits_vocabulary: bool = False
    is_first: bool = True  # The first stage; others receive activations
    is_last: bool = True
    offloads: bool = False  # The host keeps saved tensors, all but those of two blocks

    @property
    def dtype(self) -> str:
        return self.storage.recipe.compute

    @property
    def kept(self) -> int:
        """Bytes that one micro-batch leaves for its backward on the device, with the tensors sent to the next stage."""
        stays = sum((each.kept - each.sent) * each.repeats for each in self._runs)
        last = next((each.sent for each in reversed(self._runs) if not each.is_root), 0)
        return self._arguments + stays + last + self._stream * (not self.is_last)

    def peaks(self) -> StagePeaks:
        """The bytes of one micro-batch."""
        border, received = self._stream * (not self.is_last), self._stream * (not self.is_first)
        all_sums = self._sums()
        total = self.kept - border
        moments = [([*self._forward(each, received)], [*self._backward(each, total)]) for each in all_sums]
        forward, backward = (_largest(map(_largest, each)) for each in zip(*moments, strict=True))
        return StagePeaks(
            self.kept, forward.with_saved(border), backward.with_saved(border), max(each.kept for each in all_sums)
        )

    @property
    def _stream(self) -> int:
        return max((b.input.bytes(self.shape, self.dtype) for b in self.spec.blocks if b.input), default=0)

    @property
    def _arguments(self) -> int:
        """Bytes that recomputed blocks read again."""
        if all(policy == "none" for policy in self.policies):
            return 0
        return sum(tensor.bytes(self.shape, self.dtype) for block in self.spec.blocks for tensor in block.arguments)

    def _sums(self) -> list[_FlatSums]:
        if self.storage.kind == "rows":
            return [_GatheredRows(self._runs, self.storage, case) for case in _GatheredRows.cases(self.storage)]
        if self.storage.kind == "buckets":
            return [_OpenBuckets(self.storage.buckets(self.spec), self.storage)]
        return [_FlatSums(self.storage.plan_buckets, self.storage)]

    @cached_property
    def _runs(self) -> tuple[BlockBytes, ...]:
        """The blocks; those in the middle of many equal ones are taken together."""
        left, runs, is_received = [*self.policies], list[BlockBytes](), not self.is_first
        for block in self.spec.blocks:
            nothing: list[BlockPolicy] = ["none"] * block.repeat
            chosen = left[: block.repeat] if block.input is not None else nothing
            left = left[block.repeat :] if block.input is not None else left
            policy_bytes = {policy: self._bytes(block, policy) for policy in {*chosen}}
            together = self.storage.blocks_together(block) if len(policy_bytes) == 1 else 1
            index = 0
            while index < block.repeat:
                each = policy_bytes[chosen[index]]
                kept = each.kept if index else each.kept_as_first
                count = together if index == _SINGLE_BLOCKS[self.storage.kind] else 1
                received = block.input.bytes(self.shape, self.dtype) if block.input and is_received else 0
                tensors = block.saved(chosen[index], is_first=not index) if block.input and self.offloads else ()
                sent = sum(sent_sizes(tensors, self.shape, self.dtype, received=received))
                how: dict[str, Any] = {"block_id": block.first_index + index, "repeats": count}
                runs.append(each._replace(block=block, kept=kept, sent=sent, **how))
                is_received = is_received and block.input is None
                index += count
        return tuple(runs)

    def _bytes(self, block: BlockSpec, policy: BlockPolicy) -> BlockBytes:
        how: dict[str, Any] = {"policy": policy, "splits_vocabulary": self.splits_vocabulary}
        return _bytes_of_block(SameBlock(block), self.shape, self.dtype, **how)

    def _forward(self, sums: _FlatSums, received: int) -> Iterator[MomentBytes]:
        saved, before = self._arguments, 0  # `before`: bytes of the block before, which leave when this one ends
        for each in self._runs:
            for live in sums.before_forward(each):
                yield MomentBytes(saved + before, 0, live, received, sums.sums)
            saved += (each.kept - each.sent) * each.repeats
            before = max(before, each.sent * (each.repeats > 1))
            work = each.workspace + each.recomputed + received
            yield MomentBytes(saved + before + each.sent, 0, sums.in_forward(each), work, sums.sums)
            before = before if each.is_root else each.sent

    def _backward(self, sums: _FlatSums, saved: int) -> Iterator[MomentBytes]:
        tied = self._tied_gradient()
        sent = [0, *(each.sent for each in self._runs if not each.is_root)]
        fetched = sent.pop()  # Bytes of the block before, which are fetched
        saved -= fetched
        for each in reversed(self._runs):
            saved -= (each.kept - each.sent) * each.repeats
            for live in sums.before_backward(each):
                here = saved + fetched + (each.kept - each.sent) * each.repeats
                yield MomentBytes(here, 0, live, 0, sums.sums)
            fetched = fetched if each.is_root else max(sent.pop(), each.sent * (each.repeats > 1))
            moments = each.largest_moments if self.storage.kind == "flat" and not each.is_head else each.moments
            for moment in moments if each.repeats == 1 else ():
                done = each.saved - moment.left
                kept = each.kept if each.recomputed else moment.left
                waiting = 0 if each.is_head and moment.left >= tied else tied
                recomputed = max(0, each.recomputed - done)
                kept += saved + fetched + waiting
                yield MomentBytes(kept, recomputed, sums.in_kernel(moment), moment.workspace, sums.sums)
                for live in sums.after_kernel(each, moment):
                    yield MomentBytes(kept, recomputed, live, 0, sums.sums)
            for live in sums.after_backward(each):
                yield MomentBytes(saved + fetched, 0, live, 0, sums.sums)
        for live in sums.end():
            yield MomentBytes(0, 0, live, 0, sums.sums)

    def _tied_gradient(self) -> int:
        """The gradient of a tied output head, which waits for that of the embedding."""
        if not self.spec.has_tied_head:
            return 0
        saved = (tensor for block in self.spec.blocks for tensor in block.layer.saved)
        return sum(tensor.bytes(self.shape, self.dtype) for tensor in saved if tensor.kernel == "fused head")


@lru_cache(maxsize=1 << 13)
def _bytes_of_block(
    same: SameBlock, shape: MicroBatchShape, dtype: str, *, policy: BlockPolicy, splits_vocabulary: bool
) -> BlockBytes:
    block = same.block
    recomputed = recomputed_bytes(block, shape, dtype, policy=policy)
    saved = sum(tensor.bytes(shape, dtype) for tensor in block.layer.saved)
    moments = tuple(backward_moments(block, shape, dtype))

    def total(moment: BackwardMoment) -> int:
        left = max(0, recomputed - saved + moment.left) if recomputed else moment.left
        return left + moment.workspace + moment.gradient

    has_policy = block.input is not None
    kept, kept_as_first = (
        sum(t.bytes(shape, dtype) for t in (block.saved(policy, is_first=first) if has_policy else block.layer.saved))
        for first in (False, True)
    )
    return BlockBytes(
        block,
        kept,
        kept_as_first,
        0,
        saved,
        recomputed,
        forward_workspace(block, shape, dtype, splits_vocabulary=splits_vocabulary),
        moments,
        largest_moments=(max(moments, key=total),) if moments else (),
        is_head=block.has_fused_head,
    )


def stage_peaks(
    spec: ModelSpec,
    shape: MicroBatchShape,
    policies: Sequence[BlockPolicy],
    *,
    stages: Sequence[range],
    storage: GradientStorage,
    splits_vocabulary: bool = False,
    offloads: bool = False,
) -> list[StagePeaks]:
    """The bytes of each stage of the model of a rank; `policies` are those of all blocks."""
    parts = [spec] if len(stages) == 1 else [*map(spec.on_stage, stages)]
    last = len(parts) - 1
    return [
        StageBlocks(
            part,
            shape,
            policies[blocks.start : blocks.stop],
            storage,
            splits_vocabulary=splits_vocabulary,
            is_first=index == 0,
            is_last=index == last,
            offloads=offloads,
        ).peaks()
        for index, (part, blocks) in enumerate(zip(parts, stages, strict=True))
    ]


def _largest(moments: Iterable[MomentBytes]) -> MomentBytes:
    return max(moments, key=sum, default=MomentBytes())


@dataclass(frozen=True)
class BusyMoment:
    """A pass of a rank, and the number of other micro-batches that each of its stages keeps meanwhile."""

    is_forward: bool
    stage: int
    others: tuple[tuple[int, int], ...]  # (stage, micro-batches)

    @property
    def in_flight(self) -> dict[int, int]:
        """Stage -> micro-batches that the rank keeps, with the one that it computes."""
        counts = dict(self.others)
        return counts | {self.stage: counts.get(self.stage, 0) + 1}

    def live(self, stages: Mapping[int, StagePeaks]) -> MomentBytes:
        """The bytes of the rank, with the sums of gradients of its other stages."""
        live, sums = self._own(stages).with_saved(self._saved(stages)), sums_of_others(stages, self.stage)
        return live._replace(gathered=live.gathered + self._gathered(stages), gradients=live.gradients + sums)

    def total(self, stages: Mapping[int, StagePeaks]) -> int:
        """Their sum."""
        other = self._saved(stages) + self._gathered(stages) + sums_of_others(stages, self.stage)
        return self._own(stages).total + other

    def _own(self, stages: Mapping[int, StagePeaks]) -> MomentBytes:
        return stages[self.stage].forward if self.is_forward else stages[self.stage].backward

    def _saved(self, stages: Mapping[int, StagePeaks]) -> int:
        return sum(count * stages[stage].kept for stage, count in self.others)

    def _gathered(self, stages: Mapping[int, StagePeaks]) -> int:
        return sum(stages[stage].gathered for stage, _ in self.others if stage != self.stage)


def sums_of_others(stages: Mapping[int, StagePeaks], stage: int) -> int:
    """Bytes of the sums of gradients of the other stages of a rank, while they compute nothing."""
    return sum(peaks.forward.gradients for other, peaks in stages.items() if other != stage)


def busy_moments(actions: Iterable[PipelineAction]) -> tuple[BusyMoment, ...]:
    """The forward and the backward of each stage of a rank with the most other micro-batches in flight."""
    kept, most = dict[int, int](), dict[tuple[bool, int], tuple[int, dict[int, int]]]()
    count = 0
    for kind, stage, _ in actions:
        is_forward = kind == "F"
        key, others = (is_forward, stage), count if is_forward else count - 1
        if kind != "W" and (key not in most or others > most[key][0]):
            most[key] = others, kept.copy() if is_forward else {**kept, stage: kept[stage] - 1}
        change = is_forward - (kind in ("B", "W"))
        kept[stage] = kept.get(stage, 0) + change
        count += change
    return tuple(
        BusyMoment(*key, tuple((each, left) for each, left in others.items() if left > 0))
        for key, (_, others) in most.items()
    )


def largest_moment(stages: Mapping[int, StagePeaks], moments: Iterable[BusyMoment]) -> BusyMoment:
    """The moment in which a rank has the most bytes."""
    return max(moments, key=lambda moment: moment.total(stages))
