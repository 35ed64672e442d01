"""Mistakes in the samples, masks, counts and updates of a rank."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from motet.core.batch import Batch
from motet.data.samples.loader import BatchLoader
from motet.models.layout_invariant_dropout import LayoutInvariantDropoutMode
from motet.parallel.data_parallel.bucketed_zero import BucketedDataParallel
from motet.parallel.data_parallel.data_sharding import MicroBatchRows
from motet.train import engine, evaluation, step
from motet.train.engine import TrainingEngine
from motet.train.optimizer import module_plan
from motet.train.optimizer.sharded_optimizer import ShardedOptimizer
from motet.train.state import TrainingState
from motet.train.step import MicroBatchLoop
from parity.faults import GRADIENT, Patch, around, changed, fault, nothing

LAYOUTS = ("dp=2 zero=1", "dp=2 zero=3 microbatches=2")


@fault(*LAYOUTS, first="sample .*", cause="computed [24] times, by ranks 0 and 1")
def every_rank_reads_the_rows_of_the_first(rank: int) -> Patch:
    return around(step, "microbatches_of_rank", lambda own, layout, rank, rows: own(layout, 0, rows))


@fault("dp=3 zero=3 microbatches=2", first="sample .*", cause="no rank computes rows")
def a_microbatch_is_lost(rank: int) -> Patch:
    return changed(step, "microbatches_of_rank", lambda parts, *_: parts[1:] * 2) if rank == 1 else nothing()


UNEVEN = ("run.reproducible=layout", "data.batch_sequences=13")
AGAIN = "compute once more.*are counted again"


@fault("dp=2 zero=1", "dp=3 zero=3", first="target tokens", cause=AGAIN, settings=UNEVEN)
def a_row_that_is_computed_once_more_is_counted_again(rank: int) -> Patch:
    return changed(step, "microbatches_of_rank", lambda parts, *_: [MicroBatchRows(part.rows) for part in parts])


@fault("dp=2 zero=1", "dp=3 zero=3", first="sample .*", cause="of rows .* of the step after")
def a_rank_is_one_step_ahead_in_the_data(rank: int) -> Patch:
    return around(BatchLoader, "batch", lambda own, self, at, rows: own(self, at + 1, rows)) if rank else nothing()


@fault("dp=2 zero=0", first="sample .*", cause="it is of row")
def rows_are_read_in_another_order(rank: int) -> Patch:
    def wrong(batch: Batch, *_: Any) -> Batch:
        return replace(batch, tokens=batch.tokens.flip(0), targets=batch.targets.flip(0))

    return changed(BatchLoader, "batch", wrong) if rank else nothing()


DROPS = ("dp=2 zero=1", "dp=3 zero=3 microbatches=2")


@fault(*DROPS, first="random mask .*", cause="it is of row", model="bert")
def masks_follow_the_place_in_the_microbatch(rank: int) -> Patch:
    def wrong(own: Any, mode: LayoutInvariantDropoutMode, at: int, rows: Tensor) -> Any:
        return own(mode, at, torch.arange(len(rows)))

    return around(LayoutInvariantDropoutMode, "for_rows", wrong)


@fault(*DROPS, first="random mask .*", cause="another seed", model="bert")
def each_rank_has_another_seed(rank: int) -> Patch:
    return around(
        LayoutInvariantDropoutMode, "__init__", lambda own, mode, seed, module: own(mode, seed + rank, module)
    )


@fault("dp=2 zero=1", first="random mask .*", cause="of the batch of the step before", model="bert")
def masks_are_those_of_the_first_step(rank: int) -> Patch:
    return around(LayoutInvariantDropoutMode, "for_rows", lambda own, mode, at, rows: own(mode, 0, rows))


@fault("dp=2 zero=1 microbatches=2", first="random mask block 0 dropout 1,", cause="no rank draws it", model="bert")
def calls_of_blocks_are_counted_on(rank: int) -> Patch:
    @contextmanager
    def wrong(own: Any, mode: LayoutInvariantDropoutMode, number: int, rows: Tensor) -> Iterator[Any]:
        calls = mode._calls if rows[0] else Counter[int]()
        with own(mode, number, rows) as entered:
            mode._calls = calls
            yield entered

    return around(LayoutInvariantDropoutMode, "for_rows", wrong)


def losses_divided(divisor: Callable[[MicroBatchLoop, Batch], Any]) -> Patch:
    def wrong(own: Any, loop: MicroBatchLoop, *given: Any, **more: Any) -> Any:
        plain = loop.model.loss_sum
        object.__setattr__(loop.model, "loss_sum", lambda batch: plain(batch) / divisor(loop, batch))
        try:
            return own(loop, *given, **more)
        finally:
            object.__delattr__(loop.model, "loss_sum")

    return around(MicroBatchLoop, "run", wrong)


SPLIT = ("dp=2 zero=1 microbatches=2", "dp=2 zero=3 microbatches=2")


@fault(*SPLIT, first="activation gradient .*", cause="divided by.*micro-batches")
def losses_are_divided_by_the_microbatches(rank: int) -> Patch:
    return losses_divided(lambda loop, batch: loop.layout.sharding.microbatches)


@fault("dp=2 zero=0", "dp=3 zero=2", first="activation gradient .*", cause="divided by.*target tokens")
def each_rank_divides_by_its_own_count(rank: int) -> Patch:
    """The ranks then learn from the mean of their means."""
    return losses_divided(lambda loop, batch: batch.weights.sum())


@fault("dp=2 zero=0", "dp=3 zero=3", first="target tokens", cause="rank . alone: the sum over the ranks is missing")
def targets_are_not_added_up_over_ranks(rank: int) -> Patch:
    return changed(engine, "sum_scalars", lambda summed, values, *_: [values[0].item(), *summed[1:]])


@fault("dp=2 zero=1", "dp=3 zero=2", first="gradient norm, ", cause="that of rank . alone")
def the_norm_is_not_added_up_over_shards(rank: int) -> Patch:
    return changed(engine, "sum_scalars", lambda summed, values, *_: [summed[0], values[1].item(), *summed[2:]])


@fault(*LAYOUTS, first="clipped gradient .*", cause="before clipping")
def nothing_is_clipped(rank: int) -> Patch:
    return changed(TrainingEngine, "gradient_scale", lambda _, engine, norm, count: 1.0 / count)


@fault("dp=2 zero=1", first="clipped gradient .*", cause="clipped twice")
def gradients_are_clipped_twice(rank: int) -> Patch:
    def wrong(scale: float, engine: TrainingEngine, norm: float, count: float) -> float:
        return scale * min(1.0, (engine.clip_norm or norm) / norm)

    return changed(TrainingEngine, "gradient_scale", wrong)


@fault("dp=2 zero=0", "dp=3 zero=3", first="clipped gradient .*, step 2", cause="the norm of the step before")
def gradients_are_clipped_by_the_norm_before(rank: int) -> Patch:
    """The previous norm is known without waiting for all ranks."""

    def wrong(own: Any, engine: TrainingEngine, norm: float, count: float) -> Any:
        before, vars(engine)["before"] = vars(engine).get("before", norm), norm
        return own(engine, before, count)

    return around(TrainingEngine, "gradient_scale", wrong)


def _restored_without(moment: str) -> Patch:
    def wrong(found: Any, state: TrainingState, *_: Any) -> Any:
        for name, shard in state.tensors().items():
            if name.startswith(moment):
                shard.values.zero_()
        return found

    return changed(TrainingState, "restore", wrong)


@fault("dp=2 zero=2", "dp=2 zero=3", first="state .*", cause="its earlier value is missing")
def moments_are_not_restored(rank: int) -> Patch:
    return _restored_without("exp_avg")


SGD, BUFFER = ("optimizer.name=sgd", "optimizer.momentum=0.9", "optimizer.learning_rate=0.1"), "state momentum_buffer/"


@fault("dp=2 zero=1", "dp=3 zero=3", first=f"{BUFFER}.*, step 2", cause="its earlier value is missing", settings=SGD)
def momentum_is_not_restored(rank: int) -> Patch:
    return _restored_without("momentum_buffer")


@fault("dp=2 zero=1", "dp=2 zero=3", first="state step", cause="counts 1 steps, where one device has 2")
def steps_are_counted_from_a_restore(rank: int) -> Patch:
    def wrong(own: Any, optimizer: ShardedOptimizer) -> None:
        for master in optimizer._masters:
            optimizer._optimizer.state[master]["step"].zero_()
        own(optimizer)

    return around(ShardedOptimizer, "sync_parameters", wrong)


@fault(*LAYOUTS, first="state master/.*", cause="weight decay")
def everything_is_decayed(rank: int) -> Patch:
    def wrong(groups: Any, named: Any, settings: Any) -> Any:
        return {(scale, settings.weight_decay + 0.01 * (not decay)): m for (scale, decay), m in groups.items()}

    return changed(module_plan, "group_parameters", wrong)


@fault("dp=3 zero=1", "dp=2 zero=3", first="state master/.*", cause="multiplied by.*dp")
def the_learning_rate_grows_with_the_ranks(rank: int) -> Patch:
    def wrong(own: Any, engine: TrainingEngine, learning_rate: float, *given: Any, **more: Any) -> Any:
        return own(engine, learning_rate * engine.group.world, *given, **more)

    return around(TrainingEngine, "update", wrong)


@fault("dp=2 zero=1", "dp=3 zero=2", first=GRADIENT, cause="1 of its .* not finite, .*in element 3 of")
def a_number_is_not_finite(rank: int) -> Patch:
    def spoil(found: Any, *_: Any) -> Any:
        if rank == 0:
            next(iter(found)).view(-1)[3] = float("nan")
        return found

    return changed(BucketedDataParallel, "local_gradients", spoil)


@fault("dp=2 zero=0", first="sample targets", cause="the value of tokens")
def a_rank_does_not_shift_its_targets(rank: int) -> Patch:
    return changed(BatchLoader, "batch", lambda batch, *_: replace(batch, targets=batch.tokens)) if rank else nothing()


@fault("dp=2 zero=0", "dp=3 zero=2", first="evaluation loss", cause="mean of the means of ranks")
def evaluation_means_the_means(rank: int) -> Patch:
    def wrong(own: Any, values: list[float], ranks: Any, device: Any) -> list[float]:
        targets, right, loss = values
        summed = own([targets, right, loss / max(targets, 1.0)], ranks, device)
        return [*summed[:2], summed[2] / ranks.world * summed[0]]

    return around(evaluation, "sum_scalars", wrong)
