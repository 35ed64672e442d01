"""The kinds of ranks of a layout: ranks of one kind hold equally much, and start the same collectives."""

from collections.abc import Hashable
from itertools import product

from motet.parallel.model_sharding import PIPELINE_DIMENSION
from motet.parallel.parallel_dims import ParallelDims
from motet.parallel.rank_placement import stages_of_rank
from motet.parallel.step_plan.attention_traffic import sent_attention_bytes
from motet.parallel.step_plan.plan import StepPlan
from motet.train.job import Job, batch_shape
from motet.train.memory_check.step_prediction import memory_need


def ranks_of_each_kind(plan: StepPlan, job: Job) -> list[int]:
    """A rank of each kind: of a pipeline's first, middle and last place, and of the first and last place of the other
    dimensions where they hold another number of bytes, have more tokens of each row, or send more in attention."""
    recipe, shape = job.precision.resolved, batch_shape(job, 1)
    chosen: dict[Hashable, int] = {}
    for rank in _corner_ranks(plan.dims):
        need = memory_need(plan, recipe, job.optimizer, rank=rank)
        place = plan.dims.coordinates(rank).get(PIPELINE_DIMENSION, 0)
        tokens, sent = plan.part_on_rank(shape, rank).length, sent_attention_bytes(plan, shape, recipe, rank=rank)
        chosen.setdefault((place, stages_of_rank(plan, rank), tuple(need.values()), tokens, sent), rank)
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
