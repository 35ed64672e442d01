"""Communication about the choices of experts in a step, without torch.

Ranks that share rows gather their choices for a limit of loads, and add up the counts of rows for a loss of each row.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal

from motet.collectives.execute.slot_plan import backend_sent_bytes
from motet.core.units import DTYPE_BYTES
from motet.models.settings import DecoderSettings, MixtureOfExpertsSettings, ModelSettings
from motet.models.spec.layer_specs import MicroBatchShape
from motet.parallel.context_parallel.context_partition import ContextPartition
from motet.parallel.layout import Layout
from motet.parallel.model_sharding import CONTEXT_DIMENSION, TENSOR_DIMENSION
from motet.parallel.rank_placement import stages_of_rank
from motet.parallel.step_plan.plan import StepPlan
from motet.parallel.step_plan.traffic import StepTrafficBytes
from motet.precision.recipe import PrecisionRecipe


@dataclass(frozen=True)
class ExpertCollective:
    """A collective in one forward of a micro-batch, of one layer with experts."""

    block: int
    collective: Literal["all-gather", "all-reduce"]
    ranks: tuple[int, ...]
    numel: int  # Elements of the result
    dtype: str

    @property
    def bytes(self) -> int:
        """The size of the result."""
        return self.numel * DTYPE_BYTES[self.dtype]


def expert_collectives(
    model: ModelSettings, plan: StepPlan, layout: Layout, *, shape: MicroBatchShape, recipe: PrecisionRecipe, rank: int
) -> tuple[ExpertCollective, ...]:
    """The collectives of a rank in the forward of a micro-batch of complete rows of this shape, of motet's decoder."""
    experts = model.experts if isinstance(model, DecoderSettings) else None
    if not isinstance(model, DecoderSettings) or experts is None:
        return ()
    stages = plan.model_sharding.stages
    ranges = [stages[stage] for stage in stages_of_rank(plan, rank)] if stages else [range(model.layers)]
    blocks = [block for stage in ranges for block in stage if block >= experts.first_dense_layers]
    wide = "float64" if recipe.compute == "float64" else "float32"
    over = (CONTEXT_DIMENSION, *((TENSOR_DIMENSION,) if layout.sp else ()))
    sharing, made = plan.dims.group_of(rank, *over), list[ExpertCollective]()
    for block in blocks if len(sharing) > 1 else ():
        if experts.capacity is not None:
            for dtype in (wide, "int64"):  # Weights and indices
                made += _gathers(experts, plan, layout, shape=shape, rank=rank, block=block, dtype=dtype)
        if model.balance.row_weight:
            made.append(ExpertCollective(block, "all-reduce", sharing, shape.rows * experts.count, "int64"))
    return tuple(made)


def _gathers(
    experts: MixtureOfExpertsSettings,
    plan: StepPlan,
    layout: Layout,
    *,
    shape: MicroBatchShape,
    rank: int,
    block: int,
    dtype: str,
) -> Iterator[ExpertCollective]:
    """The gathers that make complete rows: of the part that tensor-parallel ranks share, then of all parts."""
    context, tensor = (plan.dims.group_of(rank, name) for name in (CONTEXT_DIMENSION, TENSOR_DIMENSION))
    here, cuts = plan.part_on_rank(shape, rank).length, list[tuple[ContextPartition, tuple[int, ...]]]()
    if layout.sp and len(tensor) > 1:
        cuts.append((ContextPartition(here, len(tensor), "contiguous"), tensor))
    if len(context) > 1:
        cuts.append((plan.context.partition(shape.length), context))
    for partition, ranks in cuts:
        numel = partition.longest * len(ranks) * shape.rows * experts.per_token
        yield ExpertCollective(block, "all-gather", ranks, numel, dtype)


def sent_expert_bytes(
    model: ModelSettings,
    plan: StepPlan,
    layout: Layout,
    *,
    shape: MicroBatchShape,
    recipe: PrecisionRecipe,
    rank: int,
    recomputed: Collection[int] = (),
) -> StepTrafficBytes:
    """Bytes that a rank sends in a step, where ranks share one host. Backward computes the forward of `recomputed`
    blocks again."""
    sent = {"all_gather": 0, "all_reduce": 0}
    for each in expert_collectives(model, plan, layout, shape=shape, recipe=recipe, rank=rank):
        ranks = len(each.ranks)
        numel = each.numel if each.collective == "all-reduce" else each.numel // ranks
        sent[each.collective.replace("-", "_")] += (
            plan.microbatches
            * (1 + (each.block in recomputed))
            * backend_sent_bytes(each.collective, numel, each.dtype, rank=each.ranks.index(rank), hosts=(0,) * ranks)
        )
    return StepTrafficBytes(reduce_scatter=0, **sent)
