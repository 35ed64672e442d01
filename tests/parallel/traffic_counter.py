"""Bytes that a rank sends in steps of training, and those that it keeps between them, beside what was promised."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from pages.control_collectives import control_bytes
from torch.distributed.tensor import DTensor

from motet.collectives.execute.slot_plan import HostOfRank
from motet.core.trace import install_sink
from motet.parallel.data_parallel.bucketed_zero import BucketedDataParallel
from motet.parallel.data_parallel.composite import CompositeDataParallel
from motet.parallel.data_parallel.fsdp import FSDP2DataParallel
from motet.parallel.model_sharding import ModelSharding
from motet.parallel.process.process_group import RankGroup
from motet.parallel.step_plan.memory import model_state_memory
from motet.parallel.step_plan.traffic import sent_activation_bytes, sent_bytes_per_step
from motet.train.build import build_components, precision_context
from motet.train.job import Job, batch_shape
from motet.train.optimizer.sharded_optimizer import ShardedOptimizer
from on_ranks import Counter


class CountedBytes(NamedTuple):
    """Bytes of a rank, counted and promised."""

    sent: list[int]  # In each step, without those of CONTROL_COLLECTIVES
    promised: int  # For each step
    kept: int
    formula: int


def count_bytes(
    group: RankGroup,
    job: Job,
    steps: int = 2,
    hosts: HostOfRank | None = None,
    model_sharding: ModelSharding | None = None,
) -> CountedBytes:
    with precision_context(job), tempfile.TemporaryDirectory() as folder:
        parts = build_components(job, group, Path(folder), model_sharding=model_sharding)
        engine, spread = parts.engine, parts.engine.optimizer.sharded_parameters
        stepper, recipe, sent = parts.make_train_step(job), job.precision.resolved, []
        for step in range(steps):
            if step and job.layout.zero == 3:  # a forward without a backward changes nothing about the next step
                with torch.no_grad():
                    parts.model.loss_sum(parts.data.batch(0, range(1)))
            counter = Counter()
            with install_sink(counter):
                stepper.step(step, 0.001)
            buckets = sum(len(each.plan.units) for each in spread.engines if isinstance(each, BucketedDataParallel))
            control = _control_bytes(group, job, step, hosts=hosts or (0,) * group.world, buckets=buckets)
            sent.append(int(counter.counts.get("sent_bytes", 0) - counter.counts.get("check_bytes", 0)) - control)
        spread.wait_for_pending()
        said = sent_bytes_per_step(engine.plan, recipe, settings=job.communication, rank=group.rank, hosts=hosts)
        shape = batch_shape(job, len(engine.plan.rows_by_rank[0][0]))
        activations = sent_activation_bytes(engine.plan, shape, recipe, rank=group.rank, hosts=hosts)
        held = [*_computed_with(spread), *spread.local_masters, *spread.local_gradients()]
        held += _moments(engine.optimizer)
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}
        kept = model_state_memory(engine.plan, recipe, moments_per_parameter=2, rank=group.rank)
    return CountedBytes(sent, said.total + activations.total, sum(storages.values()), kept.total)


def _control_bytes(group: RankGroup, job: Job, step: int, *, hosts: HostOfRank, buckets: int) -> int:
    """Bytes of the control collectives of a job without buffers; with forward overlap a shard group has all ranks."""
    usage = group.world * (2 if job.layout.pp > 1 else 1)
    numels = {"agreement": 2 + usage}
    if job.run.reproducible:
        numels = {"agreement": job.data.batch_sequences + 1 + usage, "norm bound": 0, "exact norm": 0}
    if job.communication.overlap == "forward" and not step:
        numels["gather order"] = buckets
    return sum(control_bytes(name, numel, rank=group.rank, hosts=hosts) for name, numel in numels.items())


def _moments(updater: ShardedOptimizer) -> list[torch.Tensor]:
    return [t for state in updater._optimizer.state.values() for t in state.values() if t.ndim]


def _computed_with(spread: CompositeDataParallel) -> Iterator[torch.Tensor]:
    """The tensors in which the model holds its parameters between steps."""
    for engine in spread.engines:
        if isinstance(engine, BucketedDataParallel):
            yield engine.flat_parameters.compute
        if isinstance(engine, FSDP2DataParallel):
            yield from (p.to_local() for p in engine.root.parameters() if isinstance(p, DTensor))
