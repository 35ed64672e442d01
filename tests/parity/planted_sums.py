"""Mistakes in what travels between ranks, and in what comes of it."""

from contextlib import AbstractContextManager
from typing import Any

import torch

from motet.collectives.execute.work_queue import CompletedWork
from motet.parallel.data_parallel import fsdp
from motet.parallel.data_parallel.bucketed_zero import BucketedDataParallel
from motet.parallel.data_parallel.communication.communicator import DataParallelCommunicator
from motet.parallel.data_parallel.flat_parameters import GradientBuffer
from motet.train.optimizer.sharded_optimizer import ShardedOptimizer
from parity.faults import GRADIENT, all_of, changed, fault, replaced

ALONE = r"contribution of rank \d alone"
Patch = AbstractContextManager[object]


@fault("dp=2 zero=0", "dp=3 zero=0", first=GRADIENT, cause=ALONE)
def the_sum_over_replicas_is_missing(rank: int) -> Patch:
    return replaced(DataParallelCommunicator, "all_reduce", lambda own: lambda self, number, shard: CompletedWork())


@fault("dp=2 zero=1", "dp=3 zero=2", "dp=2 zero=3", first=GRADIENT, cause=ALONE)
def the_sum_over_shards_is_missing(rank: int) -> Patch:
    def wrong(own: Any) -> Any:
        def scatter(
            self: DataParallelCommunicator, number: int, shard: torch.Tensor, whole: torch.Tensor
        ) -> CompletedWork:
            shard.view(-1).copy_(whole.view(self.mesh.shard_group.world, -1)[self.mesh.shard_group.rank])
            return CompletedWork()

        return scatter

    return replaced(DataParallelCommunicator, "reduce_scatter", wrong)


@fault("dp=3 zero=0", "dp=2 zero=0 microbatches=2", first=GRADIENT, cause=r"is [23] times.*dp")
def replicas_are_summed_twice(rank: int) -> Patch:
    def wrong(own: Any) -> Any:
        def twice(self: DataParallelCommunicator, number: int, shard: torch.Tensor) -> Any:
            own(self, number, shard).wait()
            return own(self, number, shard)

        return twice

    return replaced(DataParallelCommunicator, "all_reduce", wrong)


@fault("dp=3 zero=0", "dp=4 zero=2 shard_group=2", first=GRADIENT, cause=r"divided by.*(dp|replicas)")
def replicas_are_averaged(rank: int) -> Patch:
    def wrong(own: Any) -> Any:
        def mean(self: DataParallelCommunicator, number: int, shard: torch.Tensor) -> Any:
            own(self, number, shard).wait()
            shard.div_(self.mesh.replica_group.world)
            return CompletedWork()

        return mean

    return replaced(DataParallelCommunicator, "all_reduce", wrong)


@fault(
    "dp=4 zero=1 shard_group=2",
    "dp=4 zero=3 shard_group=2",
    first=GRADIENT,
    cause=r"leaves out the contribution of rank",
)
def a_hybrid_forgets_its_replicas(rank: int) -> Patch:
    return replaced(DataParallelCommunicator, "all_reduce", lambda own: lambda self, number, shard: CompletedWork())


@fault("dp=4 zero=1 shard_group=2", first=GRADIENT, cause="changed while it was summed")
def a_hybrid_sums_over_the_wrong_ranks(rank: int) -> Patch:
    def wrong(own: Any) -> Any:
        def other(self: DataParallelCommunicator, number: int, shard: torch.Tensor) -> Any:
            from motet.collectives.execute import api

            return api.all_reduce(shard, self.mesh.shard_group, async_op=True)

        return other

    return replaced(DataParallelCommunicator, "all_reduce", wrong)


@fault("dp=2 zero=1", "dp=3 zero=2", first=GRADIENT, cause="belongs at element .* of gradient")
def a_rank_gets_the_shard_of_another(rank: int) -> Patch:
    def wrong(own: Any) -> Any:
        def shifted(self: DataParallelCommunicator, number: int, shard: torch.Tensor, whole: torch.Tensor) -> Any:
            world = self.mesh.shard_group.world
            return own(self, number, shard, whole.view(world, -1).roll(1, 0).reshape(-1).contiguous())

        return shifted

    return replaced(DataParallelCommunicator, "reduce_scatter", wrong)


SMALL = ("communication.bucket_mib=0.01", "communication.first_bucket_mib=0.01")


@fault("dp=2 zero=0", "dp=2 zero=2", first=GRADIENT, cause=ALONE, settings=SMALL)
def one_bucket_is_not_summed(rank: int) -> Patch:
    def scatter(own: Any) -> Any:
        def some(self: DataParallelCommunicator, number: int, *tensors: torch.Tensor) -> Any:
            if number != 1:
                return own(self, number, *tensors)
            if len(tensors) == 2:
                tensors[0].copy_(tensors[1].view(self.mesh.shard_group.world, -1)[self.mesh.shard_group.rank])
            return CompletedWork()

        return some

    return all_of(
        replaced(DataParallelCommunicator, "reduce_scatter", scatter),
        replaced(DataParallelCommunicator, "all_reduce", scatter),
    )


@fault("dp=2 zero=1", "dp=3 zero=2", first="parameter .*", cause="not updated, though its master was")
def what_others_updated_is_not_gathered(rank: int) -> Patch:
    return replaced(BucketedDataParallel, "_start_gathers", lambda own: lambda self, buckets: None)


@fault(
    "dp=2 zero=0 microbatches=2",
    "dp=2 zero=1 microbatches=2",
    first=GRADIENT,
    cause="leaves out the contribution of micro-batch 0",
)
def only_the_last_microbatch_counts(rank: int) -> Patch:
    return changed(GradientBuffer, "begin_backward", lambda _, buffer: buffer.begin_step())


@fault("dp=2 zero=2 microbatches=2", first=GRADIENT, cause="leaves out the contribution of micro-batch")
def shards_of_microbatches_replace_each_other(rank: int) -> Patch:
    def first(_: None, parallel: BucketedDataParallel, *flags: bool) -> None:
        parallel._is_first_microbatch = True

    return changed(BucketedDataParallel, "begin_backward", first)


@fault("dp=2 zero=0", first=GRADIENT, cause="times the clipped gradient of the step before too much")
def gradients_are_not_cleared(rank: int) -> Patch:
    def wrong(own: Any) -> Any:
        def keep(self: GradientBuffer) -> None:
            if not vars(self).setdefault("begun", False):
                vars(self)["begun"] = True
                own(self)

        return keep

    return replaced(GradientBuffer, "begin_step", wrong)


@fault("dp=2 zero=3", "dp=3 zero=3", first=GRADIENT, cause="divided by.*dp")
def torch_averages_at_stage_3(rank: int) -> Patch:
    def wrong(found: Any, unit: Any, number: int, carry: DataParallelCommunicator) -> Any:
        unit.set_gradient_divide_factor(float(carry.mesh.shard_group.world))
        return found

    return changed(fsdp, "_install_collectives", wrong)


@fault("dp=4 zero=3 shard_group=2", first=GRADIENT, cause="leaves out the contribution of rank")
def stage_3_forgets_its_replicas(rank: int) -> Patch:
    return replaced(fsdp._HSDPAllReduceHook, "__call__", lambda own: lambda self, shard: None)


@fault("dp=2 zero=1", "dp=2 zero=0", first=GRADIENT, cause="in float32")
def gradients_are_summed_in_fewer_bits(rank: int) -> Patch:
    def wrong(_: None, buffer: GradientBuffer, number: int) -> None:
        buffer.bucket(number).copy_(buffer.bucket(number).float())

    return changed(GradientBuffer, "zero_missing", wrong)


@fault("dp=2 zero=0", "dp=2 zero=1", first=GRADIENT, cause="belongs 1 element before")
def a_gradient_lands_next_to_its_place(rank: int) -> Patch:
    def wrong(_: None, buffer: GradientBuffer, number: int) -> None:
        buffer.bucket(number).copy_(buffer.bucket(number).roll(1))

    return changed(GradientBuffer, "zero_missing", wrong)


@fault("dp=2 zero=1", "dp=3 zero=2", first="activation .*", cause="step before")
def a_forward_computes_with_parameters_that_others_updated_later(rank: int) -> Patch:
    """The gather is waited for after backward."""

    def update(own: Any) -> Any:
        def remember(self: Any, *given: Any) -> None:
            self.old = self.flat_parameters.compute.clone()
            own(self, *given)

        return remember

    def begin(own: Any) -> Any:
        def swap(self: Any) -> None:
            self.fresh = self.flat_parameters.compute.clone()
            if hasattr(self, "old"):
                mine = [(part.flat_slice, part.master.clone()) for part in self.flat_parameters.optimizer_slices]
                self.flat_parameters.compute.copy_(self.old)
                for place, values in mine:
                    self.flat_parameters.compute[place] = values
            own(self)

        return swap

    def end(own: Any) -> Any:
        def arrive(self: Any) -> None:
            own(self)
            self.flat_parameters.compute.copy_(self.fresh)

        return arrive

    return all_of(
        replaced(BucketedDataParallel, "update", update),
        replaced(BucketedDataParallel, "begin_step", begin),
        replaced(BucketedDataParallel, "end_backward", end),
    )


@fault("dp=2 zero=0", "dp=4 zero=2 shard_group=2", first="gradient norm, ", cause=r"counted 2 times.*(dp|replicas)")
def the_norm_counts_every_replica(rank: int) -> Patch:
    def wrong(_: float, optimizer: ShardedOptimizer) -> float:
        return float(sum(part.square().sum() for part in optimizer.sharded_parameters.reduced_gradients()))

    return changed(ShardedOptimizer, "squared_norm", wrong)


@fault("dp=2 zero=3 secondary_group=1", "dp=2 zero=3", first="gradient norm, ", cause="of what rank . has alone")
def shards_of_other_ranks_are_left_out_of_the_norm(rank: int) -> Patch:
    return changed(ShardedOptimizer, "squared_norm", lambda square, _: 0.0 if rank else square)
