"""Mistakes in tensor and sequence parallelism: sums over ranks, parts of ranks, split heads and vocabularies."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from fnmatch import fnmatch
from typing import Any

import torch
from torch import Tensor

from motet.models.arch import attention_and_feed_forward, loss
from motet.models.torch_private import is_in_backward
from motet.parallel import linear
from motet.parallel.data_parallel.comm_units import SyncGroupPlan
from motet.parallel.model_sharding import DimensionSplit, ModelSharding, ShardRule, TensorInfo
from motet.parallel.parallel_dims import ParallelDims
from motet.parallel.shard_spec import ShardSpec
from motet.parallel.tensor_parallel import boundary_functions, boundary_hooks, sharded_module
from motet.parallel.tensor_parallel.vocabulary.rank_vocabulary import RankVocabularyShard
from motet.train import build
from motet.train.engine import TrainingEngine
from motet.train.optimizer import module_plan
from parity.faults import Patch, all_of, around, around_action, changed, fault, nothing, replaced
from parity.planted_sums import not_done

TP, SP, HYBRID = "tp=2", "tp=2 sp=true", "tp=2 dp=2 zero=2"
RANK = r"\d \(tp \d( of dp \d)?\)"
SUMMAND = rf"^each rank has a summand of it: the sum over ranks {RANK} and {RANK} is missing$"
REGION = "^all tensors before it are right: in {} ranks split {}"
ATTENTION, FFN = (rf"activation blocks\.0\.{layer}, step {{}}$" for layer in (r"attention\.output", r"ffn\.down"))
GPT2_LIKE = ("model.norm=layer", "model.positions=learned", "model.bias=true", "model.gated=false", "model.kv_heads=4")


def _split_otherwise(change: Callable[[ModelSharding], ModelSharding]) -> Patch:
    """Ranks find, execute and record a wrong split, which the check before the first step does not look at."""

    def wrong(own: Any, *args: Any, model_sharding: ModelSharding, **options: Any) -> Any:
        return own(*args, model_sharding=change(model_sharding), **options)

    return all_of(around(build, "build_engine", wrong), around(module_plan, "prove_step_plan", lambda own, plan: None))


def _gradients_taken_for_complete(pattern: str) -> Patch:
    def change(sharding: ModelSharding) -> ModelSharding:
        complete = {n: replace(r, partial_over=("dp", "cp")) for n, r in sharding.rules.items() if fnmatch(n, pattern)}
        return replace(sharding, rules={**sharding.rules, **complete})

    return _split_otherwise(change)


# --- gradients that ranks have summands of ------------------------------------------------------------------------

LAST_NORM = r"gradient blocks\.1\.ffn_norm\.weight, step 1$"


@fault(SP, "tp=2 sp=true dp=2 zero=2", first=LAST_NORM, cause=SUMMAND)
def gradients_of_norms_are_not_summed_over_pieces(rank: int) -> Patch:
    return _gradients_taken_for_complete("*norm.weight")


@fault(SP, first=LAST_NORM, cause=SUMMAND)
def sums_over_tensor_parallel_ranks_are_not_done(rank: int) -> Patch:
    return around_action("all_reduce", call=not_done)


NORMS_OF_HEADS = ("model.query_key_norm=true",)


@fault(TP, first=r"gradient blocks\.1\.attention\.query_norm\.weight, step 1$", cause=SUMMAND, settings=NORMS_OF_HEADS)
def gradients_of_norms_of_heads_are_not_summed(rank: int) -> Patch:
    return _gradients_taken_for_complete("*query_norm.weight")


@fault("tp=4", first=r"gradient model\.layers\.1\.self_attn\.v_proj\.weight, step 1$", cause=SUMMAND, model="llama")
def ranks_with_one_value_head_do_not_add_its_gradients(rank: int) -> Patch:
    return _gradients_taken_for_complete("*.v_proj.weight")


@fault(TP, SP, first="gradient norm, step 1$", cause="norm.weight.* are counted 2 times, once by each rank$")
def the_norm_counts_copies_on_every_rank(rank: int) -> Patch:
    return around(SyncGroupPlan, "counted_names", lambda own, plan, rank: frozenset(plan.shapes))


@fault(HYBRID, first="target tokens, step 1$", cause="^it is 2 times what it should be: multiplied by 2 = dp = tp")
def every_tensor_parallel_rank_counts_its_targets(rank: int) -> Patch:
    return around(TrainingEngine, "reports", lambda own, self, metric: metric == "targets" or own(self, metric))


# --- activations that ranks add up or exchange ----------------------------------------------------------------------


def _without_sums(is_dropped: Callable[[], bool]) -> Patch:
    return around(linear, "all_reduce", lambda own, *a, **o: not_done() if is_dropped() else own(*a, **o))


@fault(TP, HYBRID, first=ATTENTION.format(1), cause=SUMMAND)
def partial_outputs_are_not_summed(rank: int) -> Patch:
    return _without_sums(lambda: not is_in_backward())


@fault(TP, HYBRID, first=r"activation gradient blocks\.1\.ffn_norm, step 1$", cause=SUMMAND)
def gradients_of_inputs_are_not_summed(rank: int) -> Patch:
    return _without_sums(is_in_backward)


def _row_outputs(change: Callable[[Any, Any, Any], Any]) -> Patch:
    """`change(output, split, layer)` in the place of what split rows return."""
    return around(
        boundary_hooks, "row_product", lambda own, split, layer, x: change(own(split, layer, x), split, layer)
    )


@fault(TP, first=ATTENTION.format(1), cause="^it is 1/2 times what it should be: divided by 2 = .*tp")
def partial_outputs_are_averaged(rank: int) -> Patch:
    return _row_outputs(lambda output, split, _: output / split.group.world)


@fault(
    TP,
    first=ATTENTION.format(2),
    cause=r"^blocks\.0\.attention\.output\.bias is in it 2 times$",
    settings=GPT2_LIKE,
)
def every_rank_adds_the_bias(rank: int) -> Patch:
    return _row_outputs(lambda output, split, layer: output + (split.group.world - 1) * layer.bias.detach())


@fault(TP, HYBRID, first=ATTENTION.format(1), cause="^it differs as much as a computation in bfloat16$")
def summands_are_rounded_to_bfloat16(rank: int) -> Patch:
    def rounded(own: Any, x: Tensor, *rest: Any, **options: Any) -> Any:
        return own(x if is_in_backward() else x.bfloat16().to(x.dtype), *rest, **options)

    return around(linear, "start_reduction", rounded)


@fault(SP, first=ATTENTION.format(1), cause=rf"^it is the part of rank {RANK}$")
def pieces_of_a_sum_go_to_the_wrong_ranks(rank: int) -> Patch:
    return around(linear, "unflatten_parts", lambda own, *a: own(*a) if is_in_backward() else own(*a).flip(0))


@fault(SP, first=r"activation blocks\.0\.attention_norm, step 1$", cause=rf"^it is the part of rank {RANK}$")
def ranks_take_the_pieces_of_each_other(rank: int) -> Patch:
    def wrong(x: Tensor, dim: int, group: Any) -> Tensor:
        return boundary_functions.unflatten_parts(x, dim, group)[group.world - 1 - group.rank].clone()

    return _operation("split", wrong)


def _operation(name: str, operation: Callable[[Tensor, int, Any], Tensor]) -> Patch:
    return replaced(boundary_functions, "OPERATIONS", lambda own: {**own, name: operation})


@fault(
    "tp=2 sp=true microbatches=2",
    first=r"activation blocks\.1, step 1$",
    cause="^all tensors before it are right: here ranks gather it over tp$",
)
def the_pieces_of_one_microbatch_are_not_gathered(rank: int) -> Patch:
    calls = 0

    def wrong(x: Tensor, dim: int, group: Any) -> Tensor:
        nonlocal calls
        calls += not is_in_backward()
        gathered = gather(x, dim, group)
        return (
            gathered
            if is_in_backward() or calls % 2
            else boundary_functions.join_parts(x.expand(group.world, *x.shape), dim)
        )

    gather = boundary_functions.OPERATIONS["gather"]
    return _operation("gather", wrong)


# --- parts of ranks -------------------------------------------------------------------------------------------------


@fault(
    TP,
    HYBRID,
    first=ATTENTION.format(1),
    cause=REGION.format(r"blocks\.0\.attention", r"blocks\.0\.attention\.qkv\.weight"),
)
def heads_are_mixed_by_a_split_that_all_believe(rank: int) -> Patch:
    """Queries, keys and values are cut as one matrix: the second rank takes keys for queries."""

    def change(sharding: ModelSharding) -> ModelSharding:
        rules = {n: ShardRule((DimensionSplit(0, "tp"),)) for n in sharding.rules if ".qkv." in n}
        entries = [
            replace(each, splits=(DimensionSplit(2, "tp"),)) if each.module.endswith(".qkv") else each
            for each in sharding.activations
        ]
        return replace(sharding, rules={**sharding.rules, **rules}, activations=tuple(entries))

    return _split_otherwise(change)


@fault(
    TP, first=r"starting parameter blocks\.0\.attention\.qkv\.weight, step 1$", cause="where it should have elements"
)
def a_rank_holds_the_keys_of_its_neighbour(rank: int) -> Patch:
    def wrong(
        own: Any, sharding: ModelSharding, tensor: TensorInfo, place: Mapping[str, int], dims: ParallelDims
    ) -> ShardSpec:
        own_index = place.get("tp", 0)
        spec, other = (own(sharding, tensor, {**place, "tp": index}, dims) for index in (own_index, 1 - own_index))
        if ".qkv." not in tensor.name:
            return spec
        return replace(spec, spans=((spec.spans[0][0], *other.spans[0][1:]), *spec.spans[1:]))

    return around(ModelSharding, "_shard", wrong)


@fault(TP, HYBRID, first=FFN.format(1), cause=REGION.format(r"blocks\.0\.ffn", r"blocks\.0\.ffn\.up\.weight"))
def a_rank_takes_gate_for_up(rank: int) -> Patch:
    def wrong(own: Any, gate_and_up: Tensor, *rest: Any) -> Any:
        return own(torch.cat(gate_and_up.chunk(2, -1)[::-1], -1), *rest)

    return nothing() if rank == 0 else around(attention_and_feed_forward, "gated_activation", wrong)


@fault(
    TP,
    first=r"random mask block 0 dropout 1, step 1$",
    cause=rf"^ranks {RANK} and {RANK} together leave out \d+ of its \d+ elements$",
    settings=("model.dropout=0.1",),
)
def dropout_is_equal_on_all_shards(rank: int) -> Patch:
    def wrong(own: Any, width: int, spans: Any, padding: int) -> Any:
        return own(width, [(0, stop - first) for first, stop in spans], padding)

    return around(sharded_module, "split_by_units", wrong)


@fault(
    TP,
    first=r"activation blocks\.0\.out, step 1$",
    cause=r"^all tensors before it are right: in blocks\.0 ranks split .*, blocks\.0\.heads = 2$",
    settings=("model={factory='parity.split_module:Attention'}",),
)
def a_split_attribute_is_forgotten(rank: int) -> Patch:
    return around(sharded_module, "set_attributes", lambda *_: None)


# --- a split vocabulary ---------------------------------------------------------------------------------------------

UNEVEN = ("model.vocab_size=261",)


@fault(TP, SP, first="loss, step 1$", cause="^it is the loss with the padding of its vocabulary in it", settings=UNEVEN)
def padding_of_the_vocabulary_is_counted(rank: int) -> Patch:
    def padded(shard: RankVocabularyShard, *_: Any) -> RankVocabularyShard:
        return replace(shard, stop=shard.start + -(-shard.size // shard.group.world))

    return changed(RankVocabularyShard, "from_spec", padded)


@fault(TP, first="loss, step 1$", cause="^it is the loss with a target on each rank")
def a_target_that_another_rank_has_is_counted(rank: int) -> Patch:
    return changed(loss, "_local_targets", lambda pair, *_: (pair[0], torch.ones_like(pair[1])))


@fault(TP, HYBRID, first="activation embedding, step 1$", cause=REGION.format("embedding", r"embedding\.weight"))
def the_first_rank_looks_up_the_entry_before(rank: int) -> Patch:
    def wrong(own: Any, module: Any, entries: range) -> Any:
        return own(module, range(entries.start + 1, entries.stop + 1))

    return nothing() if rank % 2 else around(sharded_module, "shard_embedding", wrong)
