"""Mistakes in mixtures of experts: choices, limits, loads, the terms that balance loads, and corrections."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatch
from typing import Any

import torch
from torch import Tensor

from motet.core.batch import Batch
from motet.models.arch.mixture import experts, router
from motet.models.arch.mixture.mixture_of_experts import CapacityLimit
from motet.models.arch.mixture.router import Router
from motet.models.torch_private import is_in_backward
from motet.parallel import sync_groups
from motet.parallel.context_parallel.gathered_rows import CompleteRows
from motet.parallel.model_sharding import ModelSharding
from motet.parallel.tensor_parallel import boundary_functions
from motet.train import step
from motet.train.balance import expert_balance
from motet.train.balance.expert_balance import ExpertBalance, ExpertLoads
from motet.train.balance.terms import RowTerms
from motet.train.engine import TrainingEngine
from parity.faults import GRADIENT, Patch, all_of, around, changed, fault, nothing, replaced
from parity.planted_splits import SUMMAND, _split_otherwise
from parity.planted_steps import UNEVEN

MIXTURE = (
    "model.experts={count=4, per_token=2, hidden=16, shared=1, capacity=1.1, drop='lowest'}",
    "model.balance={kind='bias', weight=0.1, z_weight=0.01}",
)
FULL = (*MIXTURE, "memory.recompute=full")
LOADS, LOGITS = r"loads blocks\.0\.ffn, step 1$", r"activation gradient blocks\.1\.ffn\.router\[0\], step 1$"
WEIGHTS, LIMITED = (rf"activation blocks\.0\.ffn\.{module}, step {{}}$" for module in (r"router\[1\]", r"limit\[0\]"))
CORRECTION = r"buffer blocks\.0\.ffn\.router\.correction, step 1$"


# --- choices ------------------------------------------------------------------------------------------------------


@fault("dp=2 zero=1", "tp=2 sp=true", first=r"activation blocks\.0\.ffn\.router\[0\], step 1$",
       cause="as much as a computation in bfloat16|rounded to bfloat16", settings=MIXTURE)  # fmt: skip
def logits_of_routers_are_computed_in_bfloat16(rank: int) -> Patch:
    def rounded(own: Any, ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        own(ctx, x, weight)
        return (x.bfloat16() @ weight.bfloat16().T).to(x.dtype)

    return around(router._LogitsFunction, "forward", rounded)


@fault(
    "dp=2 zero=1",
    "dp=1 cp=2",
    first=WEIGHTS.format(2),
    cause=r"its scores have the correction blocks\.0\.ffn\.router\.correction in them",
    settings=MIXTURE,
)
def weights_have_the_correction_of_the_choice(rank: int) -> Patch:
    def wrong(own: Any, self: Router, x: Tensor) -> Any:
        logits, _, chosen = own(self, x)
        scores = logits.softmax(-1) + self.correction
        weights = scores.gather(-1, chosen)
        return logits, weights / weights.sum(-1, keepdim=True), chosen

    return around_counted_routers(wrong)


def around_counted_routers(call: Callable[..., Any]) -> Patch:
    """`call(forward, router, x)` in place of the forwards of routers in training; trials of routers are right."""

    def build(own: Any, self: ExpertBalance, *args: Any, **options: Any) -> None:
        own(self, *args, **options)
        for each in self._routers:
            each.forward = lambda x, each=each: call(Router.forward, each, x)

    return around(ExpertBalance, "__init__", build)


# --- limits -------------------------------------------------------------------------------------------------------

PART = "limit is that of the part of a rank, not of the complete row"


@fault("dp=1 cp=2", "tp=2 sp=true", "dp=1 cp=2 tp=2 sp=true", first=LIMITED.format(1), cause=PART, settings=MIXTURE)
def the_limit_is_that_of_the_part_of_a_rank(rank: int) -> Patch:
    return around(CompleteRows, "on_whole_rows", lambda own, rows, compute, *parts: compute(*parts))


@fault(
    "dp=2 zero=1",
    "dp=1 pp=2 microbatches=2",
    first=LIMITED.format(1),
    cause="limit is that of the micro-batch, not of each row",
    settings=MIXTURE,
)
def the_limit_is_that_of_a_microbatch(rank: int) -> Patch:
    def wrong(own: Any, self: CapacityLimit, weights: Tensor, chosen: Tensor) -> Any:
        joined = (each.flatten(0, 1).unsqueeze(0) for each in (weights, chosen))
        return tuple(each.view_as(weights) for each in own(self, *joined))

    return around(CapacityLimit, "forward", wrong)


@fault("dp=1 cp=2", first=LIMITED.format(1), cause="in the order of ranks, not of places",
       settings=(MIXTURE[0].replace("lowest", "last"), MIXTURE[1]))  # fmt: skip
def the_limit_takes_tokens_in_the_order_of_ranks(rank: int) -> Patch:
    def wrong(own: Any, rows: CompleteRows, compute: Any, *parts: Tensor) -> Any:
        (partition, _), *_ = rows._cuts(parts[0].shape[1])

        def reordered(*complete: Tensor) -> Tensor:
            order = torch.cat([torch.arange(*span) for spans in partition.spans_by_rank for span in spans])
            result = compute(*(each[:, order] for each in complete))
            return torch.empty_like(result).index_copy_(1, order, result)

        return own(rows, reordered, *parts)

    return around(CompleteRows, "on_whole_rows", wrong)


@fault("dp=2 zero=3", "pp=2", first=LIMITED.format(1), cause="divided by their sum again", settings=MIXTURE)
def weights_are_normalised_again_after_a_drop(rank: int) -> Patch:
    def wrong(result: Any, *_: Any) -> Any:
        weights, chosen = result
        return weights / (weights.sum(-1, keepdim=True) + 1e-20), chosen

    return changed(CapacityLimit, "forward", wrong)


# --- loads --------------------------------------------------------------------------------------------------------


@fault("dp=2 zero=1", "pp=2", first=LOADS, cause="forwards of a block that backward computes again$", settings=FULL)
def loads_are_counted_again_in_recomputation(rank: int) -> Patch:
    return around(ExpertBalance, "_on_router", _as_in_forward)


def _as_in_forward(own: Any, *args: Any) -> Any:
    with replaced(expert_balance, "is_in_backward", lambda _: lambda: False):
        return own(*args)


@fault("dp=2 zero=1", first=LOADS, cause="compute once more.*are counted again",
       settings=(*MIXTURE, *UNEVEN))  # fmt: skip
def loads_of_a_row_that_is_computed_once_more_are_counted(rank: int) -> Patch:
    def read(batch: Batch, reader: Any, index: int) -> Batch:
        reader.routed_rows.setdefault(index, reader._engine.balance.rows_of(batch, reader._engine.backward_scale))
        return batch

    return changed(step._MicroBatchReader, "__call__", read)


@fault("dp=2 zero=3", first=LOADS, cause="rows without targets", settings=MIXTURE)
def loads_of_rows_without_targets_are_counted(rank: int) -> Patch:
    def wrong(own: Any, self: Any, index: int, rows: Any, **more: Any) -> None:
        own(self, index, replace(rows, targets=torch.ones_like(rows.targets)), **more)

    return around(ExpertBalance, "_count", wrong)


def _reporting(metric: str, **places: int) -> Patch:
    return replaced(sync_groups, "METRIC_REPORTERS", lambda own: {**own, metric: places})


@fault("dp=2 zero=2", "dp=3 zero=1", first=LOADS, cause="leaves out the contribution of ranks? ", settings=MIXTURE)
def loads_are_those_of_one_rank(rank: int) -> Patch:
    return _reporting("loads", tp=0, dp=0)


@fault("tp=2", "tp=2 dp=2 zero=2", first=LOADS, cause="multiplied by 2 = .*tp", settings=MIXTURE)
def loads_of_copies_of_tokens_are_counted(rank: int) -> Patch:
    return _reporting("loads")


@fault("tp=2 sp=true", first=LOADS, cause=r"leaves out the contribution of rank 1 \(tp 1\)", settings=MIXTURE)
def loads_of_the_pieces_of_other_ranks_are_lost(rank: int) -> Patch:
    return _reporting("loads of parts", tp=0)


@fault("dp=1 cp=2", first=LOADS, cause="leaves out the contribution of rank 1$", settings=MIXTURE)
def loads_of_one_part_of_each_row_are_counted(rank: int) -> Patch:
    return _reporting("loads", tp=0, cp=0)


@fault("dp=2 zero=1 microbatches=2", first=LOADS, cause="leaves out the contribution of micro-batch 0",
       settings=MIXTURE)  # fmt: skip
def loads_are_those_of_the_last_microbatch(rank: int) -> Patch:
    def wrong(own: Any, self: ExpertBalance, rows: Any) -> Any:
        if not is_in_backward():
            self.begin_step()
        return own(self, rows)

    return around(ExpertBalance, "rows", wrong)


@fault(
    "dp=2 zero=1",
    "pp=2",
    first=r"loads blocks\.0\.ffn, step 2$",
    cause="1 times its value in the step before too much",
    settings=MIXTURE,
)
def loads_are_not_cleared(rank: int) -> Patch:
    def wrong(own: Any, self: ExpertBalance) -> None:
        if not hasattr(self, "_terms"):
            own(self)

    return around(ExpertBalance, "begin_step", wrong)


# --- terms of the loss --------------------------------------------------------------------------------------------


@fault("dp=2 zero=1", "dp=2 zero=3 microbatches=2", first=LOGITS, cause="over the tokens of the micro-batch",
       settings=MIXTURE)  # fmt: skip
def the_term_is_that_of_a_microbatch(rank: int) -> Patch:
    def wrong(own: Any, self: RowTerms, logits: Tensor, counts: Tensor, targets: Tensor) -> Tensor:
        pooled = replace(self, row_tokens=self.row_tokens * len(counts))
        values = own(pooled, logits, counts.sum(0, keepdim=True), targets.sum(0, keepdim=True))
        return values.expand(len(counts)) / len(counts)

    return around(RowTerms, "values", wrong)


@fault("dp=1 cp=2", "tp=2 sp=true", first=LOGITS, cause="assignments of the tokens of one rank alone", settings=MIXTURE)
def the_term_has_the_loads_of_own_tokens(rank: int) -> Patch:
    return replaced(expert_balance, "all_reduce", lambda own: lambda counts, group: None)


def _gradient_of_terms(factor: Callable[[], float]) -> Patch:
    return around(
        expert_balance._AddGradient, "backward",
        lambda own, ctx, grad: (grad, torch.full((), ctx.scale * factor(), dtype=ctx.dtype), None),
    )  # fmt: skip


@fault("dp=2 zero=2", "dp=4 zero=3", first=LOGITS, cause="balance.*1/[24] times.*divided by .*dp", settings=MIXTURE)
def the_gradient_of_terms_is_divided_by_the_ranks(rank: int) -> Patch:
    return _gradient_of_terms(lambda: 1 / torch.distributed.get_world_size())


@fault("pp=2", first=r"activation gradient blocks\.0\.ffn\.router\[0\], step 1$", cause="balance.*is missing",
       settings=MIXTURE)  # fmt: skip
def the_gradient_of_terms_is_lost_before_the_last_stage(rank: int) -> Patch:
    return _gradient_of_terms(lambda: float(rank == 1))


@fault(
    "pp=2",
    "dp=1 pp=2 microbatches=2",
    first="balance loss, step 1$",
    cause=r"leaves out the terms of blocks\.0\.ffn$",
    settings=MIXTURE,
)
def the_terms_of_earlier_stages_are_not_reported(rank: int) -> Patch:
    def wrong(numbers: Tensor, self: ExpertBalance) -> Tensor:
        return torch.cat([numbers[: -self._terms.numel()], 0 * self._terms.view(-1)])

    return nothing() if rank else changed(ExpertBalance, "local_numbers", wrong)


@fault("dp=2 zero=1", "dp=1 cp=2", first=LOGITS, cause="square.*is missing.*rank 1", settings=MIXTURE)
def squares_of_logits_count_on_one_rank(rank: int) -> Patch:
    def wrong(own: Any, self: RowTerms, *tensors: Tensor) -> Tensor:
        return own(replace(self, settings=self.settings.model_copy(update={"z_weight": 0.0})), *tensors)

    return around(RowTerms, "values", wrong) if rank else nothing()


@fault("dp=2 zero=1", first=LOGITS, cause="the same for each row, whatever its targets", settings=MIXTURE)
def all_rows_have_terms_of_the_same_weight(rank: int) -> Patch:
    def wrong(own: Any, self: RowTerms, logits: Tensor, counts: Tensor, targets: Tensor) -> Tensor:
        return own(self, logits, counts, torch.full_like(targets, self.row_tokens))

    return around(RowTerms, "values", wrong)


OTHERS = ("model.balance={kind='bias', weight=0.1, z_weight=0.01}",)  # For a model of transformers


@fault("dp=2 zero=1", "dp=1 cp=2", first=r"activation gradient model\.layers\.1\.mlp\.gate.*, step 1$",
       cause="gradient of the terms that balance experts is missing, on rank 1 alone", model="deepseek_v3",
       settings=OTHERS)  # fmt: skip
def the_gradient_of_terms_is_lost_on_one_rank(rank: int) -> Patch:
    return _gradient_of_terms(lambda: float(rank == 0))


@fault("dp=1 cp=2", "tp=2 sp=true", first=r"loads model\.layers\.1\.mlp, step 1$",
       cause=r"leaves out the contribution of rank 1( \(tp 1\))?$", model="deepseek_v3", settings=OTHERS)  # fmt: skip
def one_rank_counts_no_tokens(rank: int) -> Patch:
    def counted(own: Any, *args: Any, **more: Any) -> None:
        if rank == 0:
            own(*args, **more)

    return around(ExpertBalance, "_count", counted)


# --- corrections --------------------------------------------------------------------------------------------------


@fault("pp=2", "dp=2 zero=1", first=CORRECTION, cause="more than the mean load", settings=MIXTURE)
def corrections_move_to_the_fuller_expert(rank: int) -> Patch:
    def wrong(own: Any, self: ExpertBalance, loads: ExpertLoads) -> None:
        self._settings = self._settings.model_copy(update={"speed": -abs(self._settings.speed)})
        own(self, loads)

    return around(ExpertBalance, "apply", wrong)


@fault("dp=2 zero=1", "dp=3 zero=2", first=r"buffer blocks\.\d\.ffn\.router\.correction, step [12]$",
       cause="by the loads of rank . alone", settings=MIXTURE)  # fmt: skip
def corrections_follow_the_loads_of_one_rank(rank: int) -> Patch:
    def wrong(own: Any, self: ExpertBalance, loads: ExpertLoads) -> None:
        pairs = zip(loads.layers, self._loads, strict=True)
        own(self, replace(loads, layers=tuple(layer._replace(loads=tuple(mine.tolist())) for layer, mine in pairs)))
        for each, layer in zip(self._routers, loads.layers, strict=True):
            each.load.copy_(torch.tensor(layer.loads))

    return around(ExpertBalance, "apply", wrong)


@fault("dp=2 zero=1", first=r"buffer blocks\.0\..*\.correction, in the job's own precision$",
       cause="a step that updates nothing must leave all buffers", settings=MIXTURE, is_fp16=True)  # fmt: skip
def a_skipped_step_moves_corrections(rank: int) -> Patch:
    """A step that updates moves them once; what a skipped step has changed stays."""
    stats = dict[ExpertBalance, ExpertLoads]()

    def sums(result: Any, self: ExpertBalance, *_: Any) -> Any:
        stats[self] = result[0]
        return result

    def update(own: Any, engine: TrainingEngine, *args: Any, **options: Any) -> Any:
        outcome = own(engine, *args, **options)
        if not outcome.is_finite:
            engine.balance.apply(stats[engine.balance])
        return outcome

    return all_of(changed(ExpertBalance, "loads_of", sums), around(TrainingEngine, "_update", update))


# --- sums of gradients over ranks ---------------------------------------------------------------------------------


def _summed_over(pattern: str, *dimensions: str) -> Patch:
    def change(sharding: ModelSharding) -> ModelSharding:
        rules = {n: replace(r, partial_over=dimensions) for n, r in sharding.rules.items() if fnmatch(n, pattern)}
        assert rules, pattern
        return replace(sharding, rules={**sharding.rules, **rules})

    return _split_otherwise(change)


@fault("tp=2 sp=true", "tp=2 sp=true dp=2 zero=2", first=r"gradient blocks\.1\.ffn\.router\.weight, step 1$",
       cause=SUMMAND, settings=MIXTURE)  # fmt: skip
def gradients_of_routers_are_not_summed_over_pieces(rank: int) -> Patch:
    return _summed_over("*.router.weight", "dp", "cp")


@fault("tp=2 sp=true", first=r"gradient blocks\.1\.ffn\.experts\.(up|down), step 1$", cause=SUMMAND, settings=MIXTURE)
def gradients_of_experts_are_not_summed_over_pieces(rank: int) -> Patch:
    return _summed_over("*.experts.*", "dp", "cp")


STALE = ("model.experts={count=16, per_token=1, hidden=16}", "model.balance={kind='row', z_weight=0.01}")


@fault("dp=2 zero=1 microbatches=6", first=GRADIENT.replace("(?!norm,)", r"blocks\..*experts"),
       cause=r"numbers .* alone differ; in number \d+ it is made of .* micro-batch", settings=STALE)  # fmt: skip
def experts_without_tokens_keep_the_gradient_before(rank: int) -> Patch:
    before, calls = dict[object, Tensor](), Counter[object]()

    def wrong(own: Any, grad: Tensor, x: Tensor, stops: Tensor) -> Tensor:
        result = own(grad, x, stops)
        calls[result.shape] += 1
        layer = result.shape, calls[result.shape] % 2  # Backward goes through both layers in turn
        is_empty = stops.diff(prepend=stops.new_zeros(1)) == 0
        before[layer] = torch.where(is_empty.view(-1, 1, 1), before.get(layer, result), result)
        return before[layer].clone()

    return around(experts, "_weight_gradient", wrong)


LATENT = (
    "model.latent_attention={query_rank=24, key_value_rank=16, rotary_head_dim=4, plain_head_dim=8, value_head_dim=6}",
    "model.kv_heads=4",
)


@fault("tp=2", "tp=2 dp=2 zero=2", first=r"activation gradient blocks\.1\.attention\.key_value_down, step 1$",
       cause=r"has a summand of \d+ of its \d+ elements: the sum over ranks", settings=LATENT)  # fmt: skip
def the_gradient_of_the_shared_key_stays_local(rank: int) -> Patch:
    def wrong(x: Tensor, dim: int, group: Any) -> Tensor:
        return x.clone() if x.shape[-1] == 4 else summed(x, dim, group)

    summed = boundary_functions.OPERATIONS["sum"]
    return replaced(boundary_functions, "OPERATIONS", lambda own: {**own, "sum": wrong})
