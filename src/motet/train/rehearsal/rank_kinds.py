"""The kinds of ranks of a layout: ranks of one kind hold equally much, and start the same collectives."""

from collections.abc import Hashable
from itertools import product

from motet.parallel.model_sharding import PIPELINE_DIMENSION
from motet.parallel.parallel_dims import ParallelDims
from motet.parallel.rank_placement import stages_of_rank
from motet.parallel.step_plan.plan import StepPlan
from motet.train.job import Job
from motet.train.memory_check.step_prediction import memory_need


def ranks_of_each_kind(plan: StepPlan, job: Job) -> list[int]:
    """A rank of each kind: of a pipeline's first, middle and last place, and of the first and last place of the other
    dimensions where they hold another number of bytes."""
    chosen: dict[Hashable, int] = {}
    for rank in _corner_ranks(plan.dims):
        need = memory_need(plan, job.precision.resolved, job.optimizer, rank=rank)
        place = plan.dims.coordinates(rank).get(PIPELINE_DIMENSION, 0)
        chosen.setdefault((place, stages_of_rank(plan, rank), tuple(need.values())), rank)
    return [*chosen.values()]


def _corner_ranks(dims: ParallelDims) -> list[int]:
    def places(name: str, size: int) -> list[int]:
        return sorted({0, size - 1, *([size // 2] if name == PIPELINE_DIMENSION else [])})

    ranks = []
    for indices in product(*(places(name, size) for name, size in dims.sizes)):
        rank = 0
        for index, (_, size) in zip(indices, dims.sizes, strict=True):
            rank = rank * size + index
        ranks.append(rank)
    return ranks
