"""Mistakes in what travels between ranks, and in what comes of it."""

from typing import Any

import torch
from torch import Tensor

from motet.collectives.execute import api
from motet.collectives.execute.work_queue import CompletedWork
from motet.parallel.data_parallel import fsdp
from motet.parallel.data_parallel.bucketed_zero import BucketedDataParallel
from motet.parallel.data_parallel.communication.communicator import DataParallelCommunicator
from motet.parallel.data_parallel.flat_parameters import GradientBuffer
from motet.train.optimizer.sharded_optimizer import ShardedOptimizer
from parity.faults import GRADIENT, LEAVES_OUT, Patch, all_of, around, around_action, changed, fault

ALONE = r"contribution of rank \d alone"


def not_done(*_: Any, **__: Any) -> CompletedWork:
    return CompletedWork()


def _slice_of_rank(communicator: DataParallelCommunicator, whole: torch.Tensor) -> torch.Tensor:
    group = communicator.mesh.shard_group
    return whole.view(group.world, -1)[group.rank]


@fault("dp=2 zero=0", "dp=3 zero=0", first=GRADIENT, cause=ALONE)
def the_sum_over_replicas_is_missing(rank: int) -> Patch:
    return around_action("all_reduce", call=not_done)


@fault("dp=2 zero=1", "dp=3 zero=2", "dp=2 zero=3", first=GRADIENT, cause=ALONE)
def the_sum_over_shards_is_missing(rank: int) -> Patch:
    def wrong(_: Any, communicator: Any, *given: Any, source: torch.Tensor, **options: Any) -> CompletedWork:
        given[-1].view(-1).copy_(_slice_of_rank(communicator, source))
        return CompletedWork()

    return around_action("reduce_scatter", call=wrong)


@fault("dp=3 zero=0", "dp=2 zero=0 microbatches=2", first=GRADIENT, cause=r"is [23] times.*dp")
def replicas_are_summed_twice(rank: int) -> Patch:
    def wrong(own: Any, *given: Any, **options: Any) -> Any:
        own(*given, **options).wait()
        return own(*given, **options)

    return around_action("all_reduce", call=wrong)


@fault("dp=3 zero=0", "dp=4 zero=2 shard_group=2", first=GRADIENT, cause=r"divided by.*(dp|replicas)")
def replicas_are_averaged(rank: int) -> Patch:
    def wrong(own: Any, communicator: Any, *given: Any, **options: Any) -> CompletedWork:
        own(communicator, *given, **options).wait()
        given[-1].div_(communicator.mesh.replica_group.world)
        return CompletedWork()

    return around_action("all_reduce", call=wrong)


HYBRIDS = ("dp=4 zero=1 shard_group=2", "dp=4 zero=3 shard_group=2")


@fault(*HYBRIDS, first=GRADIENT, cause=f"the sum over ranks . and . is wrong: it {LEAVES_OUT} rank")
def a_hybrid_forgets_its_replicas(rank: int) -> Patch:
    return around_action("all_reduce", call=not_done)


@fault("dp=4 zero=1 shard_group=2", first=GRADIENT, cause="changed during the sum")
def a_hybrid_sums_over_the_wrong_ranks(rank: int) -> Patch:
    def wrong(_: Any, communicator: Any, *given: Any, **options: Any) -> Any:
        return api.all_reduce(given[-1], communicator.mesh.shard_group, async_op=True)

    return around_action("all_reduce", call=wrong)


@fault("dp=2 zero=1", "dp=3 zero=2", first=GRADIENT, cause="it is the slice at element .* of gradient")
def a_rank_gets_the_shard_of_another(rank: int) -> Patch:
    def wrong(own: Any, communicator: Any, *given: Any, source: torch.Tensor, **options: Any) -> Any:
        by_rank = source.view(communicator.mesh.shard_group.world, -1)
        return own(communicator, *given, source=by_rank.roll(1, 0).reshape(-1).contiguous(), **options)

    return around_action("reduce_scatter", call=wrong)


SMALL = ("communication.bucket_mib=0.01", "communication.first_bucket_mib=0.01")


@fault("dp=2 zero=0", "dp=2 zero=2", first=GRADIENT, cause=ALONE, settings=SMALL)
def one_bucket_is_not_summed(rank: int) -> Patch:
    def wrong(own: Any, communicator: Any, action: Any, number: int, output: torch.Tensor, **options: Any) -> Any:
        if number != 1:
            return own(communicator, action, number, output, **options)
        if options["source"] is not None:
            output.copy_(_slice_of_rank(communicator, options["source"]))
        return CompletedWork()

    return around_action("reduce_scatter", "all_reduce", call=wrong)


@fault("dp=2 zero=1", "dp=3 zero=2", first="parameter .*", cause="not updated, though its master was")
def what_others_updated_is_not_gathered(rank: int) -> Patch:
    return around(BucketedDataParallel, "_start_gathers", lambda *_: None)


@fault(
    "dp=2 zero=0 microbatches=2",
    "dp=2 zero=1 microbatches=2",
    first=GRADIENT,
    cause=f"local gradient of ranks 0 and 1 is wrong: it {LEAVES_OUT} micro-batch 0",
)
def only_the_last_microbatch_counts(rank: int) -> Patch:
    return changed(GradientBuffer, "begin_backward", lambda _, buffer: buffer.begin_step())


@fault("dp=2 zero=2 microbatches=2", first=GRADIENT, cause=f"{LEAVES_OUT} micro-batch")
def shards_of_microbatches_replace_each_other(rank: int) -> Patch:
    def first(_: None, parallel: BucketedDataParallel, *flags: bool) -> None:
        parallel._is_first_microbatch = True

    return changed(BucketedDataParallel, "begin_backward", first)


@fault("dp=2 zero=0", first=GRADIENT, cause="times the clipped gradient of the step before too much")
def gradients_are_not_cleared(rank: int) -> Patch:
    def wrong(own: Any, buffer: GradientBuffer) -> None:
        if not vars(buffer).get("begun"):
            vars(buffer)["begun"] = True
            own(buffer)

    return around(GradientBuffer, "begin_step", wrong)


@fault("dp=2 zero=3", "dp=3 zero=3", first=GRADIENT, cause="divided by.*dp")
def torch_averages_at_stage_3(rank: int) -> Patch:
    def wrong(own: Any, unit: Any, *given: Any, communicator: DataParallelCommunicator) -> Any:
        found = own(unit, *given, communicator=communicator)
        unit.set_gradient_divide_factor(float(communicator.mesh.shard_group.world))
        return found

    return around(fsdp, "_install_collectives", wrong)


@fault("dp=4 zero=3 shard_group=2", first=GRADIENT, cause=f"{LEAVES_OUT} rank")
def stage_3_forgets_its_replicas(rank: int) -> Patch:
    return around(fsdp._HSDPAllReduceHook, "__call__", lambda *_: None)


@fault(
    "dp=2 zero=1",
    "dp=2 zero=0",
    first=GRADIENT,
    cause="local gradient of ranks 0 and 1 is wrong: it was rounded to float32",
)
def gradients_are_summed_in_fewer_bits(rank: int) -> Patch:
    def wrong(_: None, buffer: GradientBuffer, number: int) -> None:
        buffer.bucket(number).copy_(buffer.bucket(number).float())

    return changed(GradientBuffer, "zero_missing", wrong)


@fault(
    "dp=2 zero=0",
    "dp=2 zero=1",
    first=GRADIENT,
    cause="local gradient of ranks 0 and 1 is wrong: it is the slice 1 element before",
)
def a_gradient_lands_next_to_its_place(rank: int) -> Patch:
    def wrong(_: None, buffer: GradientBuffer, number: int) -> None:
        buffer.bucket(number).copy_(buffer.bucket(number).roll(1))

    return changed(GradientBuffer, "zero_missing", wrong)


@fault("dp=2 zero=1", "dp=3 zero=2", first="used parameter forward/.*", cause="it is its value in the step before")
def a_forward_computes_with_parameters_that_others_updated_later(rank: int) -> Patch:
    """The gather is waited for after backward."""

    def remember(own: Any, parallel: Any, *given: Any) -> None:
        parallel.old = parallel.flat_parameters.compute.clone()
        own(parallel, *given)

    def swap(own: Any, parallel: Any) -> None:
        flat = parallel.flat_parameters
        parallel.fresh = flat.compute.clone()
        if hasattr(parallel, "old"):
            mine = [(part.flat_slice, part.master.clone()) for part in flat.optimizer_slices]
            flat.compute.copy_(parallel.old)
            for place, values in mine:
                flat.compute[place] = values
        own(parallel)

    def arrive(_: None, parallel: Any) -> None:
        parallel.flat_parameters.compute.copy_(parallel.fresh)

    return all_of(
        around(BucketedDataParallel, "update", remember),
        around(BucketedDataParallel, "begin_step", swap),
        changed(BucketedDataParallel, "end_backward", arrive),
    )


@fault("dp=2 zero=0", "dp=4 zero=2 shard_group=2", first="gradient norm, ", cause=r"counted 2 times.*(dp|replicas)")
def the_norm_counts_every_replica(rank: int) -> Patch:
    def wrong(square: Tensor, optimizer: ShardedOptimizer) -> Tensor:
        engines = optimizer.sharded_parameters.engines
        parts = (part for engine in engines for part in engine.reduced_gradients(engine.plan.shapes))
        return square.new_tensor(sum(part.square().sum().item() for part in parts))

    return changed(ShardedOptimizer, "squared_norm", wrong)


@fault("dp=2 zero=3 secondary_group=1", "dp=2 zero=3", first="gradient norm, ", cause="that of rank . alone")
def shards_of_other_ranks_are_left_out_of_the_norm(rank: int) -> Patch:
    return changed(ShardedOptimizer, "squared_norm", lambda square, _: square * (rank == 0))
