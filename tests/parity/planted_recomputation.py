"""Mistakes in what backward computes again."""

from collections.abc import Callable
from typing import Any

from motet.memory import recompute
from motet.models.layout_invariant_dropout import LayoutInvariantDropoutMode
from motet.models.torch_private import is_in_backward
from parity.faults import Patch, around, changed, fault, replaced

FULL = ("memory.recompute=full",)
NORMED = (*FULL, "model={factory='train.trainable_user_models:NormedBlocks'}")
AVERAGED = (*FULL, "model={factory='train.trainable_user_models:AveragedBlocks'}")
MASK = "backward computes the forward again and gets another random mask block 1 dropout 1 again"
TWICE = "is changed by backward, which computes the forward again: it counts what the forward has counted"
STALE = "computes the forward again with another buffer: buffer blocks.1.mean"


@fault("dp=2 zero=1", "pp=2", "tp=2 sp=true", first="activation gradient .*", cause=MASK, model="bert", settings=FULL)
def a_recomputed_mask_differs(rank: int) -> Patch:
    return changed(LayoutInvariantDropoutMode, "_next_site", lambda site, _: site + " again" * is_in_backward())


@fault("dp=1 zero=0", first="(buffer|starting buffer|state) .*", cause=TWICE, settings=NORMED)
def a_recomputed_norm_counts_its_batch_twice(rank: int) -> Patch:
    def keep_none(own: Callable[..., Any], *args: Any) -> list[Any]:
        return []

    return around(recompute, "_buffers_of", keep_none)


@fault("dp=1 zero=0", first="activation gradient .*", cause=STALE, settings=AVERAGED)
def a_recomputed_norm_has_the_buffers_after_its_forward(rank: int) -> Patch:
    """Buffers stay as they are, and are the latest ones in recomputation."""

    def as_now(own: Callable[..., Any]) -> Callable[..., Any]:
        return lambda call, buffers: own(
            call, [b._replace(value=recompute.own_buffers(b.owner)[b.name]) for b in buffers]
        )

    return replaced(recompute._RepeatableCall, "_as_before", as_now)
