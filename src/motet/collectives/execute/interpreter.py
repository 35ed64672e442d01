"""The execution of a BufferPlan: messages over torch.distributed, and copies and reductions between them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from motet.collectives.execute.buffer_plan import Buffer, BufferPlan, BufferSlice, BufferStep
from motet.collectives.execute.p2p import P2PBatch, P2PChannel, P2PTensor
from motet.collectives.execute.reduce_ops import DtypeReduceOp


@dataclass(frozen=True)
class RankCollectiveExecution:
    """A plan with its tensors, all flat and of one dtype and device."""

    title: str
    plan: BufferPlan
    total_numel: int  # Elements of all chunks
    buffers: dict[Buffer, Tensor]
    reduce_op: DtypeReduceOp
    channel: P2PChannel

    @property
    def device(self) -> torch.device:
        return self.buffers["output"].device


@torch.no_grad()
def execute_plan(execution: RankCollectiveExecution) -> None:
    """Run all steps. On CUDA everything is queued on the current stream."""
    plan, reduce_op = execution.plan, execution.reduce_op
    buffers = execution.buffers | {"scratch": execution.buffers["output"].new_empty(plan.scratch_elements)}

    def view(span: BufferSlice) -> Tensor:
        return buffers[span.buffer][span.start : span.stop]

    for step_index, step in enumerate(plan.steps):
        if step.sends or step.receives:
            _run_step(step, view, execution, context=f"step {step_index} of {execution.title}")
    for copy in plan.final_copies:
        view(copy.target).copy_(view(copy.source))
    if reduce_op.operator == "avg":
        for count in plan.contributor_counts:
            reduce_op.divide(view(count.buffer_slice), count.ranks)


def _run_step(
    step: BufferStep, view: Callable[[BufferSlice], Tensor], execution: RankCollectiveExecution, *, context: str
) -> None:
    for pack in step.packs:
        view(pack.target).copy_(view(pack.source))
    receives, sends = ([P2PTensor(m.peer, view(m.buffer_slice)) for m in side] for side in (step.receives, step.sends))
    messages = P2PBatch(receives, sends, execution.channel, context=context)

    def received_tensor(receive_index: int, span: BufferSlice) -> Tensor:
        messages.wait_for_receive(receive_index)
        return view(span)

    for reduction in step.reductions:
        if reduction.after_sends:
            messages.wait_for_sends()
        received = (received_tensor(*each) for each in reduction.received)
        if reduction.local is None:
            view(reduction.target).copy_(next(received))
        else:
            execution.reduce_op.accumulate(view(reduction.target), view(reduction.local), received)
    messages.wait()
