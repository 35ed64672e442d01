"""Mistakes in what backward computes again."""

from collections.abc import Callable
from typing import Any

from motet.memory import recompute
from motet.models.layout_invariant_dropout import LayoutInvariantDropoutMode
from motet.models.torch_private import is_in_backward
from parity.faults import Patch, around, changed, fault

FULL = ("memory.recompute=full",)
NORMED = (*FULL, "model={factory='train.trainable_user_models:NormedBlocks'}")


@fault("dp=2 zero=1", "pp=2", "tp=2 sp=true", first="activation gradient .*", cause="", model="bert", settings=FULL)
def a_recomputed_mask_differs(rank: int) -> Patch:
    return changed(LayoutInvariantDropoutMode, "_next_site", lambda site, _: site + " again" * is_in_backward())


@fault("dp=1 zero=0", first="(buffer|starting buffer|state) .*", cause="", settings=NORMED)
def a_recomputed_norm_counts_its_batch_twice(rank: int) -> Patch:
    def keep_none(own: Callable[..., Any], *args: Any) -> list[Any]:
        return []

    return around(recompute, "_buffers_of", keep_none)
