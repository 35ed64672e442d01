"""The bytes that a stage of a model takes in one forward and one backward of a micro-batch, without its state.

A backward goes through the kernels of the blocks. While it computes, ranks hold gradients that are not reduced yet, and
at stage 3 the parameters that they gather. The peak of a step follows from the order of forwards and backwards.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from motet.models.spec.kernel_memory import BackwardMoment, backward_moments, forward_workspace, recomputed_bytes
from motet.models.spec.layer_specs import BlockPolicy, BlockSpec, MicroBatchShape, SameBlock
from motet.models.spec.model_spec import ModelSpec
from motet.parallel.pipeline.pipeline_schedule import PipelineAction
from motet.parallel.step_plan.gradient_sums import (
    SINGLE_BLOCKS,
    BlockBytes,
    FlatSums,
    GatheredRows,
    GradientStorage,
    OpenBuckets,
)
from motet.parallel.step_plan.sent_activations import sent_sizes


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

    @cached_property
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

    def _sums(self) -> list[FlatSums]:
        if self.storage.kind == "rows":
            return [GatheredRows(self._runs, self.storage, case) for case in GatheredRows.cases(self.storage)]
        if self.storage.kind == "buckets":
            return [OpenBuckets(self.storage.buckets(self.spec), self.storage)]
        return [FlatSums(self.storage.plan_buckets, self.storage)]

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
                count = together if index == SINGLE_BLOCKS[self.storage.kind] else 1
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

    def _forward(self, sums: FlatSums, received: int) -> Iterator[MomentBytes]:
        saved, before = self._arguments, 0  # `before`: bytes of the block before, which leave when this one ends
        for each in self._runs:
            for live in sums.before_forward(each):
                yield MomentBytes(saved + before, 0, live, received, sums.sums)
            saved += (each.kept - each.sent) * each.repeats
            before = max(before, each.sent * (each.repeats > 1))
            work = each.workspace + each.recomputed + received
            yield MomentBytes(saved + before + each.sent, 0, sums.in_forward(each), work, sums.sums)
            before = before if each.is_root else each.sent

    def _backward(self, sums: FlatSums, saved: int) -> Iterator[MomentBytes]:
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
