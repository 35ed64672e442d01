"""The order in which torch's pipelines compute, as an oracle: its schedules on stages that write down their work.

Its classes for one stage a rank are run, as `_get_pipeline_order` of Schedule1F1B leaves micro-batch 0 out on the last
rank.
"""

from types import SimpleNamespace
from typing import Any

from torch import nn
from torch.distributed.pipelining import schedules

from motet.parallel.pipeline.pipeline_schedule import PipelineAction

ONE_STAGE = {"gpipe": schedules.ScheduleGPipe, "1f1b": schedules.Schedule1F1B}
SEVERAL_STAGES = {
    "interleaved": schedules.ScheduleInterleaved1F1B,
    "breadth-first": schedules.ScheduleLoopedBFS,
    "zb-interleaved": schedules.ScheduleInterleavedZeroBubble,
    "zb-v": schedules.ScheduleZBVZeroBubble,
    "dualpipe-v": schedules.ScheduleDualPipeV,
}


class WritingStage(SimpleNamespace):
    """A stage that writes down forwards and backwards, and exchanges nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("get_") and name.endswith("_ops"):
            return lambda microbatch: []
        raise AttributeError(name)

    def forward_one_chunk(self, microbatch: int, *_: Any, **__: Any) -> None:
        self.written.append(PipelineAction("F", self.stage_index, microbatch))

    def backward_one_chunk(self, microbatch: int, **_: Any) -> None:
        self.written.append(PipelineAction("B", self.stage_index, microbatch))

    def perform_reduce_grad(self, _: int) -> None:
        pass


def torch_order(name: str, ranks: int, chunks: int, microbatches: int) -> list[list[PipelineAction]]:
    """The computations of each rank; ValueError where torch's schedule does not take these numbers."""
    if name in ONE_STAGE:
        return [_played(ONE_STAGE[name], rank, ranks, microbatches) for rank in range(ranks)]
    order = SEVERAL_STAGES[name](torch_stages(ranks, chunks), microbatches).pipeline_order
    return [[each for action in order[rank] if action for each in _flat(action)] for rank in range(ranks)]


def torch_stages(ranks: int, chunks: int) -> Any:
    """The stages of rank 0, from which a schedule makes the orders of all ranks."""
    return [_stage(chunk * ranks, 0, ranks, chunks) for chunk in range(chunks)]


def _stage(index: int, rank: int, ranks: int, chunks: int) -> WritingStage:
    sizes = {"group_size": ranks, "group_rank": rank, "num_stages": ranks * chunks}
    is_last = index == ranks * chunks - 1
    return WritingStage(stage_index=index, is_last=is_last, submod=nn.Identity(), written=[], **sizes)


def _played(kind: Any, rank: int, ranks: int, microbatches: int) -> list[PipelineAction]:
    stage = _stage(rank, rank, ranks, 1)
    schedule = kind(stage, microbatches)
    schedule._initialize_stage = lambda *_: None
    schedule._step_microbatches([()] * microbatches)
    return stage.written


def _flat(action: Any) -> list[PipelineAction]:
    if action.sub_actions:
        return [each for inner in action.sub_actions for each in _flat(inner)]
    return [PipelineAction(action.computation_type.value, action.stage_index, action.microbatch_index)]
