"""The peak memory of all ranks, and the time in which the stages of a pipeline compute.

Each rank fills its own places of a list of zeros, which is added up together with the other numbers of a step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from motet.cluster.local_device import peak_memory_bytes
from motet.monitor.events import PipelineRankUsage
from motet.parallel.sync_groups import pipeline_groups
from motet.train.engine import TrainingEngine


@dataclass(frozen=True)
class StepUsage:
    """The memory of all ranks, and the computation of those of a pipeline."""

    memory_bytes: int  # The most that a rank has held
    memory_rank: int = 0
    pipeline: tuple[PipelineRankUsage, ...] = ()


def local_usage(engine: TrainingEngine) -> list[float]:
    """The memory of this rank, and the time in which it computed as a rank of a pipeline, at its places."""
    group, pipeline = engine.step_group, engine.pipeline
    numbers = [peak_memory_bytes(group.device), *([pipeline.clock.total_s] if pipeline else [])]
    return [number if rank == group.rank else 0.0 for number in numbers for rank in range(group.world)]


def usage_of_ranks(sums: Sequence[float], engine: TrainingEngine) -> StepUsage:
    """The usage of all ranks, from the sums of their local usage."""
    world, sharding = engine.step_group.world, engine.plan.model_sharding
    memory, compute_s = [int(number) for number in sums[:world]], sums[world:]
    places = zip(*pipeline_groups(engine.plan.dims), strict=True) if compute_s else ()
    pipeline = tuple(
        PipelineRankUsage(
            stages=tuple(stage for stage, owner in enumerate(sharding.stage_ranks) if owner == place),
            memory_bytes=max(memory[rank] for rank in ranks),
            compute_s=fmean(compute_s[rank] for rank in ranks),
        )
        for place, ranks in enumerate(places)
    )
    return StepUsage(max(memory), memory.index(max(memory)), pipeline)
