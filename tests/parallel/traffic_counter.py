"""Bytes that a rank sends in steps of training, and those that it keeps between them, beside what was promised."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from motet.core.trace import install_sink
from motet.parallel.data_parallel.bucketed_zero import BucketedDataParallel
from motet.parallel.data_parallel.fsdp import FSDP2DataParallel, ShardedParameters
from motet.parallel.process.process_group import RankGroup
from motet.parallel.step_plan.traffic_and_memory import model_state_memory, sent_bytes_per_step
from motet.train.build import build_components, precision_context
from motet.train.job import Job
from motet.train.optimizer.sharded_optimizer import ShardedOptimizer
from on_ranks import Counter


def count_bytes(group: RankGroup, job: Job) -> tuple[int, int, int, int]:
    """Sent in two steps, and what was said; kept after them, and what was said."""
    with precision_context(job), tempfile.TemporaryDirectory() as folder:
        parts = build_components(job, group, Path(folder))
        spread = parts.engine.optimizer.sharded_parameters
        stepper, counter = parts.make_train_step(job), Counter()
        recipe = job.precision.resolved
        with install_sink(counter):
            for step in range(2):
                stepper.step(step, 0.001)
            spread.wait_for_pending()
        said = sent_bytes_per_step(spread.comm_units, parts.layout, recipe, settings=job.communication, rank=group.rank)
        held = [*_computed_with(spread), *spread.local_masters, *spread.local_gradients()]
        held += _moments(parts.engine.optimizer)
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}
        kept = model_state_memory(spread.comm_units, parts.layout, recipe, moments_per_parameter=2, rank=group.rank)
    return int(counter.counts.get("sent_bytes", 0)), 2 * said.total, sum(storages.values()), kept.total


def _moments(updater: ShardedOptimizer) -> list[torch.Tensor]:
    return [t for state in updater._optimizer.state.values() for t in state.values() if t.ndim]


def _computed_with(spread: ShardedParameters) -> Iterator[torch.Tensor]:
    """The tensors in which the model holds its parameters between steps."""
    if isinstance(spread, BucketedDataParallel):
        yield spread.flat_parameters.compute
    if isinstance(spread, FSDP2DataParallel):
        yield from (p.to_local() for p in spread.root.parameters() if isinstance(p, DTensor))
        if spread.unsharded:
            yield from _computed_with(spread.unsharded)
