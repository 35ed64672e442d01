"""Mistakes in initial values, in evaluation, and in the order of work."""

from dataclasses import replace
from typing import Any

import torch

from motet.core.batch import Batch
from motet.data.samples.loader import BatchLoader
from motet.parallel.data_parallel.communication.communicator import DataParallelCommunicator
from motet.parallel.data_parallel.fsdp import FSDP2DataParallel
from motet.train import build, engine, evaluation, state
from motet.train.optimizer.sharded_optimizer import ShardedOptimizer
from parity.faults import GRADIENT, all_of, changed, fault, nothing, replaced
from parity.planted_states import with_groups
from parity.planted_steps import Patch


@fault("dp=2 zero=0", "dp=2 zero=3", first="starting parameter .*in a row", cause="initial values .*rank 1 alone")
def ranks_have_different_initial_values(rank: int) -> Patch:
    def other(own: Any) -> Any:
        return lambda settings, seed, *rest: own(settings, seed + rank, *rest)

    return all_of(
        replaced(build, "build_trainable_model", other),
        replaced(engine, "broadcast_parameters_and_buffers", lambda own: lambda *_: None),
    )


@fault("dp=2 zero=3", first="starting parameter .*", cause="what belongs at element")
def pieces_are_stored_at_the_place_of_each_other(rank: int) -> Patch:
    def wrong(own: Any) -> Any:
        class Mirrored:
            @staticmethod
            def from_values(values: torch.Tensor, shape: tuple[int, ...], start: int) -> Any:
                return own.from_values(values, shape, torch.Size(shape).numel() - values.numel() - start)

        return Mirrored

    return replaced(state, "CheckpointShard", wrong)


@fault("dp=2 zero=1", "dp=3 zero=3", first="sample rows,", cause="of rows", model="bert")
def rows_are_numbered_within_the_rank(rank: int) -> Patch:
    return changed(BatchLoader, "batch", lambda batch, *_: replace(batch, rows=torch.arange(len(batch.rows))))


def _evaluated(change: Any) -> Patch:
    def wrong(own: Any) -> Any:
        def evaluated(model: Any, *rest: Any, **options: Any) -> Any:
            try:
                return own(model, *rest, **options)
            finally:
                change(model.module)

        return evaluated

    return replaced(build, "evaluate", wrong)


@fault("dp=2 zero=1", first="random mask .*step 2, steps in a row", cause="no rank draws it for rows", model="bert")
def a_rank_trains_as_in_evaluation(rank: int) -> Patch:
    return _evaluated(lambda module: module.eval()) if rank else nothing()


@fault("dp=2 zero=1", first="modules called as in training", cause="in training mode.*rank 1", model="bert")
def a_rank_is_evaluated_in_training_mode(rank: int) -> Patch:
    def wrong(own: Any) -> Any:
        def evaluated(model: Any, batch: Batch, has_classes: bool) -> Any:
            model.module.train()
            return own(model, batch, has_classes)

        return evaluated

    return replaced(evaluation, "_loss_sums", wrong) if rank else nothing()


@fault("dp=3 zero=2", "dp=2 zero=3", first="state master/.*", cause="with eps = ")
def eps_grows_with_the_ranks(rank: int) -> Patch:
    return with_groups(lambda group: group.update(eps=3 * group["eps"]))


@fault("dp=2 zero=1", "dp=2 zero=3", first="state master/.*step 2", cause="learning rate of the step before")
def a_rank_is_told_the_learning_rate_late(rank: int) -> Patch:
    def wrong(own: Any) -> Any:
        def update(self: ShardedOptimizer, learning_rate: float) -> None:
            now = self.__dict__.get("told", learning_rate)
            self.__dict__["told"] = learning_rate
            own(self, now)

        return update

    return replaced(ShardedOptimizer, "update", wrong) if rank else nothing()


@fault("dp=3 zero=2", first=GRADIENT, cause="the contribution of rank 2 was rounded to bfloat16")
def a_rank_rounds_what_it_sends(rank: int) -> Patch:
    def wrong(own: Any) -> Any:
        def sent(self: DataParallelCommunicator, number: int, shard: torch.Tensor, whole: torch.Tensor) -> Any:
            whole.copy_(whole.to(torch.bfloat16))
            return own(self, number, shard, whole)

        return sent

    return replaced(DataParallelCommunicator, "reduce_scatter", wrong) if rank == 2 else nothing()


@fault("dp=3 zero=2", "dp=2 zero=1", first="gradient norm", cause="of what rank . has alone")
def each_rank_clips_by_its_own_norm(rank: int) -> Patch:
    return changed(engine, "sum_scalars", lambda summed, values, *_: [summed[0], values[1], *summed[2:]])


@fault("dp=2 zero=3 min_shard_numel=100", first="gradient norm", cause="it has .*norm.* twice")
def what_stays_whole_is_in_the_norm_twice(rank: int) -> Patch:
    def wrong(own: Any, parallel: FSDP2DataParallel) -> Any:
        return [*own, *(parallel.unsharded.reduced_gradients() if parallel.unsharded else ())]

    return changed(FSDP2DataParallel, "reduced_gradients", wrong)
