"""Mistakes in what backward computes again."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from motet.memory import kept_products, recompute
from motet.models.arch.attention_and_feed_forward import FeedForward
from motet.models.layout_invariant_dropout import LayoutInvariantDropoutMode
from motet.models.torch_private import is_in_backward
from parity.faults import Patch, around, changed, fault, replaced

FULL = ("memory.recompute=full",)
NORMED = (*FULL, "model={factory='train.trainable_user_models:NormedBlocks'}")
AVERAGED = (*FULL, "model={factory='train.trainable_user_models:AveragedBlocks'}")
MASK = "backward computes the forward again and gets another random mask block 1 dropout 1 again"
TWICE = "is changed by backward, which computes the forward again: it repeats the counting of the forward"
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


KEPT = "the bytes that a block keeps for backward"
LAYOUTS = ("dp=2 zero=1", "dp=2 zero=3 microbatches=2", "tp=2 sp=true", "pp=2")
EVERYTHING = (
    r"but full recomputation keeps only its input and output; .*, which aten.*; backward does not compute it again"
)


@fault(*LAYOUTS, first=KEPT, cause=EVERYTHING, settings=FULL)
def recomputation_keeps_everything(rank: int) -> Patch:
    def only_called(own: Callable[..., Any], call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        for name in ("use_reentrant", "context_fn", "preserve_rng_state"):
            kwargs.pop(name)
        return call(*args, **kwargs)

    return around(recompute, "checkpoint", only_called)


@fault(*LAYOUTS, first=KEPT, cause=r"blocks.0 .* only its input and output; .*aten.relu.* makes$", settings=FULL)
def a_recomputed_block_keeps_a_tensor(rank: int) -> Patch:
    kept = list[Tensor]()

    def keep(own: Callable[..., Any], self: FeedForward, x: Tensor) -> Any:
        kept.append(torch.relu(x))
        return own(self, x)

    return around(FeedForward, "forward", keep)


SELECTIVE = ("memory.recompute=selective",)
TOO_MUCH = r"blocks.0 .* selective recomputation keeps only its input and output, and \d+ bytes of matrix products"


@fault(*LAYOUTS, first=KEPT, cause=TOO_MUCH, settings=SELECTIVE)
def selective_recomputation_keeps_products_of_attention(rank: int) -> Patch:
    more = {torch.ops.aten.bmm.default, torch.ops.aten._softmax.default, torch.ops.aten.silu.default}
    return replaced(kept_products, "KEPT_OPERATORS", lambda operators: operators | more)
