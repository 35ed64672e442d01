"""Stages of a pipeline whose computations sleep for the durations of the schedule, which needs no core.

So the idle time of a real run of the player can be compared with that of the schedule on any machine.
"""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from motet.core.trace import install_sink
from motet.parallel.pipeline.pipeline_schedule import PipelineAction, PipelineSchedule
from motet.parallel.pipeline.player import PipelinePlayer, WireShape
from motet.parallel.pipeline.schedule_timeline import DURATIONS
from motet.parallel.process.process_group import RankGroup

WIRE = WireShape((16, 256), torch.float32, needs_gradient=True)
WIRE_BYTES = 16 * 256 * 4


@dataclass(frozen=True)
class SleepingStages:
    """All stages of a rank; one hidden state crosses each border."""

    last_stage: int
    unit_s: float

    def wires(self, border: int, microbatch: int) -> Sequence[WireShape]:
        return [WIRE]

    def forward(self, stage: int, microbatch: int, received: Sequence[Tensor]) -> Sequence[Tensor]:
        time.sleep(DURATIONS["F"] * self.unit_s)
        return [torch.zeros(() if stage == self.last_stage else WIRE.shape)]

    def backward(self, action: PipelineAction, outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        time.sleep(DURATIONS[action.kind] * self.unit_s)


@dataclass(frozen=True)
class RankRecord:
    """The run of one rank: the start and the duration of its computations, and counts."""

    computations: tuple[tuple[str, float, float], ...]  # (kind, start, duration) on the clock of the machine
    in_flight: int  # The most activations of a stage and a micro-batch that it held
    sent_bytes: int


class _ComputationSpans:
    def __init__(self) -> None:
        self.computations: list[tuple[str, float, float]] = []

    def on_span(self, action: str, start_s: float, duration_s: float, depth: int) -> None:
        if action[:1] in ("F", "B", "I", "W") and action[1:].isdecimal():
            self.computations.append((action[0], start_s, duration_s))

    def on_count(self, name: str, value: float) -> None:
        pass


def play_asleep(schedule: PipelineSchedule, group: RankGroup, unit_s: float) -> RankRecord:
    """Play a schedule on this rank."""
    player = PipelinePlayer(schedule, SleepingStages(schedule.stages - 1, unit_s), group)
    sent_bytes, start = [0], dist.batch_isend_irecv

    def count_and_start(operations: list[dist.P2POp]) -> list[dist.Work]:
        sent_bytes[0] += sum(each.tensor.nbytes for each in operations if each.op is dist.isend)
        return start(operations)

    dist.barrier(group.process_group)
    with ExitStack() as stack:
        stack.enter_context(patch.object(dist, "batch_isend_irecv", count_and_start))
        stack.enter_context(install_sink(spans := _ComputationSpans()))
        player.play()
    return RankRecord(tuple(spans.computations), player.max_in_flight, sent_bytes[0])


def measured_bubble_share(records: Sequence[RankRecord]) -> float:
    """The share of the ranks' time in which nothing was computed, from the first start to the last end."""
    spans = [(start, start + duration) for record in records for _, start, duration in record.computations]
    end_to_end = max(stop for _, stop in spans) - min(start for start, _ in spans)
    return 1 - sum(stop - start for start, stop in spans) / (end_to_end * len(records))
