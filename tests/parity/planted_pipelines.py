"""Mistakes in pipelines: micro-batches, stages, activations and gradients that cross borders, deferred gradients."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from motet.parallel.data_parallel.comm_units import SyncGroupPlan
from motet.parallel.linear import WeightGradientQueue
from motet.parallel.model_sharding import ModelSharding
from motet.parallel.pipeline.pipeline_schedule import PipelineAction
from motet.parallel.pipeline.player import PipelinePlayer
from motet.parallel.pipeline.stages.stage_module import PipelineStages
from motet.train.engine import TrainingEngine
from motet.train.pipeline import pipeline_step
from motet.train.pipeline.pipeline_step import MicroBatchWork, PipelineEngine, SharedGradients
from motet.train.step import MicroBatchLoop
from parity.faults import Patch, around, changed, fault, nothing
from parity.planted_steps import losses_divided

PP, GPIPE, HYBRID = "pp=2 microbatches=4", "pp=2 microbatches=4 schedule=gpipe", "pp=2 dp=2 zero=1 microbatches=3"
ZERO_BUBBLE = "pp=2 chunks=2 schedule=zb-v microbatches=4"
DEEP = ("model.layers=4",)
STAGE_1 = r"1 \(pp 1( of dp \d)?\)"

# --- micro-batches ------------------------------------------------------------------------------------------------


def _reads(number: Callable[[int, int], int]) -> Patch:
    """A rank takes micro-batch `number(index, count)` for another one."""

    def wrong(own: Any, self: PipelineEngine, read: Any, count: int, **how: Any) -> Any:
        return own(self, lambda index: read(number(index, count)), count, **how)

    return around(PipelineEngine, "step", wrong)


LOST = "^no rank computes rows 9, 10 and 11 of the batch; row 6 is computed 2 times"


@fault(PP, first="sample tokens, step 1$", cause=LOST)
def the_last_microbatch_of_a_pipeline_is_lost(rank: int) -> Patch:
    return _reads(lambda index, count: min(index, count - 2))


@fault(PP, first="sample tokens, step 1$", cause="^no rank computes rows 0, 1 and 2 of the batch; row 3 is computed 2")
def a_stage_repeats_a_microbatch(rank: int) -> Patch:
    return _reads(lambda index, count: max(index, 1)) if rank == 1 else nothing()


@fault(
    GPIPE,
    first=r"activation gradient blocks\.0, step 1$",
    cause="^micro-batch (0 has that of micro-batch 1, rows 3, 4 and 5|1 has that of micro-batch 0, rows 0, 1 and 2) of",
)
def activations_of_two_microbatches_are_swapped_in_backward(rank: int) -> Patch:
    """The activation of one meets the gradient of another."""
    swapped = {0: 1, 1: 0}

    def wrong(own: Any, player: PipelinePlayer, action: PipelineAction) -> Any:
        if action.kind == "B" and action.microbatch in swapped:
            kept = vars(player).setdefault("kept", dict(player._kept))
            player._kept[0, action.microbatch] = kept[0, swapped[action.microbatch]]
        return own(player, action)

    return around(PipelinePlayer, "_compute", wrong) if rank == 0 else nothing()


def _taken(change: Callable[[PipelinePlayer, int, Sequence[Tensor]], Sequence[Tensor]], is_gradient: bool) -> Patch:
    """`change(player, microbatch, tensors)` in the place of what arrived."""

    def wrong(own: Any, player: PipelinePlayer, stage: int, microbatch: int, **how: Any) -> Any:
        tensors = own(player, stage, microbatch, **how)
        return change(player, microbatch, tensors) if how["is_gradient"] == is_gradient else tensors

    return around(PipelinePlayer, "_take", wrong)


@fault(
    PP,
    HYBRID,
    first=r"activation blocks\.1\.attention_norm, step 1$",
    cause="^micro-batch (1 has that of micro-batch 0|2 has that of micro-batch 1|3 has that of micro-batch 2), rows ",
)
def a_stage_computes_with_the_activation_before(rank: int) -> Patch:
    """A buffer is read before the new activation has arrived in it."""

    def stale(player: PipelinePlayer, microbatch: int, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        before, vars(player)["before"] = vars(player).get("before", tensors), tensors
        return [each.detach().clone().requires_grad_(each.requires_grad) for each in before]

    return _taken(stale, is_gradient=False)


@fault(
    PP,
    first="random mask block 1 dropout 1, step 1$",
    cause=r"^it is of rows 0, 1 and 2 of the batch$",
    settings=("model.dropout=0.1",),
)
def a_stage_draws_the_masks_of_the_first_microbatch(rank: int) -> Patch:
    def wrong(own: Any, loop: MicroBatchLoop, step: int, read: Any, index: int) -> MicroBatchWork:
        microbatch: MicroBatchWork = own(loop, step, read, index)
        vars(loop).setdefault("first", microbatch.context)
        return replace(microbatch, context=vars(loop)["first"])

    return around(MicroBatchLoop, "_microbatch", wrong) if rank == 1 else nothing()


# --- stages -------------------------------------------------------------------------------------------------------


def _runs_blocks(*stages: range) -> Patch:
    """Stages run other blocks than the plan says."""

    def wrong(own: Any, self: PipelineStages, module: Any, sharding: ModelSharding) -> None:
        own(self, module, replace(sharding, stages=stages))

    return around(PipelineStages, "__init__", wrong)


@fault(
    PP,
    first=r"activation blocks\.2\.attention_norm, step 1$",
    cause=rf"^no rank has it: it belongs to stage 1 of rank {STAGE_1}$",
    settings=DEEP,
)
def a_block_is_computed_by_nobody(rank: int) -> Patch:
    return _runs_blocks(range(2), range(3, 4)) if rank == 1 else nothing()


@fault(
    PP,
    first=r"activation blocks\.1\.attention_norm, step 1$",
    cause=rf"^rank {STAGE_1} computes it, but it belongs to stage 0 of rank 0 \(pp 0\)$",
    settings=DEEP,
)
def a_block_is_computed_by_two_stages(rank: int) -> Patch:
    return _runs_blocks(range(2), range(1, 4)) if rank == 1 else nothing()


# --- what crosses borders -----------------------------------------------------------------------------------------

BORDER = r"activation gradient blocks\.0, step 1$"
SENT_BACK = r"sent back by stage 1 to stage 0"


@fault(PP, first=BORDER, cause=rf"^it is 0 throughout, {SENT_BACK}, in micro-batch 2 alone$")
def the_gradient_of_an_activation_is_dropped(rank: int) -> Patch:
    def zero(player: PipelinePlayer, microbatch: int, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return [torch.zeros_like(each) for each in tensors] if microbatch == 2 else tensors

    return _taken(zero, is_gradient=True)


@fault(PP, HYBRID, first=BORDER, cause="^its numbers were rounded to bfloat16")
def gradients_are_rounded_on_the_way(rank: int) -> Patch:
    def rounded(player: PipelinePlayer, microbatch: int, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return [each.bfloat16().to(each.dtype) for each in tensors]

    return _taken(rounded, is_gradient=True)


# --- gradients of parameters --------------------------------------------------------------------------------------

TIED = r"gradient embedding\.weight, step 1$"


@fault(
    PP,
    first=TIED,
    cause=rf"^each rank has a summand of it: the sum over ranks 0 \(pp 0\) and {STAGE_1} is missing$",
)
def a_tied_weight_is_not_synchronised(rank: int) -> Patch:
    return around(SharedGradients, "finish", lambda own, shared: None)


@fault(PP, first="gradient norm, step 1$", cause=r"^embedding\.weight are counted 2 times, once by each rank$")
def the_norm_counts_the_tied_weight_twice(rank: int) -> Patch:
    def wrong(counted: frozenset[str], plan: SyncGroupPlan, rank: int) -> frozenset[str]:
        return counted | {"embedding.weight"}.intersection(plan.shapes)

    return changed(SyncGroupPlan, "counted_names", wrong)


@fault(PP, HYBRID, first="activation gradient .*, step 1$", cause="divided by . = micro-batches of a rank")
def losses_are_divided_by_the_microbatches_of_a_pipeline(rank: int) -> Patch:
    return losses_divided(lambda loop, batch: loop.layout.sharding.microbatches)


COUNTED_TWICE = rf"^it (is 2 times what it should be: multiplied by 2 = .*pp|has that of rank {STAGE_1} twice)"


@fault(PP, HYBRID, first="target tokens, step 1$", cause=COUNTED_TWICE)
def every_stage_counts_its_targets(rank: int) -> Patch:
    return around(TrainingEngine, "reports", lambda own, self, metric: metric == "targets" or own(self, metric))


@fault(
    HYBRID,
    first=r"gradient norm\.weight, step 1$",
    cause="leaves out the contribution of micro-batch 2 of rank",
)
def gradients_of_the_last_microbatch_are_not_reduced(rank: int) -> Patch:
    def wrong(own: Any, self: Any, engines: Any, backwards: int) -> None:
        own(self, engines, backwards - 1)

    return around(pipeline_step._StageGradients, "__init__", wrong)


def _weight_gradients(times: int) -> Patch:
    """Stage 3, on the first rank, computes weight gradients of micro-batch 1 as many times."""

    def wrong(own: Any, queue: WeightGradientQueue, key: object) -> None:
        if key == (3, 1):
            queue._deferred[key] = queue._deferred[key] * times
        own(queue, key)

    return around(WeightGradientQueue, "compute", wrong)


WEIGHT = r"gradient blocks\.3\.ffn\.down\.weight, step 1$"
OF_MICROBATCH = r"contribution of micro-batch 1 of rank 0 \(pp 0\)"


@fault(ZERO_BUBBLE, first=WEIGHT, cause=f"it leaves out the {OF_MICROBATCH}", settings=DEEP)
def deferred_weight_gradients_are_dropped(rank: int) -> Patch:
    return _weight_gradients(0)


@fault(ZERO_BUBBLE, first=WEIGHT, cause=f"it has the {OF_MICROBATCH} twice", settings=DEEP)
def deferred_weight_gradients_are_computed_twice(rank: int) -> Patch:
    return _weight_gradients(2)
