"""Mistakes that show in a job's own precision alone: parameters that are not their rounded masters, losses, sums."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from motet.collectives.execute import api
from motet.parallel.data_parallel.flat_parameters import FlatParameters, GradientBuffer
from motet.train import engine, step
from motet.train.optimizer.sharded_optimizer import ShardedOptimizer
from parity.faults import GRADIENT, Patch, all_of, around, around_action, changed, fault, nothing


def no_fault(rank: int) -> Patch:
    return nothing()


TIED = "pp=2 microbatches=4"
ITS_MASTER = "it is not its master rounded to bfloat16"


@fault(
    TIED,
    first="parameter embedding.weight, step 3",
    cause=f"on rank 1 .*{ITS_MASTER}: it was not updated: it keeps",
    recipe="bf16",
)
def a_tied_copy_goes_stale(rank: int) -> Patch:
    """The rank of the last stage does not cast the masters of the bucket that both stages have."""

    def wrong(own: Any, flat: FlatParameters, slices: Any = None) -> None:
        if "embedding.weight" not in flat._members or not vars(flat).setdefault("filled", False):
            own(flat, slices)
        vars(flat)["filled"] = True

    return around(FlatParameters, "cast_masters", wrong) if rank == 1 else nothing()


def _cast_with(cast: Callable[[Tensor, torch.dtype], Tensor]) -> Patch:
    """Masters become parameters in another way, but for the initial values."""

    def wrong(own: Any, flat: FlatParameters, slices: Any = None) -> None:
        for each in flat.optimizer_slices if slices is None else slices:
            values = flat.compute[each.flat_slice]
            if each.master.data_ptr() != values.data_ptr():
                values.copy_(cast(each.master, values.dtype))

    return around(FlatParameters, "cast_masters", wrong)


@fault("dp=2 zero=1", "dp=2 zero=0", first="parameter .*, step 2", cause="cut off, not rounded", recipe="bf16")
def masters_are_cut_off(rank: int) -> Patch:
    return _cast_with(lambda master, dtype: (master.view(torch.int32) & -65536).view(torch.float32))


@fault("dp=2 zero=1", first="parameter .*, step 2", cause="rounded to float16 first", recipe="bf16")
def masters_are_rounded_twice(rank: int) -> Patch:
    return _cast_with(lambda master, dtype: master.half())


@fault("dp=2 zero=2", "tp=2", first="parameter .*, step 2", cause="the neighbour that is further away", recipe="bf16")
def masters_are_rounded_at_random(rank: int) -> Patch:
    generator = torch.Generator().manual_seed(0)

    def cast(master: Tensor, dtype: torch.dtype) -> Tensor:
        noise = torch.randint(65536, master.shape, generator=generator, dtype=torch.int32)
        return ((master.view(torch.int32) + noise) & -65536).view(torch.float32)

    return _cast_with(cast)


def _once_filled(own: Any, owner: Any, *given: Any) -> bool:
    """Whether it is called again; the first call is for restored values."""
    count = vars(owner)["calls"] = vars(owner).get("calls", 0) + 1
    return count > 1


@fault(
    "dp=2 zero=1",
    first="parameter .*, step 3",
    cause="on ranks 0 and 1 it is not.*it was not updated.*rank 1 updates",
    recipe="bf16",
)
def a_rank_gathers_what_it_had(rank: int) -> Patch:
    def wrong(own: Any, flat: FlatParameters, *given: Any) -> None:
        if not _once_filled(own, flat):
            own(flat, *given)

    return around(FlatParameters, "cast_masters", wrong) if rank == 1 else nothing()


@fault(
    "dp=2 zero=0",
    "tp=2",
    first="parameter .*, step 3",
    cause="on rank 1 .*in elements? [0-9 to]* of [0-9]+",
    recipe="fp16",
)
def the_end_of_a_bucket_is_not_cast(rank: int) -> Patch:
    def wrong(own: Any, flat: FlatParameters, *given: Any) -> None:
        before = flat.compute[-3:].clone()
        own(flat, *given)
        if _once_filled(own, flat):
            flat.compute[-3:] = before

    return around(FlatParameters, "cast_masters", wrong) if rank == 1 else nothing()


@fault(
    TIED,
    first="parameter embedding.weight, step 4",
    cause="on rank 0 .*it is not its master rounded to float16: it was not updated: it keeps",
    recipe="fp16",
)
def a_tied_copy_misses_every_second_update(rank: int) -> Patch:
    def wrong(own: Any, flat: FlatParameters, *given: Any) -> None:
        count = vars(flat)["calls"] = vars(flat).get("calls", 0) + 1
        if count != 3 or "embedding.weight" not in flat._members:
            own(flat, *given)

    return around(FlatParameters, "cast_masters", wrong) if rank == 0 else nothing()


@fault(
    "dp=2 zero=1",
    "pp=2",
    first="parameter .*, step 2",
    cause="was not updated: it keeps its earlier value",
    recipe="bf16",
)
def restored_masters_are_not_cast(rank: int) -> Patch:
    return around(ShardedOptimizer, "sync_parameters", lambda own, optimizer: None)


@fault(
    "dp=2 zero=0",
    "tp=2",
    first="state master/.*, step 3",
    cause="rank 0.* and rank 1.* hold copies that should be equal",
    recipe="bf16",
)
def a_master_drifts_on_one_rank(rank: int) -> Patch:
    """Not in float64, and by less than the copies of 16 bits show."""

    def wrong(_: None, optimizer: ShardedOptimizer, *given: Any) -> None:
        for master in optimizer.sharded_parameters.local_masters:
            master[-1:] = torch.nextafter(master[-1:], torch.full_like(master[-1:], torch.inf))

    return changed(ShardedOptimizer, "update", wrong) if rank == 1 else nothing()


@fault(
    "dp=2 zero=0", first="parameter .*, step 3", cause="the slice 1 element before the rounded master", recipe="bf16"
)
def copies_are_one_element_off(rank: int) -> Patch:
    def wrong(own: Any, flat: FlatParameters, *given: Any) -> None:
        own(flat, *given)
        if _once_filled(own, flat):
            flat.compute.copy_(flat.compute.roll(1))

    return around(FlatParameters, "cast_masters", wrong) if rank == 0 else nothing()


@fault("dp=2 zero=2", first="parameter .*, step 3", cause="it is 0.98. times", recipe="bf16")
def copies_alone_are_decayed(rank: int) -> Patch:
    def wrong(own: Any, flat: FlatParameters, *given: Any) -> None:
        own(flat, *given)
        if _once_filled(own, flat):
            flat.compute.mul_(63 / 64)

    return around(FlatParameters, "cast_masters", wrong)


def _sums_of(dtype: torch.dtype, change: Callable[[Tensor], Any]) -> Patch:
    """Reductions of a dtype change what they sum."""

    def wrong(own: Any, *given: Any, **options: Any) -> Any:
        source = options.get("source")
        if (summed := given[-1] if source is None else source).dtype == dtype:
            change(summed)
        return own(*given, **options)

    return around_action("all_reduce", "reduce_scatter", call=wrong)


@fault("dp=2 zero=0", "dp=2 zero=2", first=GRADIENT, cause="it is 1/2 times.*dp", recipe="bf16")
def sums_of_fewer_bits_are_means(rank: int) -> Patch:
    return _sums_of(torch.float32, lambda summed: summed.div_(2))


@fault("dp=2 zero=1", first=GRADIENT, cause="leaves out the contribution of rank 1", recipe="bf16")
def a_rank_sends_nothing_in_fewer_bits(rank: int) -> Patch:
    return _sums_of(torch.float32, torch.Tensor.zero_) if rank == 1 else nothing()


@fault(
    "dp=2 zero=0 microbatches=2", first=GRADIENT, cause="leaves out the contribution of micro-batch 0", recipe="bf16"
)
def the_first_microbatch_is_lost_in_fewer_bits(rank: int) -> Patch:
    return changed(GradientBuffer, "begin_backward", lambda _, buffer: buffer.begin_step())


@fault("dp=2 zero=1", "pp=2", "tp=2", first="mean loss, step 3", cause="as far from one device", recipe="bf16")
def losses_are_kept_in_fewer_bits(rank: int) -> Patch:
    return changed(step.MicroBatchLoop, "_loss_sums", lambda sums, *_: sums.bfloat16().double())


def sums_in_bfloat16(rank: int) -> Patch:
    """Only float32 gradients are rounded, so float64 shows no difference."""

    def rounded(own: Any, *tensors: Any, **how: Any) -> Any:
        for each in tensors:
            if isinstance(each, Tensor) and each.dtype == torch.float32 and each.numel() > 1:
                each.copy_(each.bfloat16())
        return own(*tensors, **how)

    return all_of(around(api, "reduce_scatter", rounded), around(api, "all_reduce", rounded))


def _masters_updated(spoilt: Callable[[Tensor], Tensor]) -> Patch:
    def wrong(_: None, optimizer: ShardedOptimizer, *given: Any) -> None:
        for master in optimizer.sharded_parameters.local_masters:
            master.copy_(spoilt(master))

    return changed(ShardedOptimizer, "_update_masters", wrong)


def masters_in_bfloat16(rank: int) -> Patch:
    return _masters_updated(Tensor.bfloat16)


def a_bit_in_a_master(rank: int) -> Patch:
    return _masters_updated(lambda master: torch.nextafter(master, torch.full_like(master, torch.inf)))


def masters_of_rounded_values(rank: int) -> Patch:
    """Masters are rounded once, when they are made."""

    def wrong(optimizer: ShardedOptimizer, *given: Any) -> ShardedOptimizer:
        for master in optimizer.sharded_parameters.local_masters:
            master.copy_(master.bfloat16())
        return optimizer

    return changed(engine, "build_sharded_optimizer", wrong)
