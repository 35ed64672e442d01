"""A rank plays its part in a Program: messages over torch.distributed, and what is made of them in between."""

from dataclasses import dataclass

import torch
from torch import Tensor

from motet.collectives.execute.p2p import P2PBatch, P2PChannel, P2PTensor
from motet.collectives.execute.rank_plan import Buffer, BufferSlice, RankCollectivePlan, RankCollectiveStep
from motet.collectives.execute.reduce_ops import DtypeReduceOp


@dataclass(frozen=True)
class RankCollectiveExecution:
    """A part with the tensors to play it on, all flat and of one dtype and device."""

    title: str
    plan: RankCollectivePlan
    total_numel: int  # Of all chunks
    buffers: dict[Buffer, Tensor]
    reduce_op: DtypeReduceOp
    channel: P2PChannel

    @property
    def device(self) -> torch.device:
        return self.buffers["output"].device


@torch.no_grad()
def execute_plan(execution: RankCollectiveExecution) -> None:
    """From the first step to the last; on CUDA everything is queued on the current stream."""
    plan = execution.plan
    scratch = execution.buffers["output"].new_empty(plan.scratch_elements)
    interpreter = _RankPlanInterpreter(execution, execution.buffers | {"scratch": scratch})
    for step_index, step in enumerate(plan.steps):
        if step.sends or step.receives:
            interpreter.run_step(step_index, step)
    for copy in plan.final_copies:
        interpreter.view(copy.target).copy_(interpreter.view(copy.source))
    if execution.reduce_op.operator == "avg":
        for count in plan.contributor_counts:
            execution.reduce_op.divide(interpreter.view(count.buffer_slice), count.ranks)


class _RankPlanInterpreter:
    """The buffers of a rank while it plays."""

    def __init__(self, execution: RankCollectiveExecution, buffers: dict[Buffer, Tensor]) -> None:
        self.execution = execution
        self.buffers = buffers

    def view(self, span: BufferSlice) -> Tensor:
        return self.buffers[span.buffer][span.start : span.stop]

    def run_step(self, step_index: int, step: RankCollectiveStep) -> None:
        for pack in step.packs:
            self.view(pack.target).copy_(self.view(pack.source))
        receives, sends = (
            [P2PTensor(m.peer, self.view(m.buffer_slice)) for m in side] for side in (step.receives, step.sends)
        )
        messages = P2PBatch(receives, sends, self.execution.channel, f"step {step_index} of {self.execution.title}")

        def received_tensor(receive_index: int, span: BufferSlice) -> Tensor:
            messages.wait_for_receive(receive_index)
            return self.view(span)

        for reduction in step.reductions:
            if reduction.after_sends:
                messages.wait_for_sends()
            received = (received_tensor(*each) for each in reduction.received)
            if reduction.local is None:
                self.view(reduction.target).copy_(next(received))
            else:
                self.execution.reduce_op.accumulate(self.view(reduction.target), self.view(reduction.local), received)
        messages.wait()
