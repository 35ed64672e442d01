"""Mistakes with the scale of the loss in float16."""

import math
from typing import Any

from torch import Tensor

from motet.precision.recipe import LossScaler
from motet.train import engine
from motet.train.engine import TrainingEngine
from parity.faults import Patch, around, changed, fault

LAYOUTS = ("dp=2 zero=1", "dp=2 zero=3 microbatches=2", "tp=2", "pp=2")
ALONE = r"gradients overflow on rank 1( \(.*\))? alone, and rank 0( \(.*\))? updates its part; all ranks must skip"


@fault(*LAYOUTS, first="the decision to skip a step", cause=ALONE, is_fp16=True)
def each_rank_decides_alone_whether_its_gradients_overflow(rank: int) -> Patch:
    def own_norm(sums: list[float], local: Tensor, *_: Any) -> list[float]:
        return [local[1].item() if index == 1 and not math.isfinite(each) else each for index, each in enumerate(sums)]

    return changed(engine, "sum_scalars", own_norm)


@fault(*LAYOUTS, first="the clipped gradients", cause="2 times .*: the scale is not divided out", is_fp16=True)
def the_loss_scale_is_not_divided_out_before_clipping(rank: int) -> Patch:
    def scaled(own: Any, self: TrainingEngine, norm: float, count: float) -> Any:
        return own(self, norm * self.backward_scale, count)

    return around(TrainingEngine, "gradient_scale", scaled)


@fault(*LAYOUTS, first="the gradient norm", cause="0.5 times .*: the scale is not divided out", is_fp16=True)
def the_loss_scale_stays_in_the_norm(rank: int) -> Patch:
    def scaled(own: Any, self: TrainingEngine, *args: Any, **options: Any) -> Any:
        stats = own(self, *args, **options)
        return engine.StepStats(**{**vars(stats), "grad_norm": stats.grad_norm * stats.loss_scale})

    return around(TrainingEngine, "update", scaled)


@fault(
    *LAYOUTS,
    first="the loss scale from a checkpoint",
    cause="saved as 1024, and restored it is 2048, not 1024",
    is_fp16=True,
)
def the_loss_scale_is_not_restored(rank: int) -> Patch:
    return around(LossScaler, "restored", lambda own, self, state: self)
