"""Plays a pipeline schedule on one rank: computes its stages, and exchanges activations and gradients with neighbours.

Shapes of received tensors are known from the batch, so no rank asks another for them. Sent tensors are checked against
them first, since a transport such as Gloo ends the process where sizes differ.

The time in which a rank computes, without the time in which it waits for other ranks.
"""

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from motet.cluster.device_clock import DeviceClock
from motet.collectives.execute.api import all_gather
from motet.core.errors import InputError
from motet.core.trace import span
from motet.parallel.pipeline.pipeline_schedule import PipelineAction, PipelineMessage, PipelineSchedule
from motet.parallel.process.process_group import RankGroup


class ComputeClock:
    """Adds up the time of blocks of code, on a CUDA device that of the kernels that they start."""

    def __init__(self, device: torch.device) -> None:
        self._clock, self._blocks = DeviceClock(device), list[tuple[Any, Any]]()

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Add the time of the computations inside."""
        start = self._clock.now()
        yield
        self._blocks.append((start, self._clock.now()))

    @property
    def total_s(self) -> float:
        """The sum so far; on a CUDA device it waits for the last block."""
        return sum((self._clock.seconds(*block) for block in self._blocks), 0.0)


MAX_WIRES = 64  # Tensors that cross one border


class WireShape(NamedTuple):
    """A tensor that crosses a border between stages."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_gradient: bool
    slices: RankGroup | None = (
        None  # Ranks that have the same tensor: each sends a slice of it, and gathers the slices that arrive
    )

    @property
    def sent_shape(self) -> tuple[int, ...]:
        """The shape of the tensor that this rank sends or receives."""
        return self.shape if self.slices is None else (prod(self.shape) // self.slices.world,)

    def slice(self, tensor: Tensor) -> Tensor:
        """The part that this rank sends."""
        if self.slices is None:
            return tensor.contiguous()
        return tensor.reshape(self.slices.world, -1)[self.slices.rank]

    def gather(self, received: Tensor) -> Tensor:
        """The tensor from the slices of all ranks."""
        if self.slices is None:
            return received
        gathered = received.new_empty(self.shape)
        all_gather(gathered.view(-1), received, self.slices)
        return gathered


class StageComputation(Protocol):
    """The computations of a rank, behind which are the parts of a model and its gradients."""

    def wires(self, border: int, microbatch: int) -> Sequence[WireShape]:
        """The tensors that cross the border between stages `border` and `border + 1`."""

    def forward(self, stage: int, microbatch: int, received: Sequence[Tensor]) -> Sequence[Tensor]:
        """The tensors that cross the next border, or the loss alone."""

    def backward(self, action: PipelineAction, outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Compute the gradients of a B, I or W action of the schedule, from the gradients of the outputs."""


@dataclass
class StageActivations:
    """Tensors that a stage keeps of a micro-batch from its forward to its last backward."""

    received: Sequence[Tensor]
    outputs: Sequence[Tensor]


@dataclass
class PendingMessages:
    """Started sends, or started receives of the tensors that one action needs."""

    works: Sequence[dist.Work]
    tensors: Sequence[Tensor]  # They must live until they were sent

    @property
    def is_completed(self) -> bool:
        has_memory = any(not tensor.is_meta for tensor in self.tensors)
        return not has_memory or all(work.is_completed() for work in self.works)

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        self.works, self.tensors = (), ()


@dataclass
class PipelinePlayer:
    """One step of a schedule on one pipeline rank."""

    schedule: PipelineSchedule
    computation: StageComputation
    group: RankGroup  # The ranks of the pipeline, in order
    # Stages whose last backward sends the gradient of its input before it computes weight gradients: no rank waits for
    # these, but earlier stages wait for that. Later no other micro-batch holds memory.
    early_stages: Collection[int] = ()
    max_in_flight: int = 0  # The most activations that were kept at a time
    clock: ComputeClock = field(init=False)
    _kept: dict[tuple[int, int], StageActivations] = field(default_factory=dict)
    # (stage that reads it, micro-batch, whether it is a gradient) -> tensors, and the messages that fill them.
    _arrived: dict[tuple[int, int, bool], tuple[Sequence[Tensor], PendingMessages | None]] = field(default_factory=dict)
    _to_send: dict[tuple[int, int, bool], Sequence[Tensor]] = field(default_factory=dict)
    _sends: deque[PendingMessages] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.clock = ComputeClock(self.group.device)

    def play(self) -> None:
        """Carry out all actions of this rank."""
        weights_left: PipelineAction | None = None
        for step in self.schedule.steps[self.group.rank]:
            if not isinstance(step, PipelineAction):
                self._exchange(step)
                if weights_left is not None:
                    self._compute(weights_left)
                    weights_left = None
            elif step.stage in self.early_stages and step in self.schedule.sent_last_backwards:
                self._compute(step._replace(kind="I"))
                weights_left = step._replace(kind="W")
            else:
                self._compute(step)
        with span("send"):
            for messages in self._sends:
                messages.wait()
        self._sends.clear()
        assert not (self._kept or self._to_send or self._arrived), "a schedule leaves something undone"

    def _compute(self, action: PipelineAction) -> None:
        stage, microbatch = action.stage, action.microbatch
        key, is_last = (stage, microbatch), stage == self.schedule.stages - 1
        if action.kind == "F":
            received = self._take(stage, microbatch, is_gradient=False) if stage else ()
            with span(f"{action.kind}{stage}"), self.clock.timed():
                outputs = self.computation.forward(stage, microbatch, received)
            if not is_last:
                self._check_wires(stage, microbatch, outputs)
                sent = [output.detach() for output in outputs]
                self._hand_over(stage, stage + 1, microbatch, tensors=sent, is_gradient=False)
            if torch.is_grad_enabled():
                self._kept[key] = StageActivations(received, outputs)
            self.max_in_flight = max(self.max_in_flight, len(self._kept))
            return
        kept, gradients = self._kept[key], tuple[Tensor, ...]()
        if action.kind in ("B", "I") and not is_last:
            gradients = tuple(self._take(stage, microbatch, is_gradient=True))
        with span(f"{action.kind}{stage}"), self.clock.timed():
            self.computation.backward(action, kept.outputs, gradients)
        if action.kind != "W" and stage:
            input_gradients = [
                t.grad if t.grad is not None else torch.zeros_like(t) for t in kept.received if t.requires_grad
            ]
            self._hand_over(stage, stage - 1, microbatch, tensors=input_gradients, is_gradient=True)
        if action.kind == "I":
            self._kept[key] = StageActivations((), ())
        else:
            del self._kept[key]

    def _check_wires(self, stage: int, microbatch: int, outputs: Sequence[Tensor]) -> None:
        for index, (wire, tensor) in enumerate(zip(self.computation.wires(stage, microbatch), outputs, strict=True)):
            if tensor.shape != wire.shape or tensor.dtype != wire.dtype:
                made, expected = (f"{list(each.shape)} and {each.dtype}" for each in (tensor, wire))
                raise InputError(
                    f"stage {stage} of the pipeline makes tensor {index} for the next stage of shape {made}, but "
                    f"{expected} follow from the rows and tokens of micro-batch {microbatch}; use layout.pp=1"
                )

    def _hand_over(
        self, stage: int, to_stage: int, microbatch: int, *, tensors: Sequence[Tensor], is_gradient: bool
    ) -> None:
        """Keep tensors until the action that sends them, or give them to a stage of this rank."""
        if self.schedule.stage_ranks[to_stage] != self.group.rank:
            self._to_send[stage, microbatch, is_gradient] = tensors
            return
        if not is_gradient:
            self._require_gradients(stage, microbatch, tensors)
        self._arrived[to_stage, microbatch, is_gradient] = tensors, None

    def _require_gradients(self, border: int, microbatch: int, tensors: Sequence[Tensor]) -> None:
        for wire, tensor in zip(self.computation.wires(border, microbatch), tensors, strict=True):
            tensor.requires_grad_(wire.needs_gradient and torch.is_grad_enabled())

    def _take(self, stage: int, microbatch: int, *, is_gradient: bool) -> Sequence[Tensor]:
        tensors, messages = self._arrived.pop((stage, microbatch, is_gradient))
        if messages is not None:
            border = stage if is_gradient else stage - 1
            wires = [w for w in self.computation.wires(border, microbatch) if w.needs_gradient or not is_gradient]
            with span("receive"):
                messages.wait()
                tensors = [wire.gather(tensor) for wire, tensor in zip(wires, tensors, strict=True)]
            if not is_gradient:
                self._require_gradients(stage - 1, microbatch, tensors)
        return tensors

    def _exchange(self, messages: Sequence[PipelineMessage]) -> None:
        """Start neighbouring sends and receives together."""
        operations, tensors_of = list[dist.P2POp](), list[Sequence[Tensor]]()
        for (_, stage, microbatch), border, is_gradient, is_receive, peer, number in messages:
            wires = self.computation.wires(border, microbatch)
            wires = [wire for wire in wires if wire.needs_gradient] if is_gradient else wires
            if is_receive:
                tensors = [torch.empty(w.sent_shape, dtype=w.dtype, device=self.group.device) for w in wires]
            else:
                to_send = self._to_send.pop((stage, microbatch, is_gradient))
                tensors = [wire.slice(tensor) for wire, tensor in zip(wires, to_send, strict=True)]
            operation = dist.irecv if is_receive else dist.isend
            for index, tensor in enumerate(tensors):
                tag = number * MAX_WIRES + index
                process_group = self.group.process_group
                operations.append(dist.P2POp(operation, tensor, group=process_group, tag=tag, group_peer=peer))
            tensors_of.append(tensors)
        works = dist.batch_isend_irecv(operations) if operations else []
        is_one_by_one = len(works) == len(operations)  # Else the transport has one work for all of them
        for message, exchanged in zip(messages, tensors_of, strict=True):
            pending = PendingMessages(works[: len(exchanged)] if is_one_by_one else works, exchanged)
            works = works[len(exchanged) :] if is_one_by_one else works
            if message.is_receive:
                self._arrived[message.action.stage, message.action.microbatch, message.is_gradient] = exchanged, pending
            else:
                self._sends.append(pending)
        while self._sends and self._sends[0].is_completed:
            self._sends.popleft()
