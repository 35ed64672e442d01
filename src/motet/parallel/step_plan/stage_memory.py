"""The bytes that a stage of a model takes in one forward and one backward of a micro-batch, without its state.

A backward goes through the kernels of the blocks. While it computes, ranks hold gradients that are not reduced yet, and
at stage 3 the parameters that they gather. The peak of a step follows from the order of forwards and backwards.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from motet.models.spec.kernel_memory import (
    BackwardMoment,
    backward_moments,
    forward_workspace,
    recomputed_bytes,
)
from motet.models.spec.layer_specs import BlockPolicy, BlockSpec, MicroBatchShape
from motet.models.spec.model_spec import ModelSpec
from motet.parallel.pipeline.pipeline_schedule import PipelineAction
from motet.parallel.step_plan.unreduced_gradients import (
    BlockBytes,
    GatheredParameters,
    GradientStorage,
    make_open_sums,
)

_TIED_GRADIENT, _TABLE = "head.weight.gradient", "embedding.weight"


class MomentBytes(NamedTuple):
    """The bytes of a stage in a moment, by category."""

    saved: int = 0
    recomputed: int = 0
    gathered: int = 0  # Or not reduced yet
    workspace: int = 0
    gradients: int = 0  # Shards of sums of stage 3, which a step begins without

    @property
    def total(self) -> int:
        return sum(self)

    def with_saved(self, more: int) -> "MomentBytes":
        """The same with more that is saved."""
        return self._replace(saved=self.saved + more)


@dataclass(frozen=True)
class StagePeaks:
    """A micro-batch on one stage."""

    kept: int  # From its forward to its backward
    forward: MomentBytes  # When it takes the most; what is kept is a part
    backward: MomentBytes


@dataclass(frozen=True)
class StageBlocks:
    """The blocks of a stage, one after the other, with their policies."""

    spec: ModelSpec
    shape: MicroBatchShape
    policies: Sequence[BlockPolicy]
    storage: GradientStorage
    splits_vocabulary: bool = False
    is_first: bool = True  # Of the stages; others receive activations
    is_last: bool = True

    @property
    def dtype(self) -> str:
        return self.storage.recipe.compute

    def peaks(self) -> StagePeaks:
        """The bytes of one micro-batch."""
        blocks = [*self._runs()]
        stream = max((b.input.bytes(self.shape, self.dtype) for b in self.spec.blocks if b.input), default=0)
        border, received = stream * (not self.is_last), stream * (not self.is_first)
        arguments = 0
        if any(policy != "none" for policy in self.policies):
            arguments = sum(t.bytes(self.shape, self.dtype) for b in self.spec.blocks for t in b.arguments)
        total = sum(each.kept * each.count for each in blocks) + arguments
        forward = _largest(self._forward(blocks, arguments, received)).with_saved(border)
        backward = _largest(self._backward(blocks, total)).with_saved(border)
        return StagePeaks(total + border, forward, backward)

    def _runs(self) -> Iterator[BlockBytes]:
        """The blocks; those in the middle of many equal ones are taken together."""
        left = [*self.policies]
        for block in self.spec.blocks:
            nothing: list[BlockPolicy] = ["none"] * block.repeat
            chosen = left[: block.repeat] if block.input is not None else nothing
            left = left[block.repeat :] if block.input is not None else left
            of_policy = {policy: self._bytes(block, policy) for policy in {*chosen}}
            together = self.storage.blocks_together(block) if len(of_policy) == 1 else 1
            index = 0
            while index < block.repeat:
                each = of_policy[chosen[index]]
                kept = each.kept if index else each.kept_as_first
                count = together if index == self.storage.single_blocks else 1
                yield replace(each, block=block, kept=kept, index=block.first_index + index, count=count)
                index += count

    def _bytes(self, block: BlockSpec, policy: BlockPolicy) -> BlockBytes:
        return _bytes_of_block(_BlockKey(block, (self.shape, self.dtype, policy, self.splits_vocabulary)))

    def _forward(self, blocks: Sequence[BlockBytes], saved: int, received: int) -> Iterator[MomentBytes]:
        gathered = GatheredParameters(self.spec, self.storage)
        shards = make_open_sums(self.spec, self.storage).shards if self.storage.kind == "rows" else 0
        for each in blocks:
            saved += each.kept * each.count
            work = each.workspace + each.recomputed + received
            yield MomentBytes(saved, 0, gathered.in_forward(each.block), work, shards)

    def _backward(self, blocks: Sequence[BlockBytes], saved: int) -> Iterator[MomentBytes]:
        open_sums, tied = make_open_sums(self.spec, self.storage), self._tied_gradient()
        for each in reversed(blocks):
            saved -= each.kept * each.count
            open_sums.begin_block(each)
            moments = each.largest_moments if self.storage.kind == "flat" and not each.is_head else each.moments
            for moment in moments if each.count == 1 else ():
                done = each.saved - moment.left
                left = each.kept if each.recomputed else moment.left
                waiting = 0 if each.is_head and moment.left >= tied else tied
                gathered = open_sums.advance(each, moment)
                recomputed = max(0, each.recomputed - done)
                yield MomentBytes(saved + left + waiting, recomputed, gathered, moment.workspace, open_sums.shards)
            open_sums.end_block(each)

    def _tied_gradient(self) -> int:
        """The gradient of a tied output head, which waits for that of the embedding."""
        names = {parameter.name for block in self.spec.blocks for parameter in block.layer.parameters}
        if _TABLE not in names or "head.weight" in names:
            return 0
        saved = (tensor for block in self.spec.blocks for tensor in block.layer.saved)
        return sum(tensor.bytes(self.shape, self.dtype) for tensor in saved if tensor.name == _TIED_GRADIENT)


class _BlockKey:
    """A block in a cache: its layer is compared by identity, since all of its tensors are many."""

    __slots__ = ("block", "rest")

    def __init__(self, block: BlockSpec, rest: tuple[MicroBatchShape, str, BlockPolicy, bool]) -> None:
        self.block, self.rest = block, rest  # The key keeps the layer alive, so that no other has its identity

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BlockKey) and self._values() == other._values()

    def __hash__(self) -> int:
        return hash(self._values())

    def _values(self) -> tuple[object, ...]:
        return id(self.block.layer), self.block.input, self.rest


@lru_cache(maxsize=1 << 13)
def _bytes_of_block(key: _BlockKey) -> BlockBytes:
    block, (shape, dtype, policy, splits_vocabulary) = key.block, key.rest
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
        saved,
        recomputed,
        forward_workspace(block, shape, dtype, splits_vocabulary=splits_vocabulary),
        moments,
        largest_moments=(max(moments, key=total),) if moments else (),
        is_head=any(tensor.name == _TIED_GRADIENT for tensor in block.layer.saved),
    )


def stage_peaks(
    spec: ModelSpec,
    shape: MicroBatchShape,
    policies: Sequence[BlockPolicy],
    *,
    stages: Sequence[range],
    storage: GradientStorage,
    splits_vocabulary: bool = False,
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
        ).peaks()
        for index, (part, blocks) in enumerate(zip(parts, stages, strict=True))
    ]


def _largest(moments: Iterable[MomentBytes]) -> MomentBytes:
    return max(moments, key=sum, default=MomentBytes())


@dataclass(frozen=True)
class BusyMoment:
    """A pass of a rank, and how many other micro-batches each of its stages keeps meanwhile."""

    is_forward: bool
    stage: int
    others: tuple[tuple[int, int], ...]  # (stage, micro-batches)

    def live(self, stages: Mapping[int, StagePeaks]) -> MomentBytes:
        """The bytes of the rank, with the sums of gradients of its other stages."""
        live = self._own(stages).with_saved(self._saved(stages))
        return live._replace(gradients=live.gradients + sums_of_others(stages, self.stage))

    def total(self, stages: Mapping[int, StagePeaks]) -> int:
        """Their sum."""
        return self._own(stages).total + self._saved(stages) + sums_of_others(stages, self.stage)

    def _own(self, stages: Mapping[int, StagePeaks]) -> MomentBytes:
        return stages[self.stage].forward if self.is_forward else stages[self.stage].backward

    def _saved(self, stages: Mapping[int, StagePeaks]) -> int:
        return sum(count * stages[stage].kept for stage, count in self.others)


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


def largest_moment(stages: Mapping[int, StagePeaks], moments: Iterable[BusyMoment]) -> MomentBytes:
    """The bytes of a rank when it has the most."""
    return max(moments, key=lambda moment: moment.total(stages)).live(stages)
