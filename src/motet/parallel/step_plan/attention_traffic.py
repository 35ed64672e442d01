"""Communication inside of attention in a step: keys, values and heads that ranks of context parallelism exchange.

It follows from the calls of attention in the split of a model, and the description that the exchanges follow.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from motet.core.units import DTYPE_BYTES
from motet.models.spec.layer_specs import AttentionSpec, MicroBatchShape
from motet.models.spec.model_spec import ModelSpec
from motet.parallel.context_parallel.attention_calls import AttentionCall
from motet.parallel.context_parallel.context_bytes import sent_bytes
from motet.parallel.context_parallel.context_partition import ContextParallelKind
from motet.parallel.model_sharding import CONTEXT_DIMENSION, TENSOR_DIMENSION
from motet.parallel.rank_placement import stages_of_rank
from motet.parallel.step_plan.plan import StepPlan
from motet.precision.recipe import PrecisionRecipe

AttentionCollective = Literal["all-gather", "reduce-scatter", "all-to-all", "send"]

# Collectives of a forward and of a backward. In backward keys and values are communicated again, and not kept.
COLLECTIVES_OF_KIND: dict[ContextParallelKind, tuple[tuple[AttentionCollective, ...], ...]] = {
    "all-gather": (("all-gather",), ("all-gather", "reduce-scatter")),
    "ring": (("send",), ("send",)),
    "all-to-all": (("all-to-all",), ("all-to-all",)),
}


@dataclass(frozen=True)
class AttentionComm:
    """Communication inside of one call of attention, in one forward and one backward of a micro-batch."""

    module: str
    block: int | None
    kind: ContextParallelKind
    forward: tuple[AttentionCollective, ...]
    backward: tuple[AttentionCollective, ...]
    forward_bytes: int  # Bytes that the rank sends; a forward that is computed again sends them again
    backward_bytes: int
    ranks: tuple[int, ...]


def attention_comms(
    plan: StepPlan, shape: MicroBatchShape, recipe: PrecisionRecipe, *, rank: int
) -> tuple[AttentionComm, ...]:
    """The communication of a rank in a micro-batch of this shape, with the tokens of whole rows, by calls."""
    ranks = plan.dims.group_of(rank, CONTEXT_DIMENSION)
    if len(ranks) == 1:
        return ()
    context, itemsize = plan.context, DTYPE_BYTES[recipe.compute]
    forward, backward = COLLECTIVES_OF_KIND[context.kind]
    also: tuple[AttentionCollective, ...] = ("all-to-all",) if context.inner > 1 else ()
    made, sizes = list[AttentionComm](), dict[AttentionCall, tuple[int, int]]()
    for call in attention_on_ranks(plan, rank):
        alike = replace(call, module="", block=None)
        if alike not in sizes:
            sizes[alike] = sent_bytes(call, context, ranks.index(rank), shape=shape, itemsize=itemsize)
        made.append(
            AttentionComm(call.module, call.block, context.kind, forward + also, backward + also, *sizes[alike], ranks)
        )
    return tuple(made)


def sent_attention_bytes(
    plan: StepPlan,
    shape: MicroBatchShape,
    recipe: PrecisionRecipe,
    *,
    rank: int,
    recomputed: Collection[int] = (),
) -> int:
    """Bytes that a rank sends inside of attention in a step whose micro-batches have this shape. Backward computes the
    forward of `recomputed` blocks again."""
    comms = attention_comms(plan, shape, recipe, rank=rank)
    sent = (each.forward_bytes * (1 + (each.block in recomputed)) + each.backward_bytes for each in comms)
    return plan.microbatches * sum(sent)


def attention_on_ranks(plan: StepPlan, rank: int | None = None) -> Iterator[AttentionCall]:
    """The calls of attention with the heads that a rank computes; only those of a rank, if it is given."""
    sharding, tp = plan.model_sharding, plan.dims.size(TENSOR_DIMENSION)
    stages = sharding.stages if rank is None else [sharding.stages[stage] for stage in stages_of_rank(plan, rank)]
    blocks = {block for stage in stages for block in stage}
    with_tensors, split = _modules(plan)
    for call in sharding.attention:
        if sharding.stages and call.block is not None and call.block not in blocks:
            continue
        owner = call.module
        while owner and owner not in with_tensors:
            owner = owner.rpartition(".")[0]
        yield _with_heads_of_rank(call, tp) if owner in split else call


def _modules(plan: StepPlan) -> tuple[set[str], set[str]]:
    """Modules that have matrices, themselves or inside of them; and those of which tensor-parallel ranks split one."""
    with_tensors, split = set[str](), set[str]()
    for tensor in plan.inventory.tensors:
        if tensor.kind not in ("trained", "frozen") or len(tensor.shape) < 2:
            continue
        names = tensor.name.split(".")
        around = {".".join(names[:count]) for count in range(len(names))}
        with_tensors |= around
        if any(each.over == TENSOR_DIMENSION for each in plan.model_sharding.rule(tensor.name).splits):
            split |= around
    return with_tensors, split


def _with_heads_of_rank(call: AttentionCall, ranks: int) -> AttentionCall:
    """The heads of a rank of tensor parallelism, of which neighbours share a key head where there are fewer."""
    return replace(call, query_heads=max(1, call.query_heads // ranks), key_heads=max(1, call.key_heads // ranks))


def attention_of_spec(spec: ModelSpec) -> tuple[AttentionCall, ...]:
    """The calls of attention of a model that is known by its sizes, before any proof has seen them."""
    calls, blocks = list[AttentionCall](), 0
    for block in spec.blocks:
        is_block = "{i}" in block.prefix
        for repetition in range(block.repeat):
            prefix = block.prefix.format(i=block.first_index + repetition)
            block_id = blocks + repetition if is_block else None
            for each in (each for each in block.layer.operations if isinstance(each, AttentionSpec)):
                heads = each.heads, each.kv_heads or each.heads, each.key_dim, each.value_dim
                calls.append(AttentionCall(prefix + each.name, *heads, each.causal, each.window, block_id))
        blocks += block.repeat if is_block else 0
    return tuple(calls)
