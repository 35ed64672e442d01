"""Stages of motet's own steps: their peaks, and the moments in which the ranks of a pipeline keep the most."""

from functools import lru_cache
from typing import NamedTuple

from motet.models.spec.layer_specs import BlockPolicy, MicroBatchShape
from motet.models.spec.model_spec import ModelSpec
from motet.parallel.pipeline.pipeline_schedule import PipelineAction, PipelineSchedule
from motet.parallel.pipeline.schedules import order_of_computations
from motet.parallel.step_plan.stage_memory import BusyMoment, GradientStorage, StageBlocks, StagePeaks, busy_moments
from motet.plan.same_object import SameObject

_SCHEDULE_ROUNDS = 2  # Further rounds of as many micro-batches as ranks do not add to what is in flight

ScheduleSize = tuple[str, int, int, int]  # Schedule, ranks, chunks, micro-batches


class StageSettings(NamedTuple):
    """All that the peaks of a stage depend on besides the model."""

    shape: MicroBatchShape
    policy: BlockPolicy
    storage: GradientStorage
    splits_vocabulary: bool


@lru_cache(maxsize=1 << 14)
def peaks_of_stage(specs: SameObject[tuple[ModelSpec, ...]], stage: int, rest: StageSettings) -> StagePeaks:
    """The peaks of a stage, of which many layouts have the same."""
    spec, last = specs.value[stage], len(specs.value) - 1
    return StageBlocks(
        spec,
        rest.shape,
        (rest.policy,) * spec.policy_count,
        rest.storage,
        splits_vocabulary=rest.splits_vocabulary,
        is_first=stage == 0,
        is_last=stage == last,
    ).peaks()


@lru_cache(maxsize=4096)
def busy_moments_of_ranks(size: ScheduleSize) -> tuple[tuple[BusyMoment, ...], ...]:
    """The moments of each rank of a pipeline."""
    if size[1] == 1:
        return (busy_moments(PipelineAction(kind, 0, 0) for kind in ("F", "B")),)
    return tuple(map(busy_moments, order_of_schedule(size).actions))


@lru_cache(maxsize=8)
def order_of_schedule(size: ScheduleSize) -> PipelineSchedule:
    """The order of enough micro-batches to see the most in flight."""
    schedule, ranks, chunks, microbatches = size
    is_bounded = schedule not in ("gpipe", "breadth-first")  # Otherwise all micro-batches are in flight
    is_even = microbatches % ranks == 0  # Otherwise the size of a round depends on the number of all micro-batches
    count = min(microbatches, _SCHEDULE_ROUNDS * ranks) if is_bounded and is_even else microbatches
    return order_of_computations(schedule, ranks, chunks=chunks, microbatches=count)
