"""Mistakes in initial values, in evaluation, and in the order of work."""

from dataclasses import replace
from typing import Any

import torch

from motet.data.samples.loader import BatchLoader
from motet.parallel.data_parallel.bucketed_zero import BucketedDataParallel
from motet.parallel.data_parallel.composite import CompositeDataParallel
from motet.parallel.shard_spec import ShardSpec
from motet.train import build, evaluation, state
from motet.train.optimizer.sharded_optimizer import ShardedOptimizer
from parity.faults import GRADIENT, Patch, around, around_action, changed, fault, nothing, replaced
from parity.planted_states import with_groups


@fault("dp=2 zero=0", "dp=2 zero=3", first="starting parameter .*in a row", cause="initial values .*rank 1 alone")
def ranks_have_different_initial_values(rank: int) -> Patch:
    return around(
        build, "build_trainable_model", lambda own, job, seed, *rest, **how: own(job, seed + rank, *rest, **how)
    )


@fault("dp=2 zero=3", first="starting parameter .*", cause="the slice at element")
def pieces_are_stored_at_the_place_of_each_other(rank: int) -> Patch:
    def wrong(own: Any) -> Any:
        class Mirrored:
            @staticmethod
            def from_values(values: torch.Tensor, spec: ShardSpec, start: int, **parts: Any) -> Any:
                mirrored = spec.numel - values.numel() - start
                return own.from_values(values, spec, start if parts else mirrored, **parts)

        return Mirrored

    return replaced(state, "CheckpointShard", wrong)


@fault("dp=2 zero=1", "dp=3 zero=3", first="sample rows,", cause="of rows", model="bert")
def rows_are_numbered_within_the_rank(rank: int) -> Patch:
    return changed(BatchLoader, "batch", lambda batch, *_: replace(batch, rows=torch.arange(len(batch.rows))))


def _evaluated(change: Any) -> Patch:
    def wrong(result: Any, model: Any, *_: Any) -> Any:
        change(model.module)
        return result

    return changed(build, "evaluate", wrong)


@fault("dp=2 zero=1", first="random mask .*step 2, steps in a row", cause="no rank draws it for rows", model="bert")
def a_rank_trains_as_in_evaluation(rank: int) -> Patch:
    return _evaluated(lambda module: module.eval()) if rank else nothing()


@fault("dp=2 zero=1", first="modules called as in training", cause="in training mode.*rank 1", model="bert")
def a_rank_is_evaluated_in_training_mode(rank: int) -> Patch:
    def wrong(own: Any, model: Any, *rest: Any, **how: Any) -> Any:
        model.module.train()
        return own(model, *rest, **how)

    return around(evaluation, "_loss_sums", wrong) if rank else nothing()


@fault("dp=3 zero=2", "dp=2 zero=3", first="state master/.*", cause="with eps = ")
def eps_grows_with_the_ranks(rank: int) -> Patch:
    return with_groups(lambda group: group.update(eps=3 * group["eps"]))


@fault("dp=2 zero=1", "dp=2 zero=3", first="state master/.*step 2", cause="learning rate of the step before")
def a_rank_is_told_the_learning_rate_late(rank: int) -> Patch:
    def wrong(own: Any, optimizer: ShardedOptimizer, learning_rate: float, *rest: Any) -> None:
        now, vars(optimizer)["told"] = vars(optimizer).get("told", learning_rate), learning_rate
        own(optimizer, now, *rest)

    return around(ShardedOptimizer, "update", wrong) if rank else nothing()


@fault("dp=3 zero=2", first=GRADIENT, cause="the contribution of rank 2 was rounded to bfloat16")
def a_rank_rounds_what_it_sends(rank: int) -> Patch:
    def wrong(own: Any, *given: Any, source: torch.Tensor, **options: Any) -> Any:
        source.copy_(source.to(torch.bfloat16))
        return own(*given, source=source, **options)

    return around_action("reduce_scatter", call=wrong) if rank == 2 else nothing()


@fault("dp=2 zero=3 min_shard_numel=100", first="gradient norm", cause="it has .*norm.* twice")
def what_stays_whole_is_in_the_norm_twice(rank: int) -> Patch:
    def wrong(own: Any, parallel: CompositeDataParallel) -> Any:
        buckets = (engine for engine in parallel.engines if isinstance(engine, BucketedDataParallel))
        return [*own, *(tensor for engine in buckets for tensor in engine.reduced_gradients(engine.plan.shapes))]

    return changed(CompositeDataParallel, "counted_gradients", wrong)
